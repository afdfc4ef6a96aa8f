"""What a local server is and was asked to be, and the file that remembers it."""

import dataclasses
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nnsweep.errors import UserError
from nnsweep.ndif.ports import HOST
from nnsweep.ndif.processes import Process

_FORMAT = 1
_LOCK = "nnsweep-ndif.lock"


@dataclass(frozen=True)
class Settings:
    """What a server serves, and how; two servers with equal settings give equal bits.

    Attributes:
        model: absolute model folder, or a repository id.
        dtype: torch name of the dtype of the weights.
        trusted: run requests as a trusted key's (in the actor) instead of in the sandbox.
        device: ``cpu`` or ``cuda``.
        threads: torch threads of the model and of the sandbox.
        execution_timeout_s: seconds after which a running request is ended, or None.
        sandbox_pool: sandbox processes that are kept ready.
    """

    model: str
    dtype: str
    trusted: bool
    device: str
    threads: int
    execution_timeout_s: float | None
    sandbox_pool: int

    @property
    def is_folder(self) -> bool:
        """Whether the model is a folder on this machine."""
        return Path(self.model).is_absolute()

    def differences(self, other: "Settings") -> list[str]:
        """Describe every setting that differs, as ``name: here, not there``."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return [
            f"{name}: {mine[name]}, not {theirs[name]}"
            for name in mine
            if mine[name] != theirs[name]
        ]


@dataclass(frozen=True)
class ServerState:
    """A local server.

    Attributes:
        marker: what its processes carry in their environment.
        settings: what it serves.
        ports: where it listens on the loopback address, by the names of `Ports`.
        python: the interpreter of the server's environment.
        scratch: short-named folder for sockets, temporary files and Ray's logs.
        parts: the processes it was started from, by name, in order.
        ready: whether a trace has gone through it.
        boot_id: the boot of the machine in which it was started.
    """

    marker: str
    settings: Settings
    ports: dict[str, int]
    python: Path
    scratch: Path
    parts: dict[str, Process] = field(default_factory=dict)
    ready: bool = False
    boot_id: str = ""

    @property
    def host(self) -> str:
        """Base URL for clients, the value of ``NDIF_HOST``."""
        return f"http://{HOST}:{self.ports['api']}"

    def with_part(self, name: str, process: Process) -> "ServerState":
        """Return the state with one more part."""
        return dataclasses.replace(self, parts={**self.parts, name: process})


def current_boot() -> str:
    """Return the id of the machine's present boot; pids and start times mean nothing in another."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def save(state: ServerState, state_dir: Path) -> None:
    """Write the state file, whole or not at all, readable by its owner only."""
    document = {"format": _FORMAT, **dataclasses.asdict(state)}
    # mkstemp makes the file with mode 0600.
    handle, name = tempfile.mkstemp(dir=state_dir, prefix=".server-", suffix=".json")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, default=str)
        file.flush()
        os.fsync(file.fileno())
    os.replace(name, _file(state_dir))


def load(state_dir: Path) -> ServerState | None:
    """Read the state file; None if there is none.

    Raises:
        UserError: if the file is not one that this version wrote.
    """
    try:
        document = json.loads(_file(state_dir).read_text(encoding="utf-8"))
        return _from_document(document)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{_file(state_dir)} is not a server's state file ({error}). "
            "Give another folder, or delete the file if no server runs from it"
        ) from error


def forget(state_dir: Path) -> None:
    """Remove the state file."""
    _file(state_dir).unlink(missing_ok=True)


@contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Keep every other `serve` and `stop` off the folder while the block runs.

    Raises:
        UserError: if another one is at work (the lock goes with its process, crash or not), or
            if the folder is somebody else's: a server clears its folder when it starts.
    """
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = state_dir / _LOCK
    if not lock.exists() and any(state_dir.iterdir()):
        raise UserError(f"{state_dir} holds other files. Give a new or an empty folder")
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another command is starting or stopping the server of {state_dir}. "
                "Wait for it, or end it"
            ) from error
        yield


def _from_document(document: dict[str, Any]) -> ServerState:
    if document.pop("format") != _FORMAT:
        raise ValueError("another format")
    parts = {name: Process(**process) for name, process in document.pop("parts").items()}
    return ServerState(
        settings=Settings(**document.pop("settings")),
        python=Path(document.pop("python")),
        scratch=Path(document.pop("scratch")),
        parts=parts,
        **document,
    )


def _file(state_dir: Path) -> Path:
    return state_dir / "server.json"
