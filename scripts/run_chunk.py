"""Run one chunk's forward passes on one engine."""

from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.config import read_config
from nnsweep.jobs import recent, run_chunk, taken_over
from nnsweep.log import job_log

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    config = read_config(snakemake.config)
    chunk, part = Path(snakemake.input.chunk), Path(snakemake.output.part)
    preflight = part.parents[2] / "ndif" / "preflight.json"
    engine = snakemake.resources.side
    if not taken_over(engine, part, config):
        run_chunk(
            chunk,
            engine,
            config,
            part,
            Path(snakemake.output.facts),
            preflight if recent(preflight) else None,
        )
