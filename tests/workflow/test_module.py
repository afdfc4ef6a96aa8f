"""The workflow inside another one: `module`, `use rule *`, and a rule that reads its table."""

from pathlib import Path

import pytest

from workflow.project import CUT, ROOT, Done, Project, command, copy_workflow, digest

SNAKEFILE = """\
configfile: "settings.yaml"


module nnsweep:
    snakefile: "{workflow}/Snakefile"
    config: config["nnsweep"]


use rule * from nnsweep as nnsweep_*


rule answer:
    default_target: True
    input: "results/tiny/local/values.parquet", rules.nnsweep_all.input
    output: "answer.txt"
    shell: "wc -c < {{input[0]}} > {{output}}"
"""

TWO = """\
COMMON = {{"threads": 1, "batch_rows": 3, "chunk_passes": 6}}


module tiny:
    snakefile: "{workflow}/Snakefile"
    config: COMMON | {{"sweep": "tiny"}}


module second:
    snakefile: "{workflow}/Snakefile"
    config: COMMON | {{"sweep": "second"}}


use rule * from tiny as tiny_*
use rule * from second as second_*


rule answer:
    default_target: True
    input: expand("results/{{sweep}}/local/values.parquet", sweep=["tiny", "second"])
"""


@pytest.fixture(scope="module")
def outer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Done]:
    """A project with a Snakefile, a sweep and prompts of its own, and no copy of the workflow."""
    root = tmp_path_factory.mktemp("outer") / "project"
    whole = copy_workflow(root.with_name("whole"), model)
    (root / "config").mkdir(parents=True)
    for name in ("sweeps", "prompts"):
        (whole / f"config/{name}").rename(root / f"config/{name}")
    (root / "model").symlink_to(model)
    (root / "Snakefile").write_text(SNAKEFILE.format(workflow=ROOT / "workflow"))
    settings = {"sweep": "tiny", "threads": 1} | CUT
    lines = [f"  {key}: {value}" for key, value in settings.items()]
    (root / "settings.yaml").write_text("\n".join(["nnsweep:", *lines, ""]))
    return Project(root), command("snakemake", "--cores", "2", "--nocolor", cwd=root)


def test_a_sweep_runs_inside_another_workflow(outer, finished):
    project, done = outer
    assert done.code == 0, done.out
    assert digest(project.values) == digest(finished.values)
    assert int((project / "answer.txt").read_text()) == project.values.stat().st_size
    assert done.out.count("(Rule: nnsweep_run_chunk)") == 3
    assert not (project / "config/config.yaml").exists()


def test_a_second_run_of_the_outer_workflow_does_nothing(outer):
    again = command("snakemake", "--cores", "2", "--nocolor", cwd=outer[0].root)
    assert again.idle, again.out


def test_two_sweeps_are_two_modules(outer, tmp_path):
    project = outer[0].copy(tmp_path / "project")
    project.write_sweep(name="second", axes={"position": ["last"], "layer": [1]})
    (project / "Snakefile").write_text(TWO.format(workflow=ROOT / "workflow"))
    done = command("snakemake", "-n", "--nocolor", cwd=project.root)
    assert done.code == 0, done.out
    assert done.jobs("second_expand_sweep") == 1
    assert done.jobs("tiny_expand_sweep") == done.jobs("tiny_run_chunk") == 0


def test_a_mistake_in_the_settings_is_one_line(outer, tmp_path):
    project = outer[0].copy(tmp_path / "project")
    (project / "settings.yaml").write_text("nnsweep: {sweep: tiny, engnie: ndif}\n")
    done = command("snakemake", "-n", "--nocolor", cwd=project.root)
    assert done.code != 0
    assert "config: engnie: unknown key (value 'ndif'), did you mean 'engine'" in done.out
    assert "Traceback" not in done.out
