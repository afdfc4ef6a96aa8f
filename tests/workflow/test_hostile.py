"""Hostile names from end to end: only the sweep's own files appear, and no shell reads a name."""

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hostile import HOSTILE
from workflow.forks import dry_runs
from workflow.project import ROWS, SWEEP, Project, command, copy_workflow

FOLDER = "pro ject $(touch escaped) `touch escaped` 'q'"
MODEL = "m<script>alert(1)$(touch escaped)"
PROMPTS = "config/prompts/; touch escaped #.csv"
MADE = {"results", "logs", "benchmarks", ".snakemake"}
PAIRS = [
    f"{key}={text}"
    for key in ("sweep", "sweeps")
    for name, text in HOSTILE.items()
    if name != "zero byte"  # no argument of a program can hold one
]


def tree(root: Path) -> set[str]:
    """Everything below a folder, what Snakemake and the sweep make left out."""
    files = {str(path.relative_to(root)) for path in root.rglob("*")}
    return {file for file in files if file.split("/")[0] not in MADE}


def test_hostile_settings_are_refused_and_write_nothing(tmp_path: Path):
    project = copy_workflow(tmp_path / "project")
    before = tree(tmp_path)
    found = dry_runs(project.root, [("--config", pair) for pair in PAIRS])
    for pair, done in zip(PAIRS, found, strict=True):
        assert done.code != 0, pair
        assert "Traceback" not in done.out, done.out
        assert done.jobs("total") == 0
    assert {path for path in tree(tmp_path) - before if ".snakemake" not in path} == set()


@pytest.fixture(scope="module")
def hostile(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The tiny sweep, run with hostile names wherever a name is free."""
    project = copy_workflow(tmp_path_factory.mktemp("hostile") / FOLDER, model)
    (project / "model").rename(project / MODEL)
    ids = [text for name, text in HOSTILE.items() if name != "zero byte"]
    rows = [(row_id, *row[1:]) for row_id, row in zip(ids, ROWS, strict=False)]
    project.write_prompts(rows)
    (project / "config/prompts/tiny.csv").rename(project / PROMPTS)
    prompts = SWEEP["prompts"] | {"file": PROMPTS}
    measures = {"gap": SWEEP["measures"]["gap"]}
    project.write_sweep(model={"id": MODEL}, prompts=prompts, measures=measures)
    before = tree(project.root.parent)
    done = project.run()
    assert done.code == 0, done.out
    assert tree(project.root.parent) - before - set(tree_of_results(project)) == set()
    return project


def tree_of_results(project: Project) -> list[str]:
    """What a run may make, as `tree` of the folder above names it."""
    parent = project.root.parent
    return [
        str(path.relative_to(parent))
        for made in MADE
        for path in [project / made, *(project / made).rglob("*")]
    ]


def test_hostile_row_ids_come_home_as_they_are(hostile: Project):
    ids = pq.read_table(hostile.values)["row_id"].to_pylist()
    assert set(ids) == set(list(HOSTILE.values())[: len(ROWS)])


def test_no_file_of_a_run_is_named_by_its_texts(hostile: Project):
    for made in MADE - {".snakemake"}:
        for path in (hostile / made).rglob("*"):
            name = str(path.relative_to(hostile.root))
            assert re.fullmatch(r"[a-z0-9_./-]+", name), name


def test_a_page_shows_a_hostile_name_as_text(hostile: Project):
    page = (hostile.results / "local" / "overview.html").read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page


def test_commands_show_hostile_names_without_obeying(hostile: Project):
    for words in (("show", "results/tiny/local"), ("explain", "config/sweeps/tiny.yaml")):
        done = command("nnsweep", *words, cwd=hostile.root)
        assert done.code == 0, done.out
    assert not (hostile / "escaped").exists()
