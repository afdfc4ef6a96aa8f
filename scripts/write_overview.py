"""Write the page with the run's provenance, its null controls and its extremes."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.log import job_log
from nnsweep.overview import write_overview
from nnsweep.sweep import Sweep

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    write_overview(
        Sweep.model_validate(json.loads(snakemake.params.sweep)),
        Path(snakemake.input.run),
        Path(snakemake.input.summary),
        Path(snakemake.output[0]),
    )
