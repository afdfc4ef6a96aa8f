"""Run one chunk's forward passes on one engine."""

from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.jobs import run_chunk
from nnsweep.log import job_log

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    run_chunk(
        Path(snakemake.input.chunk),
        snakemake.wildcards.engine,
        snakemake.params.device,
        snakemake.params.threads,
        Path(snakemake.output.part),
        Path(snakemake.output.facts),
    )
