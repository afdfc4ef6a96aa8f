"""Join the parts of all chunks into values.parquet, sessions.parquet and run.json."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.log import job_log
from nnsweep.merge import merge_chunks
from nnsweep.sweep import Sweep

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    output = Path(snakemake.output.values).parent
    merge_chunks(
        Sweep.model_validate(json.loads(snakemake.params.sweep)),
        output.parent,
        snakemake.wildcards.engine,
        output,
    )
