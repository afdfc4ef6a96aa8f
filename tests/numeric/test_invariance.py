"""Case C10: chunks, batches, the order of rows and points move nothing."""

import pytest
from harness import (
    RECORDS,
    effect,
    largest_difference,
    plan_of,
    rows_of,
    run,
    run_chunks,
    sweep_of,
)
from sweeps import NOISE, layered

from nnsweep.chunks import keys_of, pass_ids, split_chunk, split_pass

PATCH = {"site": "resid_post", "layer": "$layer", "position": "$position", "set": "donor"}
STEER = {"vector": {"mean": "donor", "minus": "text"}, "scale": "$scale"}
GRID = {"layer": "all", "position": ["subject", "last"]}

MIXED = {
    "mean": layered("resid_post", set={"mean": "text"}),
    "noise and patch": sweep_of(axes=GRID, writes=[NOISE, PATCH]),
    "steer": sweep_of(
        axes={"layer": "all", "scale": [-2, -1, 1, 2]},
        writes=[{"site": "resid_pre", "layer": "$layer", "position": "last", "add": STEER}],
    ),
    "heads": layered("z", [1, 2], set="donor"),
}
"""48 points: means, noise, patches and steering."""


@pytest.fixture(scope="module")
def chain(tiny_model, opened, tokenizer, tmp_path_factory):
    """Run a sweep on the tiny Llama under some settings."""
    model = tiny_model("llama")

    class Chain:
        engine = opened("local", model)

        def rows(self, sweep, records=RECORDS):
            return rows_of(sweep, tokenizer, tmp_path_factory.mktemp("rows"), records)

        def run(self, sweep, records=RECORDS, **how):
            return run(self.engine, sweep, model, self.rows(sweep, records), **how)

        def plan(self, sweep, **how):
            return plan_of(sweep, model, self.rows(sweep), **how)

    return Chain()


@pytest.mark.parametrize("recompute", ["fast", "exact"])
@pytest.mark.parametrize("name", MIXED)
def test_chunking_moves_no_bit(chain, name, recompute):
    runs = [
        chain.run(MIXED[name], chunk_passes=size, batch_rows=4, recompute=recompute)
        for size in (1, 7, 1000)
    ]
    assert effect(runs[0]) > 0.01
    for other in runs[1:]:
        assert largest_difference(runs[0], other) == 0.0


@pytest.mark.parametrize("name", MIXED)
def test_the_order_of_rows_moves_no_bit(chain, name):
    plain = chain.run(MIXED[name], batch_rows=4)
    order = [3, 0, 5, 1, 4, 2]
    shuffled = chain.run(MIXED[name], [RECORDS[i] for i in order], batch_rows=4, chunk_passes=3)
    assert largest_difference(plain, shuffled) == 0.0


@pytest.mark.parametrize("name", MIXED)
def test_the_size_of_a_batch_moves_nothing_that_counts(chain, name):
    plain = chain.run(MIXED[name], batch_rows=1000)
    for rows in (1, 2, 5):
        found = chain.run(MIXED[name], batch_rows=rows)
        assert largest_difference(plain, found, ["rank"]) < 1e-4


@pytest.mark.parametrize("name", MIXED)
def test_the_order_of_points_moves_no_bit(chain, name):
    axes = {
        axis: list(reversed(range(4) if values == "all" else values))
        for axis, values in MIXED[name].model_dump()["axes"].items()
    }
    writes = [write.model_dump(exclude_none=True) for write in MIXED[name].writes]
    backwards = chain.run(sweep_of(axes=axes, writes=writes), batch_rows=2)
    assert largest_difference(chain.run(MIXED[name], batch_rows=2), backwards) == 0.0


def test_noise_and_means_do_not_depend_on_what_else_is_swept(chain):
    """The same points in a smaller sweep."""
    for name in ("mean", "noise and patch"):
        whole = chain.run(MIXED[name])
        axes = {"layer": [2], "position": ["last"]}
        writes = [write.model_dump(exclude_none=True) for write in MIXED[name].writes]
        few = chain.run(sweep_of(axes=axes, writes=writes))
        some = {key: value for key, value in whole.items() if key in few}
        assert len(some) == len(RECORDS)
        assert largest_difference(some, few) < 1e-4


def test_a_run_can_be_resumed_chunk_by_chunk(chain):
    """Chunks that ran before an interruption and chunks that run after it make one table."""
    sweep = MIXED["noise and patch"]
    plan = chain.plan(sweep, chunk_passes=3, batch_rows=4)
    assert len(plan.chunks) > 3
    together = run_chunks(chain.engine, plan.chunks)
    apart = run_chunks(chain.engine, plan.chunks[2:]) | run_chunks(chain.engine, plan.chunks[:2])
    assert largest_difference(together, apart) == 0.0


def test_a_chunk_may_be_split(chain):
    """Between passes no bit moves; within a pass nothing that counts."""
    (chunk,) = chain.plan(MIXED["heads"], batch_rows=4).chunks
    whole = run_chunks(chain.engine, [chunk])
    parts = split_chunk(chunk, 2)
    assert len(parts) > 2
    assert largest_difference(whole, run_chunks(chain.engine, parts)) == 0.0
    halves = split_pass(split_chunk(chunk, 1)[0])
    assert len(halves) == 2
    assert [pass_ids(half) for half in halves] == [pass_ids(chunk)[:1]] * 2
    found = run_chunks(chain.engine, halves)
    some = {key: whole[key] for half in halves for key in keys_of(half)}
    assert largest_difference(some, found, ["rank"]) < 1e-4
