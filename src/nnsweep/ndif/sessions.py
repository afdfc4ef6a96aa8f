"""A chunk becomes sessions, and every session one request that survives what can go wrong.

Transient failures are retried with growing pauses; a session that ran too long is split; a bad
point is isolated by bisection and reported, the others are kept. How each session ended is on disk,
so that a killed job sends nothing twice.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tenacity

from nnsweep.chunks import columns, halves_of, keys_of, pass_ids, split_chunk
from nnsweep.errors import NnsweepError
from nnsweep.ndif import transport
from nnsweep.ndif.transport import (
    BadSession,
    Deadlines,
    Refused,
    Timing,
    TooLong,
    Transient,
    Unfinished,
)
from nnsweep.tables import digest, write_atomically, write_json

logger = logging.getLogger(__name__)
Plain = dict[str, Any]
Report = Callable[[str], None]
Pack = Callable[[Plain], bytes]
"""A chunk -> the payload of one session."""

FAILURES = {kind.__name__: kind for kind in (TooLong, BadSession)}
"""How a session can end that is not sent again as it is."""


@dataclass(frozen=True)
class Budget:
    """How long a request may take and how often it is tried."""

    deadlines: Deadlines
    attempts: int
    pause: float
    max_minutes: float


class Sessions:
    """Runs the sessions of one chunk and keeps account of each."""

    def __init__(
        self, model_key: str, pack: Pack, folder: Path, budget: Budget, report: Report
    ) -> None:
        """Remember how to run.

        Args:
            model_key: The server's name of the model.
            pack: Serializes a (part of a) chunk as a session.
            folder: Where job ids and finished sessions lie until the chunk is done.
            budget: Deadlines and tries.
            report: Called with every state and line.
        """
        self.model_key, self.pack, self.folder = model_key, pack, folder
        self.budget, self.report = budget, report
        self.records: list[Plain] = []
        self.checked = False

    def run(self, chunk: Plain) -> dict[tuple[str, str], np.ndarray | str]:
        """Run a whole chunk: key -> measures (float32), or the error of a bad point."""
        done: dict[tuple[str, str], np.ndarray | str] = {}
        waiting = [chunk]
        while waiting:
            part = waiting.pop(0)
            try:
                values = self._session(part)
            except TooLong as error:
                waiting = self._smaller(part, error) + waiting
            except BadSession as error:
                self._check_canary(part, error)
                halves = halves_of(part)
                if not halves:
                    done |= {key: str(error) for key in keys_of(part)}
                    self.report(f"a point failed on the server: {error}")
                waiting = halves + waiting
            else:
                done |= dict(zip(keys_of(part), values, strict=True))
                waiting = self._resized(waiting)
        return done

    def _smaller(self, part: Plain, error: TooLong) -> list[Plain]:
        halves = halves_of(part)
        if not halves:
            self._forget(part)
            raise NnsweepError(f"one point alone is too much for the server: {error}")
        self.report(f"the session is split: {error}")
        return halves

    def _check_canary(self, part: Plain, error: BadSession) -> None:
        """Before looking for a bad point, see that a session without writes works at all."""
        if self.checked:
            return
        try:
            self._session(canary(part))
        except (BadSession, TooLong):
            self._forget(part)
            self._forget(canary(part))
            raise Refused(
                f"NDIF fails on a session without writes too: {error}. Compare the versions with "
                "`nnsweep ndif status`."
            ) from None
        self.checked = True

    def _resized(self, waiting: list[Plain]) -> list[Plain]:
        """Split what is waiting by the server's own seconds for a pass."""
        measured = [r for r in self.records if r["seconds_running"] > 0 and r["passes"]]
        if not measured or not waiting:
            return waiting
        rate = max(r["seconds_running"] / r["passes"] for r in measured)
        most = max(1, int(self.budget.max_minutes * 60 / rate))
        return [piece for part in waiting for piece in split_chunk(part, most)]

    def _session(self, part: Plain) -> np.ndarray:
        """One session's values: from disk if it was finished before, else from the server."""
        stored, journal = self._files(part)
        known = _read(journal)
        if stored.exists():
            values: np.ndarray = np.load(stored, allow_pickle=False)
            self._account(part, known)
            return values
        if "failed" in known:
            raise FAILURES[known["failed"]](known["why"])
        try:
            record = self._request(part, journal)
        except (TooLong, BadSession) as error:
            write_json(journal, {"failed": type(error).__name__, "why": str(error)})
            raise
        values = record.pop("values")
        # The job's id stays in the journal: a kill between the two files loses nothing.
        write_json(journal, _read(journal) | record)
        write_atomically(stored, lambda path: _save(path, values))
        self._account(part, record)
        return values

    def _files(self, part: Plain) -> tuple[Path, Path]:
        """Where a session's values lie, and what is known of its job."""
        name = digest([part["chunk_id"], pass_ids(part), keys_of(part)])
        return self.folder / f"{name}.npy", self.folder / f"{name}.json"

    def _forget(self, part: Plain) -> None:
        """Let the next run try a session anew."""
        self._files(part)[1].unlink(missing_ok=True)

    def _account(self, part: Plain, record: Plain) -> None:
        facts = {"points": len({p for p, _ in keys_of(part)}), "rows": len(keys_of(part))}
        facts |= {"passes": len(pass_ids(part)), "session": len(self.records)}
        self.records.append(facts | record)

    def _request(self, part: Plain, journal: Path) -> Plain:
        """Submit and wait, with retries; the job's id is on disk before the wait."""
        blob = self.pack(part)
        tries = 0
        for attempt in tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.budget.attempts),
            wait=tenacity.wait_random_exponential(self.budget.pause, max=60),
            retry=tenacity.retry_if_exception_type(Transient),
            before_sleep=self._say,
            reraise=True,
        ):
            with attempt:
                tries += 1
                content, timing = self._once(blob, journal)
                values = self._checked(content, part, journal)
        return _record(values, tries, len(blob), timing)

    def _checked(self, content: bytes, part: Plain, journal: Path) -> np.ndarray:
        """A result's values; the id of a job whose result is no use is forgotten."""
        wanted = (len(keys_of(part)), len(columns(part["measures"])))
        try:
            values = unpack(content)
            if values.shape != wanted:
                raise NnsweepError(f"{wanted} values were asked for, {values.shape} came back.")
        except NnsweepError:
            journal.unlink(missing_ok=True)
            raise
        return values

    def _once(self, blob: bytes, journal: Path) -> tuple[bytes, Timing]:
        earlier = _read(journal).get("job_id")
        if earlier:
            self.report(f"re-attaching to job {earlier}")
            try:
                return self._wait(earlier, journal, known=False)
            except Transient as error:
                if journal.exists():
                    raise
                self.report(f"{error}; submitting anew")
        job_id = transport.submit(blob, self.model_key, self.budget.deadlines)
        write_json(journal, {"job_id": job_id})
        self.report(f"submitted {len(blob)} bytes as job {job_id}")
        return self._wait(job_id, journal, known=True)

    def _wait(self, job_id: str, journal: Path, known: bool) -> tuple[bytes, Timing]:
        """Wait for a job; forget its id when it has ended without a usable result."""
        try:
            return transport.wait(job_id, self.budget.deadlines, self.report, known)
        except Unfinished:
            raise
        except (Transient, Refused):
            journal.unlink(missing_ok=True)
            raise

    def _say(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        pause = state.next_action.sleep if state.next_action else 0
        self.report(f"try {state.attempt_number} failed: {error}; next in {pause:.1f} s")


def _record(values: np.ndarray, tries: int, payload: int, timing: Timing) -> Plain:
    return {
        "values": values,
        "attempts": tries,
        "payload_bytes": payload,
        "result_bytes": timing.result_bytes,
        "seconds_queued": timing.queued,
        "seconds_running": timing.running,
        "seconds_downloading": timing.downloading,
    }


def _read(journal: Path) -> Plain:
    return dict(json.loads(journal.read_text())) if journal.exists() else {}


def _save(path: Path, values: np.ndarray) -> None:
    with path.open("wb") as stream:
        np.save(stream, values, allow_pickle=False)


def unpack(content: bytes) -> np.ndarray:
    """The values of a finished session.

    Raises:
        Transient: the result holds no values; an earlier result is never used in its place.
    """
    import torch

    saved = transport.unpack(content)
    values = saved.get("values") if isinstance(saved, Mapping) else None
    if not isinstance(values, torch.Tensor):
        raise Transient("the result holds no values")
    return values.numpy().astype(np.float32, copy=False)


def canary(part: Plain) -> Plain:
    """The smallest session of a chunk: one pass of one block, without writes."""
    block = part["blocks"][0]
    item = block["passes"][0]
    alone = {"pass_id": "canary", "points": ["canary"], "resumes": [0], "start": 0, "edits": []}
    return part | {
        "chunk_id": digest(["canary", item["pass_id"]]),
        "references": {},
        "reads": [],
        "blocks": [block | {"passes": [alone | {"inert": False, "estimated": False}]}],
    }
