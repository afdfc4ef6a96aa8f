"""The local NDIF server: what it serves, where it listens, and what is left after it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch

from nnsweep.errors import UserError
from nnsweep.ndif import launch, processes, server
from nnsweep.ndif.ports import Ports, is_open
from nnsweep.ndif.processes import Process
from nnsweep.ndif.state import ServerState, load

PROMPT = "The Eiffel Tower is in the city of"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.fixture
def threads() -> Iterator[int]:
    """Give this process as many threads as the server's model has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield 1
    torch.set_num_threads(before)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the client from asking the Hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_started_server_has_run_a_trace(ndif_server: ServerState, ndif_state_dir: Path) -> None:
    """`serve` returns with the model deployed in the asked dtype, as for an ordinary key."""
    status = server.status(ndif_state_dir)
    assert status["running"]
    assert all(status["parts"].values())
    deployment = status["deployment"]
    assert (deployment["state"], deployment["level"]) == ("RUNNING", "HOT")
    assert (deployment["dtype"], deployment["trusted"]) == ("float32", False)
    assert server.received(ndif_state_dir)[0]["blocking"]


def test_the_logs_are_there(ndif_server: ServerState, ndif_state_dir: Path) -> None:
    """Every part has a log, and the model has its own."""
    names = set(server.logs(ndif_state_dir))
    assert names >= {"redis", "store", "ray", "controller", "api", "probe", "received", "model"}


def test_remote_equals_local_bit_for_bit(
    ndif_server: ServerState, ndif_state_dir: Path, threads: int, offline: None
) -> None:
    """With equal threads the model and the sandbox compute what this process computes."""
    client = _client(ndif_server.settings.model, ndif_server.host)
    before = len(server.received(ndif_state_dir))
    remote, remote_threads = _trace(client, remote=True)
    assert len(server.received(ndif_state_dir)) == before + 1
    local, _ = _trace(
        _client(ndif_server.settings.model, ndif_server.host, weights=True), remote=False
    )
    assert remote_threads == threads
    assert torch.equal(remote, local)


def test_code_runs_in_the_sandbox_without_the_servers_secrets(
    ndif_server: ServerState, offline: None
) -> None:
    """A request runs in NDIF's runner process, which knows nothing of the server's set-up."""
    modules, names = _surroundings(_client(ndif_server.settings.model, ndif_server.host))
    assert "ndif.services.ray.sandbox.nns" in modules
    assert not [name for name in names if name.startswith(("NDIF_", "RAY_", "NNSWEEP_"))]


def test_serving_twice_returns_the_running_server(
    ndif_server: ServerState, ndif_state_dir: Path, ndif_python: Path
) -> None:
    """The second call starts nothing."""
    again = server.serve(ndif_server.settings.model, state_dir=ndif_state_dir, python=ndif_python)
    assert again == ndif_server


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"threads": 2}, "threads: 2, not 1"), ({"ports": Ports(api=1 << 15)}, "port 'api'")],
)
def test_serving_something_else_from_the_folder_is_refused(
    ndif_server: ServerState, ndif_state_dir: Path, ndif_python: Path, changed: dict, said: str
) -> None:
    """A running server is not replaced, and the error says what differs."""
    with pytest.raises(UserError, match=re.escape(said)):
        server.serve(
            ndif_server.settings.model, state_dir=ndif_state_dir, python=ndif_python, **changed
        )


def test_everything_listens_on_the_loopback_address_only(ndif_server: ServerState) -> None:
    """No process of the server has a socket that another machine could reach."""
    listening = _listening(processes.family(processes.marked(ndif_server.marker)))
    ports = {port for _, port in listening}
    assert ports >= set(ndif_server.ports.values())
    assert {address for address, _ in listening} <= LOOPBACK


@pytest.mark.parametrize("trusted", [False, True])
def test_a_second_server_ends_long_requests_and_can_be_stopped_after_a_crash(
    ndif_server: ServerState,
    ndif_state_dir: Path,
    serve_hasty: Callable[[bool], tuple[ServerState, Path]],
    offline: None,
    trusted: bool,
) -> None:
    """Beside the first: a request that takes too long leaves the model usable; then a crash."""
    state, where = serve_hasty(trusted)
    assert server.status(where)["deployment"]["trusted"] == trusted
    client = _client(state.settings.model, state.host)
    with pytest.raises(Exception, match="exceeded the execution timeout of 12"):
        _work_for(client, 60.0)
    assert _work_for(client, 0.0) == "done"
    _check_that_a_crashed_server_can_be_stopped(state, where)
    assert server.status(ndif_state_dir)["running"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_start_leaves_nothing(
    model_folder: str, ndif_python: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C undoes the start; after a kill, which nothing can undo, `stop` does."""
    child = _serve_in_a_process(model_folder, ndif_python, tmp_path)
    _wait_until(lambda: "ray" in getattr(load(tmp_path), "parts", {}))
    time.sleep(2)
    state = load(tmp_path)
    child.send_signal(number)
    child.wait(timeout=300)
    assert server.stop(tmp_path) == (number == signal.SIGKILL)
    assert _nothing_is_left(state)


def test_a_start_that_takes_too_long_is_undone(
    model_folder: str, ndif_python: Path, tmp_path: Path
) -> None:
    """The error is one line that names the part and its log."""
    with pytest.raises(UserError, match=r"local NDIF's ray was not ready in time.*ray\.log") as e:
        server.serve(model_folder, state_dir=tmp_path, python=ndif_python, timeout_s=1.5)
    assert "\n" not in str(e.value)
    assert server.status(tmp_path) == {"running": False}
    assert "ray" in server.logs(tmp_path)


def test_a_missing_environment_says_what_to_run(model_folder: str, tmp_path: Path) -> None:
    """Neither a missing interpreter nor one without NDIF starts anything."""
    for python in (tmp_path / "none", Path(sys.executable)):
        with pytest.raises(UserError, match="make ndif-env"):
            server.serve(model_folder, state_dir=tmp_path / "state", python=python)


@pytest.mark.parametrize("model", ["./no/such/folder", "/no/such/folder", "folder"])
def test_a_missing_model_is_refused(model: str, tmp_path: Path) -> None:
    """A path that is no folder is not mistaken for a repository id."""
    with pytest.raises(UserError, match="no such folder"):
        server.serve(model, state_dir=tmp_path, python=Path(sys.executable))


def test_a_folder_with_other_files_is_refused(model_folder: str, tmp_path: Path) -> None:
    """A server clears its folder, so it does not take one that is in use."""
    (tmp_path / "logs").mkdir()
    with pytest.raises(UserError, match="holds other files"):
        server.serve(model_folder, state_dir=tmp_path, python=Path(sys.executable))
    assert not server.stop(tmp_path)


def test_a_taken_port_is_refused() -> None:
    """The error names the port and what it was for."""
    taken = Ports().resolve()["api"]
    with pytest.raises(UserError, match=f"port {taken} for 'store' is taken"):
        Ports(api=taken, store=taken).resolve()
    with pytest.raises(UserError, match="deals out itself"):
        Ports(ray_client=10500).resolve()


def test_one_server_at_a_time_connects_to_its_ray() -> None:
    """Two that do so at once may be given the same port by their Rays, and both listen there."""
    order = []

    def later() -> None:
        with launch._turn(time.monotonic() + 300):
            order.append("later")

    with launch._turn(time.monotonic() + 300):
        waiting = Thread(target=later)
        waiting.start()
        time.sleep(0.5)
        order.append("first")
    waiting.join()
    assert order == ["first", "later"]


def test_a_recycled_pid_is_left_alone() -> None:
    """A process with our pid and another start time is a stranger."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        mine = Process(stranger.pid, processes.identify(stranger.pid).started - 1)
        assert processes.terminate([mine], grace_s=0.1) == set()
        assert stranger.poll() is None
        stranger.kill()


def _check_that_a_crashed_server_can_be_stopped(state: ServerState, state_dir: Path) -> None:
    members = processes.family(processes.marked(state.marker))
    os.kill(state.parts["api"].pid, signal.SIGKILL)
    _wait_until(lambda: not server.status(state_dir)["running"])
    assert server.stop(state_dir)
    assert not [process for process in members if processes.alive(process)]
    assert _nothing_is_left(state)
    assert not server.stop(state_dir)


def _client(model: str, host: str, *, weights: bool = False):
    from nnsight import CONFIG, TransformersModel
    from nnsight.modeling import huggingface

    CONFIG.API.HOST = host
    CONFIG.APP.REMOTE_LOGGING = False
    huggingface._ID_CACHE[model] = model
    options = {"dispatch": True, "dtype": torch.float32} if weights else {}
    return TransformersModel(model, task="text-generation", **options)


def _trace(model, *, remote: bool) -> tuple[torch.Tensor, int]:
    """Write what the sandbox computed into the stream; return logits and the threads it had."""
    with model.session(remote=remote):
        found = [].save()
        found.append(torch.get_num_threads())
        with model.trace(PROMPT):
            stream = model.model.layers[10].output
            stream[0, -1] += 1.5 * stream[0, 0].softmax(-1) @ torch.eye(stream.shape[-1])
            found.append(model.lm_head.output[0, -1].detach().cpu())
    return found[1], found[0]


def _work_for(model, seconds: float) -> str:
    """Keep the server busy in Python code for a while."""
    with model.session(remote=True):
        import time as server_time

        found = [].save()
        start = server_time.monotonic()
        while server_time.monotonic() - start < seconds:
            pass
        with model.trace(PROMPT):
            found.append(str(model.lm_head.output.dtype))
        found.append("done")
    return found[1]


def _surroundings(model) -> tuple[list[str], list[str]]:
    """Return the names of the modules and environment variables that a request sees."""
    with model.session(remote=True):
        import os as server_os
        import sys as server_sys

        found = [].save()
        found.append(sorted(server_sys.modules))
        found.append(sorted(server_os.environ))
        with model.trace(PROMPT):
            found.append(str(model.lm_head.output.dtype))
    return found[0], found[1]


def _listening(family: set[Process]) -> set[tuple[str, int]]:
    inodes = {inode for process in family for inode in _socket_inodes(process.pid)}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found


def _socket_inodes(pid: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
        if match:
            yield match[1]


def _nothing_is_left(state: ServerState) -> bool:
    ports = state.ports.values()
    ended = not processes.marked(state.marker)
    return ended and not any(is_open(port) for port in ports) and not state.scratch.exists()


def _serve_in_a_process(model: str, python: Path, state_dir: Path) -> subprocess.Popen:
    script = (
        "import sys; from pathlib import Path; from nnsweep.ndif import server; "
        "server.serve(sys.argv[1], state_dir=Path(sys.argv[2]), python=Path(sys.argv[3]))"
    )
    command = [sys.executable, "-c", script, model, str(state_dir), str(python)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def _wait_until(true, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)
