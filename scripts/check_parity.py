"""Compare two engines value by value; the job fails when they do not agree."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nnsweep.log import job_log
from nnsweep.parity import check_parity, check_sample
from nnsweep.sweep import Sweep

if TYPE_CHECKING:
    from snakemake.iocontainers import snakemake

with job_log(snakemake.log[0]):
    output = Path(snakemake.output.verdict)
    other = Path(snakemake.input.b).parent
    if snakemake.input.get("a"):
        check_parity(Path(snakemake.input.a).parent, other, output)
    else:
        sweep = Sweep.model_validate(json.loads(snakemake.params.sweep))
        check_sample(
            sweep,
            snakemake.wildcards.a,
            [Path(part) for part in snakemake.input.parts],
            other,
            output,
        )
