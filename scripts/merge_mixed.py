"""Join the parts of both sides of a mixed run into one table, and say who computed what."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.log import job_log
from nnsweep.mixed import merge_mixed
from nnsweep.sweep import Sweep

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    output = Path(snakemake.output.values).parent
    sweep = Sweep.model_validate(json.loads(snakemake.params.sweep))
    merge_mixed(sweep, output.parent, output)
