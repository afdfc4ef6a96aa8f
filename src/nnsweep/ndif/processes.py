"""Which processes belong to a local server, and how to end exactly those.

A server is two dozen processes: Ray starts daemons, those start workers, those start sandbox
runners, and a crash anywhere in between leaves orphans. Three facts find them all without ever
naming a stranger:

* every process that `spawn` starts carries a *marker* (a fresh UUID) in its environment, and
  children inherit it, however often they fork away from their parent;
* a child that was given a clean environment (the sandbox runner) still has a parent;
* a process is a pid *and* its start time, so a recycled pid is never mistaken for ours.

Linux only, as everything is read from ``/proc``.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nnsweep.errors import UserError

MARKER = "NNSWEEP_NDIF_SERVER"
"""Name of the environment variable that says which server a process belongs to."""

_POLL_S = 0.05
_PROC = Path("/proc")

# A child of ours would stay a zombie until we wait for it, and a server outlives the command
# that started it. So a helper starts it, says its pid and goes; init inherits the child.
_LAUNCHER = """
import json, os, subprocess, sys
spec = json.load(sys.stdin)
try:
    with open(spec["log"], "ab") as log:
        child = subprocess.Popen(
            spec["command"], env=spec["env"], cwd=spec["cwd"], stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )
except OSError as error:
    sys.exit(str(error))
print(child.pid, flush=True)
os._exit(0)
"""


@dataclass(frozen=True, order=True)
class Process:
    """One process, safe against a recycled pid.

    Attributes:
        pid: its number.
        started: its start time in clock ticks since boot.
    """

    pid: int
    started: int


def spawn(command: list[str], *, env: dict[str, str], cwd: Path, log: Path) -> Process:
    """Start a detached process in a session of its own, its output appended to a log.

    Args:
        command: program and arguments.
        env: the whole environment of the process.
        cwd: its working directory.
        log: file that receives stdout and stderr.

    Returns:
        The process.

    Raises:
        UserError: if the program cannot be started or ended at once.
    """
    spec = {"command": command, "env": env, "cwd": str(cwd), "log": str(log)}
    helper = subprocess.run(
        [sys.executable, "-I", "-c", _LAUNCHER],
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        check=False,
    )
    process = identify(int(helper.stdout)) if helper.returncode == 0 else None
    if process is None:
        reason = helper.stderr.strip() or "it ended at once"
        raise UserError(f"could not start {command[0]}: {reason}. Its log is {log}")
    return process


def identify(pid: int) -> Process | None:
    """Return the process that has this pid now, or None if there is none."""
    fields = _stat(pid)
    return None if fields is None else Process(pid, int(fields[19]))


def alive(process: Process) -> bool:
    """Tell whether this very process still runs (a zombie does not)."""
    fields = _stat(process.pid)
    return fields is not None and int(fields[19]) == process.started and fields[0] not in "ZX"


def marked(marker: str) -> set[Process]:
    """Return the live processes that carry the marker in their environment."""
    needle = f"{MARKER}={marker}".encode()
    return {process for process in _all() if needle in _environment(process.pid)}


def family(roots: Iterable[Process]) -> set[Process]:
    """Return the roots that live and all their descendants."""
    children: dict[int, list[Process]] = {}
    for process in _all():
        fields = _stat(process.pid)
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(process)
    found: set[Process] = set()
    waiting = [process for process in roots if alive(process)]
    while waiting:
        process = waiting.pop()
        if process not in found:
            found.add(process)
            waiting.extend(children.get(process.pid, []))
    return found


def command_line(process: Process) -> list[str]:
    """Return the arguments of a process; empty if it is gone or hides them."""
    raw = _read(_PROC / str(process.pid) / "cmdline")
    return [part.decode(errors="replace") for part in raw.split(b"\0") if part]


def terminate(processes: Iterable[Process], *, grace_s: float) -> set[Process]:
    """End processes: SIGTERM to all, and SIGKILL to those left after the grace.

    Args:
        processes: exactly these are ended; descendants are the caller's business.
        grace_s: seconds between the two signals.

    Returns:
        The processes that survived both, which is only possible in uninterruptible sleep.
    """
    left = set(processes)
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for process in left:
            _send(process, number)
        left = _wait_for_end(left, patience_s)
    return left


def _wait_for_end(processes: set[Process], patience_s: float) -> set[Process]:
    deadline = time.monotonic() + patience_s
    left = {process for process in processes if alive(process)}
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = {process for process in left if alive(process)}
    return left


def _send(process: Process, number: signal.Signals) -> None:
    # The descriptor pins the process first, so the check and the signal mean the same one.
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if alive(process):
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


def _all() -> Iterator[Process]:
    for name in os.listdir(_PROC):
        if name.isdigit():
            process = identify(int(name))
            if process is not None and alive(process):
                yield process


def _stat(pid: int) -> list[str] | None:
    # "pid (name) state ppid ...": the name may hold spaces and brackets, so cut after the last.
    raw = _read(_PROC / str(pid) / "stat").decode(errors="replace")
    return raw.rpartition(")")[2].split() or None


def _environment(pid: int) -> bytes:
    return _read(_PROC / str(pid) / "environ")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
    except OSError as error:
        if error.errno == errno.ESRCH:
            return b""
        raise
