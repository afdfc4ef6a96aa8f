"""The checked configuration and sweep, as every rule reads them."""

import json
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake.utils import validate

from nnsweep import SEMANTICS
from nnsweep.config import SIDES, read_config
from nnsweep.cost import WAITING_MB, chunk_mb, chunk_minutes, waiting_minutes
from nnsweep.errors import UserError
from nnsweep.expansion import cutting
from nnsweep.sweep_file import read_sweep, size_line
from nnsweep.sites import SHAPE_VERSION
from nnsweep.store import Store
from nnsweep.sweep import vector_files

try:
    CONFIG = read_config(config)
    SWEEP_FILE = f"{CONFIG.sweeps}/{CONFIG.sweep}.yaml"
    SPEC = read_sweep(Path(SWEEP_FILE))
    if workflow.is_main_process:
        store = Store(Path(f"results/{SPEC.name}"), CONFIG)
        for engine in CONFIG.engines_here():
            store.refuse_unlike(engine)
except UserError as error:
    raise WorkflowError(str(error)) from None

# With defaults filled in and numbers that came as text from the command line read as numbers.
config.update(CONFIG.model_dump(mode="json"))
validate(config, "../schemas/config.schema.yaml")

SWEEP = SPEC.name
ENGINE = CONFIG.engine
if workflow.is_main_process:
    try:
        line = size_line(SPEC, Path(f"results/{SWEEP}/model.json"))
    except UserError as error:
        raise WorkflowError(f"{SWEEP_FILE}: {error}") from None
    logger.info(f"{line}, engine {ENGINE}")

# A list of tokens has no mean to draw.
MEASURES = [name for name, one in SPEC.measures.items() if one.kind != "top_k"]
VECTOR_FILES = vector_files(SPEC)

# One string each: Snakemake compares params as a set of values without names. The order of the
# keys is kept, since the first axis is the slowest.
SPEC_PARAM = SPEC.model_dump_json()
SETTINGS_PARAM = json.dumps(cutting(CONFIG))
PARITY = f"{CONFIG.parity.against}-vs-ndif"
PARITY_FILES = (
    [f"results/{SWEEP}/parity/{PARITY}.json"]
    if ENGINE == "ndif" and CONFIG.parity.points != 0
    else []
)

# A request to NDIF has tries of its own; with `mixed.fallback` the second try is the other side's;
# other chunks follow `snakemake --retries`.
CHUNK_RETRIES = {"ndif": 0, "mixed": 1 if CONFIG.mixed.fallback else None}.get(ENGINE)


onstart:
    if getattr(workflow.executor_settings, "array_jobs", None):
        raise WorkflowError(
            "--slurm-array-jobs: a task of an array waits for another task's files and loses its "
            "own (issues 447 and 473 of snakemake-executor-plugin-slurm). Leave it out."
        )


def kept(output):
    """An output that the rule reads before it writes; the first time there is nothing to keep."""
    there = Path(str(output).replace("{sweep}", SWEEP)).exists()
    return update(output) if there else output


wildcard_constraints:
    sweep=SWEEP,
    engine="local|ndif|reference|mixed",
    a="local|ndif|reference|mixed",
    b="local|ndif|reference|mixed",
    chunk="[0-9a-f]{16}",
    measure="|".join(MEASURES),


def plan_of(wildcards):
    """The finished plan of the sweep."""
    done = checkpoints.expand_sweep.get(sweep=wildcards.sweep)
    return json.loads(Path(done.output.plan).read_text())


def parts_of(wildcards, engine, names):
    """Parts and facts of some chunks on one engine, once their jobs may begin."""
    folder = f"results/{wildcards.sweep}/{engine}/chunks"
    found = {
        "parts": [f"{folder}/{name}.parquet" for name in names],
        "facts": [f"{folder}/{name}.json" for name in names],
    }
    if missing(found["parts"] + found["facts"]):
        gates(wildcards, engine)
    return found


def missing(paths):
    """Whether a chunk is still to be run; a dry run shows all of them at once."""
    return not workflow.dryrun and not all(Path(path).exists() for path in paths)


def gates(wildcards, engine):
    """What must have happened in this run before chunks of an engine run.

    Checkpoints and no inputs of run_chunk: the server is asked anew in every run, and a file that
    is made anew would send every finished chunk again.
    """
    if engine != "ndif" and CONFIG.device == "cuda" and workflow.local_exec:
        checkpoints.check_device.get(sweep=wildcards.sweep)
    if engine in ("ndif", "mixed"):
        checkpoints.check_ndif.get(sweep=wildcards.sweep)
    if engine == "mixed":
        checkpoints.calibrate.get(sweep=wildcards.sweep)


def engine_parts(wildcards):
    """Parts and facts of every chunk of the plan, null controls included."""
    plan = plan_of(wildcards)
    return parts_of(wildcards, wildcards.engine, [*plan["chunks"], *controls_of(plan)])


def mixed_parts(wildcards):
    """Parts and facts of every chunk, wherever it ran; null controls of both sides."""
    plan = plan_of(wildcards)
    found = parts_of(wildcards, "mixed", list(plan["chunks"]))
    sides = [parts_of(wildcards, one, controls_of(plan)) for one in SIDES]
    return found | {
        "controls": [path for one in sides for path in sum(one.values(), [])]
    }


def calibration_parts(wildcards):
    """The parts that must agree before a mixed run begins."""
    names = list(plan_of(wildcards)["calibration"])
    sides = {one: parts_of(wildcards, one, names) for one in SIDES}
    facts = [path for one in SIDES for path in sides[one]["facts"]]
    return {one: sides[one]["parts"] for one in SIDES} | {"facts": facts}


def controls_of(plan):
    """The name of the chunk of null controls, or none."""
    return [plan["controls"]] if plan["controls"] else []


def finished_parts(wildcards):
    """Every part of the plan, so that one that was lost is run again."""
    run = SimpleNamespace(sweep=SWEEP, engine=ENGINE)
    found = mixed_parts(run) if ENGINE == "mixed" else engine_parts(run)
    return sum(found.values(), [])


def parity_inputs(wildcards):
    """Two engines' tables; or one engine's sample and the other's table."""
    folder = f"results/{wildcards.sweep}"
    found = {"b": f"{folder}/{wildcards.b}/values.parquet"}
    if CONFIG.parity.points == "all" or not plan_of(wildcards)["sample"]:
        return found | {"a": f"{folder}/{wildcards.a}/values.parquet"}
    return found | parts_of(wildcards, wildcards.a, list(plan_of(wildcards)["sample"]))


@lru_cache(maxsize=1)
def places(plan, changed):
    """Chunk -> its place in the plan; read once for each plan."""
    chunks = json.loads(plan.read_text())["chunks"]
    return {name: one["place"] for name, one in chunks.items()}


def side(wildcards, attempt=1):
    """The engine that a chunk's job opens: its own, or one of the two of a mixed run."""
    if wildcards.engine != "mixed":
        return wildcards.engine
    plan = Path(f"results/{wildcards.sweep}/plan.json")
    place = places(plan, plan.stat().st_mtime_ns)[wildcards.chunk]
    return CONFIG.mixed.side(place, attempt)


def chunk_threads(wildcards, attempt):
    """A job that only waits for a server needs no core to speak of."""
    return 1 if side(wildcards, attempt) == "ndif" else CONFIG.threads


def ndif_sessions(wildcards, attempt):
    """Sessions in flight on NDIF, bounded by `--resources ndif_sessions=N`."""
    return 1 if side(wildcards, attempt) == "ndif" else 0


def chunk_memory(wildcards, input, attempt):
    """Megabytes of the job: the plan's estimate with a margin, as much again with every attempt."""
    if side(wildcards, attempt) == "ndif":
        return WAITING_MB
    return attempt * chunk_mb(json.loads(Path(input.chunk).read_text()))


def chunk_runtime(wildcards, input, attempt):
    """Minutes of the job: the plan's estimate on a slow machine, or a request's own deadlines."""
    if side(wildcards, attempt) == "ndif":
        return waiting_minutes(CONFIG.ndif)
    plan = json.loads(Path(input.chunk).read_text())
    return attempt * chunk_minutes(
        plan, side(wildcards, attempt), CONFIG.device, CONFIG.threads
    )


def chunk_gpus(wildcards, attempt):
    """One GPU where `device: cuda` asks for it (a login node cannot tell what `auto` will find)."""
    return int(side(wildcards, attempt) != "ndif" and CONFIG.device == "cuda")
