"""Expand the axes into points, and the points into passes and chunks."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.config import read_config
from nnsweep.expansion import expand_sweep
from nnsweep.log import job_log
from nnsweep.sweep import Sweep

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    expand_sweep(
        Sweep.model_validate(json.loads(snakemake.params.sweep)),
        read_config(snakemake.config),
        Path(snakemake.input.model),
        Path(snakemake.input.prompts),
        Path(snakemake.output.plan).parent,
    )
