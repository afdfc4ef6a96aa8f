"""End what a local server started, and only that, and clear up after it."""

import shutil
from pathlib import Path

from nnsweep.errors import UserError
from nnsweep.ndif import processes
from nnsweep.ndif.components import SCRATCH_PREFIX, Layout
from nnsweep.ndif.processes import Process
from nnsweep.ndif.state import ServerState, current_boot

_GRACE_S = 8.0
_ROUNDS = 5


def tear_down(state: ServerState, layout: Layout) -> None:
    """End all processes of a server, whichever of them still live, and keep its logs.

    Args:
        state: the server, as its state file has it.
        layout: its folders.

    Raises:
        UserError: if a process could not be ended.
    """
    if state.boot_id == current_boot():
        sockets = _sandbox_sockets(_everything(state))
        _end(state)
        for socket in sockets:
            if socket.is_socket():
                socket.unlink(missing_ok=True)
    _keep_ray_logs(state, layout)


def _end(state: ServerState) -> None:
    for group in _groups(state):
        processes.terminate(group, grace_s=_GRACE_S)
    # What was started while we were at it; an API that is gone starts nothing new.
    for _ in range(_ROUNDS):
        left = _everything(state)
        if not left:
            return
        processes.terminate(left, grace_s=0.5)
    pids = ", ".join(str(process.pid) for process in sorted(_everything(state)))
    raise UserError(f"could not end these processes of the local NDIF: {pids}. End them by hand")


def _groups(state: ServerState) -> list[set[Process]]:
    # The API first, with its dispatcher (which would go on taking requests) and any orphan; then
    # Ray with the model; the queue and the store, which the others talk to, last.
    everything = _everything(state)
    later = [_part(state, name) for name in ("ray", "store", "redis")]
    return [everything.difference(*later), *later]


def _part(state: ServerState, name: str) -> set[Process]:
    return processes.family([state.parts[name]]) if name in state.parts else set()


def _everything(state: ServerState) -> set[Process]:
    return processes.family(processes.marked(state.marker) | set(state.parts.values()))


def _sandbox_sockets(family: set[Process]) -> list[Path]:
    # A runner that is ended from outside leaves its socket behind. One that has just started
    # has not made it yet, so nothing is asked of the file here.
    lines = [processes.command_line(process) for process in family]
    runners = [line for line in lines if "ndif.services.ray.sandbox.runner" in line]
    return [Path(argument) for line in runners for argument in line if argument.endswith(".sock")]


def _keep_ray_logs(state: ServerState, layout: Layout) -> None:
    if not state.scratch.name.startswith(SCRATCH_PREFIX):
        raise UserError(f"{state.scratch} is not a folder of ours, so it is left alone")
    for session in state.scratch.glob("session_*/logs"):
        if not session.parent.is_symlink():
            shutil.copytree(session, layout.kept_ray_logs, dirs_exist_ok=True)
    shutil.rmtree(state.scratch, ignore_errors=True)
