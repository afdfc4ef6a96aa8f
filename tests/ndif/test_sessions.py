"""A chunk on a server that misbehaves: every value comes once, or an error that names it."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import (
    CLOSE,
    CUT,
    HTML,
    QUEUED,
    RESET,
    RUNNING,
    SILENT,
    FakeNdif,
    chunk_of,
    completed,
    error,
    pack,
    points_of,
    result,
    state,
    status,
    values_of,
)

from nnsweep.chunks import keys_of, pass_ids
from nnsweep.errors import NnsweepError
from nnsweep.ndif.sessions import Budget, Sessions
from nnsweep.ndif.transport import Deadlines, Refused, StillQueued, Transient

TRIES = 4
TIMEOUT = "Your job exceeded the execution timeout of 3600s."
INDEX = (
    "Traceback (most recent call last):\n"
    '  File "kernel.py", line 9, in apply\n'
    "IndexError: index 99 is out of bounds for dimension 1 with size 5\n"
)
LAST = INDEX.splitlines()[-1]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNdif]:
    """A server of canned answers, and this process as its client."""
    from nnsight import CONFIG

    with FakeNdif().running() as server:
        monkeypatch.setattr(CONFIG.API, "HOST", server.host)
        yield server


@pytest.fixture
def sessions(fake: FakeNdif, tmp_path: Path) -> Callable[..., Sessions]:
    """A factory: the sessions of a job that finds what an earlier one left in the folder."""

    def make(max_minutes: float = 45, **deadlines: float) -> Sessions:
        limits = {"connect": 30, "queue": 30, "run": 30, "download": 30} | deadlines
        budget = Budget(Deadlines(**limits), TRIES, 0.01, max_minutes)
        return Sessions("a-model", pack, tmp_path / "journal", budget, said(tmp_path))

    return make


def said(folder: Path) -> Callable[[str], None]:
    """A reporter that writes lines to a file."""

    def report(line: str) -> None:
        with (folder / "log").open("a") as stream:
            stream.write(line + "\n")

    return report


def lines(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def check(found: dict[Any, Any], chunk: dict[str, Any], without: tuple[str, ...] = ()) -> None:
    """Every asked value is there exactly once, with its own numbers."""
    keys = keys_of(chunk)
    assert sorted(found) == sorted(keys)
    for key, numbers in zip(keys, values_of(chunk).numpy(), strict=True):
        if key[0] not in without:
            assert np.array_equal(found[key], numbers), key


def sizes(fake: FakeNdif) -> list[int]:
    """How many passes each session had that the server took in."""
    return [len(pass_ids(chunk)) for chunk in fake.sessions]


# --- the good day ---------------------------------------------------------------------------------


def test_a_chunk_is_one_session(fake: FakeNdif, sessions: Any) -> None:
    chunk, runner = chunk_of(passes=5, points=3), sessions()
    check(runner.run(chunk), chunk)
    assert (fake.posts, sizes(fake)) == (1, [5])
    (record,) = runner.records
    counts = {name: record[name] for name in ("points", "rows", "passes", "attempts", "session")}
    assert counts == {"points": 15, "rows": 30, "passes": 5, "attempts": 1, "session": 0}
    assert record["payload_bytes"] == len(pack(chunk))
    assert record["result_bytes"] == len(result({"values": values_of(chunk)}))
    assert record["seconds_running"] == 0.5


# --- what passes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [status(503), status(429), RESET, CLOSE, HTML], ids=str)
def test_a_request_that_fails_in_passing_is_sent_again(
    fake: FakeNdif, sessions: Any, fault: Any
) -> None:
    fake.submit = [fault]
    chunk, runner = chunk_of(), sessions()
    check(runner.run(chunk), chunk)
    assert (fake.posts, len(fake.sessions)) == (2, 1)
    assert runner.records[0]["attempts"] == 2


@pytest.mark.parametrize("fault", [status(503), RESET, CLOSE, CUT, SILENT], ids=str)
@pytest.mark.parametrize("phase", ["poll", "download"])
def test_what_fails_on_the_way_home_is_fetched_again_and_not_computed_again(
    fake: FakeNdif, sessions: Any, phase: str, fault: Any
) -> None:
    """A result that was cut off is still on the server."""
    setattr(fake, phase, [fault])
    chunk = chunk_of()
    check(sessions(connect=1).run(chunk), chunk)
    assert fake.posts == 1


@pytest.mark.parametrize(
    "spoilt",
    [
        state("COMPLETED"),
        state("COMPLETED", raw=b""),
        state("COMPLETED", raw=b"damaged"),
        state("COMPLETED", saved={"something": "else"}),
        state("ERROR", "Replica was evicted. Please try again later."),
    ],
    ids=["no data", "gone", "damaged", "no values", "evicted"],
)
def test_a_job_that_ended_without_values_is_computed_again(
    fake: FakeNdif, sessions: Any, spoilt: Any
) -> None:
    fake.story = lambda chunk: [spoilt] if len(fake.sessions) == 1 else completed(chunk)
    chunk, runner = chunk_of(), sessions()
    check(runner.run(chunk), chunk)
    assert fake.posts == 2


def test_a_job_without_data_never_gets_an_earlier_result(
    fake: FakeNdif, sessions: Any, tmp_path: Path
) -> None:
    """The first of two sessions succeeds, the second says COMPLETED and gives nothing."""

    def story(chunk: Any) -> list[Any]:
        names = points_of(chunk)
        if len(names) == 4:
            return error(TIMEOUT)
        return completed(chunk) if "p0" in names else [state("COMPLETED")]

    fake.story = story
    with pytest.raises(Transient, match="COMPLETED without data"):
        sessions().run(chunk_of(passes=4))
    assert fake.posts == 2 + TRIES
    assert len(list((tmp_path / "journal").glob("*.npy"))) == 1


def test_tries_are_bounded_and_their_pauses_grow(
    fake: FakeNdif, sessions: Any, tmp_path: Path
) -> None:
    fake.submit = [status(503, "compute backend is reconnecting")] * 99
    with pytest.raises(Transient, match=r"status 503 .compute backend is reconnecting"):
        sessions().run(chunk_of())
    assert fake.posts == TRIES
    assert [line.partition(" failed")[0] for line in lines(tmp_path)] == ["try 1", "try 2", "try 3"]


def test_a_silent_server_costs_a_bounded_time(fake: FakeNdif, sessions: Any) -> None:
    fake.submit = [SILENT] * 99
    began = time.monotonic()
    with pytest.raises(Transient, match=r"request could not be sent .timed out"):
        sessions(connect=0.3).run(chunk_of())
    assert time.monotonic() - began < 20


def test_a_preempted_job_is_not_submitted_again(
    fake: FakeNdif, sessions: Any, tmp_path: Path
) -> None:
    fake.story = lambda chunk: [RUNNING, QUEUED, RUNNING, *completed(chunk)]
    chunk = chunk_of()
    check(sessions().run(chunk), chunk)
    assert fake.posts == 1
    names = [line.split()[0] for line in lines(tmp_path)]
    assert names == ["submitted", "RUNNING", "QUEUED", "RUNNING", "COMPLETED"]


# --- what does not pass ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [400, 401, 403, 422])
def test_a_refused_request_is_submitted_once(fake: FakeNdif, sessions: Any, number: int) -> None:
    fake.submit = [status(number, "Your nnsight is too old.")] * 99
    with pytest.raises(Refused, match="Your nnsight is too old"):
        sessions().run(chunk_of())
    assert fake.posts == 1


def test_a_model_that_is_not_deployed_is_asked_for_once(
    fake: FakeNdif, sessions: Any, tmp_path: Path
) -> None:
    fake.story = lambda chunk: error("Could not deploy this model. It is gated.")
    with pytest.raises(Refused, match="It is gated"):
        sessions().run(chunk_of())
    assert fake.posts == 1
    assert not list((tmp_path / "journal").iterdir()), "a refused job is nothing to go back to"


def test_a_result_of_another_size_is_refused_and_forgotten(
    fake: FakeNdif, sessions: Any, tmp_path: Path
) -> None:
    fake.story = lambda chunk: [state("COMPLETED", saved={"values": values_of(chunk)[1:]})]
    with pytest.raises(NnsweepError, match=r"\(8, 2\) values were asked for, \(7, 2\) came back"):
        sessions().run(chunk_of())
    assert not list((tmp_path / "journal").iterdir())


# --- too much for one session ---------------------------------------------------------------------


def too_long_above(passes: int) -> Callable[[Any], list[Any]]:
    """A server that ends every session of more passes."""
    return lambda chunk: error(TIMEOUT) if len(pass_ids(chunk)) > passes else completed(chunk)


@pytest.mark.parametrize(
    ("limit", "asked"), [(4, [7, 4, 3]), (2, [7, 4, 2, 2, 3, 2, 1]), (1, [7, 4, 2, 1, 1])]
)
def test_a_session_that_runs_too_long_is_split_and_never_sent_again_as_it_is(
    fake: FakeNdif, sessions: Any, limit: int, asked: list[int]
) -> None:
    fake.story = too_long_above(limit)
    chunk = chunk_of(passes=7)
    check(sessions().run(chunk), chunk)
    assert sizes(fake)[: len(asked)] == asked
    names = [tuple(pass_ids(session)) for session in fake.sessions]
    assert len(names) == len(set(names))


def test_a_pass_that_is_too_much_is_split_into_its_points(fake: FakeNdif, sessions: Any) -> None:
    fake.story = lambda chunk: error(TIMEOUT) if len(points_of(chunk)) > 2 else completed(chunk)
    chunk = chunk_of(passes=1, points=5)
    check(sessions().run(chunk), chunk)
    assert [points_of(session) for session in fake.sessions] == [
        ["p0", "p1", "p2", "p3", "p4"],
        ["p0", "p1", "p2"],
        ["p0", "p1"],
        ["p2"],
        ["p3", "p4"],
    ]
    slots = [[e["slot"] for e in s["blocks"][0]["passes"][0]["edits"]] for s in fake.sessions]
    assert slots == [[0, 1, 2, 3, 4], [0, 1, 2], [0, 1], [0], [0, 1]]


def test_a_point_that_is_too_much_alone_ends_the_job(fake: FakeNdif, sessions: Any) -> None:
    fake.story = lambda chunk: error(TIMEOUT)
    with pytest.raises(NnsweepError, match=r"one point alone is too much .*execution timeout"):
        sessions().run(chunk_of(passes=2))
    assert sizes(fake) == [2, 1]
    fake.story = completed
    check(sessions().run(chunk_of(passes=2)), chunk_of(passes=2))
    assert sizes(fake) == [2, 1, 1, 1]


def test_later_sessions_are_cut_by_the_measured_rate(fake: FakeNdif, sessions: Any) -> None:
    """Sixteen passes are too much; the first eight took eight minutes, and two are allowed."""

    def story(chunk: Any) -> list[Any]:
        passes = len(pass_ids(chunk))
        return error(TIMEOUT) if passes > 8 else completed(chunk, seconds=60.0 * passes)

    fake.story = story
    chunk = chunk_of(passes=16)
    check(sessions(max_minutes=2).run(chunk), chunk)
    assert sizes(fake) == [16, 8, 2, 2, 2, 2]


# --- bad points -----------------------------------------------------------------------------------


def failing_on(*bad: str) -> Callable[[Any], list[Any]]:
    """A server on which some points raise."""
    return lambda chunk: error(INDEX) if set(bad) & set(points_of(chunk)) else completed(chunk)


@pytest.mark.parametrize(
    ("shape", "bad", "posts"),
    [
        ({"passes": 1}, ("p0",), 2),
        ({"passes": 8}, ("p5",), 8),
        ({"passes": 1, "points": 4}, ("p2",), 6),
        ({"passes": 4, "points": 2}, ("p0", "p7"), 12),
    ],
)
def test_a_bad_point_is_isolated_and_the_others_are_kept(
    fake: FakeNdif, sessions: Any, shape: dict[str, int], bad: tuple[str, ...], posts: int
) -> None:
    fake.story = failing_on(*bad)
    chunk = chunk_of(**shape)
    found = sessions().run(chunk)
    check(found, chunk, without=bad)
    assert {point for (point, _), value in found.items() if isinstance(value, str)} == set(bad)
    assert {value for value in found.values() if isinstance(value, str)} == {LAST}
    assert fake.posts == posts, "a session without writes is tried once, then halves"
    canaries = [s for s in fake.sessions if pass_ids(s) == ["canary"]]
    assert len(canaries) == 1
    (item,) = canaries[0]["blocks"][0]["passes"]
    assert (item["edits"], item["resumes"], item["start"]) == ([], [0], 0)


def test_where_everything_fails_two_requests_say_so(fake: FakeNdif, sessions: Any) -> None:
    fake.story = lambda chunk: error(INDEX)
    with pytest.raises(Refused, match="without writes too: IndexError: index 99"):
        sessions().run(chunk_of(passes=64))
    assert fake.posts == 2
    fake.story = completed
    check(sessions().run(chunk_of(passes=64)), chunk_of(passes=64))
    assert fake.posts == 3, "once the server is mended, the whole chunk is one session again"


# --- killed and run again -------------------------------------------------------------------------

RUN = """
import json, sys
from pathlib import Path
from fakes import chunk_of, pack
from nnsweep.ndif.sessions import Budget, Sessions
from nnsweep.ndif.transport import Deadlines
budget = Budget(Deadlines(connect=30), 1, 0.01, 45)
Sessions("a-model", pack, Path(sys.argv[1]), budget, print).run(chunk_of(**json.loads(sys.argv[2])))
"""


def run_and_kill(fake: FakeNdif, folder: Path, due: Callable[[], bool], **shape: int) -> None:
    """Run a chunk in a process of its own and SIGKILL it at some moment."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), json.dumps(shape)],
        cwd=Path(__file__).parent,
        env=environment(fake),
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while not due():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


def environment(fake: FakeNdif) -> dict[str, str]:
    import os

    return os.environ | {"NDIF_HOST": fake.host}


def test_a_job_killed_after_submitting_is_picked_up_again(
    fake: FakeNdif, sessions: Any, tmp_path: Path
) -> None:
    """The job's id is on disk before the first question after it is answered."""
    fake.poll = [SILENT]
    run_and_kill(fake, tmp_path / "journal", lambda: bool(fake.polls))
    chunk = chunk_of()
    check(sessions().run(chunk), chunk)
    assert fake.posts == 1
    assert "re-attaching to job job1" in lines(tmp_path)


def test_finished_sessions_of_a_killed_job_are_not_sent_again(
    fake: FakeNdif, sessions: Any, tmp_path: Path
) -> None:
    def story(chunk: Any) -> list[Any]:
        names = points_of(chunk)
        return completed(chunk) if "p0" in names and len(names) < 8 else [RUNNING]

    fake.story = lambda chunk: error(TIMEOUT) if len(points_of(chunk)) == 8 else story(chunk)
    run_and_kill(fake, tmp_path / "journal", lambda: "job3" in fake.polls, passes=8)
    assert sizes(fake) == [8, 4, 4]
    fake.finish(3)
    fake.polls.clear()
    chunk, runner = chunk_of(passes=8), sessions()
    check(runner.run(chunk), chunk)
    assert sizes(fake) == [8, 4, 4], "what was too long is not sent again either"
    assert set(fake.polls) == {"job3"}, "finished values are on disk"
    assert [record["rows"] for record in runner.records] == [8, 8]
    assert all(record["result_bytes"] for record in runner.records)


def test_a_kill_between_journal_and_values_loses_nothing(
    fake: FakeNdif, sessions: Any, tmp_path: Path
) -> None:
    chunk = chunk_of()
    sessions().run(chunk)
    (values,) = (tmp_path / "journal").glob("*.npy")
    values.unlink()
    runner = sessions()
    check(runner.run(chunk), chunk)
    assert fake.posts == 1
    check(sessions().run(chunk), chunk)
    assert fake.posts == 1
    assert runner.records[0]["seconds_running"] == 0.5


def test_a_job_that_the_server_has_lost_is_submitted_anew_once(
    fake: FakeNdif, sessions: Any, tmp_path: Path
) -> None:
    fake.story = lambda chunk: [QUEUED]
    with pytest.raises(StillQueued, match="picked up where it is"):
        sessions(queue=0.1).run(chunk_of())
    assert fake.posts == 1
    fake.forget()
    fake.story = completed
    chunk = chunk_of()
    check(sessions().run(chunk), chunk)
    assert fake.posts == 2


def test_a_job_that_waited_too_long_is_picked_up_by_the_next_run(
    fake: FakeNdif, sessions: Any
) -> None:
    fake.story = lambda chunk: [QUEUED, QUEUED, QUEUED, *completed(chunk)]
    with pytest.raises(StillQueued, match=r"ndif\.queue_s"):
        sessions(queue=0.1).run(chunk_of())
    chunk = chunk_of()
    check(sessions().run(chunk), chunk)
    assert fake.posts == 1


def test_values_keep_their_bits(fake: FakeNdif, sessions: Any) -> None:
    """From a float64 or bfloat16 server, float32 comes back; NaN and infinity stay."""
    odd = torch.tensor([[torch.nan, torch.inf], [-0.0, 1e-40]], dtype=torch.float64)
    fake.story = lambda chunk: [state("COMPLETED", saved={"values": odd})]
    found = sessions().run(chunk_of(passes=1))
    rows = np.stack([found[key] for key in keys_of(chunk_of(passes=1))])
    assert rows.dtype == np.float32
    assert np.array_equal(rows.view(np.uint32), odd.float().numpy().view(np.uint32))
