"""Look, once a run, for the GPUs that `device: cuda` asks for."""

from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.jobs import check_device
from nnsweep.log import job_log

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    check_device(Path(snakemake.output.device))
