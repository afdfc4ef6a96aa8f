"""The checked configuration and sweep, as every rule reads them."""

import json
from dataclasses import asdict
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake.utils import validate

from nnsweep import SEMANTICS
from nnsweep.config import read_config
from nnsweep.cost import WAITING_MB, chunk_mb, chunk_minutes, waiting_minutes
from nnsweep.errors import UserError
from nnsweep.expansion import settings_of
from nnsweep.jobs import read_sweep, size_line
from nnsweep.sites import SHAPE_VERSION
from nnsweep.sweep import vector_files

try:
    CONFIG = read_config(config)
    SWEEP_FILE = f"{CONFIG.sweeps}/{CONFIG.sweep}.yaml"
    SPEC = read_sweep(Path(SWEEP_FILE))
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
SETTINGS_PARAM = json.dumps(asdict(settings_of(CONFIG)))
PARITY = f"{CONFIG.parity.against}-vs-ndif"
PARITY_FILES = (
    [f"results/{SWEEP}/parity/{PARITY}.json"]
    if ENGINE == "ndif" and CONFIG.parity.points != 0
    else []
)

# A request to NDIF has tries of its own; other chunks follow `snakemake --retries`.
CHUNK_RETRIES = 0 if ENGINE == "ndif" else None


def kept(output):
    """An output that the rule reads before it writes; the first time there is nothing to keep."""
    return update(output) if Path(f"results/{SWEEP}/plan.json").exists() else output


wildcard_constraints:
    sweep=SWEEP,
    engine="local|ndif|reference",
    a="local|ndif|reference",
    b="local|ndif|reference",
    chunk="[0-9a-f]{16}",
    measure="|".join(MEASURES),


def plan_of(wildcards):
    """The finished plan of the sweep."""
    done = checkpoints.expand_sweep.get(sweep=wildcards.sweep)
    return json.loads(Path(done.output.plan).read_text())


def parts_of(wildcards, engine, names):
    """Parts and facts of some chunks on one engine."""
    folder = f"results/{wildcards.sweep}/{engine}/chunks"
    return {
        "parts": [f"{folder}/{name}.parquet" for name in names],
        "facts": [f"{folder}/{name}.json" for name in names],
    }


def engine_parts(wildcards):
    """Parts and facts of every chunk of the plan, null controls included."""
    plan = plan_of(wildcards)
    names = [*plan["chunks"], *([plan["controls"]] if plan["controls"] else [])]
    return parts_of(wildcards, wildcards.engine, names)


def finished_parts(wildcards):
    """Every part of the plan, so that one that was lost is run again."""
    done = checkpoints.expand_sweep.get(sweep=SWEEP)
    plan = json.loads(Path(done.output.plan).read_text())
    names = [*plan["chunks"], *([plan["controls"]] if plan["controls"] else [])]
    folder = f"results/{SWEEP}/{ENGINE}/chunks"
    return [f"{folder}/{name}.{end}" for name in names for end in ("parquet", "json")]


def parity_inputs(wildcards):
    """Two engines' tables; or one engine's sample and the other's table."""
    folder = f"results/{wildcards.sweep}"
    found = {"b": f"{folder}/{wildcards.b}/values.parquet"}
    if CONFIG.parity.points == "all" or not plan_of(wildcards)["sample"]:
        return found | {"a": f"{folder}/{wildcards.a}/values.parquet"}
    return found | parts_of(wildcards, wildcards.a, list(plan_of(wildcards)["sample"]))


def preflight(wildcards):
    """Chunks on NDIF wait for the check of the server."""
    if wildcards.engine != "ndif":
        return []
    return ancient(f"results/{wildcards.sweep}/ndif/preflight.json")


def machine(wildcards):
    """What of this machine can move a value."""
    return (
        ""
        if wildcards.engine == "ndif"
        else f"{CONFIG.device}, {CONFIG.threads} threads"
    )


def chunk_threads(wildcards):
    """A job that only waits for a server needs no core to speak of."""
    return 1 if wildcards.engine == "ndif" else CONFIG.threads


def ndif_sessions(wildcards):
    """Sessions in flight on NDIF, bounded by `--resources ndif_sessions=N`."""
    return 1 if wildcards.engine == "ndif" else 0


def chunk_memory(wildcards, input, attempt):
    """Megabytes of the job: the plan's estimate with a margin, as much again with every attempt."""
    if wildcards.engine == "ndif":
        return WAITING_MB
    return attempt * chunk_mb(json.loads(Path(input.chunk).read_text()))


def chunk_runtime(wildcards, input, attempt):
    """Minutes of the job: the plan's estimate on a slow machine, or a request's own deadlines."""
    if wildcards.engine == "ndif":
        return waiting_minutes(CONFIG.ndif)
    plan = json.loads(Path(input.chunk).read_text())
    return attempt * chunk_minutes(
        plan, wildcards.engine, CONFIG.device, CONFIG.threads
    )


def chunk_gpus(wildcards):
    """One GPU where `device: cuda` asks for it (a login node cannot tell what `auto` will find)."""
    return int(wildcards.engine != "ndif" and CONFIG.device == "cuda")
