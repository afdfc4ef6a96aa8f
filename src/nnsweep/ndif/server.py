"""A real NDIF server on this machine, started and stopped by one call each.

The server is the one from the package index, run from an environment of its own
(``envs/ndif-server.lock``): a queue (valkey), an object store, Ray with NDIF's controller and a
model actor, and the API. All of it listens on the loopback address, where every user of this
machine can reach it. By default a request's code runs in NDIF's sandbox process, as the public
service runs an ordinary key's.
"""

import json
import logging
import platform
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nnsweep.errors import UserError
from nnsweep.ndif import components, processes
from nnsweep.ndif.components import Layout
from nnsweep.ndif.launch import bring_up, fetch
from nnsweep.ndif.ports import Ports
from nnsweep.ndif.state import ServerState, Settings, current_boot, forget, load, locked
from nnsweep.ndif.teardown import tear_down

logger = logging.getLogger(__name__)

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_DEVICES = ("cpu", "cuda")
# Ray puts sockets below its folder, and a socket's path is at most 107 bytes long.
_LONGEST_SCRATCH = 40


def serve(
    model: str,
    *,
    state_dir: Path,
    python: Path,
    trusted: bool = False,
    dtype: str = "float32",
    threads: int = 1,
    device: str = "cpu",
    ports: Ports | None = None,
    timeout_s: float = 300.0,
    execution_timeout_s: float | None = None,
    sandbox_pool: int = 2,
    progress: Callable[[str], None] = logger.info,
) -> ServerState:
    """Start a server, or find the one that runs, and return once a trace has gone through it.

    Args:
        model: a model folder (served offline, under its absolute path) or a repository id.
        state_dir: folder for the server's state and logs; one server a folder.
        python: interpreter of the server's environment.
        trusted: run requests in the model's process, as a trusted key's, not in the sandbox.
        dtype: torch name of the dtype that the weights are served in.
        threads: torch threads of model and sandbox; equal to the client's for equal bits.
        device: ``cpu`` or ``cuda``.
        ports: where to listen; free ports by default.
        timeout_s: seconds for the whole start.
        execution_timeout_s: seconds after which a running request is ended; no limit by default.
        sandbox_pool: sandbox processes kept ready; a request takes one, about 4 s of work to
            replace, and about half a GB each.
        progress: called with one line before each stage.

    Returns:
        The running server.

    Raises:
        UserError: if the server cannot be started, or another one runs from the folder. Whatever
            was started by then has been stopped.
    """
    state_dir = state_dir.absolute()
    settings = Settings(
        model=_model_id(model),
        dtype=_one_of("dtype", dtype, _DTYPES),
        trusted=trusted,
        device=_one_of("device", device, _DEVICES),
        threads=_at_least_one("threads", threads),
        execution_timeout_s=execution_timeout_s,
        sandbox_pool=_at_least_one("sandbox_pool", sandbox_pool),
    )
    with locked(state_dir):
        running = _running(state_dir, settings, ports or Ports())
        return running or _start(
            settings, state_dir, python.absolute(), ports or Ports(), timeout_s, progress
        )


def stop(state_dir: Path) -> bool:
    """Stop the server of a folder, whatever state it or the command that started it is in.

    Args:
        state_dir: the folder given to `serve`.

    Returns:
        Whether there was a server to stop. Its logs stay in the folder.

    Raises:
        UserError: if a process cannot be ended.
    """
    if load(state_dir) is None:
        return False
    with locked(state_dir.absolute()):
        return _stop(state_dir.absolute())


def status(state_dir: Path) -> dict[str, Any]:
    """Describe the server of a folder.

    Args:
        state_dir: the folder given to `serve`.

    Returns:
        ``running`` (all parts live and the start was completed), and unless nothing was ever
        started: ``host``, the settings, ``parts`` (name -> lives), and ``deployment``: what the
        API says about the model (``state``, ``level``, ``dtype``, ``trusted``, ...), or None.
    """
    state = load(state_dir)
    if state is None:
        return {"running": False}
    parts = _parts_alive(state)
    return {
        "running": state.ready and all(parts.values()),
        "host": state.host,
        **vars(state.settings),
        "parts": parts,
        "deployment": _deployment(state),
    }


def logs(state_dir: Path) -> dict[str, Path]:
    """Return the logs of a folder's server, running or stopped, by part.

    Args:
        state_dir: the folder given to `serve`.

    Returns:
        The files that exist: one a part, ``probe``, ``received`` and ``model``, the model's own.
    """
    layout = Layout(state_dir.absolute())
    names = ("redis", "store", "ray", "controller", "api", "probe")
    found = {name: layout.log(name) for name in names} | {"received": layout.received}
    state = load(state_dir)
    sessions = layout.kept_ray_logs if state is None else state.scratch
    model = components.model_log(sessions)
    if model is not None:
        found["model"] = model
    return {name: path for name, path in found.items() if path.exists()}


def received(state_dir: Path) -> list[dict[str, Any]]:
    """Return the requests that the server has received, oldest first.

    Args:
        state_dir: the folder given to `serve`.

    Returns:
        One entry a request: ``time``, ``id`` (the job id), ``blocking`` and ``model_key``. The
        first is the trace that `serve` sends.
    """
    lines = Layout(state_dir.absolute()).received.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _start(
    settings: Settings,
    state_dir: Path,
    python: Path,
    ports: Ports,
    timeout_s: float,
    progress: Callable[[str], None],
) -> ServerState:
    deadline = time.monotonic() + timeout_s
    if platform.system() != "Linux":
        raise UserError("the local NDIF runs on Linux only. Use NDIF itself, or engine 'local'")
    components.check_environment(python, settings.device)
    layout = Layout(state_dir)
    layout.prepare()
    state = ServerState(
        marker=uuid.uuid4().hex,
        settings=settings,
        ports=ports.resolve(),
        python=python,
        scratch=_scratch(),
        boot_id=current_boot(),
    )
    with ExitStack() as undo:
        # Also on Ctrl-C: whatever ends the start early ends what it started.
        undo.callback(_stop, state_dir)
        state = bring_up(state, layout, deadline=deadline, progress=progress)
        undo.pop_all()
    return state


def _running(state_dir: Path, settings: Settings, ports: Ports) -> ServerState | None:
    """Return the folder's server if it is the one asked for; clear a broken one away."""
    state = load(state_dir)
    if state is None:
        return None
    if not (state.ready and all(_parts_alive(state).values())):
        logger.info("clearing away what is left of an earlier server")
        _stop(state_dir)
        return None
    different = settings.differences(state.settings)
    different += [f"port '{name}'" for name in ports.conflicts(state.ports)]
    if different:
        raise UserError(
            f"another server runs from {state_dir} (asked for {'; '.join(different)}). "
            "Stop it first with 'nnsweep ndif stop', or give another folder"
        )
    return state


def _stop(state_dir: Path) -> bool:
    state = load(state_dir)
    if state is None:
        return False
    tear_down(state, Layout(state_dir))
    forget(state_dir)
    return True


def _parts_alive(state: ServerState) -> dict[str, bool]:
    same_boot = state.boot_id == current_boot()
    return {name: same_boot and processes.alive(part) for name, part in state.parts.items()}


def _deployment(state: ServerState) -> dict[str, Any] | None:
    answer = fetch(f"{state.host}/status", timeout_s=10.0)
    if answer is None:
        return None
    names = ("dtype", "trusted", "execution_timeout_seconds", "actor_class", "model_key")
    for entry in json.loads(answer)["deployments"].values():
        if entry.get("repo_id") == state.settings.model:
            described = {name: entry.get(name) for name in names}
            level, phase = entry.get("deployment_level"), entry.get("application_state")
            return {"state": phase, "level": level, **described}
    return None


def _model_id(model: str) -> str:
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"model '{model}': the folder holds no config.json")
        return str(folder.absolute())
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(
            f"model '{model}': no such folder, and not a repository id of the form owner/name"
        )
    return model


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UserError(f"{name} '{value}': give one of {', '.join(allowed)}")
    return value


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise UserError(f"{name} {value}: give 1 or more")
    return value


def _scratch() -> Path:
    # mkdtemp adds a slash and eight letters.
    usual = tempfile.gettempdir()
    fits = len(usual) + len(components.SCRATCH_PREFIX) + 9 <= _LONGEST_SCRATCH
    parent = usual if fits else "/tmp"
    scratch = Path(tempfile.mkdtemp(dir=parent, prefix=components.SCRATCH_PREFIX))
    (scratch / "tmp").mkdir()
    return scratch
