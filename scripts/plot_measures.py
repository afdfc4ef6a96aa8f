"""Draw one measure over the sweep's axes: a line, a heat map, or several."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.figures import plot_measure
from nnsweep.log import job_log
from nnsweep.sweep import Sweep

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    plot_measure(
        Sweep.model_validate(json.loads(snakemake.params.sweep)),
        snakemake.wildcards.measure,
        Path(snakemake.input.summary),
        Path(snakemake.input.values),
        Path(snakemake.output[0]),
    )
