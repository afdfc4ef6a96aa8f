"""The checked configuration and sweep, as every rule reads them."""

import json
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.utils import validate

from nnsweep import SEMANTICS
from nnsweep.config import read_config
from nnsweep.errors import UserError
from nnsweep.jobs import read_sweep
from nnsweep.sweep import vector_files

try:
    CONFIG = read_config(config)
    SWEEP_FILE = f"{CONFIG.sweeps}/{CONFIG.sweep}.yaml"
    SPEC = read_sweep(Path(SWEEP_FILE))
except UserError as error:
    raise WorkflowError(str(error)) from None

validate(config, "../schemas/config.schema.yaml")

SWEEP = SPEC.name
ENGINE = CONFIG.engine
MEASURES = list(SPEC.measures)
VECTOR_FILES = vector_files(SPEC)

# One string each: Snakemake compares params as a set of values without names. The order of the
# keys is kept, since the first axis is the slowest.
SPEC_PARAM = SPEC.model_dump_json()
SETTINGS_PARAM = json.dumps(
    {
        "batch_rows": CONFIG.batch_rows,
        "chunk_passes": CONFIG.chunk_passes,
        "recompute": CONFIG.recompute,
    },
    sort_keys=True,
)


wildcard_constraints:
    sweep=SWEEP,
    engine="local|reference",
    chunk="[0-9a-f]{16}",
    measure="|".join(MEASURES),


def engine_parts(wildcards):
    """The parts and facts of every chunk of the plan, null controls included."""
    plan = json.loads(
        Path(
            checkpoints.expand_sweep.get(sweep=wildcards.sweep).output.plan
        ).read_text()
    )
    names = [*plan["chunks"], *([plan["controls"]] if plan["controls"] else [])]
    folder = f"results/{wildcards.sweep}/{wildcards.engine}/chunks"
    return {
        "parts": [f"{folder}/{name}.parquet" for name in names],
        "facts": [f"{folder}/{name}.json" for name in names],
    }
