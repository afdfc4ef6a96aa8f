"""`batch_rows: auto`, and GPUs that jobs of one node share out among themselves."""

import logging
from types import SimpleNamespace

import pytest
import torch
from examples import model_of, rows_of, sweep_of
from hypothesis import given
from hypothesis import strategies as st

from nnsweep import cost, memory
from nnsweep.config import read_config
from nnsweep.engines import machine
from nnsweep.errors import UserError
from nnsweep.expansion import cutting, settings_of
from nnsweep.plan import make_plan
from nnsweep.vectors import load_vector

MODEL = model_of()


def settled(tmp_path, **config):
    sweep = sweep_of(on_bad_row="exclude")
    return settings_of(
        read_config({"batch_rows": "auto"} | config), sweep, MODEL, rows_of(sweep, tmp_path)
    )


@given(st.floats(1.0, 500.0), st.integers(1, 2000), st.booleans())
def test_what_is_said_to_fit_is_the_most_that_does(gigabytes, width, backward):
    count = cost.rows_that_fit(MODEL, width, backward, gigabytes * 1e9)
    assert 1 <= count <= cost.MOST_ROWS
    assert count & (count - 1) == 0
    more = cost.rows_that_fit(MODEL, width, backward, 2 * gigabytes * 1e9)
    assert count <= more


@pytest.mark.parametrize("gigabytes", [1.0, 2.0, 8.0])
def test_the_plan_of_what_fits_fits(tmp_path, gigabytes):
    """By the estimate that a cluster is asked for memory with."""
    sweep = sweep_of(axes={"layer": "all"}, on_bad_row="exclude")
    rows = rows_of(sweep, tmp_path)
    settings = settings_of(
        read_config({"batch_rows": "auto", "memory_gb": gigabytes}), sweep, MODEL, rows
    )
    chunks = make_plan(sweep, MODEL, rows, settings, load_vector).chunks
    assert cost.memory_of(MODEL, chunks) <= gigabytes * 1e9


def test_auto_takes_the_memory_of_this_machine_and_says_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("nnsweep.expansion.available", lambda device, threads: 2e9)
    with caplog.at_level(logging.INFO):
        number = settled(tmp_path).batch_rows
    assert number == settled(tmp_path, memory_gb=2.0).batch_rows
    assert f"batch_rows: auto is {number}, which fits into 2.0 GB" in caplog.text


def test_another_machine_is_not_another_setting():
    """Snakemake compares what was asked for, not what it came to."""
    assert cutting(read_config({"batch_rows": "auto"}))["batch_rows"] == "auto"


def test_too_little_memory_and_a_servers_memory_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"needs more than .* GB, a job has 0\.1 GB"):
        settled(tmp_path, memory_gb=0.1)
    with pytest.raises(UserError, match="auto needs memory_gb, the memory of the NDIF server"):
        settled(tmp_path, engine="ndif")
    assert settled(tmp_path, engine="ndif", memory_gb=2.0).batch_rows > 1


def test_jobs_that_may_run_side_by_side_share_the_memory():
    alone = memory.available("cpu", threads=10_000)
    assert memory.available("cpu", threads=1) <= alone
    assert 1e8 < alone < 1e14


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Two GPUs that are none; the one that was made the current one."""
    chosen = []
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(machine, "POLL_S", 0.01)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(uuid=f"gpu-{index}", total_memory=(index + 2) * 10**9),
    )
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_each_job_takes_a_gpu_of_its_own(gpus):
    first, second = machine.claim_gpu(), machine.claim_gpu()
    assert gpus == [0, 1]
    first.close()
    third = machine.claim_gpu()
    assert gpus == [0, 1, 0]
    second.close()
    third.close()


def test_a_job_too_many_waits_until_a_gpu_is_free(gpus, monkeypatch, caplog):
    held = [machine.claim_gpu(), machine.claim_gpu()]
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: held[1].close())
    with caplog.at_level(logging.INFO):
        last = machine.claim_gpu()
    assert gpus[-1] == 1
    assert caplog.text.count("waiting: other jobs hold every GPU") == 1
    held[0].close()
    last.close()


def test_auto_takes_the_smallest_gpu(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert memory.available("auto", 1) == memory.GPU_SHARE * 2e9
    assert memory.available("cpu", 1) != memory.GPU_SHARE * 2e9
