"""A small server in NDIF's place: it answers as a test tells it to, and remembers what it got.

It speaks what nnsweep's client speaks: POST /request, GET /response/ID, GET /result/ID (the object
store), GET /status and GET /env. A session's payload here is its chunk as JSON (`pack`), so a test
can let the answer depend on what was asked.
"""

import io
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import zstandard

from nnsweep.chunks import keys_of

Plain = dict[str, Any]
Story = Callable[[Any], list[Plain]]
"""A session's payload -> the states that its job goes through; the last one stays."""


# --- what may go wrong with one connection --------------------------------------------------------


class Fault:
    """One answer that is none: a status, a broken connection, silence, or half of the content."""

    def __init__(self, kind: str, status: int = 0, text: str = "") -> None:
        self.kind, self.status, self.text = kind, status, text

    def __repr__(self) -> str:
        return f"{self.kind}{self.status or ''}"


RESET, CLOSE, SILENT, CUT = (Fault(kind) for kind in ("reset", "close", "silent", "cut"))
PIECE = 512
HTML = Fault("text", 200, "<html>Welcome to this hotel's network</html>")


def status(number: int, detail: str = "injected") -> Fault:
    """An HTTP error with a JSON body, as FastAPI writes one."""
    return Fault("text", number, json.dumps({"detail": detail}))


# --- states of a job ------------------------------------------------------------------------------


def state(name: str, description: str = "", **more: Any) -> Plain:
    """One state; `saved` (any value) or `raw` (bytes) becomes the result of a COMPLETED one."""
    return {"status": name, "description": description, **more}


QUEUED, RUNNING = state("QUEUED", "Added to Queue at position 1."), state("RUNNING", "It runs.")


def error(description: str) -> list[Plain]:
    """A job that fails."""
    return [state("ERROR", description)]


def completed(chunk: Plain, seconds: float = 0.5) -> list[Plain]:
    """A job that computes its chunk."""
    return [state("COMPLETED", saved={"values": values_of(chunk)}, meta={"runtime": seconds})]


# --- sessions -------------------------------------------------------------------------------------


def chunk_of(passes: int = 4, points: int = 1, rows: int = 2) -> Plain:
    """A chunk of one block; its points are p0, p1, ... in the order of the passes."""
    made = [
        {
            "pass_id": f"pass{n}",
            "points": [f"p{n * points + k}" for k in range(points)],
            "resumes": [1] * points,
            "inert": False,
            "estimated": False,
            "start": 0,
            "edits": [{"slot": k, "operand": {}} for k in range(points)],
        }
        for n in range(passes)
    ]
    names = [f"row{n}" for n in range(rows)]
    block = {
        "row_keys": names,
        "shared": 0,
        "donor_shared": 0,
        "ids": [[1, 2]] * rows,
        "donor_ids": [],
        "passes": made,
    }
    measures = [{"name": "gap", "kind": "logit_diff"}, {"name": "drift", "kind": "kl"}]
    return {"chunk_id": "c" * 16, "measures": measures, "references": {}, "blocks": [block]}


def pack(chunk: Plain) -> bytes:
    """A payload that this server can read."""
    return json.dumps(chunk).encode()


def points_of(chunk: Plain) -> list[str]:
    """The points of a session, in order."""
    return [name for b in chunk["blocks"] for item in b["passes"] for name in item["points"]]


def values_of(chunk: Plain) -> torch.Tensor:
    """Values that depend on point, row and measure, and on nothing else."""
    rows = [
        [zlib.crc32(f"{key} {spec['name']}".encode()) / 2**32 for spec in chunk["measures"]]
        for key in keys_of(chunk)
    ]
    return torch.tensor(rows, dtype=torch.float32)


def result(saved: Any) -> bytes:
    """The bytes of a result, as a server stores them."""
    with io.BytesIO() as stream:
        torch.save(saved, stream)
        return zstandard.ZstdCompressor().compress(stream.getvalue())


# --- the server -----------------------------------------------------------------------------------


class FakeNdif:
    """What the server was told, and what it got.

    Attributes:
        story: What becomes of a session.
        submit, poll, download: Faults of the next connections of each kind; after them, none.
        pages: path -> JSON value or fault of any other GET.
        posts: How many requests arrived whole, spoilt ones included.
        sessions: The payload of every session that was taken in.
        headers, bodies: What every request that arrived whole consisted of.
        polls: Job ids asked for, answered or not.
        pause: Seconds between two pieces of a result.
        host: The server's base URL.
    """

    def __init__(self) -> None:
        self.story: Story = completed
        self.submit: list[Fault] = []
        self.poll: list[Fault] = []
        self.download: list[Fault] = []
        self.pages: Plain = {}
        self.posts = 0
        self.sessions: list[Any] = []
        self.headers: list[Plain] = []
        self.bodies: list[bytes] = []
        self.polls: list[str] = []
        self.pause = 0.0
        self.over = threading.Event()
        self._states: dict[str, list[Plain]] = {}
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": self}))
        self.host = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator["FakeNdif"]:
        """Serve until the block ends."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            self.over.set()
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def accept(self, blob: bytes) -> str:
        """Take a session in; returns the id of its job."""
        try:
            payload = json.loads(blob)
        except ValueError:
            payload = blob
        self.sessions.append(payload)
        job = f"job{len(self.sessions)}"
        self._states[job] = list(self.story(payload))
        return job

    def state(self, job: str) -> Plain | None:
        """The job's next state, as it is sent; a result becomes the address of one."""
        states = self._states.get(job)
        if not states:
            return None
        found = states.pop(0) if len(states) > 1 else states[0]
        sent = {key: value for key, value in found.items() if key not in ("saved", "raw")}
        if len(sent) < len(found):
            sent["data"] = f"{self.host}/result/{job}?Signature=secret"
        return {"id": job, "data": None} | sent

    def content(self, job: str) -> bytes:
        """The bytes of a job's result; none when it is gone."""
        last = self._states[job][-1] if job in self._states else {}
        return last.get("raw") or (result(last["saved"]) if "saved" in last else b"")

    def finish(self, number: int) -> None:
        """Let a job that hangs end well; jobs count from 1, in the order of `sessions`."""
        self._states[f"job{number}"] = completed(self.sessions[number - 1])

    def forget(self) -> None:
        """Lose all jobs, as a restarted server does."""
        self._states.clear()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def shutdown_request(self, request: Any) -> None:
        """Close without the polite end, so that a reset is one."""
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    fake: FakeNdif

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.fake.posts += 1
        self.fake.headers.append(dict(self.headers))
        self.fake.bodies.append(body)
        if not self.spoilt(_next(self.fake.submit)):
            job = self.fake.accept(_blob(self.headers["Content-Type"], body))
            self.send(200, {"id": job, "status": "RECEIVED"})

    def do_GET(self) -> None:
        kind, _, name = self.path.partition("?")[0].strip("/").partition("/")
        if kind == "response":
            self.fake.polls.append(name)
            if not self.spoilt(_next(self.fake.poll)):
                found = self.fake.state(name)
                self.send(200 if found else 404, found or {"detail": "No response."})
        elif kind == "result":
            self.send_result(self.fake.content(name), _next(self.fake.download))
        else:
            page = self.fake.pages.get(self.path, status(404, "Not Found"))
            if not isinstance(page, Fault):
                self.send(200, page)
            else:
                self.spoilt(page)

    def spoilt(self, fault: Fault | None) -> bool:
        """Misbehave, if told to."""
        if fault is None:
            return False
        if fault.kind == "silent":
            self.fake.over.wait()
        elif fault.kind == "reset":
            reset_on_close(self.connection)
        elif fault.kind == "text":
            self.send_bytes(fault.status, fault.text.encode())
        return True

    def send(self, number: int, value: Any) -> None:
        self.send_bytes(number, json.dumps(value).encode())

    def send_result(self, content: bytes, fault: Fault | None) -> None:
        if fault and fault.kind == "cut":
            self.start(200, len(content))
            self.wfile.write(content[: len(content) // 2])
        elif not self.spoilt(fault):
            self.start(200 if content else 404, len(content))
            for place in range(0, len(content), PIECE):
                self.wfile.write(content[place : place + PIECE])
                time.sleep(self.fake.pause)

    def send_bytes(self, number: int, content: bytes) -> None:
        self.start(number, len(content))
        self.wfile.write(content)

    def start(self, number: int, length: int) -> None:
        self.send_response(number)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


def _next(faults: list[Fault]) -> Fault | None:
    return faults.pop(0) if faults else None


def reset_on_close(connection: socket.socket) -> None:
    """Let a connection end in a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _blob(kind: str, body: bytes) -> bytes:
    """The file of a multipart form."""
    boundary = kind.partition("boundary=")[2].encode()
    part = next(p for p in body.split(b"--" + boundary) if b'name="blob"' in p)
    return part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
