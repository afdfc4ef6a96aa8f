"""The real model: shipped sweeps against golden numbers and an independent implementation."""

import copy
import csv
import statistics

import pytest
import torch
from harness import largest_difference, plan_of, run, whole_logits
from transformers import AutoModelForCausalLM

import oracle
from nnsweep import jobs
from nnsweep.chunks import keys_of
from nnsweep.controls import judge
from nnsweep.models import locate
from nnsweep.prompts import prepare_rows
from nnsweep.sweep import Sweep
from nnsweep.sweep_file import read_sweep

GOLDEN = 1e-3
CLOSE = 2e-4
FEW = 4


@pytest.fixture(scope="module")
def plain(real_model):
    """The model as transformers alone opens it."""
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(locate(real_model), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def shipped(repository, tokenizer):
    """A sweep of the repository with other axes, and its rows; `few` keeps the first rows."""

    def read(name, few=None, **changes):
        document = read_sweep(repository / "config" / "sweeps" / f"{name}.yaml").model_dump()
        sweep = Sweep.model_validate(copy.deepcopy(document) | changes)
        rows = prepare_rows(sweep, repository / sweep.prompts.file, tokenizer, 0)
        assert all(row.reason is None for row in rows)
        return sweep, rows[:few]

    return read


@pytest.fixture(scope="module")
def golden(repository):
    """Golden means: (axis values) -> measure -> mean."""

    def read(name, *axes):
        with (repository / "tests" / "golden" / f"{name}.csv").open() as stream:
            lines = list(csv.DictReader(stream))
        return {tuple(line[axis] for axis in axes): line for line in lines}

    return read


def means(values, measure):
    """cell -> mean over rows."""
    cells = dict.fromkeys(cell for cell, _ in values)
    return {
        cell: statistics.fmean(v[measure] for (c, _), v in values.items() if c == cell)
        for cell in cells
    }


def answers(tokenizer, row):
    """(target, foil) ids, tokenized by the oracle."""
    return [oracle.answer_id(tokenizer, row.answer_texts[name]) for name in ("target", "foil")]


# --- golden numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["fast", "exact"])
def test_capitals_layers_has_the_golden_means(shipped, golden, opened, real_model, recompute):
    layers = [0, 12, 19, 21, 29] if recompute == "fast" else [20, 28]
    sweep, rows = shipped(
        "capitals_layers", axes={"layer": layers, "position": ["subject", "last"]}
    )
    values = run(opened("local", real_model), sweep, real_model, rows, recompute=recompute)
    expected = golden("capitals_layers", "layer", "position")
    for measure, tolerance in (("iia", 1e-6), ("logit_diff", GOLDEN)):
        for (layer, position), mean in means(values, measure).items():
            line = expected[str(layer), position]
            assert mean == pytest.approx(float(line[measure]), abs=tolerance), (layer, position)


@pytest.mark.parametrize("recompute", ["fast", "exact"])
def test_ioi_heads_has_the_golden_means(shipped, golden, opened, real_model, recompute):
    axes = (
        {"layer": [18, 25], "head": [0, 4, 8]}
        if recompute == "fast"
        else {"layer": [27], "head": [1, 8]}
    )
    sweep, rows = shipped("ioi_heads", axes=axes)
    values = run(opened("local", real_model), sweep, real_model, rows, recompute=recompute)
    expected = golden("ioi_heads", "layer", "head")
    for (layer, head), mean in means(values, "logit_diff").items():
        line = expected[str(layer), str(head)]
        assert mean == pytest.approx(float(line["logit_diff"]), abs=GOLDEN), (layer, head)


def test_the_subject_moves_the_answer_early_and_the_last_token_late(shipped, opened, real_model):
    sweep, rows = shipped(
        "capitals_layers", few=8, axes={"layer": [2, 28], "position": ["subject", "last"]}
    )
    iia = means(run(opened("local", real_model), sweep, real_model, rows), "iia")
    assert iia[2, "subject"] == iia[28, "last"] == 1.0
    assert iia[2, "last"] == iia[28, "subject"] == 0.0


# --- the oracle, row by row -------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["fast", "exact"])
def test_patches_are_the_oracles(shipped, opened, real_model, plain, tokenizer, recompute):
    sweep, rows = shipped(
        "capitals_layers", few=FEW, axes={"layer": [3, 20], "position": ["subject", "last"]}
    )
    values = run(opened("local", real_model), sweep, real_model, rows, recompute=recompute)
    assert len(values) == 4 * FEW
    for row in rows:
        target, foil = answers(tokenizer, row)
        words = [text.split()[3] for text in (row.text, row.donor_text)]
        spans = [
            oracle.span_positions(tokenizer, text, word)
            for text, word in zip((row.text, row.donor_text), words, strict=True)
        ]
        for layer in (3, 20):
            for position, places in (("subject", spans), ("last", ([-1], [-1]))):
                logits = oracle.patch_resid(
                    plain, tokenizer, row.text, row.donor_text, layer, *places
                )
                found = values[(layer, position), row.row_id]
                expected = oracle.logit_diff(logits, target, foil)
                assert found["logit_diff"] == pytest.approx(expected, abs=CLOSE)
                assert found["iia"] == oracle.match(logits, target)


def test_head_patches_are_the_oracles(shipped, opened, real_model, plain, tokenizer):
    sweep, rows = shipped("ioi_heads", few=FEW, axes={"layer": [18], "head": [0, 8]})
    values = run(opened("local", real_model), sweep, real_model, rows)
    for row in rows:
        target, foil = answers(tokenizer, row)
        runs = [oracle.last_logits(plain, tokenizer, text) for text in (row.text, row.donor_text)]
        clean, donor = (oracle.logit_diff(logits, target, foil) for logits in runs)
        for head in (0, 8):
            logits = oracle.patch_head(plain, tokenizer, row.text, row.donor_text, 18, head, -1, -1)
            found = values[(18, head), row.row_id]
            expected = oracle.logit_diff(logits, target, foil)
            assert found["logit_diff"] == pytest.approx(expected, abs=CLOSE)
            assert found["kl"] == pytest.approx(oracle.kl(runs[0], logits), abs=CLOSE)
            share = (expected - clean) / (donor - clean)
            assert found["recovery"] == pytest.approx(share, abs=CLOSE)


def test_zero_mean_and_steering_are_the_oracles(shipped, opened, real_model, plain, tokenizer):
    engine = opened("local", real_model)
    place = {"site": "resid_post", "layer": 12, "position": "last"}
    difference = {"vector": {"mean": "donor", "minus": "text"}, "scale": 2.0}
    writes = {"zero": {"set": 0.0}, "mean": {"set": {"mean": "donor"}}, "add": {"add": difference}}
    found = {}
    for name, write in writes.items():
        measures = {
            "logit_diff": {"kind": "logit_diff", "answers": ["target", "foil"]},
            "recovery": {"kind": "recovery", "of": "logit_diff"},
        }
        sweep, rows = shipped("ioi_heads", FEW, axes={}, writes=[place | write], measures=measures)
        found[name] = run(engine, sweep, real_model, rows)
    texts = [row.text for row in rows]
    donors = [row.donor_text for row in rows]
    mean = oracle.mean_resid(plain, tokenizer, donors, 12, [-1])
    vector = (mean - oracle.mean_resid(plain, tokenizer, texts, 12, [-1]))[0]
    for row in rows:
        logits = {
            "zero": oracle.zero_resid(plain, tokenizer, row.text, 12, [-1]),
            "mean": oracle.set_resid(plain, tokenizer, row.text, 12, [-1], mean),
            "add": oracle.steer(plain, tokenizer, row.text, 12, [-1], vector, 2.0),
        }
        for name, expected in logits.items():
            value = oracle.logit_diff(expected, *answers(tokenizer, row))
            assert found[name][(), row.row_id]["logit_diff"] == pytest.approx(value, abs=CLOSE)


def test_behaviour_is_the_oracles(shipped, opened, real_model, plain, tokenizer):
    sweep, rows = shipped("capitals_behaviour", few=FEW)
    values = run(opened("local", real_model), sweep, real_model, rows)
    for row in rows:
        target, foil = (
            oracle.answer_id(tokenizer, row.answer_texts[n]) for n in ("capital", "other")
        )
        logits = oracle.last_logits(plain, tokenizer, row.text)
        found = values[(), row.row_id]
        assert found["accuracy"] == oracle.match(logits, target) == 1.0
        assert found["probability"] == pytest.approx(oracle.prob(logits, target), abs=1e-5)
        assert found["rank"] == oracle.rank(logits, target) == 0
        expected = oracle.logit_diff(logits, target, foil)
        assert found["logit_diff"] == pytest.approx(expected, abs=CLOSE)


# --- the reference, bit by bit ----------------------------------------------------------------


def test_local_is_the_reference_bit_by_bit_where_shapes_are(shipped, opened, real_model):
    sweep, rows = shipped(
        "capitals_layers", few=FEW, axes={"layer": [5, 25], "position": ["subject", "last"]}
    )
    expected = run(opened("reference", real_model), sweep, real_model, rows, batch_rows=FEW)
    model = whole_logits(real_model)
    local = opened("local", real_model)
    found = run(local, sweep, model, rows, batch_rows=FEW, recompute="exact")
    assert largest_difference(expected, found) == 0.0
    fast = run(local, sweep, real_model, rows)
    assert largest_difference(expected, fast) < 1e-4


# --- noise and controls -----------------------------------------------------------------------


def test_noise_is_each_rows_own_and_every_points_same(shipped, opened, real_model):
    """A corrupted prompt, restored at a layer that changes nothing, is one number per row.

    Noise follows the tokens, so a second row of the same tokens is corrupted the same way.
    """
    writes = [
        {"site": "embed", "position": "subject", "noise": {"std": 0.5, "seed": 1}},
        {"site": "resid_post", "layer": "$layer", "position": "last", "set": "donor"},
    ]
    sweep, rows = shipped("capitals_layers", few=FEW, axes={"layer": [0, 1]}, writes=writes)
    twin = copy.deepcopy(rows[0])
    twin.row_id, twin.row_key = "twin", "another key"
    plan = plan_of(sweep, real_model, [*rows, twin])
    seeds = {}
    for block in plan.chunks[0]["blocks"]:
        for item in block["passes"]:
            for edit in item["edits"]:
                if edit["op"] == "noise":
                    for key, seed in zip(block["row_keys"], edit["operand"]["seeds"], strict=True):
                        seeds.setdefault(key, set()).add(seed)
    assert all(len(found) == 1 for found in seeds.values())
    assert len(set.union(*seeds.values())) == FEW

    values = run(opened("local", real_model), sweep, real_model, [*rows, twin])
    for layer in (0, 1):
        ours = values[(layer,), rows[0].row_id]["logit_diff"]
        assert abs(ours - values[(layer,), "twin"]["logit_diff"]) < 1e-4


def test_null_controls_hold_on_shipped_sweeps(shipped, opened, real_model):
    for name in ("capitals_layers", "capitals_behaviour"):
        sweep, rows = shipped(name)
        chunk = plan_of(sweep, real_model, rows).controls
        values = opened("local", real_model).run(chunk, lambda line: None).values
        kinds = {measure: spec.kind for measure, spec in sweep.measures.items()}
        verdict = judge(jobs.part_table(chunk, keys_of(chunk), values, {}), kinds, "float32")
        expected = 2 if name == "capitals_behaviour" else 5
        assert len(verdict) == expected
        held = [control["holds"] for control in verdict.values()]
        assert held == [True] * expected or held == [True, None]
