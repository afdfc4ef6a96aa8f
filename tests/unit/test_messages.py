"""What a user reads: where in the file, what is wrong, what is allowed; and before any model."""

import pytest
import torch
import yaml
from examples import RECORDS, SUBJECT, document, model_of, plan_of, rows_of, write_csv
from safetensors.torch import save_file
from typer.testing import CliRunner

from nnsweep.cli import app, validate
from nnsweep.documents import parse
from nnsweep.errors import UserError
from nnsweep.sweep import Sweep

W = {"site": "resid_post", "layer": 0, "position": "last"}
EMBED = {"site": "embed", "position": "last"}
HEAD = W | {"site": "z", "head": 0}
EDGES = HEAD | {"keys": "subject"}
KL = {"kl": {"kind": "kl"}}
LOGIT = {"kind": "logit", "answer": "target"}
WHOLE = {"kind": "log_prob", "answer": "target", "tokens": "sum"}
RUN = {"prompt": "text", "writes": [W | {"set": 0.0}, W | {"layer": 9, "set": 0.0}]}


def one(**write):
    """A sweep of one write."""
    return {"axes": {}, "writes": [W | write]}


def placed(write, **more):
    return {"axes": {}, "writes": [write], **more}


def over(axes, **write):
    return {"axes": axes, "writes": [W | write]}


WITHOUT_A_MODEL = {
    "empty choice": ({"measures": {}}, "measures: got {}, expected 1 or more entries"),
    "a list in a list": (
        {"axes": {"layer": [[1]]}},
        "axes.layer.0: got [1], expected a number or text",
    ),
    "a word in a list": (
        one(layer=None, layers=[0, "a"], set=0.0),
        "writes.0.layers.1: got 'a', expected a whole number",
    ),
    "a difference of nothing": (
        one(add={"vector": {"mean": "text", "minus": "text"}, "scale": 1.0}),
        "writes.0.add.vector: a mean minus itself is nothing; take text from donor",
    ),
    "the same answer twice": (
        {"measures": {"gap": {"kind": "logit_diff", "answers": ["target", "target"]}}},
        "measures.gap.answers: ['target', 'target'] names an answer twice",
    ),
    "a negative layer of an axis": (
        over({"layer": [-1, 0]}, layer="$layer", set=0.0),
        "axes.layer: -1 is negative. Layers and heads count from 0.",
    ),
    "an empty list": (
        one(layer=None, layers=[], set=0.0),
        "writes.0.layers: got [], expected 1 or more entries",
    ),
    "below the least": (one(layer=-1, set=0.0), "writes.0.layer: got -1, expected 0 or more"),
    "two sources": (
        one(set={"mean": "text", "resample": "donor"}),
        "writes.0.set: resample and mean exclude each other; give one of them",
    ),
    "two sources and a key": (
        one(mix={"source": {"mean": "text", "resample": "donor", "seed": 1}, "weight": 0.5}),
        "writes.0.mix.source: mean and resample, seed exclude each other; give one of them",
    ),
    "two vectors": (
        one(add={"vector": {"unit": 1, "file": "x"}}),
        "writes.0.add.vector: unit and file exclude each other; give one of them",
    ),
    "half a vector": (
        one(add={"vector": {"mean": "donor"}}),
        "writes.0.add.vector.minus: this key is required",
    ),
    "no source": (one(set={}), "writes.0.set: give one of patch, mean, resample"),
    "a misspelt site": (one(site="resid_pots", set=0.0), "; did you mean 'resid_post'?"),
    "a misspelt source": (one(set="donr"), "writes.0.set: got 'donr', expected 'donor', keys and "),
    "a misspelt kind": (
        {"measures": {"m": {"kind": "logitdiff", "answers": ["target", "foil"]}}},
        "; did you mean 'logit_diff'?",
    ),
    "measured at an axis": (
        {"measure_at": "$layer"},
        "measure_at: one position for the whole sweep, no axis. Positions: ",
    ),
    "measured nowhere": (
        {"measure_at": "lst"},
        "measure_at: position 'lst' is not declared, did you mean 'last'?",
    ),
    "written nowhere": (one(position="lst", set=0.0), "writes.0.position: position 'lst' is not "),
    "a lens nowhere": (
        {"measures": {"m": {"kind": "entropy", "lens": {"position": "lst"}}}},
        "measures.m.lens.position: position 'lst' is not declared",
    ),
    "an axis of nowhere": (
        over({"p": ["last", "lst"]}, position="$p", set=0.0),
        "axes.p: position 'lst' is not declared",
    ),
    "layer and layers": (
        one(layers=[1], set=0.0),
        "writes.0: layer and layers exclude each other; give one of them",
    ),
    "head and heads": (placed(HEAD | {"heads": "all", "set": 0.0}), "head and heads exclude each"),
    "backwards": ({"axes": {"layer": {"range": [5, 2]}}}, "[5, 2] runs the other way. Give [2, 5]"),
    "a backwards span": (
        {"positions": {"subject": SUBJECT, "second": {"span": [5, 2]}}},
        "positions.second.span: [5, 2] runs backwards; write [2, 5]",
    ),
    "crossed bounds": (one(clamp={"low": 2, "high": 1}), "writes.0.clamp: low 2 is above high 1"),
    "crossed axes": (
        over({"l": [0.0, 3.0], "h": [1.0, 4.0]}, clamp={"low": "$l", "high": "$h"}),
        "writes.0.clamp: low 3.0 is above high 1.0",
    ),
    "crossed beside all": (
        over({"layer": "all", "l": [0.0, 3.0]}, layer="$layer", clamp={"low": "$l", "high": 1}),
        "writes.0.clamp: low 3.0 is above high 1",
    ),
    "a negative spread": (one(noise={"std": -1.0}), "writes.0.noise.std: got -1.0, expected 0 or"),
    "a negative axis": (over({"s": [1.0, -1.0]}, noise={"std": "$s"}), "axes.s: -1.0 is negative"),
    "a negative length": (one(renormalize=-1), "writes.0.renormalize: got -1, expected 0 or more"),
    "knockout": (
        placed(EDGES | {"site": "attn_scores", "knockout": True}),
        "writes.0.site: attn_scores needs `attention: eager` under `model`",
    ),
    "pattern in a run": (
        placed(
            W | {"set": {"patch": "r"}},
            runs={"r": {"prompt": "donor", "writes": [EDGES | {"site": "pattern", "set": 0.0}]}},
        ),
        "runs.r.writes.0.site: pattern needs `attention: eager`",
    ),
    "a head of a stream": (one(set={"patch": "donor", "head": 1}), "writes.0.set.head: site resid"),
    "no head": (one(set={"patch": "donor", "site": "z"}), "writes.0.set.head: a patch from site z"),
    "a layer of embed": (
        one(set={"patch": "donor", "site": "embed", "layer": 3}),
        "writes.0.set.layer: site embed takes no layer",
    ),
    "no layer": (
        placed(EMBED | {"set": {"patch": "donor", "site": "resid_post"}}),
        "writes.0.set.layer: a patch from site resid_post needs a layer",
    ),
    "neurons of a stream": (
        one(site="mlp_post", units=[3], set={"patch": "donor", "site": "resid_post"}),
        "writes.0.set.site: site resid_post has no units",
    ),
    "a stream from edges": (
        one(set={"patch": "text", "site": "pattern", "head": 0}),
        "writes.0.set.site: site resid_post takes no patch from pattern",
    ),
    "estimated logits": (
        placed(
            {"site": "logits", "position": "last", "set": 0.0},
            measures={"m": LOGIT, "slope": {"kind": "attribution", "of": "m"}},
        ),
        "writes.0: attribution estimates writes inside the model",
    ),
    "estimated where nothing is written": (
        one(add={"vector": {"unit": 1}})
        | {"measures": {"m": LOGIT, "slope": {"kind": "attribution", "of": "m"}}}
        | {"generate": {"max_new_tokens": 3, "writes_at": [1, 2]}},
        "measures.slope: attribution estimates what is written at the prompt, and ",
    ),
    "an estimated lens": (
        {"measures": {"m": LOGIT | {"lens": {}}, "slope": {"kind": "attribution", "of": "m"}}},
        "measures.slope.of: 'm' is read through a lens, which attribution does not estimate",
    ),
    "an estimated whole answer": (
        {"measures": {"m": WHOLE, "first": LOGIT, "slope": {"kind": "attribution", "of": "m"}}},
        "measures.slope.of: 'm' is read behind several tokens (tokens: sum), attribution takes one",
    ),
    "an estimate without a slope": (
        {"measures": {"m": LOGIT | {"kind": "rank"}, "slope": {"kind": "attribution", "of": "m"}}},
        "measures.slope.of: 'm' has no slope. Possible: none here",
    ),
    "an estimate in place without a slope": (
        {
            "measures": {
                "slope": {"kind": "attribution", "of": {"kind": "rank", "answer": "target"}}
            }
        },
        "measures.slope.of: rank has no slope",
    ),
    "an estimate of a divergence": (
        {"measures": {"slope": {"kind": "attribution", "of": {"kind": "kl"}}}},
        "measures.slope.of.kind: got 'kl', expected 'match', ",
    ),
    "an estimate of nobody's answer": (
        {"measures": {"slope": {"kind": "attribution", "of": LOGIT | {"answer": "third"}}}},
        "measures.slope.of: answer 'third' is not one of: ",
    ),
    "a unit below 0": (
        one(add={"vector": {"unit": -1}}),
        "writes.0.add.vector.unit: got -1, expected 0 or more",
    ),
    "a vector of neither kind": (
        one(add={"vector": {"plus": "text"}}),
        "writes.0.add.vector.plus: unknown key (value 'text'). Allowed: file, key, mean, minus, ",
    ),
    "a recovered divergence": (
        {"measures": {"m": {"kind": "kl"}, "fit": LOGIT, "r": {"kind": "recovery", "of": "m"}}},
        "measures.r.of: 'm' is no number of one run alone. Possible: fit",
    ),
    "no donor": (
        {"prompts": {key: v for key, v in document()["prompts"].items() if key != "donor"}},
        "prompts.donor: a write or measure reads the donor",
    ),
    "no run": (
        one(set={"patch": "path"}),
        "writes.0: patches from 'path', which is no run. Runs: ",
    ),
    "no axis": (one(layer="$x", set=0.0), "writes.0.layer: $x is no axis. Axes: none"),
    "an idle axis": (over({"x": [1]}, set=0.0), "axes.x: used by no write"),
    "twins": (
        over({"p": ["last", "end"]}, position="$p", set=0.0)
        | {"positions": {"subject": SUBJECT, "end": -1}},
        "are the same point. Remove one",
    ),
    "no vector file": (
        one(add={"vector": {"file": "none.safetensors"}}),
        "writes.0.add.vector.fil",
    ),
    "no such vector": (
        one(add={"vector": {"file": "vector.safetensors", "key": "v"}}),
        "writes.0.add.vector.key: vector.safetensors has no 'v'. Tensors: cube, vector",
    ),
    "a cube": (
        one(add={"vector": {"file": "vector.safetensors", "key": "cube"}}),
        "writes.0.add.vector.key: 'cube' has shape [2, 2, 2], expected [width] or [layers, width]",
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the prompt file and a vector file of the sweeps."""
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "prompts.csv", RECORDS)
    save_file({"vector": torch.ones(32), "cube": torch.ones(2, 2, 2)}, "vector.safetensors")
    return tmp_path


@pytest.mark.parametrize("name", WITHOUT_A_MODEL)
def test_what_needs_no_model_is_refused_by_validate(folder, name):
    change, said = WITHOUT_A_MODEL[name]
    file = folder / "example.yaml"
    file.write_text(yaml.safe_dump(document(**change)))
    with pytest.raises(UserError) as caught:
        validate(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert said in message
    assert message.isprintable()


@pytest.mark.parametrize(
    "change",
    [
        {},
        one(add={"vector": {"file": "vector.safetensors"}}),
        one(clamp={"low": 1, "high": 1}),
        over({"l": [0.0, 3.0], "h": [1.0, 4.0]}, clamp={"low": "$l", "high": "$h"})
        | {"exclude": [{"l": 3.0, "h": 1.0}]},
        over({"l": [0.0, 3.0], "h": [1.0, 4.0]}, clamp={"low": "$l", "high": "$h"})
        | {"zip": [["l", "h"]]},
    ],
)
def test_what_is_right_is_valid(folder, change):
    file = folder / "example.yaml"
    file.write_text(yaml.safe_dump(document(**change)))
    validate(file)


WITH_A_MODEL = {
    "a layer": (one(layer=30, set=0.0), "writes.0.layer: 30 is outside 0..3."),
    "layers": (one(layer=None, layers=[0, 30], set=0.0), "writes.0.layers: 30 is outside 0..3."),
    "heads": (
        placed(W | {"site": "z", "heads": [4], "set": 0.0}),
        "writes.0.heads: 4 is outside 0..3.",
    ),
    "neurons": (
        one(site="mlp_post", units=[3, 64], set=0.0),
        "writes.0.units: 64 is outside 0..63",
    ),
    "of a patch": (
        one(set={"patch": "donor", "layer": 30}),
        "writes.0.set.layer: 30 is outside 0..3.",
    ),
    "of a mix": (
        placed(HEAD | {"mix": {"source": {"patch": "donor", "head": 8}, "weight": 1}}),
        "writes.0.mix.source.head: 8 is outside 0..3.",
    ),
    "of a run": (
        placed(W | {"set": {"patch": "r"}}, runs={"r": RUN}),
        "runs.r.writes.1.layer: 9 is outside 0..3.",
    ),
    "an axis": ({"axes": {"layer": [0, 30]}}, "axes.layer: layer 30 is outside 0..3."),
    "a lens": (
        {"measures": {"m": {"kind": "entropy", "lens": {"layers": [0, 30]}}}},
        "measures.m.lens.layers: 30 is outside 0..3.",
    ),
    "a read layer": (
        {"measures": {"m": {"kind": "cosine", "read": {"site": "resid_post", "layer": 4}}}},
        "measures.m.read.layer: 4 is outside 0..3.",
    ),
    "a read head": (
        {"measures": {"m": {"kind": "cosine", "read": {"site": "z", "layer": 0, "head": 4}}}},
        "measures.m.read.head: 4 is outside 0..3.",
    ),
    "a component": (
        one(add={"vector": {"unit": 99}}),
        "writes.0.add.vector.unit: 99 is outside 0..31",
    ),
    "a width": (
        placed(EMBED | {"set": {"patch": "donor", "site": "z", "layer": 0, "head": 1}}),
        "writes.0.set: the patch reads 8 numbers a token at site z, the write takes 32.",
    ),
    "tokens": (
        {"positions": {"subject": SUBJECT, "two": {"last": 2}, "three": {"last": 3}}}
        | one(position="two", set={"patch": "donor", "position": "three"}),
        "writes.0.set: row row-0: three has 3 tokens, two 2.",
    ),
    "no partner": (
        {"positions": {"subject": SUBJECT, "whole": {"text": "base"}}, "on_bad_row": "exclude"}
        | one(position="whole", set={"resample": "text"}),
        "writes.0.set: row odd: no other row has 3 tokens at position whole to resample from.",
    ),
}


@pytest.mark.parametrize("name", WITH_A_MODEL)
def test_what_the_model_lacks_is_refused_with_its_key(tmp_path, name):
    change, said = WITH_A_MODEL[name]
    sweep = parse(Sweep, document(**change), "sweep.yaml")
    odd = RECORDS[0] | {"row_id": "odd", "base": "In Oslo we", "word": "Oslo", "source": "In Paris"}
    rows = rows_of(sweep, tmp_path, [*RECORDS, odd] if name == "no partner" else RECORDS)
    with pytest.raises(UserError) as caught:
        plan_of(sweep, rows)
    assert said in str(caught.value)


def test_a_site_that_the_family_lacks_is_refused_with_its_key(tmp_path):
    shape = model_of()["shape"]
    sites = {site: place for site, place in shape["sites"].items() if site != "mlp_out"}
    bare = model_of(shape=shape | {"sites": sites, "refused": {"mlp_out": "no MLP was found"}})
    read = {"m": {"kind": "cosine", "read": {"site": "mlp_out", "layer": 0}}}
    for change, where in (
        (one(site="mlp_out", set=0.0), "writes.0.site"),
        (one(set={"patch": "text", "site": "mlp_out"}), "writes.0.set.site"),
        (one(set=0.0) | {"measures": KL | read}, "measures.m.read.site"),
    ):
        sweep = parse(Sweep, document(**change), "sweep.yaml")
        with pytest.raises(UserError, match=f"^{where}: site mlp_out: no MLP was found in llama"):
            plan_of(sweep, rows_of(sweep, tmp_path), bare)


COMMANDS = ("", "validate", "explain", "model", "status", "gc", "ndif", "ndif serve")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_a_short_form(command):
    short, long = (CliRunner().invoke(app, [*command.split(), flag]) for flag in ("-h", "--help"))
    assert short.exit_code == 0
    assert "Usage: " in short.output
    assert short.output == long.output


def test_rows_named_by_a_column_that_is_not_there_are_refused(folder):
    """Without a name of its own the column may be missing; then rows have numbers."""
    asked = {"prompts": document()["prompts"] | {"row_id": "name"}}
    (folder / "example.yaml").write_text(yaml.safe_dump(document(**asked)))
    with pytest.raises(UserError, match=r"prompts\.csv: no column 'name'\. Columns: row_id, base"):
        validate(folder / "example.yaml")
