"""One local NDIF server for all tests that need one, started once a session."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client import client_of

from nnsweep import models
from nnsweep.engines.ndif import pack_probe
from nnsweep.ndif import server, transport
from nnsweep.ndif.state import ServerState
from nnsweep.ndif.transport import Deadlines

Plain = dict[str, Any]
DEADLINES = Deadlines()
ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("NNSWEEP_NDIF_PYTHON", ROOT / ".venv-ndif/bin/python"))


@pytest.fixture(scope="session")
def ndif_python() -> Path:
    """Interpreter of the server's environment."""
    if not PYTHON.exists():
        pytest.fail(f"no NDIF server environment at {PYTHON}: run 'make ndif-env'")
    return PYTHON


@pytest.fixture(scope="session")
def model_folder() -> str:
    """A real model folder that client and server both see."""
    given = os.environ.get("NNSWEEP_TEST_MODEL")
    if given:
        return str(Path(given).absolute())
    spec = {"id": "smollm2-135m", "revision": None, "dtype": "float32", "attention": "sdpa"}
    return str(models.locate(models.prepare(spec)))


@pytest.fixture(scope="session")
def ndif_state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the session's server runs from."""
    return tmp_path_factory.mktemp("ndif")


@pytest.fixture(scope="session")
def ndif_server(
    ndif_python: Path, model_folder: str, ndif_state_dir: Path
) -> Iterator[ServerState]:
    """A sandboxed float32 server with one thread."""
    yield server.serve(model_folder, state_dir=ndif_state_dir, python=ndif_python)
    server.stop(ndif_state_dir)


@pytest.fixture(scope="session")
def tiny(tiny_model: Callable[..., Plain]) -> Plain:
    """A tiny model."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def serve_hasty(
    ndif_python: Path, tiny: Plain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[bool], tuple[ServerState, Path]]]:
    """A factory of servers that end requests after 12 s, trusted or not; running ones are found."""
    folders = {trusted: tmp_path_factory.mktemp(f"trusted-{trusted}") for trusted in (True, False)}

    def serve(trusted: bool) -> tuple[ServerState, Path]:
        how: Plain = {"trusted": trusted, "execution_timeout_s": 12, "sandbox_pool": 1}
        where = folders[trusted]
        model = str(models.locate(tiny))
        return server.serve(model, state_dir=where, python=ndif_python, **how), where

    yield serve
    for where in folders.values():
        server.stop(where)


@pytest.fixture(scope="session")
def deployed(ndif_server: ServerState, tiny: Plain) -> None:
    """The server deploys a model when it is first asked for."""
    with pytest.MonkeyPatch.context() as patch:
        client_of(ndif_server.host, patch)
        shell = models.open_model(tiny, None)
        job = transport.submit(pack_probe(shell, tiny["shape"]), models.model_key(shell), DEADLINES)
        transport.wait(job, DEADLINES, str)
