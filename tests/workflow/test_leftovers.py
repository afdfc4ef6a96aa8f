"""`nnsweep gc` lists what nothing refers to, and deletes that and nothing else."""

import json
import shutil
from pathlib import Path

import pytest

from workflow.project import Done, Project, command

NOBODY = "0123456789abcdef"
"""A chunk that no plan has."""


def gc(project: Project, *words: str) -> Done:
    return command("nnsweep", "gc", *words, cwd=project.root)


def everything(project: Project) -> set[Path]:
    return set((project / "results").rglob("*"))


def plant(path: Path, size: int = 10) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    return path


@pytest.fixture
def littered(copied: Project) -> tuple[Project, set[Path], set[Path]]:
    """A finished run among leftovers of every kind: (project, leftovers, what must stay)."""
    results, done = copied.results, next(iter(copied.parts()))
    waiting = copied.plan()["controls"]
    (results / f"local/chunks/{waiting}.parquet").unlink()
    leftovers = {
        plant(results / f"chunks/{NOBODY}.json", 1500),
        plant(results / f"local/chunks/{NOBODY}.json"),
        plant(results / f"local/chunks/{NOBODY}.parquet"),
        plant(results / f"ndif/chunks/{NOBODY}.parquet"),
        plant(results / f"local/chunks/.{done}.parquet.x1.part"),
        plant(results / ".plan.json.x2.part"),
        plant(results / f"local/jobs/{NOBODY}/session.json").parent,
        plant(results / f"local/jobs/{done}/session.json").parent,
        plant(results.parent / "gone/plan.json").parent,
    }
    kept = {
        plant(results / f"local/jobs/{waiting}/session.json"),
        plant(results / f"ndif/jobs/{done}/session.json"),
        plant(results.parent / "paper/table.csv"),
    }
    return copied, leftovers, kept


def listed(project: Project, out: str) -> set[Path]:
    lines = [line.split("  (")[0].split() for line in out.splitlines() if "  (" in line]
    return {project / words[2] for words in lines}


def test_leftovers_are_listed_with_sizes_and_stay(littered):
    project, leftovers, _ = littered
    before = everything(project)
    done = gc(project)
    assert done.code == 0, done.out
    assert listed(project, done.out) == leftovers
    assert f"1.5 kB  results/tiny/chunks/{NOBODY}.json  (its chunk is not in the plan)" in done.out
    assert "1.6 kB  in 9 leftovers" in done.out
    assert "Nothing was deleted" in done.out
    assert everything(project) == before


def test_only_leftovers_are_deleted_and_only_when_asked(finished, littered):
    project, leftovers, kept = littered
    before = everything(project)
    done = gc(project, "--delete")
    assert done.code == 0, done.out
    left = everything(project)
    inside = {path for one in leftovers if not one.suffix for path in before if one in path.parents}
    assert left == before - leftovers - inside
    assert kept <= left
    assert "0 B  in 0 leftovers" in gc(project).out


def test_a_finished_run_has_no_leftovers_and_stays_finished(copied):
    before = everything(copied)
    assert "0 B  in 0 leftovers" in gc(copied, "--delete").out
    assert everything(copied) == before
    plant(copied.results / f"chunks/{NOBODY}.json")
    plant(copied.results / f"local/chunks/{NOBODY}.parquet")
    gc(copied, "--delete")
    assert everything(copied) == before
    assert copied.run().idle


def test_the_sample_of_a_plan_is_no_leftover_and_that_of_an_earlier_one_is(copied):
    plan = copied.plan()
    sample = plant(copied.results / "local/chunks" / f"{NOBODY}.parquet")
    (copied.results / "plan.json").write_text(json.dumps(plan | {"sample": NOBODY}))
    assert not listed(copied, gc(copied).out)
    (copied.results / "plan.json").write_text(json.dumps(plan))
    assert listed(copied, gc(copied).out) == {sample}


def test_nothing_is_deleted_while_snakemake_is_at_work(littered):
    project, *_ = littered
    plant(project / ".snakemake/locks/0.input.lock")
    before = everything(project)
    done = gc(project, "--delete")
    assert done.code == 2
    assert "snakemake --unlock" in done.out.splitlines()[-1]
    assert everything(project) == before


def test_without_sweep_files_nothing_is_a_leftover(littered):
    project, *_ = littered
    before = everything(project)
    shutil.move(project / "config/sweeps", project / "elsewhere")
    done = gc(project, "--delete")
    assert done.code == 2
    (line,) = done.out.splitlines()
    assert "Give --sweeps" in line
    assert everything(project) == before
    assert gc(project, "--sweeps", "elsewhere").code == 0
    assert gc(project, "nowhere").code == 2


def test_a_folder_of_sweep_files_in_the_configuration_is_heeded(littered):
    project, leftovers, _ = littered
    shutil.move(project / "config/sweeps", project / "elsewhere")
    (project / "config/config.yaml").write_text("sweeps: elsewhere\n")
    assert listed(project, gc(project).out) == leftovers
