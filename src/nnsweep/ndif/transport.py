"""One request to an NDIF server over plain HTTP: submit, wait, download, with a deadline each.

nnsight's own client waits without a deadline and raises one class for everything. Here a request
is non-blocking: it is posted once, its id is on disk before the wait begins, and every failure has
a class that says what to do about it. Host and key are nnsight's own (NDIF_HOST, NDIF_API_KEY or
its configuration file); the key goes into a request header and nowhere else.
"""

import functools
import io
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from nnsweep.errors import NnsweepError, UserError

logger = logging.getLogger(__name__)


class Transient(NnsweepError):
    """Nothing is wrong with the request; the same request may succeed later."""


class Unfinished(Transient):
    """The job itself may be fine: ask for it again, do not submit it again."""


class StillQueued(NnsweepError):
    """The job waited for longer than it may; the next run picks it up where it is."""


class Refused(UserError):
    """The server will never take this request; its own words say why."""


class TooLong(NnsweepError):
    """The session ran into a time or memory limit; a smaller one may not."""


class BadSession(NnsweepError):
    """The code or a point of the session failed on the server."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds that each phase of a request may take."""

    connect: float = 10
    queue: float = 3600
    run: float = 3600
    download: float = 600


@dataclass
class Timing:
    """What a request took, in seconds and bytes."""

    queued: float = 0.0
    running: float = 0.0
    downloading: float = 0.0
    result_bytes: int = 0
    meta: dict[str, Any] = field(default_factory=dict)


NO_ANSWER = (httpx.HTTPError, httpx.InvalidURL)
TRANSIENT_STATUS = (408, 425, 429, 500, 502, 503, 504)
WAITING = ("RECEIVED", "QUEUED", "PROVISIONING", "DEPLOYING", "DISPATCHED")
TRANSIENT_WORDS = (
    "try again",
    "evicted",
    "reconnecting",
    "preempted",
    "connection",
    "error starting model",
    "error provisioning model",
)
REFUSED_WORDS = ("could not deploy", "not deployed", "not running", "api key", "cancelled by")
TOO_LONG_WORDS = ("execution timeout", "out of memory")


def host() -> str:
    """The server's base URL, as nnsight knows it."""
    from nnsight import CONFIG

    found = str(CONFIG.API.HOST).rstrip("/")
    if not found.startswith(("http://", "https://")):
        raise UserError(f"NDIF_HOST '{found}' is no http:// or https:// address. Set NDIF_HOST.")
    return found


def headers() -> dict[str, str]:
    """The key's header, if there is a key; never logged, never written."""
    key = _key()
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        # The HTTP library would name the header's value in its complaint.
        raise UserError("the NDIF key holds a line break or the like. Set NDIF_API_KEY anew.")
    return {"ndif-api-key": key} if key else {}


def _key() -> str:
    from nnsight import CONFIG

    return CONFIG.API.APIKEY or ""


def _without_key(text: str) -> str:
    """What a server says, less the key: NDIF repeats a malformed one in its answer."""
    return text.replace(_key(), "[key]") if _key() else text


@functools.cache
def _tls() -> ssl.SSLContext:
    """The certificates to trust, read once a process and not once a poll."""
    return httpx.create_ssl_context()


def get_json(path: str, connect: float) -> dict[str, Any]:
    """GET a JSON object.

    Raises:
        Transient: no answer in time, a status that may pass, or something else than JSON.
        Refused: any other status.
    """
    try:
        answer = httpx.get(f"{host()}{path}", headers=headers(), timeout=connect, verify=_tls())
    except NO_ANSWER as error:
        raise Transient(f"no answer from the NDIF host for {path} ({_words(error)})") from None
    _raise_for_status(answer, f"GET {path}")
    return _object(answer, f"GET {path}")


def submit(blob: bytes, model_key: str, deadlines: Deadlines) -> str:
    """POST one session; returns the server's id of the job."""
    from importlib.metadata import version
    from platform import python_version

    from nnsight.schema.request import RequestModel

    envelope = RequestModel(model_key=model_key, compress=True).metadata()
    facts = {"nnsight-version": version("nnsight"), "python-version": python_version()}
    # Sending is given a second for every 100 kB on top, for slow lines.
    limit = httpx.Timeout(deadlines.connect, read=deadlines.connect + len(blob) / 1e5)
    try:
        answer = httpx.post(
            f"{host()}/request",
            data={"data": envelope},
            files={"blob": ("request", blob, "application/octet-stream")},
            headers=headers() | facts | {"ndif-timestamp": repr(time.time())},
            timeout=limit,
            verify=_tls(),
        )
    except NO_ANSWER as error:
        raise Transient(f"the request could not be sent ({_words(error)})") from None
    _raise_for_status(answer, "the request")
    job_id = _object(answer, "the request").get("id")
    if not job_id:
        raise Transient("the server took the request without naming a job")
    return str(job_id)


def wait(
    job_id: str, deadlines: Deadlines, report: Callable[[str], None], known: bool = True
) -> tuple[bytes, Timing]:
    """Poll a job until it is done and download its result.

    Args:
        job_id: What `submit` returned.
        deadlines: Seconds for queue, run and download; a job that is queued again starts anew.
        report: Called with every new state of the job.
        known: False when re-attaching: a job the server does not know raises Transient at once.

    Raises:
        Transient, Unfinished, StillQueued, Refused, TooLong, BadSession: see the classes.
    """
    clock = _Clock(deadlines)
    pause = 0.2
    while True:
        state = _poll(job_id, clock, known)
        if state:
            status, words = str(state.get("status")), str(state.get("description") or "")
            if clock.enter(status):
                report(_without_key(f"{status} {words}").strip())
            if status == "ERROR":
                raise _failure(_without_key(words))
            if status == "COMPLETED":
                return _download(state, clock)
        clock.check()
        time.sleep(pause)
        pause = min(5.0, pause * 1.2)


class _Clock:
    """Seconds in queue, in run and without an answer."""

    def __init__(self, deadlines: Deadlines) -> None:
        self.deadlines, self.timing = deadlines, Timing()
        self.status = ""
        self.entered = self.heard = time.monotonic()

    def enter(self, status: str) -> bool:
        """Note a state; returns whether it is a new one."""
        now = time.monotonic()
        self.heard = now
        if status in (self.status, "LOG"):
            return False
        spent = now - self.entered
        if self.status == "RUNNING":
            self.timing.running = spent
        else:
            self.timing.queued += spent
        if status in WAITING and self.status == "RUNNING":
            # Preempted and queued again: its clocks start anew.
            self.timing.queued = 0.0
        self.entered, self.status = now, status
        return True

    def check(self) -> None:
        """Raise when the present phase has lasted too long."""
        seconds = time.monotonic() - self.entered
        if self.status == "RUNNING":
            if seconds > self.deadlines.run:
                raise TooLong(f"the session has run for {seconds:.0f} s (ndif.run_s)")
        elif seconds + self.timing.queued > self.deadlines.queue:
            raise StillQueued(
                f"the job waited {seconds + self.timing.queued:.0f} s in the queue (ndif.queue_s). "
                "Run again later, it is picked up where it is."
            )

    def silent(self, why: str) -> None:
        """Note an unanswered poll; raise when the server has been silent for too long."""
        limit = 3 * self.deadlines.connect
        if time.monotonic() - self.heard > limit:
            raise Unfinished(f"no word of the job for {limit:.0f} s ({why})")


def _poll(job_id: str, clock: _Clock, known: bool) -> dict[str, Any]:
    """The job's latest state; an empty one while the server has none or does not answer."""
    try:
        answer = httpx.get(
            f"{host()}/response/{job_id}",
            headers=headers(),
            timeout=clock.deadlines.connect,
            verify=_tls(),
        )
    except NO_ANSWER as error:
        clock.silent(_words(error))
        return {}
    if answer.status_code == 404:
        if not known:
            raise Transient(f"the server does not know job {job_id} any more")
        clock.silent("the server has no state of it")
        return {}
    if answer.status_code in TRANSIENT_STATUS:
        clock.silent(f"status {answer.status_code}")
        return {}
    _raise_for_status(answer, "the job's state")
    try:
        return _object(answer, "the job's state")
    except Transient as error:
        clock.silent(str(error))
        return {}


def _download(state: dict[str, Any], clock: _Clock) -> tuple[bytes, Timing]:
    began = time.monotonic()
    url = state.get("data")
    if not url:
        raise Transient("the server answered COMPLETED without data")
    timeout = httpx.Timeout(clock.deadlines.connect, read=clock.deadlines.connect)
    parts = []
    try:
        with httpx.stream("GET", url, timeout=timeout, verify=_tls()) as answer:
            if answer.is_client_error:
                raise Transient(f"the result is gone (status {answer.status_code})")
            if not answer.is_success:
                raise Unfinished(f"the result: status {answer.status_code}")
            for part in answer.iter_bytes():
                parts.append(part)
                if time.monotonic() - began > clock.deadlines.download:
                    raise Unfinished("the result was not down in time (ndif.download_s)")
    except NO_ANSWER as error:
        raise Unfinished(f"the result could not be downloaded ({_words(error)})") from None
    content = b"".join(parts)
    timing = clock.timing
    timing.downloading = time.monotonic() - began
    timing.result_bytes = len(content)
    timing.meta = state.get("meta") or {}
    timing.running = float(timing.meta.get("runtime") or timing.running)
    return content, timing


def unpack(content: bytes) -> Any:
    """What a session saved, by name.

    Raises:
        Transient: the bytes are damaged.
    """
    import torch
    import zstandard

    try:
        raw = zstandard.ZstdDecompressor().decompressobj().decompress(content)
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 (damaged bytes make torch raise anything)
        raise Transient(f"the result is damaged ({type(error).__name__})") from None


def _failure(words: str) -> NnsweepError:
    """The class of an ERROR, by the server's words."""
    low = words.lower()
    lines = words.strip().splitlines() or ["no message"]
    # A traceback says what happened in its last line, a sentence in its first.
    last = lines[-1 if "traceback" in low else 0]
    if any(word in low for word in TOO_LONG_WORDS):
        return TooLong(last)
    if "traceback" not in low:
        if any(word in low for word in REFUSED_WORDS):
            return Refused(f"NDIF refuses the request: {last}")
        if any(word in low for word in TRANSIENT_WORDS):
            return Transient(last)
    return BadSession(last)


def _raise_for_status(answer: httpx.Response, what: str) -> None:
    if answer.is_success:
        return
    if answer.status_code in TRANSIENT_STATUS:
        raise Transient(f"{what}: status {answer.status_code} ({_detail(answer)})")
    raise Refused(
        f"NDIF refuses {what}: {_detail(answer)} (status {answer.status_code}). "
        "Mend it and run again; `nnsweep ndif status` shows the service."
    )


def _object(answer: httpx.Response, what: str) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Transient(f"{what}: the answer is no JSON object")
    return found


def _detail(answer: httpx.Response) -> str:
    """The server's own words, in one line."""
    try:
        body = answer.json()
    except ValueError:
        body = answer.text[:200].strip() or answer.reason_phrase
    words = str(body.get("detail", body) if isinstance(body, dict) else body)[:500]
    return " ".join(_without_key(words).split())


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
