"""Every engine has its own files: switching engines neither reuses nor touches the other's."""

import pyarrow.parquet as pq
import pytest

from workflow.project import digest, times


def files(folder):
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


def test_engines_share_no_result_and_agree(finished, copied):
    local, reference = copied.results / "local", copied.results / "reference"
    before = times(files(local))
    done = copied.run("results/tiny/reference/summary.parquet", engine="reference")
    assert done.code == 0, done.out
    assert done.jobs("prepare_model") == done.jobs("expand_sweep") == 0
    assert set(copied.parts()) == {path.stem for path in copied.parts("reference").values()}
    assert all(path.is_file() for path in copied.parts("reference").values())
    assert times(files(local)) == before
    assert copied.run(engine="local").idle
    agree(pq.read_table(local / "values.parquet"), pq.read_table(reference / "values.parquet"))
    assert digest(copied.values) == digest(finished.values)


def agree(ours, theirs):
    """Everything but the numbers is equal; numbers are close, yes-or-no measures equal."""
    assert ours.schema.equals(theirs.schema)
    keys = [name for name in ours.column_names if name not in ("gap", "drift")]
    assert ours.select(keys).equals(theirs.select(keys))
    for name in ("gap", "drift"):
        pairs = zip(ours[name].to_pylist(), theirs[name].to_pylist(), strict=True)
        for a, b in pairs:
            assert (a is None) == (b is None)
            assert a is None or a == pytest.approx(b, abs=1e-4)


def test_an_engine_out_of_reach_fails_and_leaves_no_table(copied):
    nowhere = {"NDIF_HOST": "http://127.0.0.1:9", "NDIF_API_KEY": "none", "HF_HUB_OFFLINE": "1"}
    before = times(files(copied.results / "local"))
    done = copied.run(engine="ndif", env=nowhere)
    assert done.code != 0
    assert "Nothing to be done" not in done.out
    assert not (copied.results / "ndif" / "values.parquet").exists()
    assert times(files(copied.results / "local")) == before
    assert copied.run().idle


def test_the_plan_does_not_follow_the_engine(copied):
    """Else every switch plans and merges anew."""
    config = copied / "config/config.yaml"
    config.write_text(config.read_text() + "\nparity: {points: 2}\n")
    assert copied.run("results/tiny/plan.json").code == 0
    assert copied.run("-n").jobs("expand_sweep") == 0
    for engine in ("ndif", "reference"):
        assert copied.run("-n", engine=engine).jobs("expand_sweep") == 0, engine
