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
from nnsweep.errors import UserError
from nnsweep.plan import make_plan
from nnsweep.planned import Kept, Plan, Settings, identity
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

logger = logging.getLogger(__name__)
Plain = dict[str, Any]


def settings_of(config: Config) -> Settings:
    """The plan's settings in the workflow's configuration."""
    wanted = config.parity.points
    sampled = wanted if isinstance(wanted, int) else 0
    return Settings(
        config.batch_rows,
        config.chunk_passes,
        config.recompute,
        sampled,
        config.mixed.calibration_points,
    )


def expand_sweep(sweep: Sweep, config: Config, model: Path, prompts: Path, results: Path) -> Plan:
    """Rule expand_sweep: points.parquet, sweep.json, plan.json and one file a chunk.

    Args:
        sweep: The sweep.
        config: How passes and chunks are cut, and whose finished parts may be taken over.
        model: model.json.
        prompts: prompts.parquet.
        results: `results/SWEEP`; chunks and parts that lie there and beside it are used again.
    """
    described, settings = read_json(model), settings_of(config)
    rows = prompt_rows.from_table(read_table(prompts))
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
        "chunks": {
            part.chunk["chunk_id"]: {"place": place, **_taken(part, plan)}
            for place, part in enumerate(plan.parts)
        },
        "controls": plan.controls and plan.controls["chunk_id"],
        "control_measures": plan.controls and _renamed(plan.controls, plan.control_names, plan),
        "sample": _samples(plan.sample, plan),
        "calibration": _samples(plan.calibration, plan),
        "points": len(plan.points),
        "measures": plan.measures,
        "inert_rows": plan.inert.total(),
        "forward_passes": forward_passes(plan.chunks),
        "forward_passes_naive": naive_passes(plan.chunks),
        "settings": settings.__dict__,
    }


def _samples(parts: Sequence[Kept], plan: Plan) -> Plain:
    return {part.chunk["chunk_id"]: _renamed(part.chunk, part.names, plan) for part in parts}


def _taken(part: Kept, plan: Plan) -> Plain:
    """How many passes and values a chunk has, how many are taken, and of which rows none."""
    return {
        "passes": len(pass_ids(part.chunk)),
        "of": len(keys_of(part.chunk)),
        "values": part.values,
        "stale": part.stale,
        "measures": _renamed(part.chunk, part.names, plan),
    }


def _renamed(chunk: Plain, names: Mapping[str, str], plan: Plan) -> Plain | None:
    """The measures of an earlier chunk and the sweep's names of them; None if they are the same."""
    if chunk["measures"] == [spec for spec in in_session(plan.measures) if spec["name"] in names]:
        return None
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


def load_vector(spec: Plain, layer: int | None) -> list[float]:
    """Read a vector of shape [width] or [layers, width] from a safetensors file."""
    from safetensors import SafetensorError, safe_open

    path = Path(spec["file"])
    try:
        with safe_open(path, framework="pt") as tensors:
            names = list(tensors.keys())
            if spec["key"] not in names:
                have = ", ".join(names)
                raise UserError(f"{path}: no tensor '{spec['key']}'. Tensors: {have}.")
            values = tensors.get_tensor(spec["key"]).float()
    except (OSError, SafetensorError) as error:
        raise UserError(f"writes: {path} is not a readable safetensors file ({error}).") from None
    if values.ndim == 2 and layer is not None and layer < len(values):
        values = values[layer]
    if values.ndim != 1:
        shape = list(values.shape)
        raise UserError(f"{path}: shape {shape} is neither [width] nor [layers, width].")
    if not values.isfinite().all():
        raise UserError(f"{path}: '{spec['key']}' holds a value that is not finite.")
    return [float(value) for value in values]
