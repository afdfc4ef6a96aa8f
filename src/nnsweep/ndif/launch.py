"""Bring the parts of a local server up, in order, until a trace has gone through it."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nnsweep.errors import UserError
from nnsweep.ndif import components
from nnsweep.ndif.components import Layout
from nnsweep.ndif.ports import HOST, is_open
from nnsweep.ndif.processes import MARKER, alive, spawn
from nnsweep.ndif.state import ServerState, save

_POLL_S = 0.2
_TURN = "\0nnsweep-ndif-start"


def bring_up(
    state: ServerState, layout: Layout, *, deadline: float, progress: Callable[[str], None]
) -> ServerState:
    """Start every part and wait for it, then send one trace through the whole.

    The state file is written before the first process starts and after each, so that a crash at
    any point leaves a record of what to stop.

    Args:
        state: a new server's state, without parts.
        layout: its folders, prepared.
        deadline: `time.monotonic` value after which to give up.
        progress: called with one line before each stage.

    Returns:
        The state with all parts, marked ready.

    Raises:
        UserError: naming the part that failed, its last words and its log.
    """
    launch = _Launch(state, layout, deadline)
    progress("starting the request queue and the object store")
    launch.start("redis", components.redis_command)
    launch.start("store", components.store_command)
    progress("starting Ray")
    launch.start("ray", components.ray_command)
    launch.wait_for("ray", launch.ray_answers)
    with _turn(deadline):
        progress("starting the controller and the API")
        # Together, since both spend most of their start in importing.
        launch.start("api", components.api_command)
        launch.run_controller()
        launch.wait_for("api", launch.api_answers)
    progress(f"deploying {state.settings.model} and sending it one trace")
    launch.run_probe()
    return launch.finish()


@contextmanager
def _turn(deadline: float) -> Iterator[None]:
    """Let no other server of this machine connect its API to its Ray meanwhile.

    Ray gives each connection the first of ports 23000-23999 that nothing listens on, and a process
    that listens there only seconds later. Two Rays that do so at once take the same port, which
    gRPC lets both have, and requests of one server end up on the other. The lock is a name that is
    gone with the process that has it; after the deadline the wait for the API says what is wrong.
    """
    with socket.socket(socket.AF_UNIX) as lock:
        while time.monotonic() < deadline:
            try:
                lock.bind(_TURN)
                break
            except OSError:
                time.sleep(_POLL_S)
        yield


def fetch(url: str, *, timeout_s: float) -> bytes | None:
    """Return what a loopback URL answers with status 200, or None."""
    # Proxies from the environment are for the world outside.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return answer.read()
    except (urllib.error.URLError, OSError):
        return None


def last_line(log: Path, *, having: str = "") -> str:
    """Return the last line of a log that is not blank and has a text in it, shortened."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip() and having in line]
    return lines[-1][-300:] if lines else ""


@dataclass
class _Launch:
    state: ServerState
    layout: Layout
    deadline: float

    def __post_init__(self) -> None:
        self._environment = components.environment(self.state, self.layout)
        self._record(self.state)

    def start(self, name: str, command: Callable[[ServerState, Layout], list[str]]) -> None:
        process = spawn(
            command(self.state, self.layout),
            env=self._environment,
            cwd=self.layout.cwd,
            log=self.layout.log(name),
        )
        self._record(self.state.with_part(name, process))

    def run_controller(self) -> None:
        command = components.controller_command(self.state, self.layout)
        environment = components.controller_environment(self.state, self.layout)
        self._run("controller", command, environment)

    def run_probe(self) -> None:
        script = Path(__file__).with_name("probe.py")
        model = self.state.settings.model
        # -P: the folder of the script holds modules that are none of the client's business.
        command = [sys.executable, "-P", str(script), self.state.host, model]
        self._run("probe", command, self._client_environment())

    def finish(self) -> ServerState:
        ready = ServerState(**{**vars(self.state), "ready": True})
        self._record(ready)
        return ready

    def ray_answers(self) -> bool:
        # The controller lists the nodes as soon as it starts, and dies if it cannot.
        nodes = f"http://{HOST}:{self.state.ports['dashboard']}/api/v0/nodes"
        return is_open(self.state.ports["ray_client"]) and fetch(nodes, timeout_s=5.0) is not None

    def api_answers(self) -> bool:
        return fetch(f"{self.state.host}/connected", timeout_s=5.0) is not None

    def wait_for(self, name: str, done: Callable[[], bool]) -> None:
        while not done():
            for part, process in self.state.parts.items():
                if not alive(process):
                    raise self._failure(part, "ended while the server started")
            if time.monotonic() > self.deadline:
                raise self._failure(name, "was not ready in time")
            time.sleep(_POLL_S)

    def _run(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        with self.layout.log(name).open("wb") as log:
            child = subprocess.Popen(
                command,
                env=environment,
                cwd=self.layout.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        with child:
            try:
                self.wait_for(name, lambda: child.poll() is not None)
            finally:
                child.kill()
        if child.returncode:
            raise self._failure(name, f"failed with exit status {child.returncode}")

    def _client_environment(self) -> dict[str, str]:
        ours = {MARKER: self.state.marker, "NO_PROXY": HOST, "no_proxy": HOST}
        if self.state.settings.is_folder:
            ours["HF_HUB_OFFLINE"] = "1"
        return {**os.environ, **ours}

    def _failure(self, name: str, what: str) -> UserError:
        log = self.layout.log(name)
        words = last_line(log)
        actor = components.model_log(self.state.scratch) if name == "probe" else None
        reason = last_line(actor, having="Error") if actor else ""
        if actor and reason:
            # The model's own log says why it could not be served; the client only hears that.
            log, words = self.layout.kept_ray_log(actor), f"{words}; the model: {reason}"
        return UserError(f"the local NDIF's {name} {what}: {words}. See {log}")

    def _record(self, state: ServerState) -> None:
        self.state = state
        save(state, self.layout.root)
