"""A session that does not fit into memory runs as two halves, with the same values."""

import pytest
import torch
from harness import largest_difference, rows_of, run
from sweeps import layered

from nnsweep.engines.local import LocalEngine
from nnsweep.errors import NnsweepError


@pytest.fixture
def prepared(tiny_model, tokenizer, tmp_path):
    sweep = layered("resid_post", set="donor")
    model = tiny_model("llama")
    return sweep, model, rows_of(sweep, tokenizer, tmp_path)


def tight(engine, tokens):
    """Let a forward pass over more than so many tokens fail as a full GPU does."""

    def full(_, args, kwargs):
        stream = args[0] if args else kwargs["hidden_states"]
        if stream.shape[0] * stream.shape[1] > tokens:
            raise torch.OutOfMemoryError("out of memory, for a test")

    engine.model._module.model.layers[-1].register_forward_pre_hook(full, with_kwargs=True)
    return engine


def test_passes_are_halved_until_they_fit(prepared, caplog):
    sweep, model, rows = prepared
    whole = run(LocalEngine(model, "cpu", 1), sweep, model, rows)
    with caplog.at_level("WARNING", logger="nnsweep"):
        halved = run(tight(LocalEngine(model, "cpu", 1), 20), sweep, model, rows)
    assert "two halves" in caplog.text
    assert largest_difference(whole, halved, ["rank"]) < 1e-4


def test_one_point_that_does_not_fit_says_what_to_set(prepared):
    sweep, model, rows = prepared
    with pytest.raises(NnsweepError, match=r"one point on \d rows .* batch_rows"):
        run(tight(LocalEngine(model, "cpu", 1), 1), sweep, model, rows)
