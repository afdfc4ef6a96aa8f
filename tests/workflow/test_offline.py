"""A machine without a network: a prepared model works, an unprepared one is refused once."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from nnsweep.errors import UserError
from nnsweep.models import locate
from workflow.project import SWEEP, Project

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("kind", "name", "variable"),
    [("packaged", "smollm2-135m", "NNSWEEP_CACHE"), ("hub", "someone/model", "HF_HOME")],
)
def test_a_model_that_is_not_there_is_named_with_where_it_was_sought(
    kind, name, variable, tmp_path, monkeypatch
):
    """On a node that sees another disk than the one where the model was prepared."""
    monkeypatch.setenv("NNSWEEP_CACHE", str(tmp_path))
    with pytest.raises(
        UserError, match=f"{name} is not in /.*Set {variable} to the folder"
    ) as said:
        locate({"kind": kind, "id": name, "revision": "0" * 40})
    assert kind == "hub" or str(tmp_path) in str(said.value)
    assert f"`nnsweep model {name} --weights`" in str(said.value)


def offline(home: Path) -> dict[str, str]:
    """No network at all, and the Hugging Face cache of `home`."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
    return nowhere | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "PIP_NO_INDEX": "1"}


def prepared(home: Path, model: Path) -> Path:
    """A Hugging Face cache as a download of example/tiny would have left it."""
    folder = home / "hub" / "models--example--tiny"
    shutil.copytree(model, folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return home


def test_a_prepared_model_runs_without_a_network(fresh: Project, model: Path, tmp_path: Path):
    prompts = {key: value for key, value in SWEEP["prompts"].items() if key != "donor"}
    fresh.write_sweep(model={"id": "example/tiny"}, prompts=prompts, axes={}, writes=[])
    env = offline(prepared(tmp_path / "home", model))
    done = fresh.run("results/tiny/local/values.parquet", env=env)
    assert done.code == 0, done.out
    values = pq.read_table(fresh.values)
    assert values["status"].to_pylist().count("ok") == 5
    assert COMMIT in (fresh.results / "model.json").read_text()


def test_an_unprepared_model_is_refused_in_one_line(fresh: Project, tmp_path: Path):
    fresh.write_sweep(model={"id": "example/absent"})
    done = fresh.run(env=offline(tmp_path / "home"))
    assert done.code != 0
    (line,) = [line for line in done.out.splitlines() if line.startswith("nnsweep: ")]
    assert "example/absent" in line
    assert "network" in line
    assert "Traceback" not in done.out
    assert [line for line in done.out.splitlines() if "Error in rule" in line] == [
        "Error in rule prepare_model:"
    ]
    assert "Running chunk" not in done.out
