"""A proxy that stands before a real server and spoils the first connections of each kind.

One request a connection, as nnsweep's client makes them. A spoilt request is answered by the proxy
(an HTTP status), reset before it is passed on, or passed on with its answer thrown away.
"""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from fakes import Fault, reset_on_close


class Proxy:
    """A listener before another.

    Attributes:
        post, get: Faults of the next POSTs and GETs of a job's state; after them, none.
        passed: The first line of every request that the server was given.
        host: The proxy's base URL.
    """

    def __init__(self, target: str) -> None:
        self.target = (urlsplit(target).hostname, urlsplit(target).port)
        self.post: list[Fault] = []
        self.get: list[Fault] = []
        self.passed: list[str] = []
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self.host = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator["Proxy"]:
        """Listen until the block ends."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def fault(self, line: str) -> Fault | None:
        """What happens to a request."""
        faults = self.post if line.startswith("POST") else self.get
        named = line.startswith("POST") or " /response/" in line
        return faults.pop(0) if faults and named else None

    def ask(self, request: bytes) -> bytes:
        """Pass a request on; returns the whole answer."""
        with socket.create_connection(self.target) as server:
            server.sendall(request)
            return b"".join(iter(lambda: server.recv(65536), b""))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def shutdown_request(self, request: Any) -> None:
        """Close without the polite end, so that a reset is one."""
        self.close_request(request)


class _Handler(socketserver.StreamRequestHandler):
    proxy: Proxy

    def handle(self) -> None:
        head = list(iter(self.rfile.readline, b"\r\n"))
        lengths = [part for part in head if part.lower().startswith(b"content-length:")]
        body = self.rfile.read(int(lengths[0].partition(b":")[2]) if lengths else 0)
        line = head[0].decode().strip()
        fault = self.proxy.fault(line)
        kind = fault.kind if fault else ""
        if kind == "reset":
            reset_on_close(self.connection)
        elif fault and kind == "text":
            content = fault.text.encode()
            start = f"HTTP/1.1 {fault.status} Spoilt\r\nContent-Length: {len(content)}\r\n\r\n"
            self.wfile.write(start.encode() + content)
        else:
            self.proxy.passed.append(line)
            kept = [part for part in head if not part.lower().startswith(b"connection:")]
            answer = self.proxy.ask(b"".join(kept) + b"Connection: close\r\n\r\n" + body)
            told = {"close": 0, "cut": len(answer) // 2}.get(kind, len(answer))
            self.wfile.write(answer[:told])
