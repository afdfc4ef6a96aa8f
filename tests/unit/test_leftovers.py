"""`nnsweep gc` lists what nothing refers to, and deletes that and nothing else."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nnsweep import cli
from nnsweep.errors import UserError

NOBODY = "0123456789abcdef"
"""A chunk that no plan has."""


PLAN = {
    "chunks": {"a" * 16: {}, "b" * 16: {}},
    "controls": "c" * 16,
    "sample": {},
    "calibration": {},
}


@dataclass
class Folder:
    """A project with the results of one sweep, all of its chunks finished."""

    root: Path

    @property
    def results(self) -> Path:
        return self.root / "results" / "tiny"

    def __truediv__(self, path: str) -> Path:
        return self.root / path


def gc(project: Folder, *words: str) -> str:
    """What the command says."""
    done = CliRunner().invoke(cli.app, ["gc", *words])
    if done.exception:
        raise done.exception
    return done.output


def everything(project: Folder) -> set[Path]:
    return set((project / "results").rglob("*"))


def plant(path: Path, size: int = 10) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    return path


def plan(project: Folder, **changes: object) -> None:
    (project.results / "plan.json").write_text(json.dumps(PLAN | changes))


@pytest.fixture
def tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A finished run without leftovers, and Snakemake's own files among its results."""
    project = Folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in (*PLAN["chunks"], PLAN["controls"]):
        plant(project.results / f"chunks/{name}.json")
        for ending in ("json", "parquet"):
            plant(project.results / f"local/chunks/{name}.{ending}")
    plant(project.results / "chunks/.snakemake_timestamp", 0)
    plant(project.results / "local/values.parquet")
    plant(project / "config/sweeps/tiny.yaml")
    plan(project)
    return project


@pytest.fixture
def littered(tidy: Folder) -> tuple[Folder, set[Path], set[Path]]:
    """A run among leftovers of every kind: (project, leftovers, what must stay)."""
    results, (done, waiting) = tidy.results, PLAN["chunks"]
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
    plant(results / f"local/jobs/{done}/.session.npy.x3.part")
    kept = {
        plant(results / f"local/jobs/{waiting}/session.json"),
        plant(results / f"ndif/jobs/{done}/session.json"),
        plant(results.parent / "paper/table.csv"),
    }
    return tidy, leftovers, kept


def listed(project: Folder, out: str) -> set[Path]:
    lines = [line.split("  (")[0].split() for line in out.splitlines() if "  (" in line]
    return {project / words[2] for words in lines}


def test_leftovers_are_listed_with_sizes_and_stay(littered):
    project, leftovers, _ = littered
    before = everything(project)
    out = gc(project)
    assert listed(project, out) == leftovers
    assert f"1.5 kB  results/tiny/chunks/{NOBODY}.json  (its chunk is not in the plan)" in out
    assert "1.6 kB  in 9 leftovers" in out
    assert "Nothing was deleted" in out
    assert everything(project) == before


def test_only_leftovers_are_deleted_and_only_when_asked(littered):
    project, leftovers, kept = littered
    before = everything(project)
    gc(project, "--delete")
    left = everything(project)
    inside = {path for path in before if leftovers & set(path.parents)}
    assert left == before - leftovers - inside
    assert kept <= left
    assert "0 B  in 0 leftovers" in gc(project)


def test_a_finished_run_has_no_leftovers(tidy):
    before = everything(tidy)
    assert "0 B  in 0 leftovers" in gc(tidy, "--delete")
    assert everything(tidy) == before


def test_the_sample_of_a_plan_is_no_leftover_and_that_of_an_earlier_one_is(tidy):
    sample = plant(tidy.results / f"local/chunks/{NOBODY}.parquet")
    plan(tidy, sample={NOBODY: None})
    assert not listed(tidy, gc(tidy))
    plan(tidy)
    assert listed(tidy, gc(tidy)) == {sample}


def test_before_there_is_a_plan_only_half_written_files_are_leftovers(littered):
    project, *_ = littered
    (project.results / "plan.json").unlink()
    plant(project.results / "model.json")
    found = listed(project, gc(project))
    assert found == {*project.results.rglob(".*.part"), project / "results/gone"}
    assert len(found) == 4


def test_a_link_is_deleted_and_not_what_it_leads_to(tidy):
    elsewhere = plant(tidy / "disk/plan.json").parent
    (tidy / "results/gone").symlink_to(elsewhere)
    gc(tidy, "--delete")
    assert not (tidy / "results/gone").is_symlink()
    assert (elsewhere / "plan.json").exists()


def test_nothing_is_deleted_while_snakemake_is_at_work(littered):
    project, *_ = littered
    plant(project / ".snakemake/locks/0.input.lock")
    before = everything(project)
    with pytest.raises(UserError, match="snakemake --unlock"):
        gc(project, "--delete")
    assert everything(project) == before


def test_without_sweep_files_nothing_is_a_leftover(littered):
    project, leftovers, _ = littered
    before = everything(project)
    shutil.move(project / "config/sweeps", project / "elsewhere")
    with pytest.raises(UserError, match="Give --sweeps"):
        gc(project, "--delete")
    with pytest.raises(UserError, match="nowhere: no such folder"):
        gc(project, "nowhere", "--delete")
    assert everything(project) == before
    assert listed(project, gc(project, "--sweeps", "elsewhere")) == leftovers


def test_a_folder_of_sweep_files_in_the_configuration_is_heeded(littered):
    project, leftovers, _ = littered
    shutil.move(project / "config/sweeps", project / "elsewhere")
    (project / "config/config.yaml").write_text("sweeps: elsewhere\n")
    assert listed(project, gc(project)) == leftovers
