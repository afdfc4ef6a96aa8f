"""One tiny model and one finished run, shared by the tests of the workflow."""

from pathlib import Path

import pytest

from tiny import save_tiny
from workflow.project import Project, copy_workflow


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """A folder with a tiny random model."""
    folder = tmp_path_factory.mktemp("model")
    return save_tiny("llama", folder, tokenizer, hidden_size=64)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Project:
    """The tiny sweep, run once on two cores. Tests copy it and leave it as it is."""
    project = copy_workflow(tmp_path_factory.mktemp("finished") / "project", model)
    done = project.run(cores=2)
    assert done.code == 0, done.out
    return project


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
