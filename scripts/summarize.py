"""Mean, spread and bootstrap interval of every point and measure."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.config import Bootstrap
from nnsweep.log import job_log
from nnsweep.summary import summarize
from nnsweep.sweep import Sweep

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    summarize(
        Sweep.model_validate(json.loads(snakemake.params.sweep)),
        Path(snakemake.input[0]),
        Path(snakemake.output[0]),
        Bootstrap.model_validate(json.loads(snakemake.params.bootstrap)),
    )
