"""Ask the NDIF server, once a run, whether it will compute what the sweep asks for."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.config import read_config
from nnsweep.jobs import check_ndif
from nnsweep.log import job_log
from nnsweep.sweep import Sweep

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    check_ndif(
        Sweep.model_validate(json.loads(snakemake.params.sweep)),
        Path(snakemake.input.model),
        read_config(snakemake.config),
        Path(snakemake.output.preflight),
    )
