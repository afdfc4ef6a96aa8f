"""Measures against an independent computation in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import oracle
from nnsweep.measures import functions
from nnsweep.registry import REGISTRY

VOCAB = 23
one_row = arrays.arrays(np.float32, VOCAB, elements=st.floats(-30, 30, width=32), unique=True)
rows = st.lists(st.tuples(one_row, one_row), min_size=1, max_size=4)
token = st.integers(0, VOCAB - 1)


def measured(kind, logits, clean, *answers):
    """One measure of some rows, as plain numbers."""
    tokens = [torch.tensor(answer) for answer in answers]
    found = functions()[kind](torch.tensor(logits), torch.tensor(clean), tokens)
    assert found.dtype == torch.float32
    assert found.shape == (len(logits),)
    return found.tolist()


def drawn(data):
    pairs = data.draw(rows)
    logits, clean = (np.stack(side) for side in zip(*pairs, strict=True))
    target, foil = (data.draw(st.tuples(*[token] * len(pairs))) for _ in range(2))
    return logits, clean, list(target), list(foil)


@settings(max_examples=60)
@given(st.data())
def test_every_measure_is_the_oracles(data):
    logits, clean, target, foil = drawn(data)
    found = {
        kind: measured(kind, logits, clean, target)
        for kind in ("match", "logit", "log_prob", "cross_entropy", "prob", "rank")
    }
    found["logit_diff"] = measured("logit_diff", logits, clean, target, foil)
    found |= {kind: measured(kind, logits, clean) for kind in ("kl", "js", "entropy")}
    for i, row in enumerate(logits):
        expected = {
            "match": oracle.match(row, target[i]),
            "logit": float(row[target[i]]),
            "log_prob": oracle.log_prob(row, target[i]),
            "cross_entropy": -oracle.log_prob(row, target[i]),
            "prob": oracle.prob(row, target[i]),
            "rank": oracle.rank(row, target[i]),
            "logit_diff": oracle.logit_diff(row, target[i], foil[i]),
            "kl": oracle.kl(clean[i], row),
            "js": oracle.js(clean[i], row),
            "entropy": oracle.entropy(row),
        }
        for kind, value in expected.items():
            assert found[kind][i] == pytest.approx(value, rel=2e-5, abs=2e-5), kind


@settings(max_examples=60)
@given(st.data())
def test_values_lie_within_the_declared_bounds(data):
    logits, clean, target, foil = drawn(data)
    for kind in functions():
        entry = REGISTRY[kind]
        answers = {"logit_diff": [target, foil]}.get(kind, [target])
        for value in measured(kind, logits, clean, *answers):
            assert entry.low is None or value >= entry.low - 1e-5 * (kind not in ("kl", "js")), kind
            assert entry.high is None or value <= entry.high + 1e-5, kind
            assert not entry.discrete or value == int(value), kind


@settings(max_examples=30)
@given(st.data())
def test_adding_a_constant_to_all_logits_changes_no_distribution(data):
    logits, clean, target, foil = drawn(data)
    for kind, answers in (("log_prob", [target]), ("kl", []), ("logit_diff", [target, foil])):
        moved = measured(kind, logits + np.float32(8), clean, *answers)
        assert moved == pytest.approx(measured(kind, logits, clean, *answers), abs=1e-4)


@settings(max_examples=30)
@given(st.data())
def test_a_set_of_answers_has_their_summed_probability(data):
    logits, clean, target, foil = drawn(data)
    one, other = (measured("prob", logits, clean, answer) for answer in (target, foil))
    both = measured("prob", logits, clean, target, foil)
    assert both == pytest.approx([a + b for a, b in zip(one, other, strict=True)])
    logs = measured("log_prob", logits, clean, target, foil)
    assert np.exp(logs) == pytest.approx(both, rel=1e-4, abs=1e-30)


def test_a_run_has_no_divergence_from_itself():
    logits = np.linspace(-5, 5, VOCAB, dtype=np.float32)[None]
    assert measured("kl", logits, logits) == [0.0]
    assert measured("js", logits, logits) == [0.0]


def test_the_divergence_goes_from_clean_to_changed():
    clean = np.array([[0.0, 0.0, -30.0]], dtype=np.float32)
    changed = np.array([[0.0, -9.0, -30.0]], dtype=np.float32)
    assert measured("kl", changed, clean)[0] == pytest.approx(oracle.kl(clean[0], changed[0]))
    assert measured("kl", changed, clean)[0] > 3 > 1 > measured("kl", clean, changed)[0]


def test_a_rank_counts_strictly_larger_logits():
    logits = np.array([[1.0, 3.0, 3.0, 2.0]] * 4, dtype=np.float32)
    assert measured("rank", logits, logits, [0, 1, 2, 3]) == [3, 0, 0, 2]


def test_large_logits_stay_finite():
    logits = np.array([[3e4, -3e4, 0.0]], dtype=np.float32)
    for kind, answers in (("log_prob", [[1]]), ("prob", [[1]]), ("kl", []), ("rank", [[1]])):
        assert np.isfinite(measured(kind, logits, logits, *answers)).all()


@pytest.mark.parametrize("kind", REGISTRY)
def test_every_measure_says_what_it_is(kind):
    entry = REGISTRY[kind]
    assert entry.unit
    assert len(entry.definition) > 10
    assert entry.source
