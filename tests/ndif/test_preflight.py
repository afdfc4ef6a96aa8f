"""Before a sweep goes to NDIF: every answer that would spoil it is one line with what to do."""

import json
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from fakes import HTML, RESET, SILENT, FakeNdif, chunk_of, error, state, status

from nnsweep.config import Config, read_config
from nnsweep.errors import UserError
from nnsweep.log import exit_code
from nnsweep.ndif import preflight

KEY = "planted-4f1c9a"
FOUND = {"torch": "2.0", "threads": 3, "dtype": "float32", "device": "cpu", "logits": 49152}
CONFIG = read_config({"ndif": {"connect_s": 30}})
HASTY = read_config({"ndif": {"connect_s": 0.3}})


@pytest.fixture(scope="module")
def environment() -> dict[str, Any]:
    """This process's packages, as a server would list its own."""
    from nnsight.ndif import get_local_env

    return get_local_env()


@pytest.fixture(scope="module")
def key(real_model: dict[str, Any]) -> str:
    """The server's name of the model."""
    from nnsweep.models import model_key, open_model

    return model_key(open_model(real_model, None))


@pytest.fixture
def fake(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, Any], key: str
) -> Iterator[FakeNdif]:
    """A server that serves what is asked for; tests change one thing."""
    import nnsight
    from nnsight import CONFIG as NNSIGHT

    monkeypatch.setattr(nnsight.ndif, "get_local_env", lambda: environment)
    with FakeNdif().running() as server:
        monkeypatch.setattr(NNSIGHT.API, "HOST", server.host)
        monkeypatch.setattr(NNSIGHT.API, "APIKEY", KEY)
        entry = {"model_key": key, "application_state": "RUNNING", "repo_id": "/models/small"}
        server.pages = {"/status": {"deployments": {"a": entry}}, "/env": deepcopy(environment)}
        server.story = lambda payload: [state("COMPLETED", saved={"found": FOUND})]
        yield server


def refused(model: dict[str, Any], config: Config = CONFIG) -> str:
    """The one line of a refusal, which ends the command with exit code 2."""
    with pytest.raises(UserError) as caught:
        preflight.check(model, config)
    assert exit_code(caught.value) == 2
    line = str(caught.value)
    assert "\n" not in line
    assert KEY not in line
    return line


def test_a_server_that_fits(
    fake: FakeNdif, real_model: dict[str, Any], environment: dict[str, Any]
) -> None:
    found = preflight.check(real_model, CONFIG)
    served = {name: found[name] for name in ("dtype", "attention", "device_name", "threads")}
    assert served == {"dtype": "float32", "attention": "sdpa", "device_name": "cpu", "threads": 3}
    assert (found["state"], found["mismatches"]) == ("RUNNING", {})
    names = ("nnsight", "torch", "transformers")
    assert {name: found["versions"][name] for name in names} == {
        name: environment["packages"][name] for name in names
    }
    assert fake.posts == 1, "one trial session"
    json.dumps(found)


def test_nobody_there(
    fake: FakeNdif, real_model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nnsight import CONFIG as NNSIGHT

    monkeypatch.setattr(NNSIGHT.API, "HOST", "http://127.0.0.1:9")
    line = refused(real_model)
    for words in ("NDIF does not answer", "NDIF_HOST", "http://127.0.0.1:9", "nnsweep ndif serve"):
        assert words in line


@pytest.mark.parametrize("page", [HTML, RESET, SILENT, status(503, "reconnecting")], ids=str)
@pytest.mark.parametrize("path", ["/status", "/env"])
def test_something_else_than_an_answer(
    fake: FakeNdif, real_model: dict[str, Any], path: str, page: Any
) -> None:
    fake.pages[path] = page
    assert "NDIF does" in refused(real_model, HASTY if page is SILENT else CONFIG)
    assert fake.posts == 0


def test_another_service_of_that_name(fake: FakeNdif, real_model: dict[str, Any]) -> None:
    del fake.pages["/status"]
    assert "NDIF refuses GET /status: Not Found (status 404)" in refused(real_model)


@pytest.mark.parametrize("number", [401, 403])
def test_a_key_that_is_not_taken(fake: FakeNdif, real_model: dict[str, Any], number: int) -> None:
    fake.submit = [status(number, "Invalid API key.")]
    assert f"Invalid API key. (status {number})" in refused(real_model)
    assert fake.posts == 1


def test_a_model_that_is_not_deployed(fake: FakeNdif, real_model: dict[str, Any]) -> None:
    others = {
        "a": {"model_key": "x", "repo_id": "owner/large"},
        "b": {"model_key": "y", "repo_id": "/models/middle"},
    }
    fake.pages["/status"] = {"deployments": others}
    line = refused(real_model)
    assert "model smollm2-135m is not deployed on this NDIF host" in line
    assert "Deployed: middle, owner/large." in line
    fake.pages["/status"] = {"deployments": {}}
    assert "Deployed: none." in refused(real_model)
    assert fake.posts == 0


def test_another_nnsight(fake: FakeNdif, real_model: dict[str, Any]) -> None:
    fake.pages["/env"]["packages"]["nnsight"] = "0.9.0"
    line = refused(real_model)
    assert "here and 0.9.0 on the NDIF server" in line
    assert "Install 0.9.0 here" in line
    assert fake.posts == 0


def test_a_patch_release_of_nnsight_and_another_transformers_are_noted(
    fake: FakeNdif,
    real_model: dict[str, Any],
    environment: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = environment["packages"]
    minor = here["nnsight"].rpartition(".")[0]
    fake.pages["/env"]["packages"] |= {"nnsight": f"{minor}.99", "transformers": "4.0.0"}
    found = preflight.check(real_model, CONFIG)
    assert found["mismatches"] == {
        "nnsight": [here["nnsight"], f"{minor}.99"],
        "transformers": [here["transformers"], "4.0.0"],
    }
    assert found["versions"]["transformers"] == "4.0.0"
    assert "transformers is " in caplog.text
    assert "4.0.0 on the server" in caplog.text


def test_another_dtype(fake: FakeNdif, real_model: dict[str, Any]) -> None:
    served = FOUND | {"dtype": "bfloat16"}
    fake.story = lambda payload: [state("COMPLETED", saved={"found": served})]
    line = refused(real_model)
    assert "serves bfloat16, the sweep asks for float32" in line
    assert "model.dtype: bfloat16" in line


def test_attention_weights_are_not_to_be_had(fake: FakeNdif, real_model: dict[str, Any]) -> None:
    line = refused(real_model | {"attention": "eager"})
    assert "model.attention" in line
    assert "engine=local" in line
    assert fake.posts == 0


def test_a_packaged_model_is_not_to_be_had_elsewhere(
    fake: FakeNdif, real_model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nnsight import CONFIG as NNSIGHT

    monkeypatch.setattr(NNSIGHT.API, "HOST", "http://127.0.0.2:9")
    assert "model smollm2-135m is a local folder" in refused(real_model)
    monkeypatch.setattr(NNSIGHT.API, "HOST", fake.host.replace("127.0.0.1", "localhost"))
    assert preflight.check(real_model, CONFIG)["state"] == "RUNNING"


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (error("Traceback (most recent call last):\nValueError: no"), "failed: ValueError: no."),
        (error("Error starting model. Please try again later."), "Error starting model"),
        ([state("COMPLETED")], "COMPLETED without data"),
        ([state("COMPLETED", raw=b"damaged")], "the result is damaged"),
        ([state("COMPLETED", saved={})], "the result holds no values"),
    ],
)
def test_a_trial_session_that_fails(
    fake: FakeNdif, real_model: dict[str, Any], states: Any, words: str
) -> None:
    fake.story = lambda payload: states
    line = refused(real_model)
    assert line.startswith("a trial session on NDIF failed")
    assert words in line
    assert fake.posts == 1


def test_a_queue_without_end(fake: FakeNdif, real_model: dict[str, Any]) -> None:
    fake.story = lambda payload: [state("QUEUED")]
    with pytest.raises(UserError, match=r"trial session on NDIF failed.*ndif\.queue_s"):
        preflight.check(real_model, read_config({"ndif": {"queue_s": 0.1}}))


def test_a_person_sees_the_same(fake: FakeNdif) -> None:
    fake.pages["/env"]["packages"]["torch"] = "2.0.0"
    shown = "\n".join(preflight.describe_service(1))
    for words in (fake.host, "key          set", "torch 2.0.0", "/models/small (RUNNING)"):
        assert words in shown
    assert any(line.startswith("differs      torch: ") for line in shown.splitlines())
    assert KEY not in shown
    fake.pages["/status"] = RESET
    (line,) = preflight.describe_service(1)
    assert line.startswith("NDIF does not answer")


def test_the_command_ends_in_one_line(real_model: dict[str, Any], tmp_path: Path) -> None:
    import os

    chunk = tmp_path / "chunk.json"
    chunk.write_text(json.dumps(chunk_of() | {"model": real_model}))
    main = "from nnsweep.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", main, "run-chunk", str(chunk), str(tmp_path), "--engine", "ndif"],
        env=os.environ | {"NDIF_HOST": "http://127.0.0.1:9", "NDIF_API_KEY": KEY},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("nnsweep: NDIF does not answer")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*.parquet"))
