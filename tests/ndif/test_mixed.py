"""Engine `mixed` on a real server: both sides agree first, then they share the chunks."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from test_engine import on, project_of

from nnsweep.ndif.state import ServerState
from nnsweep.tables import read_json, read_table, write_table
from workflow.project import Done, Project

Plain = dict[str, Any]
VALUES = "results/tiny/mixed/values.parquet"
CALIBRATED = "results/tiny/mixed/calibration.json"
LOCAL = "results/tiny/local/values.parquet"
NOWHERE = "http://127.0.0.1:9"
HALF = "{calibration_points: 2}"
SHARES: Plain = {"engine": "mixed", "batch_rows": 3, "chunk_passes": 3, "mixed": HALF}
QUICK = "{connect_s: 3, attempts: 1, pause_s: 1}"


HOOK = '''
"""Kill every job that opens the local engine."""
import os
import signal
import sys


class Killer:
    def find_spec(self, name, path=None, target=None):
        if name == "nnsweep.engines.local":
            os.kill(os.getpid(), signal.SIGKILL)


sys.meta_path.insert(0, Killer())
'''


@dataclass
class Mixed:
    """A mixed run that is finished."""

    project: Project
    done: Done


@pytest.fixture(scope="module")
def mixed(
    ndif_server: ServerState,
    deployed: None,
    tiny: Plain,
    tmp_path_factory: pytest.TempPathFactory,
) -> Mixed:
    project = project_of(tmp_path_factory.mktemp("mixed") / "project", tiny)
    env = on(ndif_server.host)
    asked = project.run(CALIBRATED, env=env, cores=3, **SHARES)
    assert asked.code == 0, asked.out
    assert " on engine mixed" not in asked.out
    done = project.run(env=env, cores=3, **SHARES)
    assert done.code == 0, done.out
    return Mixed(project, done)


@pytest.fixture(scope="module")
def compared(mixed: Mixed, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The mixed run, and then the local run of the same plan."""
    project = mixed.project.copy(tmp_path_factory.mktemp("compared") / "project")
    local = project.run(LOCAL, **SHARES | {"engine": "local"})
    assert local.code == 0, local.out
    return project


@pytest.fixture
def calibrated(mixed: Mixed, tmp_path: Path) -> Project:
    """The project as it is when both sides have agreed and no chunk was shared out yet."""
    return without_chunks(mixed.project.copy(tmp_path / "project"))


def without_chunks(project: Project) -> Project:
    """Take away what both sides have computed after they agreed."""
    for part in (project.results / "mixed/chunks").iterdir():
        part.unlink()
    (project / VALUES).unlink()
    return project


def owners(project: Project) -> dict[str, str]:
    """Chunk -> the side that has computed it."""
    parts = (project.results / "mixed/chunks").glob("*.json")
    return {path.stem: read_json(path)["engine"] for path in parts}


def test_both_sides_share_the_chunks_and_make_one_table(compared: Project) -> None:
    project = compared
    chunks = project.plan()["chunks"]
    sides = owners(project)
    assert set(sides) == set(chunks)
    assert sorted(sides.values()) == ["local", "local", "ndif", "ndif"]
    assert (project / VALUES).read_bytes() == (project / LOCAL).read_bytes()


def test_it_is_told_who_computed_what(mixed: Mixed) -> None:
    folder, sides = mixed.project.results / "mixed", owners(mixed.project)
    record = read_json(folder / "run.json")
    assert {side: one["chunks"] for side, one in record["engines"].items()} == {
        "local": 2,
        "ndif": 2,
    }
    told = read_table(folder / "engines.parquet").to_pylist()
    values = [
        one for one in read_table(folder / "values.parquet").to_pylist() if one["status"] == "ok"
    ]
    assert [(one["point_id"], one["row_id"]) for one in told] == [
        (one["point_id"], one["row_id"]) for one in values
    ]
    counts = {side: sum(one["engine"] == side for one in told) for side in ("local", "ndif")}
    assert counts == {side: one["values"] for side, one in record["engines"].items()}
    sessions = read_table(folder / "sessions.parquet").to_pylist()
    plan = mixed.project.plan()
    both = [plan["controls"], *plan["calibration"]]
    assert {(one["chunk_id"], one["engine"]) for one in sessions} == {
        *sides.items(),
        *((name, side) for name in both for side in ("local", "ndif")),
    }
    sent = sum(one["engine"] == "ndif" for one in sessions)
    assert record["remote"]["requests"] == sent
    held = [name for name, one in record["controls"].items() if one["holds"]]
    assert {name.split(": ")[0] for name in held} == {"local", "ndif"}
    page = (folder / "overview.html").read_text()
    assert "on ndif" in page
    assert "calibration" in page
    assert b"local" not in (folder / "values.parquet").read_bytes()


def test_a_second_run_does_nothing_whatever_the_share(mixed: Mixed) -> None:
    for share in ("0.5", "1"):
        how = f"{{ndif_share: {share}, calibration_points: 2}}"
        again = mixed.project.run(env=on(NOWHERE), cores=3, **SHARES | {"mixed": how})
        assert again.idle, again.out


def test_sides_that_disagree_share_nothing(calibrated: Project, ndif_server: ServerState) -> None:
    (name,) = calibrated.plan()["calibration"]
    part = calibrated.results / f"ndif/chunks/{name}.parquet"
    table = read_table(part)
    moved = pc.add(table["gap"], pa.scalar(0.01, pa.float32()))
    write_table(part, table.set_column(table.schema.names.index("gap"), "gap", moved), table.schema)
    (calibrated / CALIBRATED).unlink()
    done = calibrated.run(VALUES, env=on(ndif_server.host), cores=3, **SHARES)
    assert done.code != 0
    (line,) = [line for line in done.out.splitlines() if line.startswith("nnsweep: ")]
    assert "parity of local and ndif fails" in line
    assert not list((calibrated.results / "mixed/chunks").iterdir())


def test_a_server_that_is_gone_fails_its_chunks_unless_the_user_allows_more(
    calibrated: Project, mixed: Mixed
) -> None:
    """Without `fallback` one line says what is wrong; with it this machine does all of the rest."""
    how: Plain = SHARES | {"ndif": QUICK}
    env = on(NOWHERE)
    alone = calibrated.run(VALUES, env=env, cores=3, **how)
    assert alone.code != 0
    assert "nnsweep: NDIF does not answer" in alone.out
    assert not (calibrated / VALUES).exists()
    allowed = "{calibration_points: 2, fallback: true}"
    done = calibrated.run(VALUES, env=env, cores=3, **how | {"mixed": allowed})
    assert done.code == 0, done.out
    assert set(owners(calibrated).values()) == {"local"}
    assert (calibrated / VALUES).read_bytes() == (mixed.project / VALUES).read_bytes()
    told = read_table(calibrated.results / "mixed/engines.parquet")["engine"].to_pylist()
    assert set(told) == {"local"}


def test_what_one_side_has_finished_before_is_taken_over(
    compared: Project, ndif_server: ServerState, tmp_path: Path
) -> None:
    calibrated = without_chunks(compared.copy(tmp_path / "project"))
    how = "{ndif_share: 0, calibration_points: 2}"
    done = calibrated.run(VALUES, env=on(ndif_server.host), cores=3, **SHARES | {"mixed": how})
    assert done.code == 0, done.out
    logs = [path.read_text() for path in (calibrated / "logs/tiny/run_chunk/mixed").iterdir()]
    assert sum("engine local has finished this chunk before" in log for log in logs) == 4
    assert (calibrated / VALUES).read_bytes() == (calibrated / LOCAL).read_bytes()


def test_a_side_that_is_killed_leaves_its_chunks_to_the_other(
    calibrated: Project, mixed: Mixed, ndif_server: ServerState, tmp_path: Path
) -> None:
    """As a machine without memory does it: no word, only a dead process."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join(filter(None, [str(hook), os.environ.get("PYTHONPATH")]))
    env = on(ndif_server.host) | {"PYTHONPATH": path}
    allowed = "{calibration_points: 2, fallback: true}"
    done = calibrated.run(VALUES, env=env, cores=3, **SHARES | {"mixed": allowed})
    assert done.code == 0, done.out
    assert set(owners(calibrated).values()) == {"ndif"}
    assert (calibrated / VALUES).read_bytes() == (mixed.project / VALUES).read_bytes()
