"""Expand the axes into points, and the points into passes and chunks."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.jobs import expand_sweep
from nnsweep.log import job_log
from nnsweep.planned import Settings
from nnsweep.sweep import Sweep

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    expand_sweep(
        Sweep.model_validate(json.loads(snakemake.params.sweep)),
        Settings(**json.loads(snakemake.params.settings)),
        Path(snakemake.input.model),
        Path(snakemake.input.prompts),
        Path(snakemake.output.plan).parent,
    )
