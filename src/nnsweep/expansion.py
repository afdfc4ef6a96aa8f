"""Rule expand_sweep: axes become points, points become passes and chunks, and a plan on disk."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from nnsweep import prompts as prompt_rows
from nnsweep.chunks import forward_passes, in_session, keys_of, naive_passes, pass_ids
from nnsweep.config import Config
from nnsweep.cost import rows_that_fit
from nnsweep.errors import UserError
from nnsweep.memory import available
from nnsweep.plan import make_plan
from nnsweep.planned import PLAN_FORMAT, Kept, Plan, Settings, identity
from nnsweep.prompts import PromptRow
from nnsweep.store import Store
from nnsweep.sweep import Sweep, axis_kinds
from nnsweep.tables import (
    digest,
    points_schema,
    read_json,
    read_table,
    write_json,
    write_table,
)
from nnsweep.vectors import load_vector

logger = logging.getLogger(__name__)
Plain = dict[str, Any]


CUTTING = ("batch_rows", "memory_gb", "chunk_passes", "recompute")


def cutting(config: Config) -> Plain:
    """What of the configuration decides how a plan is cut, as Snakemake compares it."""
    points = {"parity": config.parity.points, "calibration": config.mixed.calibration_points}
    return {name: getattr(config, name) for name in CUTTING} | points


def settings_of(config: Config, sweep: Sweep, model: Plain, rows: Sequence[PromptRow]) -> Settings:
    """The plan's settings; `batch_rows: auto` becomes a number.

    Raises:
        UserError: the model alone does not fit, or the memory is that of a server.
    """
    wanted, number = config.parity.points, config.batch_rows
    return Settings(
        _batch_rows(config, sweep, model, rows) if number == "auto" else number,
        config.chunk_passes,
        config.recompute,
        wanted if isinstance(wanted, int) else 0,
        config.mixed.calibration_points,
    )


def _batch_rows(config: Config, sweep: Sweep, model: Plain, rows: Sequence[PromptRow]) -> int:
    memory = config.memory_gb and config.memory_gb * 1e9
    if memory is None and config.engine == "ndif":
        raise UserError("config: batch_rows: auto needs memory_gb, the memory of the NDIF server.")
    memory = memory or available(config.device, config.threads)
    width = max((max(len(row.ids), len(row.donor_ids)) for row in rows), default=1)
    backward = any(measure.kind == "attribution" for measure in sweep.measures.values())
    number = rows_that_fit(model, width, backward, memory)
    logger.info("batch_rows: auto is %d, which fits into %.1f GB", number, memory / 1e9)
    return number


def expand_sweep(sweep: Sweep, config: Config, model: Path, prompts: Path, results: Path) -> Plan:
    """Rule expand_sweep: points.parquet, sweep.json, plan.json and one file a chunk.

    Args:
        sweep: The sweep.
        config: How passes and chunks are cut, and whose finished parts may be taken over.
        model: model.json.
        prompts: prompts.parquet.
        results: `results/SWEEP`; chunks and parts that lie there and beside it are used again.
    """
    described = read_json(model)
    rows = prompt_rows.from_table(read_table(prompts))
    settings = settings_of(config, sweep, described, rows)
    store = Store(results, config)
    began = time.perf_counter()
    plan = make_plan(sweep, described, rows, settings, load_vector, store.earlier())
    names = _write_chunks(plan, results)
    store.forget(names)
    adopted = store.adopt(names)
    table = points_table(sweep, plan)
    write_table(results / "points.parquet", table, table.schema)
    write_json(results / "sweep.json", _resolved(sweep, described))
    write_json(results / "plan.json", plan_summary(plan, settings))
    if adopted:
        logger.info("%d finished parts of other sweeps serve here", adopted)
    logger.info("%s (%.1f s)", plan_line(plan), time.perf_counter() - began)
    return plan


def _write_chunks(plan: Plan, results: Path) -> list[str]:
    chunks = [*plan.chunks, *filter(None, [plan.controls])]
    chunks += [part.chunk for part in [*plan.sample, *plan.calibration]]
    for chunk in chunks:
        write_json(results / "chunks" / f"{chunk['chunk_id']}.json", chunk, indent=None)
    return [chunk["chunk_id"] for chunk in chunks]


def _resolved(sweep: Sweep, model: Plain) -> Plain:
    full = sweep.model_dump(mode="json")
    return full | {"digest": digest(full), "resolved_model": identity(model)}


def plan_summary(plan: Plan, settings: Settings) -> Plain:
    """plan.json: the chunks, what is taken of each, and what a naive loop costs."""
    return {
        "format": PLAN_FORMAT,
        "chunks": _records(plan.parts, plan),
        "controls": plan.controls and plan.controls["chunk_id"],
        "control_measures": plan.controls and _translation(plan.controls, plan.control_names),
        "sample": _records(plan.sample, plan),
        "calibration": _records(plan.calibration, plan),
        "points": len(plan.points),
        "measures": plan.measures,
        "inert_rows": sum(plan.inert.values()),
        "forward_passes": forward_passes(plan.chunks),
        "forward_passes_naive": naive_passes(plan.chunks),
        "settings": settings.__dict__,
    }


def _records(parts: Sequence[Kept], plan: Plan) -> Plain:
    """Chunk -> its place, its passes and values, and what of them is taken."""
    asked = in_session(plan.measures)
    return {
        part.chunk["chunk_id"]: {
            "place": place,
            "passes": len(pass_ids(part.chunk)),
            "of": len(keys_of(part.chunk)),
            "values": part.values,
            "stale": part.stale,
            "measures": None
            if part.chunk["measures"] == asked and len(part.names) == len(asked)
            else _translation(part.chunk, part.names),
        }
        for place, part in enumerate(parts)
    }


def _translation(chunk: Plain, names: Mapping[str, str]) -> Plain:
    """The measures of a chunk, and what it calls those of the sweep that are taken."""
    return {"own": chunk["measures"], "names": dict(names)}


def plan_line(plan: Plan) -> str:
    """One line that says how large a plan is."""
    passes = sum(len(pass_ids(chunk)) for chunk in plan.chunks)
    return f"{len(plan.points)} points in {passes} passes in {len(plan.chunks)} chunks"


def points_table(sweep: Sweep, plan: Plan) -> pa.Table:
    """points.parquet: every point in order."""
    schema, inert = points_schema(axis_kinds(sweep)), plan.inert
    found: dict[str, list[Any]] = {
        "point_id": [point.point_id for point in plan.points],
        "point_key": [point.point_key for point in plan.points],
        "writes": [json.dumps(point.writes, sort_keys=True) for point in plan.points],
        "inert_rows": [inert[point.point_key] for point in plan.points],
    }
    for name in sweep.axes:
        found[name] = [point.cell[name] for point in plan.points]
    return pa.table({name: found[name] for name in schema.names}, schema=schema)
