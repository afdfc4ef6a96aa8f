"""Engine `mixed`: some chunks here, the others on NDIF, once both agreed on the same few points."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from nnsweep.chunks import in_order
from nnsweep.config import SIDES
from nnsweep.merge import (
    asked_values,
    assemble,
    judge_controls,
    refuse_broken,
    sample_values,
    sessions_table,
    take_all,
)
from nnsweep.parity import classify, coarser, judged, publish
from nnsweep.parts import CHUNK, KEYS
from nnsweep.provenance import remote_cost, run_record
from nnsweep.sweep import Sweep
from nnsweep.tables import SESSIONS, read_json, write_json, write_table

logger = logging.getLogger(__name__)
Plain = dict[str, Any]
OWNERS = pa.schema([(name, pa.string()) for name in ("point_id", "row_id", "measures", "engine")])


def calibrate(
    sweep: Sweep, results: Path, parts: Mapping[str, Sequence[Path]], output: Path
) -> None:
    """Rule calibrate: do both sides compute the same of the same points?

    Args:
        sweep: The sweep.
        results: `results/SWEEP`.
        parts: Side -> its parts of the plan's calibration chunks.
        output: The verdict's file; table and figure lie beside it.

    Raises:
        CheckFailed: they do not agree (the verdict is written first).
    """
    plan = read_json(results / "plan.json")
    here, there = (
        sample_values(sweep, results, parts[side], plan["calibration"]) for side in SIDES
    )
    facts = [read_json(parts[side][0].with_suffix(".json")) for side in SIDES]
    dtype = coarser(*(str(fact["dtype"]) for fact in facts))
    kinds = {spec["name"]: spec["kind"] for spec in plan["measures"]}
    table = classify(here, there, kinds, dtype)
    publish(judged(table, SIDES, dtype), table, output)


def merge_mixed(sweep: Sweep, results: Path, output: Path) -> None:
    """Rule merge_mixed: one table of what both sides computed, and who computed what.

    Args:
        sweep: The sweep.
        results: `results/SWEEP`.
        output: `results/SWEEP/mixed`, with the parts and the calibration's verdict.

    Raises:
        CheckFailed: a value is missing or doubled, or a null control does not hold on one side.
    """
    plan = read_json(results / "plan.json")
    frame = asked_values(sweep, results)
    asked = frame.loc[frame["excluded"].isna(), KEYS]
    taken = take_all(output / "chunks", plan, asked)
    values = assemble(sweep, results, plan["measures"], frame, taken.values)
    facts = {
        name: read_json(output / "chunks" / f"{name}.json") for name in in_order(plan["chunks"])
    }
    sessions = sessions_table(_with_others(plan, results, facts))
    write_table(output / "sessions.parquet", sessions, SESSIONS)
    verdict = {
        f"{side}: {name}": control
        for side in SIDES
        for name, control in judge_controls(plan, results / side, sweep.model.dtype).items()
    }
    record = run_record(sweep, results, "mixed", plan, facts, values, verdict)
    record["engines"] = _shares(facts, taken.owners)
    record["calibration"] = read_json(output / "calibration.json")
    record["remote"] = remote_cost(results, plan, sessions.to_pylist(), values)
    write_json(output / "run.json", record)
    refuse_broken(verdict, output)
    write_table(output / "engines.parquet", _engines(frame, taken.owners, facts), OWNERS)
    write_table(output / "values.parquet", values, values.schema)


def _with_others(plan: Plain, results: Path, facts: Mapping[str, Plain]) -> list[Plain]:
    """Facts of the chunks, and of null controls and calibration chunks of both sides."""
    others = [*filter(None, [plan["controls"]]), *in_order(plan["calibration"])]
    named = [{"chunk_id": chunk, **fact} for chunk, fact in facts.items()]
    return named + [
        {"chunk_id": name, **read_json(results / side / "chunks" / f"{name}.json")}
        for name in others
        for side in SIDES
    ]


def _shares(facts: Mapping[str, Plain], owners: pd.DataFrame) -> dict[str, Plain]:
    """Side -> chunks, values and passes that it has computed."""
    owner = {name: fact["engine"] for name, fact in facts.items()}
    values = _by_side(owners, owner).drop_duplicates([*KEYS, "engine"])["engine"].value_counts()
    return {
        side: {
            "chunks": list(owner.values()).count(side),
            "values": int(values.get(side, 0)),
            "passes": sum(f["passes"] for f in facts.values() if f["engine"] == side),
        }
        for side in SIDES
    }


def _by_side(owners: pd.DataFrame, owner: Mapping[str, str]) -> pd.DataFrame:
    return owners.assign(engine=owners[CHUNK].map(owner))


def _engines(frame: pd.DataFrame, owners: pd.DataFrame, facts: Mapping[str, Plain]) -> pa.Table:
    """Who computed the value of every point on every row, in the order of values.parquet."""
    owner = {name: fact["engine"] for name, fact in facts.items()}
    asked = frame[["point_id", "row_id", *KEYS]]
    whole = asked.merge(_by_side(owners, owner), on=KEYS, how="inner", sort=False)
    return pa.Table.from_pandas(whole[OWNERS.names], schema=OWNERS, preserve_index=False)
