"""Every family, every site, every write: the fast paths against plain hooks."""

import math

import pytest
from harness import (
    PAIR,
    RECORDS,
    difference,
    effect,
    largest_difference,
    plan_of,
    rows_of,
    run,
    run_chunks,
    sweep_of,
    whole_logits,
)
from sweeps import (
    FROZEN,
    RESID,
    SENDER,
    STEPS,
    answer_sweeps,
    attention_sweeps,
    estimate_sweeps,
    exact_sweeps,
    generation_sweeps,
    layered,
    mean_sweeps,
    moved,
    place_sweeps,
    position_sweeps,
    projection_sweeps,
    recovery_sweeps,
    watched_generation,
    write_sweeps,
    write_vector,
)

from nnsweep import jobs
from nnsweep.chunks import keys_of
from nnsweep.controls import judge
from nnsweep.errors import UserError
from tiny import FAMILIES, LAYERS

TOLERANCE = 1e-4
MEANS = ("mean", "mix mean", "mean z", "mean difference", "vector")
FUSED = ("gpt2", "gpt_neox", "bloom", "falcon")
UNMOVED = ("behaviour",)
INSIDE = ("ln1", "resid_mid", "ln2", "mlp_pre", "mlp_post", "ln_final")


@pytest.fixture(scope="module")
def prepared(tiny_model, opened, tokenizer, tmp_path_factory):
    """A family's model, its two engines and the rows of a sweep."""

    def get(family, sweep=None, **how):
        model = tiny_model(family, **how)
        engines = [opened(name, model) for name in ("local", "reference")]
        rows = sweep and rows_of(sweep, tokenizer, tmp_path_factory.mktemp("rows"))
        return model, *engines, rows

    return get


def compare(prepared, name, sweep, family, **how):
    """Four ways through one sweep: reference, same shapes, stacked, and with reused tokens."""
    model, local, reference, rows = prepared(family, sweep, **how)
    expected = run(reference, sweep, model, rows, batch_rows=PAIR)
    assert len(expected) > 1
    assert name in UNMOVED or effect(expected) > 10 * TOLERANCE

    same = run(local, sweep, whole_logits(model), rows, batch_rows=PAIR, recompute="exact")
    allowed = TOLERANCE if name in MEANS else 0.0
    assert largest_difference(expected, same, near("rank", allowed)) <= allowed

    for recompute in ("exact", "fast"):
        found = run(local, sweep, model, rows, recompute=recompute)
        assert largest_difference(expected, found, ["rank"]) < TOLERANCE
        assert all(
            difference(values["rank"], found[key]["rank"]) <= 3 for key, values in expected.items()
        )


def near(name, allowed):
    """Measures that are counts of near ties are compared only where bits are."""
    return [name] if allowed else []


@pytest.mark.parametrize("name", exact_sweeps())
@pytest.mark.parametrize("family", FAMILIES)
def test_local_is_the_reference(prepared, family, name):
    compare(prepared, name, exact_sweeps()[name], family)


@pytest.mark.parametrize("name", projection_sweeps())
@pytest.mark.parametrize("family", FAMILIES)
def test_local_is_the_reference_for_queries_keys_and_values(prepared, family, name):
    sweep = projection_sweeps()[name]
    if family in FUSED:
        model, *_, rows = prepared(family, sweep)
        with pytest.raises(UserError, match="no projection makes it alone"):
            plan_of(sweep, model, rows)
    else:
        compare(prepared, name, sweep, family)


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_local_is_the_reference_for_means_and_vectors(prepared, family, name, tmp_path):
    width = prepared(family)[0]["shape"]["hidden"]
    sweep = mean_sweeps(write_vector(tmp_path, LAYERS, width))[name]
    compare(prepared, name, sweep, family)


@pytest.mark.parametrize("site", ["resid_pre", "resid_post", "z"])
@pytest.mark.parametrize("family", FAMILIES)
def test_points_that_join_and_beginnings_that_are_shared(
    prepared, tokenizer, tmp_path, family, site
):
    """Points of all layers in one pass, over rows whose first tokens are computed once."""
    sweep = layered(site, set="donor")
    model, local, reference, _ = prepared(family, sweep)
    rows = rows_of(sweep, tokenizer, tmp_path, RECORDS[2:4])
    (block,) = plan_of(sweep, model, rows).chunks[0]["blocks"]
    width = len(block["ids"][0])
    beyond = model["shape"]["window"] is not None and width >= model["shape"]["window"]
    assert (block["shared"], block["donor_shared"]) == ((0, 0) if beyond else (3, 3))
    joined = [set(item["resumes"]) for item in block["passes"] if not item["inert"]]
    assert max(map(len, joined)) == (1 if family == "bloom" else LAYERS - (site != "resid_post"))
    expected = run(reference, sweep, model, rows)
    assert largest_difference(expected, run(local, sweep, model, rows), ["rank"]) < TOLERANCE


@pytest.mark.parametrize("name", ["patch resid_post", "several"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral"])
def test_local_is_the_reference_with_eager_attention(prepared, family, name):
    compare(prepared, name, exact_sweeps()[name], family, attention="eager")


@pytest.mark.parametrize("family", FAMILIES)
def test_null_controls_hold(prepared, family):
    sweep = layered("resid_post", set="donor")
    model, local, reference, rows = prepared(family, sweep)
    kinds = {name: measure.kind for name, measure in sweep.measures.items() if name != "rank"}
    chunk = plan_of(sweep, model, rows).controls
    for engine in (local, reference):
        part = jobs.part_table(
            chunk, keys_of(chunk), engine.run(chunk, lambda line: None).values, {}
        )
        verdict = judge(part, kinds, "float32")
        assert len(verdict) == 5
        assert all(control["holds"] is True for control in verdict.values()), verdict


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bfloat16_runs_and_stays_near(prepared, family):
    """Case C10: in bfloat16 a logit may move by half; nothing fails."""
    sweep = exact_sweeps()["several"]
    model, local, reference, rows = prepared(family, sweep, dtype="bfloat16")
    expected = run(reference, sweep, model, rows)
    for recompute in ("exact", "fast"):
        found = run(local, sweep, model, rows, recompute=recompute)
        assert found.keys() == expected.keys()
        for key, values in found.items():
            assert math.isfinite(values["kl"])
            assert abs(values["logit"] - expected[key]["logit"]) < 1.0


@pytest.mark.parametrize("family", ["gptj", "bloom"])
def test_an_attention_that_the_family_lacks_is_one_line(tiny_model, family):
    with pytest.raises(UserError, match="eager"):
        tiny_model(family, attention="sdpa")


@pytest.mark.parametrize("site", ["resid_post", "z", "embed"])
def test_a_sweep_that_reads_no_donor_may_declare_one(prepared, site):
    place = {"embed": {}, "z": {"layer": 1, "head": 0}}.get(site, {"layer": 1})
    measures = {"kl": {"kind": "kl"}}
    sweep = sweep_of(
        writes=[{"site": site, "position": "last", "set": 0.0} | place], measures=measures
    )
    model, local, reference, rows = prepared("llama", sweep)
    expected = run(reference, sweep, model, rows)
    assert len(expected) == len(RECORDS)
    assert largest_difference(expected, run(local, sweep, model, rows)) < TOLERANCE


def points_a_pass(plan):
    """How many points each pass of a plan holds."""
    blocks = [block for chunk in plan.chunks for block in chunk["blocks"]]
    return [len(item["points"]) for block in blocks for item in block["passes"]]


def test_points_of_one_pass_do_not_mix(prepared):
    """Several points in one forward: each equals its own run."""
    sweep = layered("z", [2], set="donor")
    model, local, _, rows = prepared("llama", sweep)
    stacked = plan_of(sweep, model, rows)
    alone = plan_of(sweep, model, rows, batch_rows=PAIR)
    assert max(points_a_pass(stacked)) > 1 == max(points_a_pass(alone))
    found, expected = (run_chunks(local, plan.chunks) for plan in (stacked, alone))
    assert largest_difference(expected, found, ["rank"]) < TOLERANCE


# --- more places, writes and measures ---------------------------------------------------------


def near_reference(prepared, sweep, family, **how):
    """`exact` and `fast` give the values of plain hooks."""
    model, local, reference, rows = prepared(family, sweep, **how)
    expected = run(reference, sweep, model, rows, batch_rows=PAIR)
    assert effect(expected) > 10 * TOLERANCE
    for recompute in ("exact", "fast"):
        found = run(local, sweep, model, rows, recompute=recompute)
        assert largest_difference(expected, found, ["rank"]) < TOLERANCE


@pytest.mark.parametrize("name", place_sweeps())
@pytest.mark.parametrize("family", FAMILIES)
def test_places_inside_a_layer(prepared, family, name):
    """Where a family has no such place, it is refused with the reason."""
    sweep = place_sweeps()[name]
    model, *_, rows = prepared(family, sweep)
    site = sweep.writes[0].site
    if site in model["shape"]["refused"]:
        with pytest.raises(UserError, match=model["shape"]["refused"][site]):
            plan_of(sweep, model, rows)
    else:
        near_reference(prepared, sweep, family)


def test_families_have_the_places_that_their_layers_have(tiny_model):
    missing = {
        family: {site for site in tiny_model(family)["shape"]["refused"] if site in INSIDE}
        for family in FAMILIES
    }
    parallel = {"resid_mid", "ln2"}
    assert {family: sites for family, sites in missing.items() if sites} == {
        "gpt_neox": {"resid_mid"},
        **dict.fromkeys(("phi", "gptj", "falcon"), parallel),
        "olmo2": {"ln1", "ln2"},
        "mixtral": {"mlp_pre", "mlp_post"},
    }


@pytest.mark.parametrize("name", write_sweeps("unused"))
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt", "bloom", "gptj"])
def test_kinds_of_writes(prepared, family, name, tmp_path):
    width = prepared(family)[0]["shape"]["hidden"]
    near_reference(prepared, write_sweeps(write_vector(tmp_path, LAYERS, width))[name], family)


@pytest.mark.parametrize("name", position_sweeps())
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bloom"])
def test_kinds_of_positions(prepared, family, name):
    near_reference(prepared, position_sweeps()[name], family)


@pytest.mark.parametrize("name", estimate_sweeps())
@pytest.mark.parametrize("family", FAMILIES)
def test_estimates_from_gradients(prepared, family, name):
    near_reference(prepared, estimate_sweeps()[name], family)


@pytest.mark.parametrize(
    ("name", "family"),
    [("at every step", family) for family in FAMILIES]
    + [(name, family) for name in generation_sweeps() for family in ("gemma2", "bloom")],
)
def test_generation(prepared, family, name):
    """Against full passes over all tokens at every step, without a cache."""
    sweep = generation_sweeps()[name]
    model, local, reference, rows = prepared(family, sweep)
    expected = run(reference, sweep, model, rows, batch_rows=PAIR)
    for recompute in ("exact", "fast"):
        found = run(local, sweep, model, rows, recompute=recompute)
        assert largest_difference(expected, found) < TOLERANCE
    ids = {tuple(v[f"generated.{i}"] for i in range(5)) for v in expected.values()}
    assert len(ids) > 1


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral", "opt", "olmo2"])
def test_lens_and_cosine_beside_generation_are_those_of_the_prompt(prepared, family, name):
    """Under the writes of the prompt's step, exactly as if nothing were generated behind it."""
    sweep = watched_generation(STEPS[name])
    model, local, reference, rows = prepared(family, sweep)
    expected = run(reference, sweep, model, rows, batch_rows=PAIR)
    alone = run(reference, watched_generation(None), model, rows, batch_rows=PAIR)
    insides = [n for n in next(iter(alone.values())) if n != "kl" and not n.endswith("rank")]
    assert len(insides) == LAYERS + 2 + 2 + 3
    for recompute in ("exact", "fast"):
        found = run(local, sweep, model, rows, recompute=recompute)
        assert largest_difference(expected, found, ["rank"]) < TOLERANCE
        if name != "later":
            assert largest_difference(alone, kept(found, alone), ["rank"]) < TOLERANCE
    clean = {key: {n: v[n] for n in ("kl", "cosine", "neurons")} for key, v in expected.items()}
    at_prompt = any(v["kl"] > 10 * TOLERANCE or v["cosine"] < 0.99 for v in clean.values())
    assert at_prompt == (name != "later")


def kept(values, like):
    """The measures that another run has, too."""
    return {key: {n: values[key][n] for n in found} for key, found in like.items()}


@pytest.mark.parametrize("name", answer_sweeps())
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "opt", "falcon", "phi"])
def test_answers_of_several_tokens(prepared, family, name):
    sweep = answer_sweeps()[name]
    model, local, reference, rows = prepared(family, sweep)
    assert {len(ids) for row in rows for ids in row.answers.values()} > {1}
    assert any(len(row.answers["long"]) > 1 for row in rows if row.reason is None)
    expected = run(reference, sweep, model, rows, batch_rows=PAIR)
    for recompute in ("exact", "fast"):
        found = run(local, sweep, model, rows, recompute=recompute)
        assert largest_difference(expected, found) < TOLERANCE


def test_a_patch_from_a_run_that_is_not_moved_at_all(prepared):
    """A chain of a point that cannot differ is not run, also where it reads clean activations."""
    path = {"prompt": "text", "writes": [FROZEN | {"position": "all"}, SENDER]}
    write = RESID | {"layer": 2, "mix": {"source": {"patch": "path"}, "weight": "$weight"}}
    for weights in ([0.0], [0.0, 0.5]):
        sweep = moved({"weight": weights}, write, runs={"path": path})
        model, local, reference, rows = prepared("llama", sweep)
        expected = run(reference, sweep, model, rows)
        assert largest_difference(expected, run(local, sweep, model, rows)) < TOLERANCE


@pytest.mark.parametrize("name", recovery_sweeps())
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bloom", "opt", "olmo2"])
def test_recovery_of_a_lens_and_of_whole_answers(prepared, family, name):
    sweep = recovery_sweeps()[name]
    model, local, reference, rows = prepared(family, sweep)
    if name != "lens" and family == "gemma2":
        with pytest.raises(UserError, match="sliding window of 6 tokens"):
            plan_of(sweep, model, rows)
        return
    expected = run(reference, sweep, model, rows, batch_rows=PAIR)
    for recompute in ("exact", "fast"):
        found = run(local, sweep, model, rows, recompute=recompute)
        assert largest_difference(expected, found) < 10 * TOLERANCE
    numbers = [v for found in expected.values() for n, v in found.items() if n.startswith("of_")]
    assert any(0.05 < abs(number) < 0.95 for number in numbers)


def test_a_donor_of_a_recovered_answer_does_not_fit_a_sliding_window(prepared, tokenizer, tmp_path):
    """The prompt and its answer do; only what reads the donor's answer asks for the donor's."""
    longer = RECORDS[0] | {"source": "I think the capital of France is"}
    sweep = recovery_sweeps()["whole answers"]
    model, *_ = prepared("mistral")
    rows = rows_of(sweep, tokenizer, tmp_path, [longer])
    with pytest.raises(UserError, match="within the sliding window of 6 tokens, they have 8"):
        plan_of(sweep, model, rows)
    measures = {name: m for name, m in sweep.measures.items() if not name.startswith("of_")}
    plan_of(sweep.model_copy(update={"measures": measures}), model, rows)


def test_a_whole_answer_does_not_fit_a_sliding_window(prepared):
    sweep = answer_sweeps()["without writes"]
    model, *_, rows = prepared("mistral", sweep)
    with pytest.raises(UserError, match="sliding window of 6 tokens"):
        plan_of(sweep, model, rows)


@pytest.mark.parametrize("kind", ["local", "reference"])
def test_generation_ends_at_an_end_token(prepared, opened, kind):
    sweep = generation_sweeps()["without writes"]
    model, *_, rows = prepared("llama", sweep)
    whole = run(opened(kind, model), sweep, model, rows)
    ends = [int(values["generated.2"]) for values in whole.values()]
    short = model | {"shape": model["shape"] | {"eos": ends}}
    for key, values in run(opened(kind, model), sweep, short, rows).items():
        before = whole[key]
        kept = next(i for i in range(5) if int(before[f"generated.{i}"]) in ends) + 1
        assert kept <= 3
        for i in range(5):
            found = [values[f"generated.{i + j * 5}"] for j in range(3)]
            if i < kept:
                assert found == [before[f"generated.{i + j * 5}"] for j in range(3)]
            else:
                assert all(math.isnan(number) for number in found)


@pytest.mark.parametrize("name", attention_sweeps())
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_edges(prepared, family, name):
    near_reference(prepared, attention_sweeps()[name], family, attention="eager")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lens_at_the_last_layer_is_the_model(prepared, family):
    """Final norm, output embedding and softcap, as a measure over all layers in one pass."""
    measures = {
        "lens": {"kind": "log_prob", "answer": "target", "lens": {}},
        "model": {"kind": "log_prob", "answer": "target"},
    }
    sweep = sweep_of(writes=[], measures=measures)
    model, local, _, rows = prepared(family, sweep)
    for values in run(local, sweep, model, rows).values():
        assert abs(values[f"lens.{LAYERS - 1}"] - values["model"]) < TOLERANCE
        assert abs(values["lens.0"] - values["model"]) > 10 * TOLERANCE


def test_attention_needs_its_eager_implementation(prepared):
    sweep = attention_sweeps()["pattern"]
    model, *_, rows = prepared("llama", sweep)
    with pytest.raises(UserError, match="attention: eager"):
        plan_of(sweep, model, rows)
