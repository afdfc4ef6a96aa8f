"""Compare both sides of a mixed run on a few points before it begins."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.config import SIDES
from nnsweep.log import job_log
from nnsweep.mixed import calibrate
from nnsweep.sweep import Sweep

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    output = Path(snakemake.output.verdict)
    parts = {"local": snakemake.input.local, "ndif": snakemake.input.ndif}
    calibrate(
        Sweep.model_validate(json.loads(snakemake.params.sweep)),
        output.parent.parent,
        {side: [Path(part) for part in parts[side]] for side in SIDES},
        output,
    )
