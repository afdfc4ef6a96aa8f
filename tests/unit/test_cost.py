"""What a cluster is asked for: more with what there is to do, and never a request too short."""

import pytest

from nnsweep import cost
from nnsweep.config import Ndif
from unit.examples import plan_of, rows_of, sweep_of


@pytest.fixture
def chunk(tmp_path):
    (found,) = planned(tmp_path).chunks
    return found


def planned(folder):
    """The example sweep's plan."""
    sweep = sweep_of()
    return plan_of(sweep, rows_of(sweep, folder))


def grown(chunk, factor):
    """The same chunk of a model with more weights."""
    shape = chunk["model"]["shape"]
    larger = shape | {"parameters": round(factor * shape["parameters"])}
    return chunk | {"model": chunk["model"] | {"shape": larger}}


def test_memory_holds_the_weights_the_interpreter_and_a_margin(chunk):
    large = grown(chunk, 1e9 / chunk["model"]["shape"]["parameters"])
    assert cost.chunk_mb(large) >= 1.5 * 4000 + 2000
    halved = large | {"model": large["model"] | {"dtype": "bfloat16"}}
    assert cost.chunk_mb(large) - cost.chunk_mb(halved) == pytest.approx(1.5 * 2000, abs=50)
    assert cost.chunk_mb(chunk) > 1e-6 * cost.RESIDENT


def test_minutes_follow_the_model_the_engine_and_the_machine(chunk):
    large = grown(chunk, 7e9 / chunk["model"]["shape"]["parameters"])
    local = cost.chunk_minutes(large, "local", "auto", 2)
    assert local > cost.chunk_minutes(chunk, "local", "auto", 2) >= cost.START_MINUTES
    assert cost.chunk_minutes(large, "reference", "auto", 2) > local
    assert cost.chunk_minutes(large, "local", "auto", 1) > local
    assert cost.chunk_minutes(large, "local", "cuda", 2) < local
    seconds_to_load = 4 * 7e9 / cost.LOAD_RATE
    assert cost.chunk_minutes(large, "local", "cuda", 2) >= seconds_to_load / 60


def test_a_request_is_waited_for_until_its_own_deadlines():
    ndif = Ndif(connect_s=60, queue_s=600, run_s=1200, download_s=120)
    assert cost.waiting_minutes(ndif) == cost.START_MINUTES + 1 + 10 + 20 + 2


def test_work_is_at_most_that_of_full_passes(tmp_path):
    plan = planned(tmp_path)
    assert 0 < cost.work_of(plan.chunks) < cost.full_work(plan.chunks)
