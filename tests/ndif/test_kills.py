"""Parts of the server are killed while a run waits: the run ends in one line, or goes on."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_engine import TOGETHER, VALUES, journals, on, project_of

from nnsweep.models import locate
from nnsweep.ndif import processes, server
from nnsweep.ndif.ports import Ports
from nnsweep.ndif.state import ServerState
from nnsweep.tables import read_table
from workflow.project import Done, Project, finish

Plain = dict[str, Any]
CONFIG = {
    "engine": "ndif",
    "ndif": "{connect_s: 3, queue_s: 60, run_s: 60, attempts: 2, pause_s: 1}",
} | TOGETHER
PATIENT = {"engine": "ndif"} | TOGETHER


@pytest.fixture(scope="module")
def serve(
    tiny: Plain, ndif_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], ServerState]]:
    """Start a server of the tiny model, or start it again at the same address."""
    folder = tmp_path_factory.mktemp("killed")
    ports: list[Ports] = []

    def start() -> ServerState:
        given = ports[0] if ports else Ports()
        how: Plain = {"python": ndif_python, "ports": given, "sandbox_pool": 1}
        state = server.serve(str(locate(tiny)), state_dir=folder, **how)
        ports[:] = [Ports(api=state.ports["api"])]
        return state

    yield start
    server.stop(folder)


@pytest.fixture(scope="module")
def undisturbed(tiny: Plain, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The run on this machine; tests copy it, and run the same plan on the server."""
    project = project_of(tmp_path_factory.mktemp("undisturbed") / "project", tiny)
    local = project.run("results/tiny/local/values.parquet", **TOGETHER)
    assert local.code == 0, local.out
    return project


def part_of(state: ServerState, name: str) -> list[processes.Process]:
    """The processes of one part of the server."""
    if name != "actor":
        return sorted(processes.family([state.parts[name]]))
    everything = processes.family(processes.marked(state.marker))
    words = {process: " ".join(processes.command_line(process)) for process in everything}
    return [process for process, line in words.items() if line.startswith("ray::Cpu")]


def rows_of(project: Project, engine: str) -> list[Plain]:
    return read_table(project.results / engine / "values.parquet").to_pylist()


def run_until(project: Project, state: ServerState, name: str) -> Done:
    """Start a run, and kill a part of the server once a session is on its way."""
    process = project.start(VALUES, env=on(state.host), **CONFIG)
    deadline = time.monotonic() + 900
    while not journals(project):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    victims = part_of(state, name)
    for victim in victims:
        if processes.alive(victim):
            os.kill(victim.pid, signal.SIGKILL)
    done = finish(process)
    assert victims, done.out
    return done


@pytest.mark.parametrize("name", ["api", "redis", "actor"])
def test_a_part_of_the_server_that_is_killed_costs_no_value(
    serve: Callable[[], ServerState], undisturbed: Project, tmp_path: Path, name: str
) -> None:
    """The run ends in one line a chunk, or comes through; after `serve` it is whole."""
    state = serve()
    project = undisturbed.copy(tmp_path / "project")
    done = run_until(project, state, name)
    if done.code:
        said = [line for line in done.out.splitlines() if line.startswith("nnsweep: ")]
        assert said, done.out
        assert "Traceback" not in done.out
        assert not (project / VALUES).exists()
        again = project.run(VALUES, env=on(serve().host), **PATIENT)
        assert again.code == 0, again.out
    remote = rows_of(project, "ndif")
    assert len({(row["point_id"], row["row_id"]) for row in remote}) == len(remote) == 6 * 6
    assert (project / VALUES).read_bytes() == undisturbed.values.read_bytes()
    assert not journals(project)
