"""One request: every way it can go wrong has a class that says what to do about it."""

import io
import pickle
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zstandard
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
    result,
    state,
    status,
    values_of,
)

from nnsweep.errors import NnsweepError, UserError
from nnsweep.ndif import transport
from nnsweep.ndif.transport import (
    BadSession,
    Deadlines,
    Refused,
    StillQueued,
    TooLong,
    Transient,
    Unfinished,
)

KEY = "planted-4f1c9a"
SOON = Deadlines(connect=30, queue=60, run=60, download=60)
TRACEBACK = 'Traceback (most recent call last):\n  File "kernel.py", line 3\n'


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNdif]:
    """A server of canned answers, and this process as its client."""
    from nnsight import CONFIG

    with FakeNdif().running() as server:
        monkeypatch.setattr(CONFIG.API, "HOST", server.host)
        monkeypatch.setattr(CONFIG.API, "APIKEY", KEY)
        yield server


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client's pauses pass at once: its clock goes on by them alone."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, time=time.time)
    monkeypatch.setattr(transport, "time", clock)


def submit(deadlines: Deadlines = SOON) -> str:
    return transport.submit(pack(chunk_of()), "a-model", deadlines)


def wait(fake: FakeNdif, *states: dict[str, Any], deadlines: Deadlines = SOON) -> Any:
    """Wait for a job that goes through these states; also returns what was reported."""
    fake.story = lambda chunk: list(states)
    said: list[str] = []
    return *transport.wait(submit(), deadlines, said.append), said


def done() -> dict[str, Any]:
    return completed(chunk_of(), seconds=7.5)[0]


# --- submitting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [408, 429, 500, 502, 503, 504])
def test_a_status_that_may_pass_is_transient(fake: FakeNdif, number: int) -> None:
    fake.submit = [status(number, "compute backend is reconnecting")]
    with pytest.raises(Transient, match=f"request: status {number} .compute backend is reconn"):
        submit()


@pytest.mark.parametrize("number", [400, 401, 403, 404, 413, 422])
def test_any_other_status_is_refused_in_the_servers_words(fake: FakeNdif, number: int) -> None:
    fake.submit = [status(number, "Your nnsight is\ntoo old.")]
    with pytest.raises(Refused, match=r"request: Your nnsight is too old\. .status") as caught:
        submit()
    assert "\n" not in str(caught.value)
    assert fake.posts == 1


@pytest.mark.parametrize(("fault", "words"), [(RESET, "reset"), (CLOSE, "disconnected")])
def test_a_broken_connection_is_transient(fake: FakeNdif, fault: Any, words: str) -> None:
    fake.submit = [fault]
    with pytest.raises(Transient, match=f"request could not be sent .*{words}"):
        submit()


def test_a_silent_server_is_left_after_its_deadline(fake: FakeNdif) -> None:
    fake.submit = [SILENT]
    began = time.monotonic()
    with pytest.raises(Transient, match=r"the request could not be sent .timed out"):
        submit(Deadlines(connect=0.3))
    assert time.monotonic() - began < 20


def test_an_answer_without_a_job_is_transient(fake: FakeNdif) -> None:
    fake.submit = [HTML]
    with pytest.raises(Transient, match="the answer is no JSON object"):
        submit()


def test_nobody_listens(fake: FakeNdif, monkeypatch: pytest.MonkeyPatch) -> None:
    from nnsight import CONFIG

    for host, kind, words in (
        ("http://127.0.0.1:9", Transient, "could not be sent"),
        ("http://127.0.0.1:port", Transient, "could not be sent .Invalid port"),
        ("127.0.0.1:5001", UserError, "no http:// or https:// address"),
    ):
        monkeypatch.setattr(CONFIG.API, "HOST", host)
        with pytest.raises(kind, match=words):
            submit()


# --- the key --------------------------------------------------------------------------------------


def test_the_key_travels_in_its_header_only(fake: FakeNdif) -> None:
    submit()
    sent = {name.lower(): value for name, value in fake.headers[0].items()}
    assert sent.pop("ndif-api-key") == KEY
    assert KEY not in str(sent)
    assert KEY.encode() not in fake.bodies[0]
    assert {"nnsight-version", "python-version"} <= set(sent)


def test_a_key_that_the_server_repeats_is_not_repeated(fake: FakeNdif) -> None:
    """NDIF 0.1.2 answers a malformed key with the key."""
    fake.submit = [status(400, f"Invalid API key format: '{KEY}'. Get one.")]
    with pytest.raises(Refused, match=r"Invalid API key format: '\[key\]'") as caught:
        submit()
    assert KEY not in str(caught.value)


def test_a_state_that_repeats_the_key_does_not_show_it(fake: FakeNdif) -> None:
    said: list[str] = []
    fake.story = lambda chunk: [state("RUNNING", f"for {KEY}"), *error(f"no luck with {KEY}")]
    with pytest.raises(BadSession, match=r"no luck with \[key\]"):
        transport.wait(submit(), SOON, said.append)
    assert said == ["RUNNING for [key]", "ERROR no luck with [key]"]


@pytest.mark.parametrize("spoilt", [f"{KEY}\n", f" {KEY}", f"{KEY}\r", f"ключ-{KEY}"])
def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(
    fake: FakeNdif, monkeypatch: pytest.MonkeyPatch, spoilt: str
) -> None:
    from nnsight import CONFIG

    monkeypatch.setattr(CONFIG.API, "APIKEY", spoilt)
    with pytest.raises(UserError, match="NDIF_API_KEY") as caught:
        submit()
    assert KEY not in str(caught.value)
    assert fake.posts == 0


def test_no_key_is_no_header(fake: FakeNdif, monkeypatch: pytest.MonkeyPatch) -> None:
    from nnsight import CONFIG

    monkeypatch.setattr(CONFIG.API, "APIKEY", None)
    submit()
    assert "ndif-api-key" not in {name.lower() for name in fake.headers[0]}


# --- waiting --------------------------------------------------------------------------------------


def test_a_job_is_followed_to_its_result(fake: FakeNdif, quick: None) -> None:
    content, timing, said = wait(fake, QUEUED, QUEUED, RUNNING, RUNNING, done())
    assert torch.equal(transport.unpack(content)["values"], values_of(chunk_of()))
    assert [line.split()[0] for line in said] == ["QUEUED", "RUNNING", "COMPLETED"]
    assert timing.queued == pytest.approx(0.2 + 0.24)
    assert timing.running == 7.5
    assert timing.result_bytes == len(content)


@pytest.mark.parametrize("fault", [status(503), RESET, CLOSE, HTML, status(404)], ids=str)
def test_a_poll_that_fails_changes_nothing(fake: FakeNdif, quick: None, fault: Any) -> None:
    fake.poll = [fault]
    *_, said = wait(fake, RUNNING, done())
    assert [line.split()[0] for line in said] == ["RUNNING", "COMPLETED"]
    assert fake.posts == 1


def test_a_poll_that_fails_does_not_wind_the_clock_back(fake: FakeNdif, quick: None) -> None:
    """A running job stays a running job while nobody answers."""
    fake.story = lambda chunk: [RUNNING]
    job = submit()
    fake.poll = [fault for _ in range(8) for fault in (None, RESET, status(503))]
    with pytest.raises(TooLong, match=r"has run for \d+ s .ndif.run_s"):
        transport.wait(job, Deadlines(connect=9, queue=60, run=5), print)
    assert fake.poll, "the deadline came while polls failed"


def test_silence_ends_the_wait_and_not_the_job(fake: FakeNdif) -> None:
    fake.poll = [SILENT] * 50
    began = time.monotonic()
    with pytest.raises(Unfinished, match=r"no word of the job for 1 s .timed out"):
        wait(fake, RUNNING, deadlines=Deadlines(connect=0.3))
    assert time.monotonic() - began < 20


def test_the_queue_has_a_deadline(fake: FakeNdif, quick: None) -> None:
    with pytest.raises(StillQueued, match=r"waited 6\d s in the queue .ndif\.queue_s"):
        wait(fake, state("PROVISIONING"), state("DEPLOYING"), QUEUED)
    assert not issubclass(StillQueued, Transient), "waiting on would make the deadline none"


def test_a_run_has_a_deadline(fake: FakeNdif, quick: None) -> None:
    with pytest.raises(TooLong, match=r"ndif\.run_s"):
        wait(fake, QUEUED, RUNNING)


def test_a_preempted_job_starts_its_clocks_anew(fake: FakeNdif, quick: None) -> None:
    """Twice 45 s in the queue and twice 45 s of running are within 60 s each."""
    once = [QUEUED] * 19 + [RUNNING] * 8  # polls; the pauses between them grow to 5 s
    _, timing, said = wait(fake, *once, *[QUEUED] * 9, *[RUNNING] * 9, done())
    names = [line.split()[0] for line in said]
    assert names == ["QUEUED", "RUNNING", "QUEUED", "RUNNING", "COMPLETED"]
    assert 40 < timing.queued < 50, "only the last wait counts"
    assert fake.posts == 1


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ("Your job exceeded the execution timeout of 3600s.", TooLong, "execution timeout of 3600"),
        (f"{TRACEBACK}torch.OutOfMemoryError: CUDA out of memory.", TooLong, "^torch.OutOfMem"),
        (
            f"{TRACEBACK}IndexError: index 99 is out of bounds\n",
            BadSession,
            "^IndexError: index",
        ),
        (f"{TRACEBACK}ValueError: connection, try again", BadSession, "^ValueError"),
        ("No module at 'h.0'.\n\nPackage versions differ.\nre-run.", BadSession, "^No module at"),
        ("", BadSession, "no message"),
        ("Could not deploy this model. It is gated. Please try again.", Refused, "It is gated"),
        ("Request cancelled by operator.", Refused, "NDIF refuses the request: Request cancelled"),
        ("Replica was evicted while processing. Please try again later.", Transient, "evicted"),
        ("Your job was cancelled or preempted by the server.", Transient, "preempted"),
        ("Critical server error occurred. Please try again later.", Transient, "Critical"),
    ],
)
def test_an_error_is_classed_by_the_servers_words(
    fake: FakeNdif, words: str, kind: type, said: str
) -> None:
    """The sentences are those of NDIF 0.1.2."""
    with pytest.raises(NnsweepError, match=said) as caught:
        wait(fake, *error(words))
    assert caught.type is kind
    assert "\n" not in str(caught.value)


def test_a_job_that_nobody_knows_ends_a_second_wait_at_once(fake: FakeNdif) -> None:
    with pytest.raises(Transient, match="does not know job job9"):
        transport.wait("job9", SOON, print, known=False)
    assert fake.polls == ["job9"]


# --- the result -----------------------------------------------------------------------------------


def test_completed_without_data_is_no_success(fake: FakeNdif) -> None:
    with pytest.raises(Transient, match="COMPLETED without data"):
        wait(fake, state("COMPLETED"))


@pytest.mark.parametrize("fault", [CUT, RESET, CLOSE, status(503)], ids=str)
def test_a_broken_download_leaves_the_job_as_it_is(fake: FakeNdif, fault: Any) -> None:
    fake.download = [fault]
    with pytest.raises(Unfinished, match="the result") as caught:
        wait(fake, done())
    assert "Signature" not in str(caught.value)


def test_a_download_has_a_deadline(fake: FakeNdif) -> None:
    fake.pause = 0.2
    with pytest.raises(Unfinished, match=r"ndif\.download_s"):
        wait(fake, done(), deadlines=Deadlines(download=0.1))


def test_a_silent_store_is_left(fake: FakeNdif) -> None:
    fake.download = [SILENT]
    with pytest.raises(Unfinished, match=r"could not be downloaded .timed out"):
        wait(fake, done(), deadlines=Deadlines(connect=0.3))


def test_a_result_that_is_gone_is_no_result(fake: FakeNdif) -> None:
    with pytest.raises(Transient, match=r"gone .status 404") as caught:
        wait(fake, state("COMPLETED", raw=b""))
    assert not isinstance(caught.value, Unfinished)


class Stranger:
    """Something that is no tensor."""


def damaged() -> dict[str, bytes]:
    """Results that are none."""
    whole = result({"values": torch.zeros(3, 2)})
    plain = zstandard.ZstdDecompressor().decompress(whole)
    again = zstandard.ZstdCompressor().compress
    return {
        "nothing": b"",
        "text": b"<html>",
        "half": whole[:-20],
        "half inside": again(plain[:-20]),
        "no archive": again(b"some other text"),
        "flipped": again(plain[:70] + bytes(255 - b for b in plain[70:90]) + plain[90:]),
        "pickle": again(pickle.dumps({"values": 1})),
        "object": result(Stranger()),
    }


@pytest.mark.parametrize("name", damaged())
def test_damaged_bytes_are_transient(name: str) -> None:
    with pytest.raises(Transient, match=r"the result is damaged .\w+.$"):
        transport.unpack(damaged()[name])


def test_a_result_never_runs_code() -> None:
    """What a server sends is read as plain tensors and containers."""
    with io.BytesIO() as stream:
        torch.save(Malicious(), stream)
        content = zstandard.ZstdCompressor().compress(stream.getvalue())
    with pytest.raises(Transient, match="damaged"):
        transport.unpack(content)


class Malicious:
    """Calls something when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code of a result has run",))
