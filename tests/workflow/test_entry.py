"""Both front doors plan the same work, and everything shipped dry-runs in a fresh clone."""

import pytest

from workflow.forks import dry_runs
from workflow.project import ROOT, Done, Project, copy_workflow

SWEEPS = sorted(path.stem for path in (ROOT / "config" / "sweeps").glob("*.yaml"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return copy_workflow(tmp_path_factory.mktemp("clone") / "project")


@pytest.fixture(scope="module")
def shipped(clone: Project) -> dict[str, Done]:
    """A dry run of every shipped sweep."""
    found = dry_runs(clone.root, [("--config", f"sweep={sweep}") for sweep in SWEEPS])
    return dict(zip(SWEEPS, found, strict=True))


def job_table(text: str) -> list[str]:
    """The lines of the table of jobs (it stands twice in a dry run's output)."""
    lines = text.split("Job stats:", 1)[1].split("\n\n", 1)[0].splitlines()
    return [" ".join(line.split()) for line in lines]


def test_both_entries_plan_the_same_jobs(clone):
    front, inner = dry_runs(clone.root, [(), ("-s", "workflow/Snakefile")])
    assert front.code == inner.code == 0, front.out + inner.out
    assert job_table(front.out) == job_table(inner.out)
    assert front.jobs("total") == inner.jobs("total") > 5
    assert front.jobs("all") == 1
    assert "results/capitals_layers/local/values.parquet" in front.out
    assert not (clone / "results").exists()


@pytest.mark.parametrize("sweep", SWEEPS)
def test_every_shipped_sweep_dry_runs(shipped, sweep):
    done = shipped[sweep]
    assert done.code == 0, done.out
    assert done.jobs("prepare_model") == done.jobs("expand_sweep") == 1
    assert f"results/{sweep}/local/summary.parquet" in done.out
