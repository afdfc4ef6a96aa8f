"""The local engine against a model written by hand, row by row and point by point.

Expected values come from `hand` (the model) and `meaning` (the sweep language), which share nothing
with the package. Every case runs through both ways of recomputation.
"""

import math
import random
import statistics

import hooks
import pytest
import torch
from harness import RECORDS, SUBJECT, plan_of, record, rows_of, run
from meaning import BASE, Meaning
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import oracle
from hand import HandLlama
from nnsweep.kernel import noise
from nnsweep.models import locate, prepare
from nnsweep.prompts import prepare_rows
from nnsweep.sweep import Sweep
from nnsweep.sweep_file import read_sweep
from tiny import FAMILIES, LAYERS

TOLERANCE = 2e-4
RECOMPUTE = ("fast", "exact")
EQUAL = [row for row in RECORDS if len(row["base"].split()) == len(row["source"].split())]
PLAIN = {
    "name": "byhand",
    "model": {"id": "unused", "attention": "eager"},
    "prompts": {
        **{"file": "unused", "text": "base", "donor": "source"},
        "answers": {"target": "source_answer", "foil": "base_answer"},
    },
    "positions": {"subject": SUBJECT, "end": {"last": 2}},
}
LOGIT = {"kind": "logit", "answer": "target"}
DIFF = {"kind": "logit_diff", "answers": ["target", "foil"]}
FEW = {"logit": LOGIT, "logit_diff": DIFF, "kl": {"kind": "kl"}}
MANY = FEW | {
    "prob": {"kind": "prob", "answer": "foil"},
    "rank": {"kind": "rank", "answer": "foil"},
    "top": {"kind": "top_k", "k": 3},
}


def case(*writes, axes=None, records=RECORDS, measures=MANY, **more):
    """A sweep's document and the rows it runs on."""
    document = PLAIN | {"axes": axes or {}, "writes": list(writes), "measures": measures} | more
    return document, records


def at(site, layer=None, position="last", **write):
    """One write."""
    place = {"site": site, "position": position}
    return place | ({} if layer is None else {"layer": layer}) | write


@pytest.fixture(scope="module")
def by_hand(tiny_model, real_model, opened, tokenizer, tmp_path_factory):
    """`check(document, records)`: both ways of recomputation give what was worked out by hand."""
    models = {}

    class Checker:
        def model(self, attention="sdpa", real=False):
            if real:
                return real_model if attention == "sdpa" else self.eager(real_model)
            return tiny_model("llama", attention=attention)

        def eager(self, model):
            if "eager" not in models:
                named = {key: model[key] for key in ("id", "revision", "dtype")}
                models["eager"] = prepare(named | {"attention": "eager"})
            return models["eager"]

        def hand(self, real=False):
            if real not in models:
                torch.set_num_threads(1)
                models[real] = HandLlama(locate(real_model) if real else self.model()["id"])
            return models[real]

        def rows(self, document, records):
            sweep = Sweep.model_validate(document)
            return sweep, rows_of(sweep, tokenizer, tmp_path_factory.mktemp("rows"), records)

        def run(self, document, records, attention="sdpa", real=False, **how):
            model = self.model(attention, real)
            sweep, rows = self.rows(document, records)
            return run(opened("local", model), sweep, model, rows, **how)

        def meaning(self, document, records, real=False, **more):
            return Meaning(self.hand(real), document, records, tokenizer, **more)

        def check(self, document, records, attention="sdpa", real=False, **more):
            expected = self.meaning(document, records, real, **more).values()
            for recompute in RECOMPUTE:
                found = self.run(document, records, attention, real, recompute=recompute)
                same(found, expected)
            return expected

    return Checker()


def same(found, expected):
    """Every value is the expected one, to rounding."""
    assert found.keys() == expected.keys()
    assert expected
    wrong = [
        (key, name, found[key].get(name), value)
        for key, values in expected.items()
        for name, value in values.items()
        if not near(found[key], name, value)
    ]
    assert not wrong, f"{len(wrong)} wrong: {wrong[:4]}"


def near(found, name, value):
    """Whether one measure is the expected one."""
    if isinstance(value, list):
        return same_top(found, name, value)
    if isinstance(value, tuple):
        return value[0] <= found[name] <= value[1]
    if math.isnan(value):
        return math.isnan(found[name])
    return abs(found[name] - value) <= TOLERANCE * max(1.0, abs(value) / 10)


def same_top(found, name, expected):
    """The ids and log-probabilities of the likeliest tokens; near ties may change places."""
    k = len(expected) - 1
    logs = [value for _, value in expected]
    for i, (token, log) in enumerate(expected[:k]):
        clear = all(abs(logs[j] - log) > 2 * TOLERANCE for j in (i - 1, i + 1) if j >= 0)
        if clear and found[f"{name}.{i}"] != token:
            return False
        if abs(found[f"{name}.{k + i}"] - log) > TOLERANCE:
            return False
    return True


def moves(expected, size=0.01):
    """Whether the largest divergence from the clean run is worth a comparison."""
    return max(values["kl"] for values in expected.values()) > size


# --- the model written by hand ----------------------------------------------------------------


@pytest.mark.parametrize("real", [False, True])
def test_the_model_by_hand_is_the_model_of_transformers(by_hand, real_model, tokenizer, real):
    folder = locate(real_model) if real else by_hand.model()["id"]
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for text in ("The", "The capital of Austria is", RECORDS[4]["base"] + " not so"):
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            expected = module(torch.tensor([ids])).logits[0]
        found = by_hand.hand(real).run(ids)["logits", None]
        assert (found - expected).abs().max() < 1e-4


def test_activations_by_hand_are_those_of_the_modules(by_hand, tokenizer):
    """Each place, where transformers has a module for it."""
    module, ids = hooks.load(by_hand.model()), tokenizer(RECORDS[0]["base"])["input_ids"]
    found = by_hand.hand().run(ids)
    places = {
        **{"ln1": ("input_layernorm", "output"), "ln2": ("post_attention_layernorm", "output")},
        **{"q": ("self_attn.q_proj", "output"), "k": ("self_attn.k_proj", "output")},
        **{"v": ("self_attn.v_proj", "output"), "z": ("self_attn.o_proj", "input")},
        **{"attn_out": ("self_attn.o_proj", "output"), "mlp_out": ("mlp", "output")},
        **{"mlp_pre": ("mlp.gate_proj", "output"), "mlp_post": ("mlp.down_proj", "input")},
        **{"resid_mid": ("post_attention_layernorm", "input"), "resid_pre": ("", "input")},
        "resid_post": ("", "output"),
    }
    for layer in range(LAYERS):
        for site, (name, side) in places.items():
            place = module.get_submodule(f"model.layers.{layer}" + (name and "." + name))
            expected = hooks.seen(module, place, side, ids)
            assert torch.allclose(found[site, layer].reshape(len(ids), -1), expected, atol=1e-4)


# --- each write at each kind of place ---------------------------------------------------------

OVER = {"layer": [0, 1, 3]}
PLACES = {
    "resid_pre": at("resid_pre", "$layer"),
    "resid_mid": at("resid_mid", "$layer"),
    "resid_mid subject": at("resid_mid", "$layer", "subject"),
    "resid_post": at("resid_post", "$layer", "end"),
    "ln1": at("ln1", "$layer", "subject"),
    "ln2": at("ln2", "$layer", "end"),
    "attn_out": at("attn_out", "$layer"),
    "mlp_out": at("mlp_out", "$layer", "subject"),
    "mlp_pre": at("mlp_pre", "$layer"),
    "mlp_post": at("mlp_post", "$layer", "subject"),
    "mlp_pre units": at("mlp_pre", "$layer", units=[7, 0, 63]),
    "mlp_post units": at("mlp_post", "$layer", "end", units=[1, 40]),
    "mlp_post one unit": at("mlp_post", "$layer", units=12),
    "q": at("q", "$layer", head=3),
    "k": at("k", "$layer", "subject", head=1),
    "v": at("v", "$layer", "subject", head=0),
    "z": at("z", "$layer", "end", head=2),
    "q heads": at("q", "$layer", "end", heads=[2, 0]),
    "k heads": at("k", "$layer", "subject", heads="all"),
    "v heads": at("v", "$layer", "subject", heads=[1, 0]),
    "z heads": at("z", "$layer", heads="all"),
    "layers": at("mlp_out", None, "end", layers=[0, 2]),
    "every layer": at("z", None, "last", layers="all", heads=[1, 3]),
    "ln_final": at("ln_final"),
    "embed": at("embed", None, "subject"),
    "logits": at("logits"),
}
OPERATIONS = {
    "donor": {"set": "donor"},
    "number": {"set": 0.75},
    "mean": {"set": {"mean": "donor"}},
    "mix": {"mix": {"source": "donor", "weight": -0.5}},
    "mix mean": {"mix": {"source": {"mean": "text"}, "weight": 0.6}},
    "clamp": {"clamp": {"low": -0.1, "high": 0.2}},
    "renormalize text": {"renormalize": "donor"},
    "renormalize number": {"renormalize": 3.0},
    "unit": {"add": {"vector": {"unit": 1}, "scale": -2.5}},
}


REPRESENTATIVE = ("resid_mid subject", "ln1", "mlp_post units", "k heads", "ln_final")
GRID = [
    (place, operation)
    for place in PLACES
    for operation in OPERATIONS
    if operation == "donor" or place in REPRESENTATIVE
]


@pytest.mark.parametrize(("place", "operation"), GRID)
def test_writes_at_places(by_hand, place, operation):
    write = PLACES[place] | OPERATIONS[operation]
    axes = OVER if "$layer" in write.values() else {}
    document, records = case(write, axes=axes)
    expected = by_hand.check(document, records[1::2] if axes else records)
    assert moves(expected, 1e-4)


# --- sources ----------------------------------------------------------------------------------

LATE = at("resid_post", "$layer")
BESIDE = {"subject": SUBJECT, "end": {"last": 2}, "start": 0, "third": 2}
SOURCES = {
    "another layer": at("resid_mid", "$layer", set={"patch": "donor", "layer": 2}),
    "another site": at("mlp_out", "$layer", "subject", set={"patch": "text", "site": "attn_out"}),
    "another position": at("ln2", "$layer", set={"patch": "text", "position": "third"}),
    "all of another": at(
        *("resid_pre", "$layer", "end"),
        set={"patch": "text", "site": "embed", "position": "others"},
    ),
    "another head": at("z", "$layer", "end", head=1, set={"patch": "donor", "head": 3}),
    "a query from z": at("q", "$layer", head=1, set={"patch": "donor", "site": "z", "head": 0}),
    "a key from a value": at("k", "$layer", "subject", head=0, set={"patch": "text", "site": "v"}),
    "mixed from afar": at(
        *("ln1", "$layer"), mix={"source": {"patch": "donor", "layer": 1}, "weight": 0.3}
    ),
    "mean of two tokens": at("resid_mid", "$layer", "end", set={"mean": "text"}),
    "mean per token": at(*("resid_mid", "$layer", "end"), set={"mean": "donor", "per_token": True}),
    "mean of heads": at("v", "$layer", "end", heads=[0, 1], set={"mean": "text"}),
    "mean per token of heads": at(
        *("z", "$layer", "end"), heads="all", set={"mean": "text", "per_token": True}
    ),
    "mean of units": at("mlp_post", "$layer", "end", units=[5, 2], set={"mean": "text"}),
    "mean of layers": at("ln1", None, "subject", layers=[0, 3], set={"mean": "donor"}),
    "renormalize like text": at("resid_mid", "$layer", "subject", renormalize="text"),
    "renormalize heads": at("z", "$layer", heads="all", renormalize="donor"),
    "renormalize units": at("mlp_post", "$layer", units=[1, 2, 3], renormalize="donor"),
    "renormalize to nothing": at("ln2", "$layer", renormalize=0),
    "difference": at(
        *("resid_mid", "$layer"), add={"vector": {"mean": "donor", "minus": "text"}, "scale": 2}
    ),
    "difference of length 1": at(
        *("ln1", "$layer", "subject"),
        add={"vector": {"mean": "donor", "minus": "text", "normalize": True}, "scale": 3},
    ),
    "difference of heads": at(
        *("q", "$layer"), heads=[0, 3], add={"vector": {"mean": "text", "minus": "donor"}}
    ),
}
STIRRED = at("resid_pre", 0, "end", add={"vector": {"unit": 3}, "scale": 1.5})


@pytest.mark.parametrize("name", SOURCES)
def test_sources(by_hand, name):
    """A write above makes the run differ from the clean one, of which the sources are."""
    positions = BESIDE | {"others": {"span": [1, 3]}}
    document, records = case(
        *(STIRRED, SOURCES[name]),
        axes={"layer": [1, 2]} if SOURCES[name].get("layer") else {},
        **{"positions": positions, "measures": FEW},
    )
    assert moves(by_hand.check(document, records))


@pytest.mark.parametrize("shape", [(32,), (LAYERS, 32)])
@pytest.mark.parametrize("normalize", [False, True])
def test_vectors_of_files(by_hand, tmp_path, shape, normalize):
    file = str(tmp_path / "vectors.safetensors")
    save_file({"mine": torch.randn(shape, generator=torch.Generator().manual_seed(1))}, file)
    vector = {"file": file, "key": "mine", "normalize": normalize}
    writes = [
        at(site, "$layer", "end", add={"vector": vector, "scale": "$scale"})
        for site in ("resid_mid", "ln2")
    ]
    axes = {"layer": [0, 3], "scale": [-1.5, 0.5]}
    by_hand.check(*case(*writes, axes=axes, records=EQUAL, measures=FEW))


# --- several writes ---------------------------------------------------------------------------

DONE = {
    "set": {"set": 0.5},
    "add": {"add": {"vector": {"unit": 0}, "scale": 2.0}},
    "mix": {"mix": {"source": "donor", "weight": 0.5}},
    "clamp": {"clamp": {"low": -0.2, "high": 0.4}},
    "renormalize": {"renormalize": 2.0},
}
ORDERS = [
    *(("set", "add", "clamp"), ("clamp", "add", "set"), ("add", "clamp"), ("clamp", "add")),
    *(("mix", "renormalize"), ("renormalize", "mix"), ("add", "renormalize", "mix", "clamp")),
]


@pytest.mark.parametrize("order", ORDERS)
def test_writes_at_one_place_apply_as_declared(by_hand, order):
    for place in (at("resid_mid", "$layer", "end"), at("z", "$layer", "end", heads=[1, 2])):
        writes = [place | DONE[name] for name in order]
        by_hand.check(*case(*writes, axes={"layer": [1]}, measures=FEW))


TOGETHER = {
    "overlapping positions": [
        at("mlp_out", 1, "end", set=0.5),
        at("mlp_out", 1, "last", add={"vector": {"unit": 2}}),
        at("mlp_out", 1, "subject", mix={"source": "donor", "weight": 0.5}),
    ],
    "overlapping heads": [
        at("z", 1, "end", heads="all", set=0.5),
        at("z", 1, head=2, set="donor"),
        at("z", 1, heads=[2, 3], clamp={"high": 0.1}),
    ],
    "overlapping units": [
        at("mlp_pre", 1, "end", units=[1, 2, 3], set=1.0),
        at("mlp_pre", 1, units=[3, 4], add={"vector": {"unit": 0}}),
    ],
    "one stream under two names": [
        at("resid_pre", 2, clamp={"high": 0.1}),
        at("resid_post", 1, add={"vector": {"unit": 2}, "scale": 3}),
    ],
    "every place of a layer, backwards": [
        at(site, layer, "end", **heads, mix={"source": "donor", "weight": 0.5})
        for layer in (2, 0)
        for site, heads in {
            **{"resid_post": {}, "mlp_out": {}, "mlp_post": {}, "mlp_pre": {}, "ln2": {}},
            **{"resid_mid": {}, "attn_out": {}, "z": {"head": 1}, "v": {"heads": "all"}},
            **{"k": {"head": 0}, "q": {"heads": [0, 3]}, "ln1": {}, "resid_pre": {}},
        }.items()
    ],
    "from the embedding to the logits": [
        at("logits", clamp={"low": -1.0, "high": 2.0}),
        at("ln_final", mix={"source": "donor", "weight": 0.25}),
        at("embed", None, "subject", set=0.2),
    ],
}


@pytest.mark.parametrize("name", TOGETHER)
def test_writes_at_once(by_hand, name):
    assert moves(by_hand.check(*case(*TOGETHER[name])))


# --- positions --------------------------------------------------------------------------------

WHOLE = {"text": "word", "donor_text": "source"}
ANY_LENGTH = {
    "last of some": {"last": 3},
    "a span from the end": {"span": [-3, -1]},
    "a list": ["subject", -1],
    "a list of lists": ["tail", -4, "tail"],
    **{f"text {end}": WHOLE | {"align": end} for end in ("first", "last", "mean")},
    **{f"span {end}": {"span": [1, None], "align": end} for end in ("first", "last", "mean")},
    **{f"union {end}": {"union": ["wide", -1], "align": end} for end in ("first", "last", "mean")},
    "aligned member": {"union": ["headed", -1], "align": "last"},
    "first token": SUBJECT | {"token": "first"},
    "last token": SUBJECT | {"token": "last"},
}
EQUAL_LENGTH = {"a span": {"span": [1, -1]}, "all": "all", "an index": 1, "a mixed list": [0, -2]}
NAMED = {
    **{"subject": SUBJECT, "tail": {"last": 2}, "wide": {"span": [1, -1]}},
    "headed": {"span": [1, -1], "align": "first"},
}


@pytest.mark.parametrize("name", [*ANY_LENGTH, *EQUAL_LENGTH])
def test_positions(by_hand, name):
    """Donor, mix and number at every kind of position; two rows have a shorter donor."""
    records = RECORDS if name in ANY_LENGTH else EQUAL
    spec = (ANY_LENGTH | EQUAL_LENGTH)[name]
    used = {k: v for k, v in NAMED.items() if name.startswith(("union", "a ", "aligned"))}
    positions = used | {"here": spec}
    for write in (
        at("resid_mid", 1, "here", set="donor"),
        at("z", 1, "here", heads=[0, 2], mix={"source": "donor", "weight": 0.5}),
    ):
        by_hand.check(*case(write, records=records, positions=positions, measures=FEW))


def test_what_is_measured_may_stand_before_the_end(by_hand):
    place = at("resid_mid", "$layer", "tail", set="donor")
    document, records = case(
        *(place, at("attn_out", 0, "subject", set=0.5)),
        axes={"layer": [0, 3]},
        positions={"subject": SUBJECT, "tail": {"last": 2}},
    )
    for where in ("subject", "tail"):
        by_hand.check(document | {"measure_at": where}, records)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_prompts_of_several_lengths(by_hand, length):
    words = " ".join(["Rome", "is", "a", "city", "in", "the", "middle", "of", "Italy"][:length])
    row = record(words, words.replace("Rome", "Paris"), "Rome", "Paris", "one", "two")
    writes = [at("resid_mid", "$layer", "all", set="donor"), at("ln2", 0, set=0.3)]
    by_hand.check(*case(*writes, axes={"layer": [0, 2, 3]}, records=[row, *RECORDS[:1]][:2]))


# --- attention --------------------------------------------------------------------------------

EDGE = {"layer": [0, 2], "head": [0, 3]}


def edge(site, position="last", **write):
    return at(site, "$layer", position, head="$head") | write


ATTENTION = {
    "knockout": edge("attn_scores", keys="subject", knockout=True),
    "knockout of one key": edge("attn_scores", keys="second", knockout=True),
    "knockout from two": edge("attn_scores", "end", keys="start", knockout=True),
    "pattern": edge("pattern", keys="subject", set="donor"),
    "whole row": edge("pattern", set="donor"),
    "pattern number": edge("pattern", "subject", keys="start", set=0.5),
    "pattern mix": edge("pattern", "end", keys="second", mix={"source": "donor", "weight": 0.5}),
    "pattern of another head": edge(
        "pattern", keys="second", set={"patch": "text", "head": 1, "layer": 1}
    ),
    "scores": edge("attn_scores", "end", keys="subject", set="donor"),
    "scores number": edge("attn_scores", keys="second", set=2.0),
    "scores clamp": edge("attn_scores", keys="subject", clamp={"low": -0.5, "high": 0.5}),
    "of a square, what is seen": edge("attn_scores", "all", keys="all", set=1.0),
}
TOKENS = {"subject": SUBJECT, "end": {"last": 2}, "start": 0, "second": 1}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_edges(by_hand, name):
    document, _ = case(ATTENTION[name], axes=EDGE, positions=TOKENS, measures=FEW)
    assert moves(by_hand.check(document, EQUAL, "eager"), 1e-4)


def test_attention_edges_together(by_hand):
    cut = {"position": "last", "keys": "subject", "knockout": True}
    writes = [
        cut | {"site": "attn_scores", "layers": "all", "heads": [0, 2]},
        cut | {"site": "attn_scores", "layers": [1, 3], "heads": "all", "keys": "start"},
        at("pattern", 2, "end", heads="all", keys="second", set=0.25),
        at("pattern", 2, head=1, set="donor"),
        at("v", 2, "subject", head=0, set=0.5),
    ]
    document, _ = case(*writes, positions=TOKENS)
    assert moves(by_hand.check(document, EQUAL, "eager"))


# --- recovery ---------------------------------------------------------------------------------

RECOVERED = {
    "lens": DIFF | {"lens": {}},
    "of_lens": {"kind": "recovery", "of": "lens", "min_gap": 0.5},
    "of_entering": {"kind": "recovery", "of": "entering", "min_gap": 0.001},
    "entering": {
        **{"kind": "prob", "answer": "foil"},
        "lens": {"site": "resid_pre", "layers": [1, 3], "position": "subject"},
    },
    "of_diff": {"kind": "recovery", "of": "diff", "min_gap": 0.5},
    "diff": DIFF,
}
SUMS = {
    "whole": {"kind": "log_prob", "answer": "target", "tokens": "sum"},
    "of_whole": {"kind": "recovery", "of": "whole", "min_gap": 0.3},
    "loss": {"kind": "cross_entropy", "answer": "foil", "tokens": "sum"},
    "of_loss": {"kind": "recovery", "of": "loss", "min_gap": 0.3},
}
LONG = {"target": "source_word", "foil": "word"}


@pytest.mark.parametrize(
    "measures", [RECOVERED, SUMS, SUMS | RECOVERED], ids=["lens", "sum", "two"]
)
def test_recovery_of_a_lens_and_of_whole_answers(by_hand, measures):
    """Each layer between its own two runs; whole answers behind the prompt and the donor."""
    write = at("resid_post", "$layer", "end", mix={"source": "donor", "weight": 0.6})
    more = {"measures": measures}
    if "whole" in measures and "lens" not in measures:
        more["prompts"] = PLAIN["prompts"] | {"answers": LONG}
    document, records = case(write, axes={"layer": [0, 2]}, **more)
    expected = by_hand.check(document, records)
    alone = by_hand.check(document | {"measures": in_place(measures)}, records)
    same(alone, {k: {n: v[n] for n in alone[k]} for k, v in expected.items()})
    numbers = [v for values in expected.values() for n, v in values.items() if n.startswith("of_")]
    assert any(math.isnan(number) for number in numbers) or "lens" not in measures
    assert any(0.05 < abs(number) < 0.95 for number in numbers)
    if "prompts" in more:
        assert any(len(row.whole["target"]) > 1 for row in by_hand.meaning(document, records).rows)


# --- tracing ----------------------------------------------------------------------------------


def draws_of(by_hand, document, records, tokenizer, real=False):
    """Row name -> the standard normal numbers that its tokens get; one draw for all points."""
    model = by_hand.model(real=real)
    sweep, rows = by_hand.rows(document, records)
    names = {row.row_key: row.row_id for row in rows}
    seeds = {}
    for block in plan_of(sweep, model, rows).chunks[0]["blocks"]:
        edits = [e for item in block["passes"] for e in item["edits"] if e["op"] == "noise"]
        for edit in edits:
            for key, seed in zip(block["row_keys"], edit["operand"]["seeds"], strict=True):
                seeds.setdefault(names[key], set()).add(seed)
    counts = {row.row_id: len(row.positions["subject"].base) for row in rows}
    assert seeds.keys() == counts.keys()
    empty = torch.zeros(1, model["shape"]["hidden"])
    return {
        name: noise([seed], torch.zeros(counts[name]), empty.expand(counts[name], -1))
        for name, (seed,) in seeds.items()
    }


NOISY = at("embed", None, "subject", noise={"std": 0.7, "seed": 4})
RESTORED = ("resid_post", "resid_mid", "mlp_out", "ln1")


@pytest.mark.parametrize("site", RESTORED)
def test_causal_tracing(by_hand, tokenizer, site):
    """Corrupt the subject, restore one state of the clean run."""
    axes = {"layer": "all", "position": ["subject", "last"]}
    restore = at(site, "$layer", "$position", set={"patch": "text"})
    document, records = case(NOISY, restore, axes=axes, measures=FEW)
    draws = draws_of(by_hand, document, records, tokenizer)
    assert moves(by_hand.check(document, records, draws=draws))


# --- paths ------------------------------------------------------------------------------------

ALL_Z = {"site": "z", "layers": "all", "heads": "all"}


def path_case(receiver, frozen, records=EQUAL, **sender):
    """The sender is patched while every other head is frozen; then one place is taken over."""
    path = [ALL_Z | {"position": frozen, "set": {"patch": "text"}}, sender | {"set": "donor"}]
    return case(
        receiver | {"set": {"patch": "path"}},
        runs={"path": {"prompt": "text", "writes": path}},
        measures=FEW,
        records=records,
    )


def path_by_hand(model, row, sender, head, frozen=None):
    """The run in which the sender's z is the donor's and that of all other heads is the clean."""
    clean, donor = model.run(row.ids[BASE]), model.run(row.ids["donor"])

    def freeze(layer):
        def edit(z):
            tokens = slice(None) if frozen is None else frozen
            z[tokens] = clean["z", layer][tokens]
            if layer == sender:
                z[-1, head] = donor["z", layer][-1, head]
            return z

        return edit

    return model.run(row.ids[BASE], {("z", n): freeze(n) for n in range(model.layers)})


@pytest.mark.parametrize("frozen", ["last", "all"])
@pytest.mark.parametrize("where", ["resid_post", "ln_final"])
def test_path_from_a_head_to_the_logits(by_hand, where, frozen):
    receiver = at(where, *([LAYERS - 1] if where == "resid_post" else []))
    document, records = path_case(receiver, frozen, **at("z", 1, head=2))
    by_hand.check(document, records)
    for recompute in RECOMPUTE:
        found = by_hand.run(document, records, recompute=recompute)
        for row in by_hand.meaning(document, records).rows:
            path = path_by_hand(by_hand.hand(), row, 1, 2, -1 if frozen == "last" else None)
            logits = path["logits", None][-1]
            expected = float(logits[row.answers["target"]])
            assert abs(found[(), row.name]["logit"] - expected) < TOLERANCE


def test_the_logits_of_a_path(by_hand):
    by_hand.check(*path_case(at("logits"), "all", **at("z", 1, head=2)))


RECEIVERS = {"q": 3, "k": 1, "v": 0, "z": 2}


@pytest.mark.parametrize("site", RECEIVERS)
def test_path_from_a_head_to_a_head(by_hand, site):
    """What the sender writes reaches the receiver directly, and then goes on freely."""
    head = RECEIVERS[site]
    receiver = at(site, 2, head=head)
    document, records = path_case(receiver, "all", **at("z", 0, head=1))
    by_hand.check(document, records)
    found = by_hand.run(document, records)
    largest = 0.0
    for row in by_hand.meaning(document, records).rows:
        model = by_hand.hand()
        path = path_by_hand(model, row, 0, 1)

        def receive(value, path=path):
            value[-1, head] = path[site, 2][-1, head]
            return value

        logits = model.run(row.ids[BASE], {(site, 2): receive})["logits", None][-1]
        clean = model.run(row.ids[BASE])["logits", None][-1]
        expected = float(logits[row.answers["target"]])
        assert abs(found[(), row.name]["logit"] - expected) < TOLERANCE
        largest = max(largest, abs(expected - float(clean[row.answers["target"]])))
    # What a frozen head gives is frozen: its z is no receiver of a path.
    assert (largest > 0.01) == (site != "z")


CHAINS = {
    "a donor under writes": ("donor", [at("resid_mid", 0, "subject", set=0.5)]),
    "a donor with the prompt's states": (
        "donor",
        [at("resid_mid", 0, "subject", set={"patch": "text"})],
    ),
    "a donor with its own states": (
        "donor",
        [at("ln1", 1, set=0.3), at("resid_post", 1, "end", set={"patch": "donor", "layer": 0})],
    ),
    "a prompt under a mean": ("text", [at("mlp_post", 1, "subject", set={"mean": "donor"})]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_patches_from_runs_under_writes(by_hand, name):
    prompt, inner = CHAINS[name]
    document, records = case(
        at("resid_mid", "$layer", "end", mix={"source": {"patch": "chain"}, "weight": 0.8}),
        at("q", 3, heads=[0, 2], set={"patch": "chain"}),
        axes={"layer": [1, 2]},
        **{"runs": {"chain": {"prompt": prompt, "writes": inner}}, "measures": FEW},
    )
    assert moves(by_hand.check(document, records))


# --- measures of the inside -------------------------------------------------------------------


def lens_measures():
    found = {}
    for site in ("resid_pre", "resid_mid", "resid_post"):
        kinds = (
            *({"kind": "prob", "answer": "target"}, {"kind": "rank", "answer": "foil"}),
            *({"kind": "kl"}, DIFF),
        )
        for spec in kinds:
            found[f"{spec['kind']}_{site}"] = spec | {"lens": {"site": site}}
    found["elsewhere"] = LOGIT | {"lens": {"layers": [1, 3], "position": "subject"}}
    return found


LENSED = {
    "nothing": [],
    "a stream": [at("resid_post", 1, "end", set="donor")],
    "a middle": [at("resid_mid", 2, "subject", set=0.5), at("mlp_out", 1, set=0.25)],
    "an entrance": [at("resid_pre", 2, mix={"source": "donor", "weight": 0.5})],
}


@pytest.mark.parametrize("name", LENSED)
def test_the_logit_lens(by_hand, name):
    by_hand.check(*case(*LENSED[name], measures=lens_measures()))


READS = {
    "stream": {"site": "resid_mid", "layer": 2, "position": "subject"},
    "entering": {"site": "resid_pre", "layer": 2},
    "norm": {"site": "ln2", "layer": 1},
    "final": {"site": "ln_final"},
    "gate": {"site": "mlp_pre", "layer": 1},
    "neurons": {"site": "mlp_post", "layer": 2, "position": "subject"},
    "embedded": {"site": "embed", "position": "subject"},
}


HEAD_READS = {
    "query": {"site": "q", "layer": 3, "head": 2},
    "key": {"site": "k", "layer": 2, "head": 0},
    "value": {"site": "v", "layer": 1, "head": 1, "position": "subject"},
    "z": {"site": "z", "layer": 2, "head": 3},
}


def cosines(reads):
    return {
        f"{read}_{against}": {"kind": "cosine", "read": spec, "against": against}
        for read, spec in reads.items()
        for against in ("text", "donor")
    }


@pytest.mark.parametrize("name", LENSED)
def test_cosines(by_hand, name):
    by_hand.check(*case(*LENSED[name], measures=cosines(READS)))


@pytest.mark.parametrize("name", LENSED)
def test_cosines_of_heads(by_hand, name):
    by_hand.check(*case(*LENSED[name], measures=cosines(HEAD_READS)))


# --- estimates --------------------------------------------------------------------------------

ESTIMATES = {
    **{"by_logit": {"kind": "attribution", "of": "logit"}, "logit": LOGIT},
    **{"by_diff": {"kind": "attribution", "of": "diff"}, "diff": DIFF},
    **{
        "by_log": {"kind": "attribution", "of": "log"},
        "log": {"kind": "log_prob", "answer": "target"},
    },
    **{"by_prob": {"kind": "attribution", "of": "prob"}},
    "prob": {"kind": "prob", "answer": "target"},
}
ESTIMATED = {
    "streams": [at("resid_post", "$layer", "end", set="donor")],
    "middles": [at("resid_mid", "$layer", set=0.5)],
    "heads": [at("z", "$layer", "end", heads=[1, 3], set="donor")],
    "queries": [at("q", "$layer", heads="all", set="donor")],
    "keys": [at("k", "$layer", "subject", head=1, set={"mean": "text"})],
    "values": [at("v", "$layer", "subject", head=0, mix={"source": "donor", "weight": 0.4})],
    "neurons": [at("mlp_post", "$layer", units=[3, 9], set=0.0)],
    "gates": [at("mlp_pre", "$layer", "subject", clamp={"low": 0.0})],
    "norms": [at("ln1", "$layer", "subject", renormalize="donor"), at("ln2", 0, set="donor")],
    "one place twice": [
        at("attn_out", "$layer", "end", add={"vector": {"unit": 1}, "scale": 2}),
        at("attn_out", "$layer", mix={"source": "donor", "weight": 0.5}),
    ],
    "two places": [at("embed", None, "subject", set="donor"), at("mlp_out", "$layer", set=0.0)],
}


def in_place(measures):
    """Estimates and recoveries alone, with their measures written in place."""
    return {name: m | {"of": measures[m["of"]]} for name, m in measures.items() if "of" in m}


@pytest.mark.parametrize("measures", [ESTIMATES, in_place(ESTIMATES)], ids=["beside", "alone"])
@pytest.mark.parametrize("name", ESTIMATED)
def test_estimates_are_gradient_times_change(by_hand, name, measures):
    """Where nothing but estimates is asked for, no point is run at all."""
    document, records = case(*ESTIMATED[name], axes={"layer": [1, 2]}, measures=measures)
    by_hand.check(document, records[1::2])


def test_an_estimate_under_a_chain_needs_no_run_of_the_point(by_hand):
    path = {"prompt": "donor", "writes": [at("resid_post", 0, "end", set=0.5)]}
    chain = at("mlp_out", "$layer", "end", set={"patch": "path"})
    document, records = case(
        chain, axes={"layer": [1, 2]}, runs={"path": path}, measures=in_place(ESTIMATES)
    )
    expected = by_hand.check(document, records[1::2])
    assert max(abs(number) for values in expected.values() for number in values.values()) > 0.01


def test_an_estimate_of_a_pattern(by_hand):
    write = edge("pattern", "end", keys="subject", set="donor")
    document, _ = case(write, axes=EDGE, measures=ESTIMATES, positions=TOKENS)
    by_hand.check(document, EQUAL, "eager")


def test_the_estimate_is_the_change_where_the_rest_is_linear(by_hand):
    document, records = case(
        at("ln_final", set="donor"), at("ln_final", add={"vector": {"unit": 4}}), measures=ESTIMATES
    )
    clean = by_hand.run(document | {"writes": [], "measures": FEW}, records)
    for recompute in RECOMPUTE:
        for key, values in by_hand.run(document, records, recompute=recompute).items():
            change = values["logit"] - clean[key]["logit"]
            assert abs(values["by_logit"] - change) < TOLERANCE
            assert abs(change) > 1e-3


# --- resampling -------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["text", "donor"])
@pytest.mark.parametrize("site", ["resid_mid", "v"])
def test_resampling_is_one_other_row_every_time(by_hand, site, role):
    """Which row it is, is read off the values: exactly one other row explains all measures."""
    heads = {"heads": "all"} if site == "v" else {}
    write = at(site, 1, **heads, set={"resample": role, "seed": "$seed"})
    document, records = case(write, axes={"seed": [0, 1, 2, 3]}, measures=FEW)
    meaning = by_hand.meaning(document, records)
    partners = {}
    found = by_hand.run(document, records)
    for (cell, name), values in found.items():
        row = next(row for row in meaning.rows if row.name == name)
        partners[cell, name] = explained(meaning, row, cell, values)
    assert all(partner != name for (_, name), partner in partners.items())
    assert all(len({p for (_, n), p in partners.items() if n == r.name}) > 1 for r in meaning.rows)
    for how in ({}, {"batch_rows": 1}, {"batch_rows": 2}, {"recompute": "exact"}):
        same(by_hand.run(document, records, **how), found)


def explained(meaning, row, cell, values):
    """The name of the only row whose activation gives these values."""
    fits = []
    for other in meaning.rows:
        meaning.partner = other
        if all(near(values, k, v) for k, v in meaning.point(row, {"seed": cell[0]}).items()):
            fits.append(other.name)
    assert len(fits) == 1, (row.name, fits)
    return fits[0]


# --- any writes -------------------------------------------------------------------------------


ALL_SITES = (
    *("resid_pre", "ln1", "q", "k", "v", "z", "attn_out", "resid_mid", "ln2", "mlp_pre"),
    *("mlp_post", "mlp_out", "resid_post", "embed", "ln_final"),
)


def drawn_write(rng):
    """Some write at some place."""
    site = rng.choice(ALL_SITES)
    layer = None if site in ("embed", "ln_final") else rng.choice([*range(LAYERS), "$layer"])
    more = {}
    if site in ("q", "z", "k", "v"):
        heads = range(4 if site in "qz" else 2)
        more["heads"] = rng.choice(["all", [rng.choice(heads)], list(heads)[:2]])
    if site in ("mlp_pre", "mlp_post") and rng.random() < 0.5:
        more["units"] = rng.sample(range(64), 5)
    donors = ("donor", {"patch": "text"}, {"mean": "text"}, {"patch": "donor", "position": "last"})
    operations = [
        *({"set": rng.choice(donors)}, {"set": round(rng.uniform(-1, 1), 2)}),
        {"mix": {"source": rng.choice(donors), "weight": round(rng.uniform(-1, 2), 2)}},
        {"add": {"vector": {"unit": rng.randrange(5)}, "scale": round(rng.uniform(-3, 3), 1)}},
        *({"clamp": {"low": -0.3, "high": 0.6}}, {"renormalize": rng.choice(["donor", "text", 2])}),
    ]
    place = rng.choice(["last", "subject", "start", "end", "all"])
    return at(site, layer, place, **more, **rng.choice(operations))


@pytest.mark.parametrize("seed", range(16))
def test_any_writes_at_once(by_hand, seed):
    rng = random.Random(seed)
    writes = [drawn_write(rng) for _ in range(rng.randint(2, 5))]
    swept = any(write.get("layer") == "$layer" for write in writes)
    document, _ = case(
        *writes,
        axes={"layer": [0, 2, 3]} if swept else {},
        positions=TOKENS,
        measure_at=rng.choice(["last", "second"]),
        measures=MANY
        | {"lens": {"kind": "kl", "lens": {"site": "resid_mid", "position": "subject"}}}
        | {"cosine": {"kind": "cosine", "read": {"site": "mlp_post", "layer": 2}}}
        | {"estimate": {"kind": "attribution", "of": "logit"}},
    )
    by_hand.check(document, EQUAL)


# --- laws of every family ---------------------------------------------------------------------


def everywhere(shape, **write):
    """One write at every site that a family has, at a layer and every token."""
    sites = [site for site in ALL_SITES if site in shape["sites"]]
    heads = {site: {"heads": "all"} for site in ("q", "k", "v", "z")}
    return [
        at(site, None if site in ("embed", "ln_final") else "$layer", "all", **write)
        | heads.get(site, {})
        for site in sites
    ]


@pytest.fixture(scope="module")
def go(tiny_model, opened, tokenizer, tmp_path_factory):
    """Run a document on a family; also the clean values of the same rows."""

    def run_family(model, document, records=EQUAL, **how):
        sweep = Sweep.model_validate(document)
        rows = rows_of(sweep, tokenizer, tmp_path_factory.mktemp("rows"), records)
        return run(opened("local", model), sweep, model, rows, **how)

    return run_family


def changed(go, model, document, recompute):
    """The largest change of the logit and the largest divergence."""
    found = go(model, document, recompute=recompute)
    clean = go(model, {k: v for k, v in document.items() if k != "axes"} | {"writes": []})
    moved = [abs(v["logit"] - clean[(), row]["logit"]) for (_, row), v in found.items()]
    assert len(moved) >= len(EQUAL)
    return max(*moved, *(values["kl"] for values in found.values()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("write", "recompute"),
    [
        ({"set": {"patch": "text"}}, "fast"),
        ({"set": {"patch": "text"}}, "exact"),
        ({"renormalize": "text"}, "fast"),
    ],
)
def test_what_is_there_already_changes_nothing(go, tiny_model, family, write, recompute):
    model = tiny_model(family)
    writes = everywhere(model["shape"], **write)
    assert len(writes) >= 6
    document, _ = case(*writes, axes={"layer": [1]}, measures=FEW)
    assert changed(go, model, document, recompute) < 1e-4


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_stream_restores_a_corrupted_prompt(go, tiny_model, family, recompute):
    noisy = at("embed", None, "all", noise={"std": 1.0})
    restored = at("resid_post", "$layer", "all", set={"patch": "text"})
    document, _ = case(noisy, restored, axes={"layer": "all"}, measures=FEW)
    assert changed(go, tiny_model(family), document, recompute) < 1e-5
    alone = document | {"writes": [noisy], "axes": {}}
    assert changed(go, tiny_model(family), alone, recompute) > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_behind_its_query_has_nothing_to_lose(go, tiny_model, family):
    """Beside a key that is seen: cutting both is cutting that one."""
    model = tiny_model(family, attention="eager")
    cut = edge("attn_scores", "second", keys="$keys", knockout=True)
    positions = TOKENS | {"behind": [0, -1]}
    axes = {"layer": [1], "head": [0, 3], "keys": ["start", "behind"]}
    document, _ = case(cut, axes=axes, positions=positions, measures=FEW)
    found = go(model, document)
    for (layer, head, keys), row in found:
        both, one = found[(layer, head, keys), row], found[(layer, head, "start"), row]
        assert all(abs(both[name] - one[name]) < 1e-5 for name in FEW)
    assert max(values["kl"] for values in found.values()) > 1e-4


@pytest.mark.parametrize("kind", ["local", "reference"])
@pytest.mark.parametrize("site", ["attn_scores", "pattern"])
def test_edges_that_no_query_sees_are_no_values(
    opened, tiny_model, tokenizer, tmp_path, site, kind
):
    """Rows whose keys all lie behind the query are left out; the others are as they are alone."""
    model = tiny_model("llama", attention="eager")
    write = {"knockout": True} if site == "attn_scores" else {"set": 0.5}
    document, _ = case(
        edge(site, "subject", keys="third", **write),
        axes=EDGE,
        positions=TOKENS | {"third": 2},
        measures=FEW,
        on_bad_row="exclude",
    )
    sweep, found = Sweep.model_validate(document), {}
    for number, records in enumerate((RECORDS, [RECORDS[0]])):
        (folder := tmp_path / str(number)).mkdir()
        rows = rows_of(sweep, tokenizer, folder, records)
        found[number] = run(opened(kind, model), sweep, model, rows)
    seen = {row for _, row in found[0]}
    behind = {r["row_id"] for r in RECORDS if r["base"].startswith("In ")}
    assert behind
    assert seen == {r["row_id"] for r in RECORDS} - behind
    same({key: found[0][key] for key in found[1]}, found[1])
    assert max(values["kl"] for values in found[0].values()) > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_middle_of_a_layer_is_its_entrance_and_its_attention(tiny_model, tokenizer, family):
    """Where MLP and attention follow each other; elsewhere there is no middle."""
    model = tiny_model(family)
    module, shape = hooks.load(model), model["shape"]
    ids = tokenizer(RECORDS[2]["base"])["input_ids"]
    if "resid_mid" not in shape["sites"]:
        assert family in ("gpt_neox", "phi", "gptj", "falcon")
        return

    def seen(site, layer):
        place = shape["sites"][site]
        where = module.get_submodule(place["path"].format(layer=layer))
        return hooks.seen(module, where, place["side"], ids)

    for layer in range(LAYERS):
        entrance, attention, middle, mlp, end = (
            seen(site, layer)
            for site in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        )
        assert torch.allclose(entrance + attention, middle, atol=1e-4)
        assert torch.allclose(middle + mlp, end, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_head_is_an_empty_projection(go, tiny_model, tokenizer, family):
    model = tiny_model(family)
    module, shape = hooks.load(model), model["shape"]
    place = shape["sites"]["z"]
    projection = module.get_submodule(place["path"].format(layer=1))
    document, _ = case(at("z", 1, "last", heads="all", set=0.0), measures=FEW)
    for recompute in RECOMPUTE:
        for (_, name), values in go(model, document, RECORDS, recompute=recompute).items():
            row = next(r for r in RECORDS if r["row_id"] == name)

            def emptied(value):
                value[..., -1, :] = 0
                return value

            with hooks.changed_input(projection, emptied):
                logits = hooks.last_logits(module, tokenizer(row["base"])["input_ids"])
            answer = oracle.answer_id(tokenizer, row["source_answer"])
            assert abs(values["logit"] - float(logits[answer])) < TOLERANCE


# --- the real model ---------------------------------------------------------------------------

REAL_FEW = [RECORDS[0], RECORDS[1]]
REAL = {
    "stream": at("resid_mid", "$layer", "subject", set="donor"),
    "head": at("z", "$layer", "end", head=4, set="donor"),
    "keys": at("k", "$layer", "subject", heads="all", set={"mean": "donor"}),
    "neurons": at("mlp_post", "$layer", "end", units=[0, 700, 1535], set=4.0),
    "norm": at("ln2", "$layer", renormalize="donor"),
}


@pytest.mark.parametrize("name", REAL)
def test_writes_in_the_real_model(by_hand, name):
    document, _ = case(REAL[name], axes={"layer": [4, 21]})
    by_hand.check(document, REAL_FEW, real=True)


def test_attention_in_the_real_model(by_hand):
    cut = at("attn_scores", "$layer", heads="all", keys="subject", knockout=True)
    patched = at("pattern", 12, head=3, keys="subject", set="donor")
    document, _ = case(cut, patched, axes={"layer": [8, 20]})
    by_hand.check(document, REAL_FEW, "eager", real=True)


def test_tracing_lens_and_path_in_the_real_model(by_hand, tokenizer):
    measures = FEW | {
        "lens": {"kind": "log_prob", "answer": "target", "lens": {"layers": [0, 15, 29]}},
        "cosine": {"kind": "cosine", "read": {"site": "resid_mid", "layer": 20}},
    }
    frozen = ALL_Z | {"position": "all", "set": {"patch": "text"}}
    path = [frozen, at("z", 10, head=2, set="donor")]
    writes = [
        NOISY | {"noise": {"std": 0.1, "seed": 2}},
        at("resid_post", 6, "subject", mix={"source": {"patch": "text"}, "weight": 0.5}),
        at("q", 20, head=1, set={"patch": "path"}),
    ]
    runs = {"path": {"prompt": "text", "writes": path}}
    document, records = case(*writes, runs=runs, measures=measures)[0], REAL_FEW
    draws = draws_of(by_hand, document, records, tokenizer, real=True)
    by_hand.check(document, records, real=True, draws=draws)


def test_estimates_in_the_real_model(by_hand):
    write = at("z", "$layer", "end", head=4, set="donor")
    measures = {"by_diff": ESTIMATES["by_diff"], "diff": DIFF}
    document, _ = case(write, axes={"layer": [10, 25]}, measures=measures)
    by_hand.check(document, REAL_FEW, real=True)


# --- what an estimate is worth ----------------------------------------------------------------


def test_estimates_follow_the_measured_changes(by_hand, repository, opened, real_model, tokenizer):
    """Heads of the last layers: what patching does, and what its gradient said it would do."""
    file = repository / "config/sweeps/ioi_attribution.yaml"
    document = read_sweep(file).model_dump()
    axes = {"layer": list(range(22, 27)), "head": "all"}
    sweep = Sweep.model_validate(document | {"axes": axes})
    rows = prepare_rows(sweep, repository / sweep.prompts.file, tokenizer, 0)[:8]
    engine = opened("local", real_model)
    found = run(engine, sweep, real_model, rows)
    assert len(found) == 5 * 9 * 8
    behaviour = {"writes": [], "axes": {}, "measures": {"logit_diff": DIFF}}
    clean = run(engine, Sweep.model_validate(document | behaviour), real_model, rows)
    cells = dict.fromkeys(cell for cell, _ in found)
    changes, estimates = [], []
    for cell in cells:
        mine = [(row.row_id, found[cell, row.row_id]) for row in rows]
        changes.append(
            statistics.fmean(v["logit_diff"] - clean[(), r]["logit_diff"] for r, v in mine)
        )
        estimates.append(statistics.fmean(v["estimate"] for _, v in mine))
    assert max(map(abs, changes)) > 0.1
    assert statistics.correlation(changes, estimates) > 0.8
