"""One tiny model and one finished run, shared by the tests of the workflow and by all workers."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from tiny import save_tiny
from workflow.project import Project, copy_workflow


@pytest.fixture(scope="session")
def once(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, Callable[[Path], object]], Path]:
    """A factory of folders that the first worker to ask fills, and the others wait for."""
    own = tmp_path_factory.getbasetemp()
    root = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def make(name: str, fill: Callable[[Path], object]) -> Path:
        folder, filled = root / name, root / f"{name}.filled"
        with FileLock(root / f"{name}.lock"):
            if not filled.exists():
                assert not folder.exists(), f"another worker could not fill {folder}"
                fill(folder)
                filled.touch()
        return folder

    return make


@pytest.fixture(scope="session")
def model(once, tokenizer) -> Path:
    """A folder with a tiny random model."""
    return once("model", lambda folder: save_tiny("llama", folder, tokenizer, hidden_size=64))


@pytest.fixture(scope="session")
def finished(once, model: Path) -> Project:
    """The tiny sweep, run once on two cores. Tests copy it and leave it as it is."""

    def run(folder: Path) -> None:
        done = copy_workflow(folder, model).run(cores=2)
        assert done.code == 0, done.out

    return Project(once("finished", run))


@pytest.fixture
def copied(finished: Project, tmp_path: Path) -> Project:
    """A copy of the finished run to change."""
    return finished.copy(tmp_path / "project")


@pytest.fixture
def fresh(tmp_path: Path, model: Path) -> Project:
    """The workflow with the tiny sweep, not yet run."""
    return copy_workflow(tmp_path / "project", model)


@pytest.fixture
def bare(tmp_path: Path) -> Project:
    """The workflow as a fresh clone has it."""
    return copy_workflow(tmp_path / "project")
