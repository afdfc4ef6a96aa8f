"""One request to an NDIF server over plain HTTP: submit, wait, download, with a deadline each.

nnsight's own client waits without a deadline and raises one class for everything. Here a request
is non-blocking: it is posted once, its id is on disk before the wait begins, and every failure has
a class that says what to do about it. Host and key are nnsight's own (NDIF_HOST, NDIF_API_KEY or
its configuration file); the key goes into a request header and nowhere else.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from nnsweep.errors import NnsweepError, UserError

logger = logging.getLogger(__name__)


class Transient(NnsweepError):
    """Nothing is wrong with the request; the same request may succeed later."""


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
    from nnsight import CONFIG

    return {"ndif-api-key": CONFIG.API.APIKEY} if CONFIG.API.APIKEY else {}


def get_json(path: str, connect: float) -> Any:
    """GET a JSON answer.

    Raises:
        Transient: no answer in time, or a status that may pass.
        Refused: any other status.
    """
    try:
        answer = httpx.get(f"{host()}{path}", headers=headers(), timeout=connect)
    except httpx.HTTPError as error:
        raise Transient(f"no answer from the NDIF host for {path} ({_words(error)})") from None
    _raise_for_status(answer, f"GET {path}")
    return answer.json()


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
        )
    except httpx.HTTPError as error:
        raise Transient(f"the request could not be sent ({_words(error)})") from None
    _raise_for_status(answer, "the request")
    job_id = answer.json().get("id")
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
        Transient, Refused, TooLong, BadSession: see the classes.
    """
    clock = _Clock(deadlines)
    pause = 0.2
    while True:
        state = _poll(job_id, clock, known)
        status = state.get("status", "QUEUED")
        if clock.enter(status):
            report(f"{status} {state.get('description', '')}".strip())
        if status == "ERROR":
            raise _failure(str(state.get("description", "")))
        if status == "COMPLETED":
            return _download(state, clock)
        clock.check(status)
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

    def check(self, status: str) -> None:
        """Raise when the present phase has lasted too long."""
        seconds = time.monotonic() - self.entered
        if status == "RUNNING" and seconds > self.deadlines.run:
            raise TooLong(f"the session has run for {seconds:.0f} s (ndif.run_s)")
        if status in WAITING and seconds + self.timing.queued > self.deadlines.queue:
            raise Transient(
                f"the job waited {seconds:.0f} s in state {status} (ndif.queue_s); "
                "run again later, it is picked up where it is"
            )

    def silent(self, why: str) -> None:
        """Note an unanswered poll; raise when the server has been silent for too long."""
        limit = max(3 * self.deadlines.connect, 5.0)
        if time.monotonic() - self.heard > limit:
            raise Transient(f"no word of the job for {limit:.0f} s ({why})")


def _poll(job_id: str, clock: _Clock, known: bool) -> dict[str, Any]:
    """The job's latest state; an empty one while the server has none or does not answer."""
    try:
        answer = httpx.get(
            f"{host()}/response/{job_id}", headers=headers(), timeout=clock.deadlines.connect
        )
    except httpx.HTTPError as error:
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
    return dict(answer.json())


def _download(state: dict[str, Any], clock: _Clock) -> tuple[bytes, Timing]:
    began = time.monotonic()
    url = state.get("data")
    if not url:
        raise Transient("the server answered COMPLETED without data")
    timeout = httpx.Timeout(clock.deadlines.connect, read=clock.deadlines.connect)
    parts = []
    try:
        with httpx.stream("GET", url, timeout=timeout) as answer:
            _raise_for_status(answer, "the result")
            for part in answer.iter_bytes():
                parts.append(part)
                if time.monotonic() - began > clock.deadlines.download:
                    raise Transient("the result was not down in time (ndif.download_s)")
    except httpx.HTTPError as error:
        raise Transient(f"the result could not be downloaded ({_words(error)})") from None
    content = b"".join(parts)
    timing = clock.timing
    timing.downloading = time.monotonic() - began
    timing.result_bytes = len(content)
    timing.meta = state.get("meta") or {}
    timing.running = float(timing.meta.get("runtime") or timing.running)
    return content, timing


def _failure(words: str) -> NnsweepError:
    """The class of an ERROR, by the server's words."""
    low = words.lower()
    last = (words.strip().splitlines() or ["no message"])[-1]
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


def _detail(answer: httpx.Response) -> str:
    answer.read()
    try:
        body = answer.json()
    except ValueError:
        return answer.text[:200].strip() or answer.reason_phrase
    return str(body.get("detail", body) if isinstance(body, dict) else body)[:500]


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
