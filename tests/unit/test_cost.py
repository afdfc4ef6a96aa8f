"""What a cluster is asked for: more with what there is to do, and never a request too short."""

import pytest

from nnsweep import cost
from nnsweep.config import Ndif
from unit.examples import RECORDS, plan_of, rows_of, sweep_of


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


RESID = {"site": "resid_post", "layer": "$layer", "position": "last"}
KL = {"kl": {"kind": "kl"}}
PATH = {
    "path": {
        "prompt": "text",
        "writes": [
            {
                "site": "z",
                "layers": "all",
                "heads": "all",
                "position": "all",
                "set": {"patch": "text"},
            },
            {"site": "z", "layer": "$layer", "head": 1, "position": "last", "set": "donor"},
        ],
    }
}
WHOLE = {"kind": "log_prob", "answer": "target", "tokens": "sum"}
FIRST = {"site": "embed", "position": "all", "set": 0.0}
ODD = {
    "one early point": {"axes": {}, "writes": [FIRST], "measures": KL},
    "no writes": {"axes": {}, "writes": []},
    "generating": {"generate": {"max_new_tokens": 4}, "measures": KL},
    "whole answers": {
        "measures": {"w": WHOLE, "r": {"kind": "recovery", "of": "w"}},
        "generate": {"max_new_tokens": 2},
    },
    "estimated, too": {
        "measures": {
            "logit": {"kind": "logit", "answer": "target"},
            "slope": {"kind": "attribution", "of": "logit"},
        }
    },
    "estimated alone": {
        "measures": {
            "slope": {"kind": "attribution", "of": {"kind": "logit", "answer": "target"}},
        }
    },
    "chains": {
        "writes": [RESID | {"set": {"patch": "path"}}],
        "runs": PATH,
        "on_bad_row": "exclude",
    },
    "a chain that cannot differ": {
        "writes": [RESID | {"mix": {"source": {"patch": "path"}, "weight": 0.0}}],
        "runs": PATH,
    },
    "means of donors": {"writes": [RESID | {"set": {"mean": "donor"}}], "measures": KL},
}


@pytest.mark.parametrize("recompute", ["fast", "exact"])
@pytest.mark.parametrize("name", ODD)
def test_no_plan_computes_more_than_whole_runs(tmp_path, name, recompute):
    sweep = sweep_of(**ODD[name])
    plan = plan_of(sweep, rows_of(sweep, tmp_path, EQUAL), recompute=recompute)
    assert 0 < cost.work_of(plan.chunks) <= cost.full_work(plan.chunks)


EQUAL = [RECORDS[i] for i in (0, 1, 3)]
"""Three rows of five tokens, and donors of five; four layers."""


@pytest.mark.parametrize(
    ("name", "work", "full"),
    [
        ("one early point", 4 * 3 * (5 + 5), 4 * 3 * (5 + 5)),
        ("no writes", 4 * 3 * 5, 4 * 3 * 5),
        # The clean run, and three points with three more tokens behind each prompt.
        ("generating", 4 * 3 * (5 + 5 + 3 * (5 + 3)), 4 * 3 * (5 + 5 + 3 * (5 + 3))),
        # Clean, donor, a pass forward and back; and layers 1 to 3, 2 to 3 and 3 of the last token.
        ("estimated, too", 3 * (4 * (5 + 5 + 3 * 5) + 6), 4 * 3 * (5 + 5 + 3 * 5 + 3 * 5)),
        # The same, but the points run nothing.
        ("estimated alone", 3 * 4 * (5 + 5 + 3 * 5), 4 * 3 * (5 + 5 + 3 * 5 + 3 * 5)),
        # Clean and donor; three chains; and the layers behind each write.
        ("chains", 3 * (4 * (5 + 5 + 3 * 5) + 6), 4 * 3 * (5 + 5 + 3 * (5 + 5))),
        ("a chain that cannot differ", 4 * 3 * 5, 4 * 3 * (5 + 3 * (5 + 5))),
        # Clean, the donors for the mean at each layer, and the layers behind each write.
        ("means of donors", 3 * (4 * (5 + 3 * 5) + 6), 4 * 3 * (5 + 3 * 5 + 3 * 5)),
    ],
)
def test_work_counted_by_hand(tmp_path, name, work, full):
    """Layers times tokens; the beginning "The town of" is shared where nothing reads it."""
    sweep = sweep_of(**ODD[name])
    plan = plan_of(sweep, rows_of(sweep, tmp_path, EQUAL))
    spared = sum(
        4 * 2 * (block["shared"] + block["donor_shared"] * (name not in UNREAD))
        for chunk in plan.chunks
        for block in chunk["blocks"]
    )
    assert (cost.work_of(plan.chunks), cost.full_work(plan.chunks)) == (work - spared, full)


UNREAD = ("one early point", "no writes", "a chain that cannot differ", "means of donors")
"""Sweeps whose donors nothing runs."""
