"""Null controls: writes whose effect is known before they run (see docs/checks.md)."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from nnsweep.sweep_measures import AGAINST_CLEAN, TEXTS

AGAINST = (*AGAINST_CLEAN, "lens")
"""Kinds that differ from the donor's even where the run ends as the donor's does."""

Plain = dict[str, Any]

TOLERANCE = {"float32": 1e-4, "bfloat16": 1.0, "float16": 0.1}
"""Largest difference of a measure that a control may show, by dtype; bfloat16 noise on a logit was
measured at up to 0.56."""

EXPECTED = {
    "self_patch_0": (
        "clean",
        "the first point's places, patched with the prompt's own activations",
    ),
    "self_patch_1": ("clean", "the last point's places, patched with the prompt's own activations"),
    "inert": ("clean", "a point whose values were taken from the clean run, run in full"),
    "zero_steer": ("clean", "a vector added with scale 0 at the middle layer"),
    "full_donor": ("donor", "the donor's whole residual stream written at the last layer"),
}
"""Control -> (the run it must equal, what it does)."""


def compared(measures: Sequence[Plain]) -> dict[str, str]:
    """Column -> kind of the measures that controls compare; lists of tokens have near ties."""
    return {
        spec["name"]: "lens" if "lens" in spec or spec.get("tokens") == "sum" else spec["kind"]
        for spec in measures
        if spec["kind"] not in ("top_k", "generate", *TEXTS)
    }


def judge(table: pa.Table, measures: Mapping[str, str], dtype: str) -> dict[str, dict[str, Any]]:
    """Compare every control with the run that it must equal.

    Args:
        table: The part of the controls' chunk.
        measures: Measure -> kind.
        dtype: The dtype that decides the tolerance.

    Returns:
        control -> what, equals, rows, largest (difference over rows and measures), tolerance,
        holds; a control that could not be run says so with `holds: null`.
    """
    runs: dict[str, dict[str, Any]] = {}
    for record in table.to_pylist():
        name = record["point_key"].removeprefix("control:")
        runs.setdefault(name, {})[record["row_key"]] = record
    names = [name for name in EXPECTED if _applies(runs, name)]
    return {name: _verdict(runs, name, measures, dtype) for name in names}


def _applies(runs: dict[str, Any], name: str) -> bool:
    return name in runs or name == "full_donor"


def _verdict(
    runs: dict[str, dict[str, Any]], name: str, measures: Mapping[str, str], dtype: str
) -> dict[str, Any]:
    equals, what = EXPECTED[name]
    verdict: dict[str, Any] = {"what": what, "equals": equals, "tolerance": TOLERANCE[dtype]}
    compared = [m for m, kind in measures.items() if equals == "clean" or kind not in AGAINST]
    if name not in runs or not compared:
        reason = "no donor prompts of the same length as the prompts"
        if name in runs:
            reason = "every measure compares with the clean run"
        return verdict | {"rows": 0, "largest": None, "holds": None, "reason": reason}
    pairs = [
        (record[measure], runs[equals][row][measure])
        for row, record in runs[name].items()
        for measure in compared
    ]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    broken = any((a is None) != (b is None) for a, b in pairs)
    largest = max((abs(a - b) for a, b in both), default=0.0)
    holds = bool(both) and not broken and largest <= TOLERANCE[dtype]
    return verdict | {"rows": len(runs[name]), "largest": largest, "holds": holds}
