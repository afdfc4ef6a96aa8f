"""How far a run is: on finished, half-finished, failed and running folders."""

import io
import json
import os
import subprocess
import time

import pytest
from rich.console import Console

from nnsweep.status import newest, read_status, show_status
from workflow.project import BIN, Project, command, environment, finish

FOLDER = "results/tiny/local"


def status(project: Project, *words: str):
    """The command in the project's folder."""
    return command("nnsweep", "status", *words, cwd=project.root)


def log_of(project: Project, name: str):
    return project / f"logs/tiny/run_chunk/local/{name}.log"


def lose(project: Project, said: str | None) -> str:
    """Take one chunk's results away; its log ends in `said`, or is gone."""
    name, part = next(item for item in project.parts().items() if item[1].exists())
    part.unlink()
    part.with_suffix(".json").unlink()
    log = log_of(project, name)
    log.unlink() if said is None else log.write_text(said)
    return name


def test_a_finished_run(finished):
    done = status(finished, FOLDER)
    assert done.code == 0, done.out
    head, passes = done.out.splitlines()
    assert head == f"{FOLDER}: 3 of 3 chunks done, 0 started, 0 waiting, 0 failed"
    total = read_status(finished.results / "local").passes
    assert passes == f"  passes     {total} of {total}, finished"


def test_without_a_folder_the_run_written_to_last(finished, copied):
    assert status(copied).out == status(finished, FOLDER).out
    (copied.results / "reference").mkdir()
    assert newest(copied.root) == copied.results / "reference"


def test_a_chunk_that_waits_and_one_that_runs(copied):
    name = lose(copied, None)
    assert "2 of 3 chunks done, 0 started, 1 waiting, 0 failed" in status(copied, FOLDER).out
    log_of(copied, name).write_text("12:00:00 INFO 90 values\n12:00:05 INFO 2/6 passes, 1.0/s\n")
    out = status(copied, FOLDER).out
    assert "2 of 3 chunks done, 1 started, 0 waiting, 0 failed" in out
    assert f"  {name}  2/6 passes, 1.0/s\n" in out
    found = read_status(copied.results / "local")
    records = copied.plan()["chunks"]
    others = found.passes - len(records[name])
    assert found.passes_done == pytest.approx(others + len(records[name]) / 3)
    assert found.rate
    assert found.left == pytest.approx(len(records[name]) * 2 / 3 / found.rate)
    assert f"/s a job, about {found.left:.0f} s left" in out


def test_the_rate_is_one_job_s_and_the_time_that_of_all(copied):
    for name in [lose(copied, "12:00:00 INFO opening") for _ in range(2)]:
        assert log_of(copied, name).exists()
    found = read_status(copied.results / "local")
    (fact,) = found.facts
    (done,) = found.of("done")
    assert found.rate == pytest.approx(done.passes / (fact["seconds_open"] + fact["seconds_run"]))
    assert found.left == pytest.approx((found.passes - done.passes) / found.rate / 2)


def test_before_the_first_chunk_nothing_is_known_of_the_time(copied):
    for path in (copied.results / "local" / "chunks").iterdir():
        path.unlink()
    out = status(copied, FOLDER).out
    assert "0 of 3 chunks done, 3 started" in out
    assert "time left unknown until a chunk is done" in out


def test_a_failed_chunk_says_why(copied):
    said = "12:00:00 INFO 1/6 passes\n12:00:01 ERROR out of memory\nTraceback (most recent call):\n"
    name = lose(copied, said)
    out = status(copied, FOLDER).out
    assert "0 waiting, 1 failed" in out
    assert f"  {name}  failed: out of memory\n" in out


def test_a_silent_chunk_is_told(copied):
    name = lose(copied, "12:00:00 INFO 1/6 passes\n")
    long_ago = time.time() - 1200
    os.utime(log_of(copied, name), (long_ago, long_ago))
    assert "1/6 passes (silent for 20 min)" in status(copied, FOLDER).out


def test_requests_retries_and_bytes(copied):
    sizes = {"attempts": 2, "payload_bytes": 1500, "result_bytes": 250}
    for facts in copied.parts().values():
        path = facts.with_suffix(".json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"sessions": [sizes]}))
    out = status(copied, FOLDER).out
    assert "  sessions   2, 2 retries, 3.0 kB sent, 0.5 kB home\n" in out


def test_a_terminal_gets_a_bar(copied):
    lose(copied, "12:00:00 INFO 0/6 passes\n")
    found = read_status(copied.results / "local")
    terminal = io.StringIO()
    show_status(found, Console(file=terminal, force_terminal=True, width=200))
    assert f"{found.passes_done / found.passes:.0%}" in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue()
    plain = io.StringIO()
    show_status(found, Console(file=plain))
    assert "\x1b[" not in plain.getvalue()
    assert "%" not in plain.getvalue()


def test_watching_a_real_run_ends_when_it_is_finished(copied, tmp_path):
    name = lose(copied, None)
    copied.values.unlink()
    said = tmp_path / "said"
    with said.open("wb") as stream:
        watching = subprocess.Popen(
            [BIN / "nnsweep", "status", FOLDER, "--watch", "--every", "0.2"],
            cwd=copied.root,
            env=environment() | {"PYTHONUNBUFFERED": "1"},
            stdout=stream,
            stderr=stream,
        )
    while "1 waiting" not in said.read_text():
        assert watching.poll() is None, said.read_text()
        time.sleep(0.05)
    ran = finish(copied.start(f"{FOLDER}/values.parquet"))
    assert ran.code == 0, ran.out
    assert watching.wait(60) == 0
    seen = said.read_text()
    heads = [line for line in seen.splitlines() if line.startswith(FOLDER)]
    assert "2 of 3 chunks done, 0 started, 1 waiting" in heads[0]
    assert any("2 of 3 chunks done, 1 started, 0 waiting" in head for head in heads)
    assert "3 of 3 chunks done" in heads[-1]
    assert f"  {name}  " in seen
    assert seen.rstrip().endswith("finished")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("results/tiny",), "expected results/SWEEP/ENGINE, ENGINE being one of"),
        (("results/none/local",), "no plan.json here yet. Run snakemake first."),
        (("results/tiny/local", "--every", "0"), "--every"),
    ],
)
def test_mistakes_are_refused(finished, words, said):
    done = status(finished, *words)
    assert done.code == 2
    assert said in done.out


def test_a_folder_without_results_is_one_line(bare):
    done = status(bare)
    assert done.code == 2
    assert done.out.strip().splitlines() == [
        "nnsweep: .: no results/SWEEP/ENGINE here. Run snakemake first."
    ]
