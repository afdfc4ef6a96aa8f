"""A part: the values of one chunk on one engine, written by its job and taken by the merge."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from nnsweep.chunks import GENERATE, columns, in_order, in_session
from nnsweep.errors import CheckFailed
from nnsweep.sweep_measures import GUARDED
from nnsweep.tables import part_schema, read_table

Plain = dict[str, Any]
KEYS = ["point_key", "row_key"]


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
    reasons = [_reason(specs, row) or None if row.any() else None for row in bad]
    return ["error" if error else "ok" for error in errors], reasons


def _reason(specs: Mapping[str, Plain], bad: Any) -> str:
    parts = []
    for (name, spec), wrong in zip(specs.items(), bad, strict=True):
        if wrong and spec["kind"] == "recovery":
            parts.append(
                f"{name}: clean and donor differ in {spec['of']} by less than {spec['min_gap']}"
            )
        elif wrong and spec["kind"] == GENERATE:
            continue  # The text has ended.
        elif wrong and spec["kind"] == "cosine":
            parts.append(f"{name}: an activation of length 0 has no direction")
        elif wrong:
            parts.append(f"{name} is not finite")
    return "; ".join(parts)


def read_part(path: Path, specs: Sequence[Plain], renamed: Plain | None = None) -> pd.DataFrame:
    """One part as a frame with the sweep's measures.

    Args:
        path: The part.
        specs: The sweep's measures.
        renamed: The chunk's own measures and what it calls the sweep's, where they differ.

    Raises:
        CheckFailed: a value stands twice.
        NnsweepError: the part is unreadable or of another schema.
    """
    own = renamed["own"] if renamed else specs
    table = read_table(path, part_schema(columns(own)))
    if renamed:
        table = _translated(table, in_session(specs), renamed["names"])
    frame: pd.DataFrame = table.to_pandas(types_mapper=nullable)
    doubled = frame.duplicated(KEYS)
    if doubled.any():
        key = " on row ".join(frame[KEYS].iloc[int(doubled.to_numpy().argmax())])
        raise CheckFailed(f"point {key} stands twice; delete {path} and run again.")
    return frame


def _translated(table: pa.Table, specs: Sequence[Plain], names: Mapping[str, str]) -> pa.Table:
    """A part of more measures, or of others' names, with the sweep's measures alone.

    Status and reason are those of the measures that are left; a point that failed stays failed.
    """
    theirs = [name for spec in specs for name in columns([spec | {"name": names[spec["name"]]}])]
    numbers = table.select(theirs).rename_columns(columns(specs))
    bad = np.column_stack([column.is_null().to_numpy() for column in numbers.itercolumns()])
    status, reasons = _judged(specs, bad)
    every = [column.is_null().to_numpy() for column in table.itercolumns()][len(KEYS) + 2 :]
    failed = np.logical_and.reduce(every) & (table["status"].to_numpy() == "error")
    for row in np.flatnonzero(failed):
        status[row], reasons[row] = "error", table["reason"][int(row)].as_py()
    state = {"status": pa.array(status, pa.string()), "reason": pa.array(reasons, pa.string())}
    keys = {name: table[name] for name in KEYS}
    return pa.table(keys | state | dict(zip(numbers.column_names, numbers.columns, strict=True)))


def nullable(kind: pa.DataType) -> Any:
    """Keep null and not-a-number apart, and integers integers."""
    return {
        pa.float32(): pd.Float32Dtype(),
        pa.float64(): pd.Float64Dtype(),
        pa.int32(): pd.Int32Dtype(),
        pa.string(): pd.StringDtype(),
    }.get(kind)


def take_parts(folder: Path, plan: Plain, asked: pd.DataFrame) -> pd.DataFrame:
    """The values that a plan takes of an engine's parts; the earlier chunk wins.

    The column `part` is the place of the chunk in the plan.

    Args:
        folder: `results/SWEEP/ENGINE/chunks`.
        plan: plan.json.
        asked: point_key and row_key of every value of the sweep.

    Raises:
        CheckFailed: a part holds another number of values than its chunk, or fewer to take.
    """
    frames = []
    for number, (name, record) in enumerate(in_order(plan).items()):
        path = folder / f"{name}.parquet"
        frame = read_part(path, plan["measures"], record["measures"])
        _refuse_count(path, len(frame), record["of"])
        fresh = frame[~frame["row_key"].isin(record["stale"])]
        frames.append(fresh.assign(part=number))
    whole = pd.concat(frames, ignore_index=True).merge(asked, on=KEYS)
    whole = whole.sort_values("part", kind="stable").drop_duplicates(KEYS)
    counts = whole["part"].value_counts()
    for number, (name, record) in enumerate(in_order(plan).items()):
        _refuse_count(folder / f"{name}.parquet", int(counts.get(number, 0)), record["values"])
    return whole


def _refuse_count(path: Path, found: int, wanted: int) -> None:
    if found != wanted:
        raise CheckFailed(
            f"{path}: {found} values, the plan takes {wanted}. Delete it and run again."
        )
