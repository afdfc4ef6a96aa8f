"""Run one chunk's forward passes on one engine."""

from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.config import read_config
from nnsweep.jobs import run_chunk
from nnsweep.log import job_log

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    preflight = snakemake.input.get("preflight")
    run_chunk(
        Path(snakemake.input.chunk),
        snakemake.wildcards.engine,
        read_config(snakemake.config),
        Path(snakemake.output.part),
        Path(snakemake.output.facts),
        Path(str(preflight)) if preflight else None,
    )
