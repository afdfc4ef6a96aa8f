"""Fetch, convert and describe the sweep's model, once, where there is a network."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.jobs import prepare_model
from nnsweep.log import job_log

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    prepare_model(json.loads(snakemake.params.model), Path(snakemake.output[0]))
