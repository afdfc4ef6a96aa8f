"""Laws that hold for every model, checked against plain PyTorch written here."""

import math

import hooks
import pytest
import torch
from harness import (
    ANSWERS,
    CAPITAL,
    MEASURES,
    RECORDS,
    SUBJECT,
    difference,
    effect,
    largest_difference,
    plan_of,
    record,
    rows_of,
    run,
    sweep_of,
)
from sweeps import layered

from nnsweep import jobs
from nnsweep.chunks import keys_of
from nnsweep.errors import UserError
from nnsweep.kernel import noise
from nnsweep.measures import functions
from tiny import FAMILIES, LAYERS

EQUAL = [row for row in RECORDS if len(row["base"].split()) == len(row["source"].split())]
WIDE = "qwen3"


@pytest.fixture(scope="module")
def family(tiny_model, opened, tokenizer, tmp_path_factory):
    """One family: `go(sweep)` runs a sweep with the local engine."""

    class Family:
        def __init__(self, name, **how):
            self.model = tiny_model(name, **how)
            self.shape = self.model["shape"]

        def rows(self, sweep, records=None):
            return rows_of(sweep, tokenizer, tmp_path_factory.mktemp("rows"), records)

        def go(self, sweep, records=None, **how):
            engine = opened("local", self.model)
            return run(engine, sweep, self.model, self.rows(sweep, records), **how)

        def ids(self, text):
            return tokenizer(text)["input_ids"]

    return Family


def one(values):
    """row_id -> values of a sweep without axes."""
    assert {cell for cell, _ in values} == {()}
    return {row: found for (_, row), found in values.items()}


def fixed(site, **write):
    """A sweep of one write without axes."""
    return sweep_of(writes=[{"site": site} | write])


def answer_logits(row, logits):
    """(target logit, logit difference) of one prompt row in float64."""
    target, foil = (row.answers[name][0] for name in ("target", "foil"))
    values = logits.double()
    return float(values[target]), float(values[target] - values[foil])


# --- what a site is ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_and_mlp_add_up_to_the_residual_stream(family, name):
    """`attn_out` and `mlp_out` are what reaches the stream, in every family."""
    shape = family(name).shape
    module = hooks.load(family(name).model)
    ids = family(name).ids(RECORDS[0]["base"])

    def at(site, layer):
        place = shape["sites"][site]
        return hooks.seen(
            module, module.get_submodule(place["path"].format(layer=layer)), place["side"], ids
        )

    for layer in range(LAYERS):
        parts = [at(site, layer) for site in ("resid_pre", "attn_out", "mlp_out")]
        assert torch.allclose(sum(parts), at("resid_post", layer), atol=1e-4)
        assert all(part.abs().max() > 1e-3 for part in parts)


@pytest.mark.parametrize("name", FAMILIES)
def test_streams_are_the_hidden_states_of_the_model(family, name):
    shape = family(name).shape
    module = hooks.load(family(name).model)
    ids = family(name).ids(RECORDS[0]["base"])
    with torch.no_grad():
        states = module(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for layer in range(LAYERS):
        place = module.get_submodule(shape["layer_path"].format(layer=layer))
        assert torch.equal(hooks.seen(module, place, "input", ids), states[layer][0])
        if layer + 1 < LAYERS:
            assert torch.equal(hooks.seen(module, place, "output", ids), states[layer + 1][0])


@pytest.mark.parametrize("name", FAMILIES)
def test_z_is_what_the_output_projection_reads(family, name):
    shape = family(name).shape
    module = hooks.load(family(name).model)
    place = shape["sites"]["z"]
    width = hooks.seen(
        module,
        module.get_submodule(place["path"].format(layer=0)),
        "input",
        family(name).ids("The capital of Austria is"),
    ).shape[-1]
    assert width == shape["heads"] * shape["head_dim"]
    assert place["width"] == shape["head_dim"]


# --- heads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", WIDE])
def test_zeroing_all_heads_is_zeroing_the_projections_input(family, name):
    """Case C11: also where a head is wider than hidden / heads."""
    this = family(name)
    heads = this.shape["heads"]
    writes = [
        {"site": "z", "layer": 1, "head": head, "position": "subject", "set": 0.0}
        for head in range(heads)
    ]
    sweep = sweep_of(writes=writes)
    rows = {row.row_id: row for row in this.rows(sweep)}
    module = hooks.load(this.model)
    projection = module.get_submodule(this.shape["sites"]["z"]["path"].format(layer=1))
    for row_id, found in one(this.go(sweep)).items():
        row = rows[row_id]

        def zero(value, row=row):
            value[:, row.positions["subject"].base] = 0
            return value

        with hooks.changed_input(projection, zero):
            expected = answer_logits(row, hooks.last_logits(module, row.ids))
        assert (found["logit"], found["logit_diff"]) == pytest.approx(expected, abs=1e-4)


def test_each_head_of_a_wide_family_is_its_own_slice(family):
    """Case C11: four heads of 32 in a stream of 64."""
    this = family(WIDE)
    assert this.shape["hidden"] == 64
    assert this.shape["head_dim"] == 32
    sweep = sweep_of(
        axes={"head": "all"},
        writes=[{"site": "z", "layer": 2, "head": "$head", "position": "last", "set": 0.5}],
    )
    rows = {row.row_id: row for row in this.rows(sweep)}
    module = hooks.load(this.model)
    projection = module.get_submodule("model.layers.2.self_attn.o_proj")
    assert projection.in_features == 128
    values = this.go(sweep)
    assert {cell for cell, _ in values} == {(0,), (1,), (2,), (3,)}
    for ((head,), row_id), found in values.items():

        def half(value, head=head):
            value[:, -1, 32 * head : 32 * (head + 1)] = 0.5
            return value

        with hooks.changed_input(projection, half):
            expected = answer_logits(rows[row_id], hooks.last_logits(module, rows[row_id].ids))
        assert (found["logit"], found["logit_diff"]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("head", [4, -1])
def test_a_head_that_is_not_there_is_refused_before_any_run(family, head):
    this = family(WIDE)
    sweep = sweep_of(
        axes={"head": [head]},
        writes=[{"site": "z", "layer": 0, "head": "$head", "position": "last", "set": 0.0}],
    )
    with pytest.raises(UserError, match=rf"head {head} is outside 0\.\.3"):
        plan_of(sweep, this.model, this.rows(sweep))


# --- writes that do nothing, writes that do everything ----------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("recompute", ["fast", "exact"])
def test_a_prompt_patched_with_itself_is_unchanged(family, name, recompute):
    """Case C8."""
    this = family(name)
    prompts = {"file": "", "text": "base", "donor": "base", "answers": ANSWERS}
    for site in ("resid_pre", "resid_post", "attn_out", "mlp_out", "z"):
        sweep = layered(site, [0, 2], set="donor")
        same = sweep_of(
            prompts=prompts,
            positions={"subject": {"text": "word"}},
            axes=sweep.model_dump()["axes"],
            writes=[w.model_dump(exclude_none=True) for w in sweep.writes],
        )
        values = this.go(same, recompute=recompute)
        clean = one(this.go(sweep_of(writes=[])))
        for (_, row), found in values.items():
            assert abs(found["kl"]) < 1e-5
            assert found["logit_diff"] == pytest.approx(clean[row]["logit_diff"], abs=1e-5)


@pytest.mark.parametrize("recompute", ["fast", "exact"])
def test_steering_by_nothing_changes_nothing(family, recompute):
    """Case C8."""
    vector = {"mean": "donor", "minus": "text"}
    place = {"site": "resid_post", "layer": "$layer", "position": "last"}
    sweep = sweep_of(
        axes={"layer": "all", "scale": [0, 1]},
        writes=[place | {"add": {"vector": vector, "scale": "$scale"}}],
    )
    values = family("llama").go(sweep, recompute=recompute)
    nothing = {key: found for key, found in values.items() if key[0][1] == 0.0}
    assert len(nothing) == LAYERS * len(RECORDS)
    assert all(abs(found["kl"]) < 1e-5 for found in nothing.values())
    assert effect(values) > 0.01


def test_noise_of_no_size_changes_nothing(family):
    sweep = fixed("embed", position="all", noise={"std": 0.0})
    assert effect(family("llama").go(sweep, EQUAL)) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral"])
@pytest.mark.parametrize("recompute", ["fast", "exact"])
def test_the_donors_last_layer_brings_the_donors_measures(family, name, recompute):
    """Case C8: all tokens of the last layer's stream."""
    this = family(name)
    write = {"site": "resid_post", "layer": LAYERS - 1, "position": "all", "set": "donor"}
    recovery = {"kind": "recovery", "of": "logit_diff", "min_gap": 0.1}
    whole = sweep_of(writes=[write], measures=MEASURES | {"recovery": recovery})
    found = one(this.go(whole, EQUAL, recompute=recompute))
    prompts = {"file": "", "text": "source", "donor": "base", "answers": ANSWERS}
    swapped = sweep_of(prompts=prompts, positions={}, writes=[])
    expected = one(this.go(swapped, EQUAL))
    clean = one(this.go(sweep_of(writes=[]), EQUAL))
    gaps = {row: abs(expected[row]["logit_diff"] - clean[row]["logit_diff"]) for row in found}
    assert max(gaps.values()) > 0.3
    for row, gap in gaps.items():
        for measure in ("logit", "log_prob", "prob", "logit_diff", "match"):
            assert difference(found[row][measure], expected[row][measure]) < 1e-4
        whole = 1.0 if gap > 0.1 else math.nan
        assert found[row]["recovery"] == pytest.approx(whole, abs=1e-3, nan_ok=True)


def test_a_write_after_the_measured_token_changes_nothing(family):
    place = {"site": "resid_pre", "layer": "$layer", "position": "last", "set": 3.0}
    values = family("llama").go(
        sweep_of(axes={"layer": "all"}, writes=[place], measure_at="subject")
    )
    assert effect(values) < 1e-5


# --- the engine against hooks written here ----------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("recompute", ["fast", "exact"])
def test_patching_is_what_the_tests_own_hooks_do(family, name, recompute):
    """Donor into base, at this row's own tokens, after the layer asked for."""
    this = family(name)
    sweep = layered("resid_post", set="donor")
    rows = {row.row_id: row for row in this.rows(sweep)}
    module = hooks.load(this.model)
    values = this.go(sweep, recompute=recompute)
    assert len(values) == 2 * LAYERS * len(RECORDS)
    for ((layer, position), row_id), found in values.items():
        row = rows[row_id]
        place = module.get_submodule(this.shape["layer_path"].format(layer=layer))
        donor = hooks.seen(module, place, "output", row.donor_ids)
        ours = _tokens(row.text, row.tokens, position, row_id.split("-")[0])
        theirs = _tokens(row.donor_text, row.donor_tokens, position, row_id.split("-")[1])
        assert len(ours) == len(theirs)

        def patch(value, ours=ours, theirs=theirs, donor=donor):
            value[0, ours] = donor[theirs]
            return value

        with hooks.changed_output(place, patch):
            expected = answer_logits(row, hooks.last_logits(module, row.ids))
        assert (found["logit"], found["logit_diff"]) == pytest.approx(expected, abs=1e-4)


def _tokens(text, tokens, position, word):
    """Indices of the last token, or of the tokens of a word; found by joining tokens here."""
    if position == "last":
        return [len(tokens) - 1]
    start, stop = text.index(word), text.index(word) + len(word)
    ends = [len("".join(tokens[: i + 1])) for i in range(len(tokens))]
    return [i for i, end in enumerate(ends) if start < end <= stop]


def test_a_mean_is_taken_over_all_rows_and_their_tokens(family):
    this = family("llama")
    sweep = fixed("resid_post", layer=1, position="subject", set={"mean": "donor"})
    rows = this.rows(sweep)
    module = hooks.load(this.model)
    place = module.model.layers[1]
    vectors = [
        hooks.seen(module, place, "output", row.donor_ids)[token]
        for row in rows
        for token in row.positions["subject"].donor
    ]
    assert len(vectors) == len(RECORDS) + 2  # two rows have a span of two tokens
    mean = torch.stack(vectors).mean(0)
    found = one(this.go(sweep))
    for row in rows:

        def replace(value, row=row):
            value[0, row.positions["subject"].base] = mean
            return value

        with hooks.changed_output(place, replace):
            expected = answer_logits(row, hooks.last_logits(module, row.ids))
        assert found[row.row_id]["logit"] == pytest.approx(expected[0], abs=1e-4)


def test_noise_is_drawn_from_the_rows_seed(family):
    this = family("llama")
    sweep = fixed("embed", position="subject", noise={"std": 0.5, "seed": 3})
    rows = {row.row_key: row for row in this.rows(sweep)}
    plan = plan_of(sweep, this.model, list(rows.values()))
    found = one(this.go(sweep))
    module = hooks.load(this.model)
    drawn = []
    for block in plan.chunks[0]["blocks"]:
        (edit,) = block["passes"][0]["edits"]
        for key, seed in zip(block["row_keys"], edit["operand"]["seeds"], strict=True):
            row = rows[key]
            places = row.positions["subject"].base
            generator = torch.Generator().manual_seed(seed)
            extra = 0.5 * torch.randn(len(places), this.shape["hidden"], generator=generator)
            drawn.append(extra[0])

            def add(value, places=places, extra=extra):
                value[0, places] += extra
                return value

            with hooks.changed_output(module.model.embed_tokens, add):
                expected = answer_logits(row, hooks.last_logits(module, row.ids))
            assert found[row.row_id]["logit"] == pytest.approx(expected[0], abs=1e-4)
    for i, vector in enumerate(drawn):
        assert all(not torch.equal(vector, other) for other in drawn[:i])


def test_noise_is_standard_normal_and_each_rows_own():
    rows = torch.arange(3).repeat_interleave(2000)
    draws = noise([11, 12, 11], rows, torch.zeros(6000, 10))
    assert draws.mean().abs() < 0.02
    assert (draws.std() - 1).abs() < 0.02
    first, second, third = draws.split(2000)
    assert torch.equal(first, third)
    assert not torch.equal(first, second)
    assert torch.equal(noise([12], torch.zeros(2000, dtype=torch.long), draws), second)


# --- rows do not see each other ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("recompute", ["fast", "exact"])
def test_longer_prompts_beside_a_row_change_nothing(family, name, recompute):
    """Case C4: every row alone, and all together."""
    this = family(name)
    sweep = sweep_of(
        axes={"position": ["second", "subject", "last"]},
        writes=[
            {"site": "resid_pre", "layer": 0, "position": "$position", "set": 1.0},
            {"site": "resid_post", "layer": 2, "position": "last", "noise": {"std": 0.5}},
        ],
    )
    together = this.go(sweep, recompute=recompute)
    # Nothing reads "second" in the donor, so that donors of another length do not matter there.
    assert len(together) == 3 * len(RECORDS)
    for record_ in RECORDS:
        for key, found in this.go(sweep, [record_], recompute=recompute).items():
            for measure in ("logit", "logit_diff", "kl"):
                assert difference(found[measure], together[key][measure]) < 1e-4


def test_position_zero_of_a_short_prompt_is_its_first_token(family):
    """Case C4, with a prompt in which the name is missing."""
    tower = "The Eiffel Tower is in the city of"
    records = [
        record(tower, tower, "Tower", "Tower", "Rome", "Paris"),
        record("The Colosseum is here in", tower, "Colosseum", "Tower", "Paris", "Rome"),
    ]
    records[1] |= {"word": "Tower", "row_id": "no tower"}
    sweep = sweep_of(
        positions={"start": 0, "tower": {"text": "word", "donor_text": "source_word"}},
        axes={"position": ["start", "last", "tower"]},
        writes=[{"site": "resid_pre", "layer": 1, "position": "$position", "set": 0.0}],
        measures={"kl": {"kind": "kl"}, "logit": MEASURES["logit"]},
        prompts={"file": "", "text": "base", "answers": ANSWERS},
    )
    this = family("llama")
    both = this.go(sweep, records)
    assert (("tower",), "no tower") not in both
    assert len(both) == 5
    alone = this.go(sweep, records[:1])
    for key, found in alone.items():
        assert found["logit"] == pytest.approx(both[key]["logit"], abs=1e-4)


# --- no influence from training, no division by nothing ---------------------------------------


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        ("llama", {"attention_dropout": 0.5}),
        ("gpt2", {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
    ],
)
def test_dropout_in_the_config_has_no_influence(family, name, dropout):
    """Case C8."""
    sweep = layered("resid_post", [0, 2], set="donor")
    quiet, noisy = family(name), family(name, **dropout)
    expected = quiet.go(sweep)
    assert largest_difference(expected, noisy.go(sweep)) == 0.0
    assert largest_difference(expected, noisy.go(sweep)) == 0.0


def test_recovery_without_a_gap_is_null_with_a_reason(family, opened):
    """Case C16: clean and donor prompt are the same."""
    base = CAPITAL.format("Austria")
    same = record(base, base, "Austria", "Austria", "Vienna", "Paris") | {"row_id": "same"}
    measures = MEASURES | {"recovery": {"kind": "recovery", "of": "logit_diff", "min_gap": 0.01}}
    write = {"site": "resid_post", "layer": 1, "position": "$position", "set": "donor"}
    sweep = sweep_of(axes={"position": ["subject", "last"]}, writes=[write], measures=measures)
    this = family("llama")
    rows = this.rows(sweep, [same, RECORDS[1]])
    (chunk,) = plan_of(sweep, this.model, rows).chunks
    values = opened("local", this.model).run(chunk, lambda line: None).values
    keys = {row.row_key: row.row_id for row in rows}
    table = jobs.part_table(chunk, keys_of(chunk), values, {}).to_pylist()
    assert len(table) == 4
    for line in table:
        assert line["status"] == "ok"
        others = [line[name] for name in MEASURES if name != "recovery"]
        assert all(value is not None and math.isfinite(value) for value in others)
        if keys[line["row_key"]] == "same":
            assert line["recovery"] is None
            assert "clean and donor differ in logit_diff by less than 0.01" in line["reason"]
            assert line["kl"] == pytest.approx(0.0, abs=1e-5)
        else:
            assert line["recovery"] is not None
            assert line["reason"] is None


def test_recovery_is_the_share_of_the_gap(family):
    """From its parts: this run, the clean run, the donor run."""
    this = family("llama")
    values = this.go(layered("resid_post", [1], set="donor"))
    clean = one(this.go(sweep_of(writes=[])))
    prompts = {"file": "", "text": "source", "donor": "base", "answers": ANSWERS}
    donor = one(this.go(sweep_of(prompts=prompts, positions={}, writes=[])))
    seen = 0
    for (_, row), found in values.items():
        base, theirs = (run[row]["logit_diff"] for run in (clean, donor))
        if abs(theirs - base) < 1.0:
            assert math.isnan(found["recovery"])
        else:
            expected = (found["logit_diff"] - base) / (theirs - base)
            assert found["recovery"] == pytest.approx(expected, abs=1e-4)
            seen += 1
    assert seen >= 4


def test_measures_are_those_of_the_logits(family):
    """Through the whole chain: a sweep without writes against the model's own logits."""
    this = family("gpt2")
    sweep = sweep_of(writes=[], measure_at="subject")
    module = hooks.load(this.model)
    found = one(this.go(sweep))
    for row in this.rows(sweep):
        at = row.positions["subject"].base[-1]
        with torch.no_grad():
            logits = module(torch.tensor([row.ids])).logits[:, at]
        for name, measure in (("log_prob", "target"), ("prob", "foil"), ("rank", "foil")):
            answer = [torch.tensor(row.answers[measure])]
            expected = float(functions()[name](logits, logits, answer))
            assert found[row.row_id][name] == pytest.approx(expected, abs=1e-4)


def test_unequal_lengths_are_refused_where_tokens_cannot_correspond(family, tokenizer, tmp_path):
    """Case C7."""
    pair = record("When {} and Bob went", "When {} and Bob went", "Alice", "Zebediah", "a", "b")
    sweep = sweep_of(
        writes=[{"site": "resid_post", "layer": 0, "position": "second", "set": "donor"}],
        on_bad_row="refuse",
    )
    with pytest.raises(UserError, match=r"5 and 8 tokens.*' Alice'.*' Z', 'eb'"):
        rows_of(sweep, tokenizer, tmp_path, [pair])
    last = sweep_of(
        positions={"subject": SUBJECT | {"token": "last"}},
        writes=[{"site": "resid_post", "layer": 0, "position": "last", "set": "donor"}],
    )
    assert len(family("llama").go(last, [pair])) == 1
