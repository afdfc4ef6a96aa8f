"""The rules' functions one after the other in this process: no job of its own for each."""

from pathlib import Path

from nnsweep import jobs
from nnsweep.config import read_config
from nnsweep.expansion import expand_sweep
from nnsweep.merge import merge_chunks
from nnsweep.planned import Plan
from nnsweep.sweep_file import read_sweep
from workflow.project import CUT, Project


def run_inline(project: Project, results: Path, **config) -> Plan:
    """Prompts to values.parquet in `results`, with the project's model (prepared before).

    The working directory must be the project's folder.
    """
    sweep = read_sweep(project / "config/sweeps/tiny.yaml")
    settings = read_config({"device": "cpu", "threads": 1} | CUT | config)
    model, prompts = project.results / "model.json", results / "prompts.parquet"
    jobs.prepare_prompts(sweep, model, prompts)
    plan = expand_sweep(sweep, settings, model, prompts, results)
    out = results / "local"
    for name in [chunk["chunk_id"] for chunk in (*plan.chunks, plan.controls)]:
        part, facts = out / f"chunks/{name}.parquet", out / f"chunks/{name}.json"
        jobs.run_chunk(results / f"chunks/{name}.json", "local", settings, part, facts)
    merge_chunks(sweep, results, "local", out)
    return plan
