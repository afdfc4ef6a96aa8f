"""A part: the values of one chunk on one engine, written by its job and taken by the merge."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from nnsweep.chunks import GENERATE, columns, in_session
from nnsweep.errors import CheckFailed
from nnsweep.sweep_measures import GUARDED
from nnsweep.tables import part_schema, read_table

Plain = dict[str, Any]
KEYS = ["point_key", "row_key"]
CHUNK, FAILED = "@chunk", "@failed"
"""Columns of frames only; what begins with @ is the name of no axis and no measure."""


@dataclass(frozen=True)
class Taken:
    """What a plan takes of an engine's parts.

    Attributes:
        values: point_key, row_key, status, reason and the columns of the measures.
        owners: point_key, row_key, `@chunk` and `measures`: which chunk gave which measures (names,
            separated by commas); one line a value where one chunk gave all of them.
    """

    values: pd.DataFrame
    owners: pd.DataFrame


def part_table(
    plan: Plain, keys: Sequence[tuple[str, str]], values: Any, failed: Mapping[int, str]
) -> pa.Table:
    """One chunk's rows. A value that is no finite number becomes null with a reason.

    Args:
        plan: The chunk.
        keys: (point_key, row_key) of every row.
        values: float32 tensor (rows, measures).
        failed: Row -> why its point failed.
    """
    array = values.numpy()
    bad = ~np.isfinite(array)
    status, reasons = _judged(plan["measures"], bad)
    for row, why in failed.items():
        status[row], reasons[row] = "error", why
    found = {
        "point_key": pa.array([point for point, _ in keys], pa.string()),
        "row_key": pa.array([row for _, row in keys], pa.string()),
        "status": pa.array(status, pa.string()),
        "reason": pa.array(reasons, pa.string()),
    }
    for i, name in enumerate(columns(plan["measures"])):
        found[name] = pa.array(array[:, i], pa.float32(), mask=bad[:, i])
    return pa.table(found)


def _judged(measures: Sequence[Plain], bad: np.ndarray) -> tuple[list[str], list[str | None]]:
    """Status and reason of every row, from which of its numbers are not finite."""
    specs = {name: spec for spec in in_session(measures) for name in columns([spec])}
    guarded = np.array([spec["kind"] in (*GUARDED, GENERATE) for spec in specs.values()], bool)
    errors = (bad & ~guarded).any(axis=1)
    reasons: list[str | None] = [None] * len(bad)
    for row in np.flatnonzero(bad.any(axis=1)):
        reasons[row] = _reason(specs, bad[row]) or None
    return ["error" if error else "ok" for error in errors], reasons


def _reason(specs: Mapping[str, Plain], bad: Any) -> str:
    parts = []
    for (name, spec), wrong in zip(specs.items(), bad, strict=True):
        if wrong and spec["kind"] == "recovery":
            of, least = spec["of"]["name"], spec["min_gap"]
            parts.append(f"{name}: clean and donor differ in {of} by less than {least}")
        elif wrong and spec["kind"] == GENERATE:
            continue  # The text has ended.
        elif wrong and spec["kind"] == "cosine":
            parts.append(f"{name}: an activation of length 0 has no direction")
        elif wrong:
            parts.append(f"{name} is not finite")
    return "; ".join(parts)


def read_part(path: Path, specs: Sequence[Plain], renamed: Plain | None = None) -> pd.DataFrame:
    """One part as a frame: its keys, those of the sweep's measures that it has, and `@failed`.

    `@failed` says why a point has no values at all; it is null where nothing failed.

    Args:
        path: The part.
        specs: The sweep's measures.
        renamed: The chunk's own measures and what it calls the sweep's, where they differ.

    Raises:
        CheckFailed: a value stands twice.
        NnsweepError: the part is unreadable or of another schema.
    """
    own = in_session(renamed["own"] if renamed else specs)
    table = read_table(path, part_schema(columns(own)))
    found = {name: table[name] for name in KEYS} | {FAILED: _failed(table, own)}
    for spec in having(specs, renamed):
        theirs = spec | {"name": renamed["names"][spec["name"]]} if renamed else spec
        pairs = zip(columns([spec]), columns([theirs]), strict=True)
        found |= {ours: table[column] for ours, column in pairs}
    frame: pd.DataFrame = pa.table(found).to_pandas(types_mapper=nullable)
    doubled = frame.duplicated(KEYS)
    if doubled.any():
        key = " on row ".join(frame[KEYS].iloc[int(doubled.to_numpy().argmax())])
        raise CheckFailed(f"point {key} stands twice; delete {path} and run again.")
    return frame


def having(specs: Sequence[Plain], renamed: Plain | None) -> list[Plain]:
    """Those of the sweep's measures that are taken of a chunk."""
    return [spec for spec in in_session(specs) if not renamed or spec["name"] in renamed["names"]]


def _failed(table: pa.Table, specs: Sequence[Plain]) -> pa.Array:
    """Why a point failed: its reason, where there is no value and the reason is none of a value."""
    names = columns(specs)
    bad = np.column_stack([table[name].is_null().to_numpy() for name in names])
    lost = np.flatnonzero(bad.all(axis=1) & (table["status"].to_numpy() == "error"))
    _, told = _judged(specs, bad[lost])
    found: list[str | None] = [None] * len(table)
    for row, why in zip(lost, told, strict=True):
        reason = table["reason"][int(row)].as_py()
        found[row] = None if reason == why else reason
    return pa.array(found, pa.string())


def with_state(frame: pd.DataFrame, specs: Sequence[Plain]) -> pd.DataFrame:
    """Status and reason of every row in the place of `@failed`."""
    bad = frame[columns(specs)].isna().to_numpy()
    status, reasons = _judged(specs, bad)
    for row in np.flatnonzero(frame[FAILED].notna()):
        status[row], reasons[row] = "error", frame[FAILED].iloc[int(row)]
    state = {"status": pd.array(status, "string"), "reason": pd.array(reasons, "string")}
    return frame.drop(columns=FAILED).assign(**state)


def nullable(kind: pa.DataType) -> Any:
    """Keep null and not-a-number apart, and integers integers."""
    return {
        pa.float32(): pd.Float32Dtype(),
        pa.float64(): pd.Float64Dtype(),
        pa.int32(): pd.Int32Dtype(),
        pa.string(): pd.StringDtype(),
    }.get(kind)


def take_parts(
    folder: Path, records: Mapping[str, Plain], specs: Sequence[Plain], asked: pd.DataFrame
) -> Taken:
    """The values that a plan takes of an engine's parts; the earlier chunk wins.

    Args:
        folder: `results/SWEEP/ENGINE/chunks`.
        records: Chunks of plan.json in their order.
        specs: The sweep's measures.
        asked: point_key and row_key of every value of the sweep.

    Raises:
        CheckFailed: a part holds another number of values than its chunk.
    """
    frames = {}
    for name, record in records.items():
        path = folder / f"{name}.parquet"
        frame = read_part(path, specs, record["measures"])
        refuse_count(path, len(frame), record["of"])
        frames[name] = frame[~frame["row_key"].isin(record["stale"])].assign(**{CHUNK: name})
    bundles = {
        ", ".join(spec["name"] for spec in group): _first(frames, names, group, asked)
        for names, group in _bundles(records, specs)
    }
    owners = [one[[*KEYS, CHUNK]].assign(measures=name) for name, one in bundles.items()]
    values = _side_by_side(list(bundles.values()))
    return Taken(with_state(values, specs), pd.concat(owners, ignore_index=True))


def _bundles(
    records: Mapping[str, Plain], specs: Sequence[Plain]
) -> list[tuple[list[str], list[Plain]]]:
    """Chunks, and the measures that exactly those have."""
    found: dict[tuple[str, ...], list[Plain]] = {}
    taken = {
        name: {spec["name"] for spec in having(specs, record["measures"])}
        for name, record in records.items()
    }
    for spec in in_session(specs):
        chunks = tuple(name for name in records if spec["name"] in taken[name])
        found.setdefault(chunks, []).append(spec)
    return [(list(chunks), group) for chunks, group in found.items()]


def _first(
    frames: Mapping[str, pd.DataFrame],
    names: Sequence[str],
    specs: Sequence[Plain],
    asked: pd.DataFrame,
) -> pd.DataFrame:
    """Some measures of every value that is asked for, of the first chunk that has it."""
    head = [*KEYS, FAILED, CHUNK, *columns(specs)]
    whole = pd.concat([frames[name][head] for name in names], ignore_index=True)
    return whole.drop_duplicates(KEYS).merge(asked, on=KEYS)


def _side_by_side(bundles: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """What has all measures; a point failed where it did for some of them."""
    first, *others = (one.drop(columns=CHUNK) for one in bundles)
    for other in others:
        first = first.merge(other.rename(columns={FAILED: "@also"}), on=KEYS)
        first[FAILED] = first[FAILED].fillna(first.pop("@also"))
    return first


def refuse_count(path: Path, found: int, wanted: int) -> None:
    """Raise CheckFailed where a part gives another number of values than the plan says."""
    if found != wanted:
        raise CheckFailed(
            f"{path}: {found} values, the plan takes {wanted}. Delete it and run again."
        )
