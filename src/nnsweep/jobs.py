"""The work of each rule: paths in, paths out; rule, command and test call the same function."""

import logging
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnsweep import prompts as prompt_rows
from nnsweep.chunks import (
    columns,
    forward_passes,
    keys_of,
)
from nnsweep.config import Config
from nnsweep.errors import NnsweepError, UserError
from nnsweep.parts import part_table
from nnsweep.store import Store
from nnsweep.sweep import Sweep
from nnsweep.tables import (
    part_schema,
    read_json,
    write_json,
    write_table,
)

if TYPE_CHECKING:
    from nnsweep.engines import Engine
    from nnsweep.ndif.sessions import Budget

logger = logging.getLogger(__name__)
Plain = dict[str, Any]
DAY = 86_400


def prepare_model(spec: Plain, output: Path, weights: bool = True) -> None:
    """Rule prepare_model: fetch, convert and describe a model."""
    from nnsweep.log import quiet_libraries
    from nnsweep.models import prepare

    quiet_libraries()
    model = prepare(spec, weights)
    logger.info("model %s is ready: revision %s", model["id"], model["revision"])
    write_json(output, model)


def prepare_prompts(sweep: Sweep, model: Path, output: Path) -> None:
    """Rule prepare_prompts: rows to ids, positions, answers and refusals."""
    from nnsweep.log import quiet_libraries
    from nnsweep.models import load_tokenizer

    quiet_libraries()
    described = read_json(model)
    context = described["shape"]["context"]
    rows = prompt_rows.prepare_rows(
        sweep, Path(sweep.prompts.file), load_tokenizer(described), context
    )
    for row in rows:
        if row.reason:
            logger.warning("row %s is left out: %s", row.row_id, row.reason)
    usable = sum(row.reason is None for row in rows)
    logger.info("%d of %d rows are usable", usable, len(rows))
    table = prompt_rows.to_table(rows)
    write_table(output, table, table.schema)


def taken_over(side: str, part: Path, config: Config) -> bool:
    """Whether an engine has finished this chunk before, alone or in a mixed run; that part serves.

    Args:
        side: The engine that would run the chunk.
        part: `results/SWEEP/ENGINE/chunks/ID.parquet`.
        config: Device and threads, which must be those of the part.
    """
    store = Store(part.parents[2], config)
    found = store.take_over(side, part.stem, part.parents[1].name)
    if found:
        logger.info("engine %s has finished this chunk before", side)
    return found


def run_chunk(
    chunk: Path, engine: str, config: Config, part: Path, facts: Path, preflight: Path | None = None
) -> None:
    """Rule run_chunk: one chunk through one engine; the facts are written before the values.

    Args:
        chunk: The chunk's plan.
        engine: local, ndif or reference.
        config: The workflow's configuration (device, threads, deadlines).
        part: Where the values go.
        facts: Where provenance and accounting go.
        preflight: What check_ndif found; None asks the server now.

    Raises:
        NnsweepError: not as many values came back as were asked for, or the engine failed.
    """
    began = time.perf_counter()
    plan = read_json(chunk)
    journal = part.parent.parent / "jobs" / chunk.stem
    gradients = any(spec["kind"] == "attribution" for spec in plan["measures"])
    runner = open_engine(engine, plan["model"], config, journal, preflight, gradients)
    opened = time.perf_counter() - began
    keys = keys_of(plan)
    result = runner.run(plan, progress(len(keys)))
    if len(result.values) != len(keys):
        raise NnsweepError(f"{len(keys)} values were asked for, {len(result.values)} came back.")
    found = dict(result.facts) | {
        "seconds_open": opened,
        "passes": forward_passes([plan]),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "sessions": result.sessions,
        "engine": engine,
    }
    write_json(facts, found)
    table = part_table(plan, keys, result.values, result.errors)
    write_table(part, table, part_schema(columns(plan["measures"])))
    shutil.rmtree(journal, ignore_errors=True)


def open_engine(
    engine: str,
    model: Plain,
    config: Config,
    journal: Path,
    preflight: Path | None,
    gradients: bool = False,
) -> "Engine":
    """Open an engine by name (imports of torch and nnsight happen here, not before)."""
    # Two jobs on one node share its cores: idle OpenMP threads must sleep, not spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from nnsweep.log import quiet_libraries

    quiet_libraries()
    device, threads = config.device, config.threads
    if engine == "local":
        from nnsweep.engines.local import LocalEngine

        return LocalEngine(model, device, threads)
    if engine == "reference":
        from nnsweep.engines.reference import ReferenceEngine

        return ReferenceEngine(model, device, threads)
    if engine == "ndif":
        from nnsweep.engines.ndif import NdifEngine
        from nnsweep.ndif.preflight import check

        served = read_json(preflight) if preflight else check(model, config, gradients)
        if "lost" in served:
            raise NnsweepError(served["lost"])
        return NdifEngine(model, served, journal, budget_of(config))
    raise UserError(f"engine '{engine}' is not one of: local, ndif, reference.")


def budget_of(config: Config) -> "Budget":
    """Deadlines and tries of a request, as the workflow's configuration has them."""
    from nnsweep.ndif.sessions import Budget
    from nnsweep.ndif.transport import Deadlines

    ndif = config.ndif
    deadlines = Deadlines(ndif.connect_s, ndif.queue_s, ndif.run_s, ndif.download_s)
    return Budget(deadlines, ndif.attempts, ndif.pause_s, config.session.max_minutes)


def recent(preflight: Path) -> bool:
    """Whether the server was asked within a day, by this run or one that was killed."""
    return preflight.exists() and time.time() - preflight.stat().st_mtime < DAY


def check_device(output: Path) -> None:
    """Rule check_device: which GPUs are here.

    Raises:
        UserError: none.
    """
    from nnsweep.engines.machine import gpus, pick_device

    pick_device("cuda")
    found = gpus()
    logger.info("%d GPUs: %s", len(found), ", ".join(one["name"] for one in found))
    write_json(output, found)


def check_ndif(sweep: Sweep, model: Path, config: Config, output: Path) -> None:
    """Rule check_ndif: is the server there, and will it compute what the sweep asks for?"""
    from nnsweep.log import quiet_libraries
    from nnsweep.ndif.preflight import NoServer, check

    quiet_libraries()
    gradients = any(measure.kind == "attribution" for measure in sweep.measures.values())
    try:
        found = check(read_json(model), config, gradients)
    except NoServer as error:
        if not (config.engine == "mixed" and config.mixed.fallback):
            raise
        logger.warning("%s Chunks run here, as mixed.fallback allows.", error)
        found = {"lost": str(error)}
    write_json(output, found)


def progress(values: int) -> Callable[[str], None]:
    """A reporter that logs at most one line in two seconds, with rate and time left."""
    began = last = time.perf_counter()

    def report(line: str) -> None:
        nonlocal last
        now = time.perf_counter()
        done, _, total = line.partition(" ")[0].partition("/")
        if now - last < 2 and done != total:
            return
        last = now
        left = ""
        if total and int(done):
            seconds = (now - began) / int(done) * (int(total) - int(done))
            left = f", {int(done) / (now - began):.1f}/s, {seconds:.0f} s left"
        logger.info("%s%s", line, left)

    logger.info("%d values to compute", values)
    return report
