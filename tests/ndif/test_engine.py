"""The engine on a real server, in its sandbox: the same plan, the same kernel, the same bits."""

import csv
import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import yaml
import zstandard
from client import client_of
from fakes import CLOSE, CUT, RESET, status
from proxy import Proxy

from nnsweep.chunks import columns, keys_of, pass_ids
from nnsweep.config import read_config
from nnsweep.engines.ndif import NdifEngine, pack, pack_probe
from nnsweep.errors import UserError
from nnsweep.jobs import budget_of, open_engine, run_chunk
from nnsweep.models import model_key, open_model
from nnsweep.ndif import preflight, server, transport
from nnsweep.ndif.state import ServerState
from nnsweep.ndif.transport import Deadlines
from nnsweep.plan import make_plan
from nnsweep.planned import Settings
from nnsweep.prompts import prepare_rows
from nnsweep.sweep import Sweep
from nnsweep.tables import read_json, read_table, write_json, write_table
from nnsweep.vectors import load_vector
from workflow.project import COLUMNS, ROWS, SWEEP, Done, Project, copy_workflow, finish

Plain = dict[str, Any]
CONFIG = read_config({"threads": 1, "ndif": {"pause_s": 0.05, "connect_s": 60}})
MEASURES = SWEEP["measures"] | {"recovery": {"kind": "recovery", "of": "gap", "min_gap": 1.0}}
WRITES = [
    {"site": "resid_post", "layer": "$layer", "position": "$position", "set": "donor"},
    {"site": "z", "layer": 1, "head": 2, "position": "last", "set": 0.5},
    {"site": "mlp_out", "layer": 1, "position": "subject", "set": {"mean": "text"}},
    {
        "site": "resid_pre",
        "layer": 3,
        "position": "last",
        "add": {"vector": {"mean": "donor", "minus": "text"}, "scale": 1.5},
    },
    {"site": "embed", "position": "subject", "noise": {"std": 0.5, "seed": 3}},
]
"""Every kind of write, each at a place of its own."""

PATH = {
    "prompt": "text",
    "writes": [
        {"site": "z", "layers": "all", "heads": "all", "position": "last"}
        | {"set": {"patch": "text"}},
        {"site": "z", "layer": 1, "head": 0, "position": "last", "set": "donor"},
    ],
}
STREAM = {"site": "resid_post", "layer": 2, "position": "last"}
INSIDE: list[Plain] = [
    {"site": "resid_mid", "layer": "$layer", "position": "$position", "set": "donor"},
    {"site": "mlp_post", "layer": 1, "units": [3, 1], "position": "last", "set": 2.0},
    STREAM | {"mix": {"source": {"patch": "path"}, "weight": 0.5}},
    STREAM | {"renormalize": "text"},
    {"site": "ln_final", "position": "last", "mix": {"source": {"mean": "text"}, "weight": 0.1}},
]
"""Writes inside a layer, a chain, and a place behind the last layer."""

ESTIMATED: Plain = {
    "gap": {"kind": "logit_diff", "answers": ["target", "foil"]},
    "slope": {"kind": "attribution", "of": "gap"},
}
WATCHED: Plain = {
    "lens": {"kind": "prob", "answer": "target", "lens": {}},
    "turned": {"kind": "cosine", "read": {"site": "attn_out", "layer": 2}, "against": "donor"},
    "top": {"kind": "top_k", "k": 3},
}


@pytest.fixture
def client(ndif_server: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process a client of the real server."""
    client_of(ndif_server.host, monkeypatch)


@pytest.fixture
def requests(ndif_server: ServerState, ndif_state_dir: Path) -> Callable[[], int]:
    """How many requests the server has received since the test began."""
    before = len(server.received(ndif_state_dir))
    return lambda: len(server.received(ndif_state_dir)) - before


@pytest.fixture(scope="module")
def local(tiny: Plain) -> Any:
    """The tiny model here."""
    return open_engine("local", tiny, CONFIG, Path(), None)


@pytest.fixture
def remote(client: None, deployed: None, tiny: Plain, tmp_path: Path) -> NdifEngine:
    """The tiny model on the server, without the preflight's request."""
    served = {"dtype": "float32", "attention": "sdpa", "device_name": "cpu", "threads": 1}
    return NdifEngine(tiny, served | {"versions": {}}, tmp_path / "jobs", budget_of(CONFIG))


def chunk_of(
    model: Plain, tokenizer: Any, folder: Path, settings: Settings | None = None, **changes: Any
) -> Plain:
    """The only chunk of the tiny sweep with some keys changed."""
    path = folder / "prompts.csv"
    with path.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(COLUMNS)
        for name, text, word, other, *answers in ROWS:
            table.writerow([name, text.format(word), text.format(other), word, other, *answers])
    sweep = Sweep.model_validate(deepcopy(SWEEP) | {"measures": MEASURES} | changes)
    rows = prepare_rows(sweep, path, tokenizer, 0)
    (chunk,) = make_plan(sweep, model, rows, settings or Settings(), load_vector).chunks
    return chunk


def bits(values: Any) -> np.ndarray:
    return values.numpy().view(np.uint32)


def quiet(line: str) -> None:
    """Report nothing."""


# --- the same bits --------------------------------------------------------------------------------


def test_every_kind_of_write_gives_the_same_bits(
    requests: Callable[[], int],
    remote: NdifEngine,
    local: Any,
    tiny: Plain,
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    """Prompts of two lengths, all five kinds of write, a ratio that is guarded."""
    chunk = chunk_of(tiny, tokenizer, tmp_path, writes=WRITES)
    assert len({len(block["ids"][0]) for block in chunk["blocks"]}) > 1
    ours, theirs = local.run(chunk, quiet), remote.run(chunk, quiet)
    assert np.array_equal(bits(ours.values), bits(theirs.values))
    assert np.isfinite(ours.values[:, :3].numpy()).all()
    assert (theirs.errors, len(theirs.values)) == ({}, len(keys_of(chunk)))
    assert requests() == len(theirs.sessions) == 1
    (session,) = theirs.sessions
    assert session["result_bytes"] / theirs.values.numel() < 64
    assert session["seconds_running"] > 0


def test_places_inside_chains_and_the_lens_give_the_same_bits(
    remote: NdifEngine, local: Any, tiny: Plain, tokenizer: Any, tmp_path: Path
) -> None:
    how = {"writes": INSIDE, "runs": {"path": PATH}, "measures": WATCHED}
    chunk = chunk_of(tiny, tokenizer, tmp_path, **how)
    ours, theirs = local.run(chunk, quiet), remote.run(chunk, quiet)
    assert np.array_equal(bits(ours.values), bits(theirs.values))
    assert ours.values.shape[1] == len(columns(chunk["measures"])) == 4 + 1 + 2 * 3
    assert np.isfinite(ours.values.numpy()).all()


def test_capitals_give_the_same_bits_and_the_same_facts(
    client: None,
    requests: Callable[[], int],
    real_model: Plain,
    tokenizer: Any,
    repository: Path,
    tmp_path: Path,
) -> None:
    """The job of rule run_chunk on the default model, preflight included."""
    plain = yaml.safe_load((repository / "config/sweeps/capitals_layers.yaml").read_text())
    sweep = Sweep.model_validate(plain | {"axes": plain["axes"] | {"layer": [3, 17]}})
    rows = prepare_rows(sweep, repository / "config/prompts/capitals.csv", tokenizer, 0)[:12]
    (chunk,) = make_plan(sweep, real_model, rows, Settings(), load_vector).chunks
    write_json(tmp_path / "chunk.json", chunk)
    found = {}
    for engine in ("local", "ndif"):
        files = [tmp_path / "out" / engine / f"chunk.{kind}" for kind in ("parquet", "json")]
        run_chunk(tmp_path / "chunk.json", engine, CONFIG, *files)
        found[engine] = (files[0].read_bytes(), read_table(files[0]), read_json(files[1]))
    assert found["local"][0] == found["ndif"][0]
    assert found["ndif"][1].num_rows == len(keys_of(chunk)) == 4 * 12
    ours, theirs = found["local"][2], found["ndif"][2]
    for name in ("dtype", "attention", "threads", "device_name", "passes"):
        assert ours[name] == theirs[name]
    assert theirs["server_versions"]["nnsight"] == theirs["versions"]["nnsight"]
    assert requests() == 1 + len(theirs["sessions"]) == 2, "a trial session and the chunk"
    assert theirs["sessions"][0]["result_bytes"] / (48 * 2) < 64
    assert not (tmp_path / "out/jobs").exists() or not list((tmp_path / "out/jobs").iterdir())


# --- what travels ---------------------------------------------------------------------------------


class Reader(pickle._Unpickler):
    """Reads a payload and notes what it imports, without importing anything."""

    def find_class(self, module: str, name: str) -> Any:
        self.imported.add(module)
        return Anything

    def persistent_load(self, key: Any) -> Any:
        return Anything()


class Anything(dict):
    """Takes part in anything that a pickle does."""

    def __new__(cls, *_: Any, **__: Any) -> "Anything":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __call__(self, *_: Any, **__: Any) -> "Anything":
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __setstate__(self, state: Any) -> None:
        """Forget it."""

    def __hash__(self) -> int:
        return id(self)


def imports_of(blob: bytes) -> set[str]:
    """The modules that a payload imports where it is read."""
    import io

    reader = Reader(io.BytesIO(zstandard.ZstdDecompressor().decompress(blob)))
    reader.imported = set()
    reader.load()
    return {module.partition(".")[0] for module in reader.imported}


def test_a_session_needs_torch_and_nnsight_and_nothing_of_ours(
    tiny: Plain, tokenizer: Any, tmp_path: Path
) -> None:
    shell = open_model(tiny, None)
    chunk = chunk_of(tiny, tokenizer, tmp_path, writes=WRITES)
    for blob in (pack(shell, chunk), pack_probe(shell, tiny["shape"])):
        found = imports_of(blob)
        assert "nnsight" in found
        assert found <= {"nnsight", "torch", "cloudpickle", "builtins", "types", "collections"}


def test_nothing_of_ours_is_on_the_server(client: None, deployed: None, tiny: Plain) -> None:
    from nnsight.schema.request import RequestModel

    sent = []
    shell = open_model(tiny, None)
    unimportable(shell, lambda tracer: sent.append(RequestModel.serialize(tracer, compress=True)))
    job = transport.submit(sent[0], model_key(shell), Deadlines())
    content, _ = transport.wait(job, Deadlines(), quiet)
    assert transport.unpack(content)["found"] == ["nnsweep", "nnterp"]


def unimportable(model: Any, backend: Any) -> None:
    """Ask a session which of our packages it cannot import."""
    with model.session(backend=backend):
        from importlib.util import find_spec

        found = [].save()
        found += [name for name in ("nnsweep", "nnterp", "torch") if find_spec(name) is None]


STRAY = "import threading\n\nlock = threading.Lock()\n"


def test_a_stray_module_in_the_folder_changes_nothing(
    remote: NdifEngine,
    local: Any,
    tiny: Plain,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does one that is imported and cannot be pickled."""
    chunk = chunk_of(tiny, tokenizer, tmp_path, axes={"position": ["last"], "layer": [1]})
    before = pack(remote.model, chunk)
    (tmp_path / "stray_module.py").write_text(STRAY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("stray_module")
    try:
        assert pack(remote.model, chunk) == before
        found = remote.run(chunk, quiet).values
    finally:
        del sys.modules["stray_module"]
    assert np.array_equal(bits(found), bits(local.run(chunk, quiet).values))


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.fixture
def proxy(client: None, ndif_server: ServerState, monkeypatch: Any) -> Iterator[Proxy]:
    """A line to the server that can be spoilt."""
    with Proxy(ndif_server.host).running() as line:
        client_of(line.host, monkeypatch)
        yield line


def test_a_bad_line_costs_tries_and_no_value(
    remote: NdifEngine,
    local: Any,
    proxy: Proxy,
    requests: Callable[[], int],
    tiny: Plain,
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    """503, a reset, an answer that is lost; then the same while waiting."""
    proxy.post = [status(503), RESET, CLOSE]
    proxy.get = [RESET, CLOSE, status(503), CUT]
    chunk = chunk_of(tiny, tokenizer, tmp_path, axes={"position": ["last"], "layer": [1]})
    found = remote.run(chunk, quiet)
    assert np.array_equal(bits(found.values), bits(local.run(chunk, quiet).values))
    assert found.sessions[0]["attempts"] == 4
    assert not proxy.post + proxy.get
    assert requests() == 2, "the one whose answer was lost, and the last"


def test_a_bad_point_is_isolated_and_the_others_are_kept(
    remote: NdifEngine,
    local: Any,
    requests: Callable[[], int],
    tiny: Plain,
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    """One of two passes writes at a token that the prompts do not have."""
    rows = sum("capital" in text for _, text, *_ in ROWS) - 1
    chunk = chunk_of(
        tiny,
        tokenizer,
        tmp_path,
        Settings(batch_rows=rows),
        axes={"value": [0.0, 1.0]},
        writes=[{"site": "resid_post", "layer": 1, "position": "last", "set": "$value"}],
    )
    chunk["blocks"] = chunk["blocks"][:1]
    block = chunk["blocks"][0]
    assert len(pass_ids(chunk)) == 2
    whole = local.run(chunk, quiet).values
    good = len(block["row_keys"])
    spoilt = json.loads(json.dumps(chunk))
    spoilt["blocks"][0]["positions"]["beyond"] = {"base": [[99]] * good, "donor": [[99]] * good}
    spoilt["blocks"][0]["passes"][1]["edits"][0]["position"] = "beyond"

    found = remote.run(spoilt, quiet)
    assert np.array_equal(bits(found.values[:good]), bits(whole[:good]))
    assert sorted(found.errors) == list(range(good, 2 * good))
    assert set(found.errors.values()) == {found.errors[good]}
    assert re.fullmatch(r"IndexError: index \d+ is out of bounds .*", found.errors[good])
    assert requests() == 4, "the whole, one without writes, and two halves"


# --- the workflow ---------------------------------------------------------------------------------

PLANTED = "planted-marker-4f1c9a"
VERDICT = "results/tiny/parity/local-vs-ndif.json"
TOGETHER = {"batch_rows": 6, "chunk_passes": 64}
VALUES = "results/tiny/ndif/values.parquet"


@dataclass
class Flow:
    """A workflow on NDIF that was killed once and run again.

    Attributes:
        project: Its folder.
        runs: What each run said.
        requests: How many requests the server had received when it was killed, and in the end.
    """

    project: Project
    runs: list[Done]
    requests: tuple[int, int]


def on(host: str) -> dict[str, str]:
    """The environment of a run on a server."""
    return {"NDIF_HOST": host, "NDIF_API_KEY": PLANTED, "HF_HUB_OFFLINE": "1"}


def project_of(folder: Path, tiny: Plain) -> Project:
    """The tiny sweep over a model that the server knows by the same path; a stray module."""
    project = copy_workflow(folder, Path(tiny["id"]))
    project.write_sweep(model={"id": tiny["id"]}, measures=MEASURES)
    (folder / "stray_module.py").write_text(STRAY)
    return project


@pytest.fixture(scope="module")
def flow(
    ndif_server: ServerState,
    ndif_state_dir: Path,
    deployed: None,
    tiny: Plain,
    tmp_path_factory: pytest.TempPathFactory,
) -> Flow:
    """Kill a run while its first session runs, then finish it; one session at a time."""
    project = project_of(tmp_path_factory.mktemp("flow") / "project", tiny)
    count = len(server.received(ndif_state_dir))
    env, config = on(ndif_server.host), {"engine": "ndif"} | TOGETHER
    process = project.start(VALUES, "--resources", "ndif_sessions=1", env=env, **config)
    killed = kill_when(process, lambda: bool(journals(project)))
    then = len(server.received(ndif_state_dir)) - count
    runs = [killed, project.run("--unlock"), project.run(VALUES, VERDICT, env=env, **config)]
    assert [run.code for run in runs[1:]] == [0, 0], runs[-1].out
    return Flow(project, runs, (then, len(server.received(ndif_state_dir)) - count))


def journals(project: Project) -> list[Path]:
    """What is on disk of jobs that were submitted."""
    return list((project.results / "ndif" / "jobs").glob("*/*.json"))


def kill_when(process: subprocess.Popen[str], due: Callable[[], bool]) -> Done:
    """SIGKILL to Snakemake and all its jobs at some moment, or after a quarter of an hour."""
    deadline = time.monotonic() + 900
    while not due() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if process.poll() is None:
        family = psutil.Process(process.pid)
        for victim in [*family.children(recursive=True), family]:
            victim.send_signal(signal.SIGKILL)
    return finish(process)


def test_a_killed_run_submits_nothing_twice(flow: Flow) -> None:
    """A trial session and the first chunk; the same trial, the second chunk, and failed tries."""
    assert flow.runs[0].code == -signal.SIGKILL
    parts = (flow.project.results / "ndif" / "chunks").glob("*.json")
    tries = [session["attempts"] for path in parts for session in read_json(path)["sessions"]]
    assert len(tries) == 2
    assert flow.requests == (2, 2 + sum(tries))
    logs = [path.read_text() for path in (flow.project / "logs/tiny/run_chunk/ndif").iterdir()]
    assert sorted("re-attaching to job" in log for log in logs) == [False, True]
    assert not journals(flow.project)


def test_both_engines_write_the_same_bytes(flow: Flow) -> None:
    local, remote = (flow.project.results / name / "values.parquet" for name in ("local", "ndif"))
    assert local.read_bytes() == remote.read_bytes()
    verdict = read_json(flow.project / VERDICT)
    assert verdict["holds"]
    assert verdict["classes"]["identical"] == verdict["values"] == 6 * 5 * 4
    sessions = read_table(remote.parent / "sessions.parquet").to_pylist()
    controls = flow.project.plan()["controls"]
    assert {session["chunk_id"] for session in sessions} == {*flow.project.parts("ndif"), controls}
    rows = [session["rows"] for session in sessions if session["chunk_id"] != controls]
    assert sum(rows) == 6 * 5


def test_the_key_is_in_no_file_and_on_no_screen(flow: Flow, ndif_state_dir: Path) -> None:
    files = [path for path in flow.project.root.rglob("*") if path.is_file()]
    assert {".snakemake", "results", "logs", "benchmarks"} <= {
        path.relative_to(flow.project.root).parts[0] for path in files
    }
    files += [path for path in ndif_state_dir.rglob("*") if path.is_file()]
    assert [path for path in files if PLANTED in contents(path)] == []
    assert not [run for run in flow.runs if PLANTED in run.out]


def contents(path: Path) -> str:
    """Everything that a file says; tables are compressed."""
    if path.suffix == ".parquet":
        return str(read_table(path).to_pylist())
    return path.read_bytes().decode("latin-1")


def test_a_second_run_does_nothing(flow: Flow) -> None:
    done = flow.project.run(
        VALUES, VERDICT, env=on("http://127.0.0.1:9"), engine="ndif", **TOGETHER
    )
    assert done.idle, done.out


def test_a_dry_run_needs_no_server(tiny: Plain, tmp_path: Path) -> None:
    project = project_of(tmp_path / "project", tiny)
    done = project.run("-n", env=on("http://127.0.0.1:9"), engine="ndif")
    assert done.code == 0, done.out
    assert done.jobs("prepare_model") == 1


def test_a_sample_of_points_is_compared(flow: Flow, tmp_path: Path) -> None:
    """With `parity.points` the other engine runs a few passes; nothing more is sent to NDIF."""
    project = flow.project.copy(tmp_path / "project")
    for name in ("local", "parity"):
        shutil.rmtree(project.results / name)
    nowhere = on("http://127.0.0.1:9")
    config = {"engine": "ndif", "parity": "{points: 1}"} | TOGETHER
    done = project.run(VALUES, VERDICT, env=nowhere, **config)
    assert done.code == 0, done.out
    assert (done.out.count(" on engine local"), done.out.count(" on engine ndif")) == (1, 0)
    assert not project.values.exists()
    verdict = read_json(project / VERDICT)
    plan = project.plan()
    keys = keys_of(read_json(project.results / "chunks" / f"{next(iter(plan['sample']))}.json"))
    assert (verdict["holds"], verdict["values"]) == (True, 4 * len(keys))
    assert verdict["points"] == len({point for point, _ in keys}) < plan["points"]


def test_a_value_that_differs_fails_the_run(flow: Flow, tmp_path: Path) -> None:
    project = flow.project.copy(tmp_path / "project")
    path = project.results / "ndif" / "values.parquet"
    table = read_table(path)
    place = table.column_names.index("gap")
    moved = table.set_column(place, "gap", pc.add(table["gap"], pa.scalar(0.01, pa.float32())))
    write_table(path, moved, table.schema)
    done = project.run(VERDICT, env=on("http://127.0.0.1:9"), engine="ndif", **TOGETHER)
    assert done.code != 0
    (line,) = [line for line in done.out.splitlines() if line.startswith("nnsweep: ")]
    assert "30 different" in line
    assert "largest distance 0.01 (gap); first: different at point" in line


def test_text_and_whole_answers_give_the_same_bits(
    remote: NdifEngine, local: Any, tiny: Plain, tokenizer: Any, tmp_path: Path
) -> None:
    steer = STREAM | {"add": {"vector": {"unit": 3}, "scale": 8.0}}
    measures = {
        "whole": {"kind": "log_prob", "answer": "target", "tokens": "sum"},
        "says": {"kind": "contains", "answer": "foil"},
    }
    how = {"max_new_tokens": 4, "writes_at": "all"}
    axes: Plain = {}
    chunk = chunk_of(
        tiny, tokenizer, tmp_path, axes=axes, writes=[steer], measures=measures, generate=how
    )
    ours, theirs = local.run(chunk, quiet), remote.run(chunk, quiet)
    assert np.array_equal(bits(ours.values), bits(theirs.values))
    assert ours.values.shape[1] == 1 + 3 * 4


# --- gradients ------------------------------------------------------------------------------------


def test_the_sandbox_runs_no_gradients_and_says_so_before_a_chunk(
    client: None, deployed: None, tiny: Plain
) -> None:
    """A sweep that estimates is refused by the preflight; the server goes on serving."""
    with pytest.raises(UserError, match="attribution needs gradients") as caught:
        preflight.check(tiny, CONFIG, gradients=True)
    assert "\n" not in str(caught.value)
    assert preflight.check(tiny, CONFIG)["state"]


def test_a_trusted_server_estimates_as_this_machine_does(
    tiny: Plain,
    local: Any,
    tokenizer: Any,
    serve_hasty: Callable[[bool], tuple[ServerState, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, _ = serve_hasty(True)
    client_of(state.host, monkeypatch)
    served = preflight.check(tiny, CONFIG, gradients=True)
    engine = NdifEngine(tiny, served, tmp_path / "jobs", budget_of(CONFIG))
    chunk = chunk_of(tiny, tokenizer, tmp_path, measures=ESTIMATED)
    ours, theirs = local.run(chunk, quiet), engine.run(chunk, quiet)
    assert float((ours.values - theirs.values).abs().max()) < 1e-4
    assert float(ours.values[:, 1].abs().max()) > 1e-2


def test_a_run_that_goes_on_sends_nothing_that_is_finished(
    flow: Flow, ndif_server: ServerState, ndif_state_dir: Path, tmp_path: Path
) -> None:
    """One part is lost: the server is asked again what it serves, and gets that chunk alone."""
    project = flow.project.copy(tmp_path / "project")
    lost = next(iter(project.parts("ndif").values()))
    lost.unlink()
    (project / VALUES).unlink()
    before = len(server.received(ndif_state_dir))
    done = project.run(VALUES, env=on(ndif_server.host), engine="ndif", **TOGETHER)
    assert done.code == 0, done.out
    assert done.out.count(" on engine ndif") == 1
    assert len(server.received(ndif_state_dir)) - before == 2, "a trial session and the chunk"
    assert (project / VALUES).read_bytes() == (flow.project / VALUES).read_bytes()
