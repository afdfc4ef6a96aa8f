"""Hostile names and files: refused in one line before anything runs, or kept as plain data."""

import pickle
from copy import deepcopy

import pytest
import yaml

from hostile import HOSTILE
from nnsweep import models
from nnsweep.config import read_config
from nnsweep.documents import parse
from nnsweep.errors import UserError
from nnsweep.prompts import from_table, read_records, to_table
from nnsweep.sweep import Sweep
from nnsweep.sweep_file import read_sweep
from nnsweep.tables import read_table, write_table
from nnsweep.vectors import load_vector
from unit.examples import DOCUMENT, RECORDS, rows_of, sweep_of, write_csv

TEXTS = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)


def named(place: str, text: str):
    """The example document with one name replaced."""
    document = deepcopy(DOCUMENT)
    if place == "name":
        return document | {"name": text}
    if place == "answers":
        document["prompts"]["answers"][text] = "base_answer"
    elif place == "axes":
        document["axes"][text] = [1, 2]
    elif place == "positions":
        document["positions"][text] = 0
    elif place == "measures":
        document["measures"][text] = {"kind": "kl"}
    elif place == "measure_at":
        document["measure_at"] = text
    else:
        document["writes"][0] = document["writes"][0] | {place: text}
    return document


def refused(call) -> str:
    """The message of the UserError that a call ends in: one line, nothing a terminal obeys."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert message.isprintable(), message
    assert len(message) < 2000
    return message


@TEXTS
@pytest.mark.parametrize(
    "place",
    ["name", "axes", "positions", "measures", "measure_at", "site", "position", "layer", "set"],
)
def test_a_name_is_refused_in_one_line(place, text):
    assert "sweep.yaml: " in refused(lambda: parse(Sweep, named(place, text), "sweep.yaml"))


@TEXTS
@pytest.mark.parametrize("key", ["sweep", "engine", "device", "recompute", "threads"])
def test_a_setting_is_refused_in_one_line(key, text):
    assert key in refused(lambda: read_config({key: text}))


@TEXTS
def test_a_sweep_file_of_that_name_is_refused(text, tmp_path):
    refused(lambda: read_sweep(tmp_path / "sweeps" / text))


@TEXTS
def test_a_prompt_file_of_that_name_is_refused(text, tmp_path):
    refused(lambda: read_records(tmp_path / "prompts" / text, []))


@TEXTS
def test_a_vector_file_of_that_name_is_refused(text, tmp_path):
    refused(lambda: load_vector({"file": str(tmp_path / text), "key": "vector"}, None))


@TEXTS
def test_a_model_of_that_name_is_refused(text, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    spec = {"id": text, "revision": None, "dtype": "float32", "attention": "sdpa"}
    refused(lambda: models.prepare(spec, weights=False))
    assert not list(tmp_path.iterdir())


@TEXTS
def test_a_revision_of_that_name_is_refused(text, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    spec = {"id": "example/any", "revision": text, "dtype": "float32", "attention": "sdpa"}
    refused(lambda: models.prepare(spec, weights=False))


@TEXTS
def test_a_row_id_is_data(text, tmp_path):
    """It comes back from the table as it was in the file, and names no file."""
    records = [RECORDS[0] | {"row_id": text}, *RECORDS[1:]]
    sweep = sweep_of(on_bad_row="exclude")
    rows = rows_of(sweep, tmp_path, records)
    table = to_table(rows)
    write_table(tmp_path / "rows.parquet", table, table.schema)
    assert from_table(read_table(tmp_path / "rows.parquet"))[0].row_id == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.csv", "rows.parquet"]


@TEXTS
def test_a_message_about_a_row_stays_one_line(text, tmp_path):
    records = [RECORDS[0] | {"row_id": text}, RECORDS[1] | {"row_id": text}]
    path = write_csv(tmp_path / "prompts.csv", records)
    assert "stands twice" in refused(lambda: rows_of(sweep_of(), path.parent, records))


@pytest.mark.parametrize("file", ["{sweep}.csv", "a{x}.csv", "b}.csv"])
def test_a_file_that_snakemake_would_read_as_a_pattern_is_refused(file, tmp_path):
    document = DOCUMENT | {"prompts": DOCUMENT["prompts"] | {"file": file}}
    (tmp_path / "example.yaml").write_text(yaml.safe_dump(document))
    assert "has braces in its name" in refused(lambda: read_sweep(tmp_path / "example.yaml"))


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["vector.safetensors", "vector.pt", "vector.npy", "vector.pkl"])
def test_a_vector_file_is_never_unpickled(name, tmp_path):
    path, target = tmp_path / name, tmp_path / "escaped"
    path.write_bytes(pickle.dumps(Bomb(target)))
    assert "not a readable safetensors file" in refused(
        lambda: load_vector({"file": str(path), "key": "vector"}, None)
    )
    assert not target.exists()
    pickle.loads(path.read_bytes()).close()
    assert target.exists()
