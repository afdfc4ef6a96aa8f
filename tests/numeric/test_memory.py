"""A long chunk holds no more than a short one."""

import gc

import pytest
import torch
from harness import RECORDS, plan_of, rows_of, sweep_of

PASSES = 300


@pytest.fixture
def long_chunk(tiny_model, tokenizer, tmp_path):
    """One chunk of 300 passes of one point each."""
    sweep = sweep_of(
        axes={"value": [step / 10 for step in range(PASSES)]},
        writes=[{"site": "resid_post", "layer": 0, "position": "subject", "set": "$value"}],
    )
    model = tiny_model("llama")
    rows = rows_of(sweep, tokenizer, tmp_path, RECORDS[:1])
    (chunk,) = plan_of(sweep, model, rows, batch_rows=1, chunk_passes=PASSES).chunks
    return model, chunk


def live_bytes():
    """Bytes of all tensors that anything still holds."""
    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return sum({each.data_ptr(): each.untyped_storage().nbytes() for each in found}.values())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_three_hundred_passes_hold_no_more_than_twenty(long_chunk, opened):
    model, chunk = long_chunk
    seen = {}

    def report(line):
        done = int(line.partition("/")[0])
        if done in (20, PASSES):
            seen[done] = live_bytes()

    opened("local", model).run(chunk, report)
    values = PASSES * len(chunk["measures"]) * 4
    logits = 4 * model["shape"]["vocab"]
    assert seen[PASSES] - seen[20] < 2 * values + logits / 2
