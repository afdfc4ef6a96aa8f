"""Turn the prompt file into token ids, positions, answers and refusals."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.jobs import prepare_prompts
from nnsweep.log import job_log
from nnsweep.sweep import Sweep

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    sweep = Sweep.model_validate(json.loads(snakemake.params.sweep))
    prepare_prompts(sweep, Path(snakemake.input.model), Path(snakemake.output[0]))
