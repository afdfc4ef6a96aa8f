"""The engine on a real server, in its sandbox: the same plan, the same kernel, the same bits."""

import csv
import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
import zstandard
from fakes import CLOSE, CUT, RESET, status
from proxy import Proxy

from nnsweep.config import read_config
from nnsweep.engines.ndif import NdifEngine, pack, pack_probe
from nnsweep.jobs import budget_of, load_vector, open_engine, run_chunk
from nnsweep.models import model_key, open_model
from nnsweep.ndif import server, transport
from nnsweep.ndif.state import ServerState
from nnsweep.ndif.transport import Deadlines
from nnsweep.plan import Settings, keys_of, make_plan, pass_ids
from nnsweep.prompts import prepare_rows
from nnsweep.sweep import Sweep
from nnsweep.tables import read_json, read_table, write_json
from workflow.project import COLUMNS, ROWS, SWEEP

Plain = dict[str, Any]
CONFIG = read_config({"threads": 1, "ndif": {"pause_s": 0.05, "connect_s": 5}})
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


def client_of(host: str, patch: pytest.MonkeyPatch) -> None:
    """Make this process a client of a server."""
    from nnsight import CONFIG as NNSIGHT

    patch.setattr(NNSIGHT.API, "HOST", host)
    patch.setattr(NNSIGHT.API, "APIKEY", None)


@pytest.fixture
def client(ndif_server: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process a client of the real server."""
    client_of(ndif_server.host, monkeypatch)


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., Plain]) -> Plain:
    """A tiny model."""
    return tiny_model("llama")


@pytest.fixture(scope="module")
def deployed(ndif_server: ServerState, tiny: Plain) -> None:
    """The server deploys a model when it is first asked for."""
    with pytest.MonkeyPatch.context() as patch:
        client_of(ndif_server.host, patch)
        shell = open_model(tiny, None)
        job = transport.submit(pack_probe(shell, tiny["shape"]), model_key(shell), Deadlines())
        transport.wait(job, Deadlines(), quiet)


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
