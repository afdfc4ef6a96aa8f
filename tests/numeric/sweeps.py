"""The sweeps that every family is put through: each site, each write, each kind of position."""

from pathlib import Path
from typing import Any

import torch
from harness import SUBJECT, sweep_of
from safetensors.torch import save_file

from nnsweep.sweep import Sweep
from nnsweep.sweep_words import HEADED

PLACES = ["subject", "last"]
LAYERED = ("resid_pre", "resid_post", "attn_out", "mlp_out")


def layered(site: str, layers: Any = "all", places: Any = PLACES, **write: Any) -> Sweep:
    """One write at a site of some layers, at the subject and at the last token."""
    axes: dict[str, Any] = {"layer": layers, "position": places}
    if site in HEADED:
        axes["head"] = [0, 3] if site in "qz" else [0, 1]
        write["head"] = "$head"
    place = {"site": site, "layer": "$layer", "position": "$position"}
    return sweep_of(axes=axes, writes=[place | write])


def write_vector(folder: Path, layers: int, width: int) -> str:
    """A file with one direction a layer."""
    torch.manual_seed(7)
    path = folder / "vector.safetensors"
    save_file({"vector": torch.randn(layers, width)}, path)
    return str(path)


def _steered(vector: dict[str, str]) -> dict[str, Any]:
    return {"add": {"vector": vector, "scale": "$scale"}}


def _scaled(site: str, vector: dict[str, str], position: str) -> Sweep:
    place = {"site": site, "layer": "$layer", "position": position}
    axes = {"layer": [0, 2], "scale": [-2, 0.5]}
    return sweep_of(axes=axes, writes=[place | _steered(vector)])


NOISE = {"site": "embed", "position": "subject", "noise": {"std": 1.0, "seed": 3}}
DIFFERENCE = {"mean": "donor", "minus": "text"}


def _several() -> list[dict[str, Any]]:
    """Writes at six places of one pass, out of their order in the forward pass."""
    return [
        {"site": "mlp_out", "layer": "$layer", "position": "last", "set": 0.0},
        {"site": "z", "layer": "$layer", "head": 2, "position": "subject", "set": "donor"},
        {"site": "z", "layer": "$layer", "head": 1, "position": "last", "set": 0.5},
        {"site": "resid_post", "layer": 3, "position": "second", "noise": {"std": 0.5}},
        {"site": "resid_pre", "layer": "$layer", "position": "last", "noise": {"std": 0.5}},
        {"site": "attn_out", "layer": 3, "position": "all", "set": 0.0},
    ]


def _twice() -> list[dict[str, Any]]:
    """Two writes at one place: the second acts on what the first left."""
    place = {"site": "resid_post", "layer": "$layer", "position": "last"}
    return [place | {"set": 0.25}, place | {"noise": {"std": 1.0}}]


def exact_sweeps() -> dict[str, Sweep]:
    """Sweeps whose values are the same bits however a pass is cut."""
    patched = {"site": "resid_post", "layer": "$layer", "position": "last", "set": "donor"}
    early = {"site": "resid_pre", "layer": "$layer", "position": "$position", "set": 1.0}
    logits = {"site": "logits", "position": "$position", "set": 1.5}
    return {
        "patch resid_post": layered("resid_post", set="donor"),
        "patch attn_out": layered("attn_out", [0, 2], set="donor"),
        "patch resid_pre": layered("resid_pre", [0, 2], set="donor"),
        "patch mlp_out": layered("mlp_out", [1, 3], set="donor"),
        "patch z": layered("z", [2], set="donor"),
        "patch embed": sweep_of(
            axes={"position": [*PLACES, "all"]},
            writes=[{"site": "embed", "position": "$position", "set": "donor"}],
        ),
        "zero": layered("attn_out", [0, 2], set=0.0),
        "zero z": layered("z", [1], ["last"], set=0.0),
        "zero whole": layered("mlp_out", [0, 2], ["all"], set=0.0),
        "noise": sweep_of(
            axes={"loudness": [0.5, 2.0]}, writes=[NOISE | {"noise": {"std": "$loudness"}}]
        ),
        "noise z": layered("z", [1], ["subject"], noise={"std": 3.0, "seed": 1}),
        "corrupt and restore": sweep_of(axes={"layer": "all"}, writes=[NOISE, patched]),
        "several": sweep_of(axes={"layer": [1, 2]}, writes=_several()),
        "mix": sweep_of(
            axes={"layer": [0, 2], "weight": [-1, 0.25, 1]},
            writes=[patched | {"set": None, "mix": {"source": "donor", "weight": "$weight"}}],
        ),
        "clamp": sweep_of(
            axes={"layer": [0, 2], "bound": [0.0, 0.25]},
            writes=[patched | {"set": None, "position": "subject", "clamp": {"high": "$bound"}}],
        ),
        "twice": sweep_of(axes={"layer": [0, 3]}, writes=_twice()),
        "measured early": sweep_of(
            axes={"layer": [0, 2], "position": ["second", *PLACES]},
            writes=[early],
            measure_at="subject",
        ),
        "patch logits": sweep_of(writes=[{"site": "logits", "position": "last", "set": "donor"}]),
        "set logits": sweep_of(axes={"position": [*PLACES, "all"]}, writes=[logits]),
        "behaviour": sweep_of(writes=[]),
    }


def projection_sweeps() -> dict[str, Sweep]:
    """Sweeps over queries, keys and values, for families that make them apart."""
    return {
        "patch q": layered("q", [0, 2], ["subject", "last"], set="donor"),
        "patch k": layered("k", [0, 2], ["subject", "last"], set="donor"),
        "patch v": layered("v", "all", ["subject"], set="donor"),
        "zero v": layered("v", [1], ["all"], set=0.0),
    }


def mean_sweeps(vector: str) -> dict[str, Sweep]:
    """Sweeps over means and vectors; engines may add up a mean in another order."""
    return {
        "mean": layered("resid_post", [0, 2], set={"mean": "text"}),
        "mix mean": layered("resid_post", [0, 2], mix={"source": {"mean": "text"}, "weight": 0.5}),
        "mean z": layered("z", [1], ["subject"], set={"mean": "donor"}),
        "mean difference": _scaled("resid_pre", DIFFERENCE, "last"),
        "vector": _scaled("mlp_out", {"file": vector}, "subject"),
    }


LENS = {"kind": "logit_diff", "answers": ["target", "foil"], "lens": {"layers": "all"}}
WATCHED = {
    "kl": {"kind": "kl"},
    "rank": {"kind": "rank", "answer": "foil"},
    "lens": LENS,
    "lens_kl": {"kind": "kl", "lens": {"layers": [1, 3], "position": "subject"}},
    "entering": {"kind": "entropy", "lens": {"site": "resid_pre", "layers": [0, 2]}},
    "cosine": {"kind": "cosine", "read": {"site": "resid_post", "layer": 2, "position": "subject"}},
    "like_donor": {
        "kind": "cosine",
        "read": {"site": "attn_out", "layer": 1, "position": "last"},
        "against": "donor",
    },
    "neurons": {"kind": "cosine", "read": {"site": "ln_final", "position": "last"}},
}
"""Measures that read the inside of the model."""


FEW = {name: WATCHED[name] for name in ("kl", "cosine")} | {
    "logit_diff": {"kind": "logit_diff", "answers": ["target", "foil"]},
    "prob": {"kind": "prob", "answer": "target"},
}


def watched(axes: Any, *writes: Any, **more: Any) -> Sweep:
    """Writes under measures of the inside."""
    return sweep_of(axes=axes, writes=list(writes), measures=WATCHED, **more)


def moved(axes: Any, *writes: Any, **more: Any) -> Sweep:
    """Writes under a few measures."""
    return sweep_of(axes=axes, writes=list(writes), measures=FEW, **more)


RESID = {"site": "resid_post", "layer": "$layer", "position": "last"}
SENDER = {"site": "z", "layer": 1, "head": 2, "position": "last", "set": "donor"}
FROZEN = {
    **{"site": "z", "layers": "all", "heads": "all", "position": "last"},
    "set": {"patch": "text"},
}
CORRUPTED = {"site": "embed", "position": "subject", "noise": {"std": 1.0, "seed": 5}}
LAYER = {"layer": [0, 2, 3]}


def place_sweeps() -> dict[str, Sweep]:
    """Sweeps over sites that not every family has."""
    return {
        "ln1": moved(LAYER, RESID | {"site": "ln1", "set": "donor"}),
        "ln2": moved(LAYER, RESID | {"site": "ln2", "set": "donor"}),
        "ln_final": moved({}, {"site": "ln_final", "position": "last", "set": 0.5}),
        "resid_mid": watched(
            {"layer": "all", "position": PLACES},
            RESID | {"site": "resid_mid", "position": "$position", "set": "donor"},
        ),
        "resid_mid and behind it": watched(
            {"layer": [1, 2]},
            RESID | {"site": "resid_mid", "noise": {"std": 0.5}},
            RESID | {"site": "mlp_out", "set": 0.1},
            RESID | {"mix": {"source": "donor", "weight": 0.5}},
        ),
        "mlp_pre": moved(LAYER, RESID | {"site": "mlp_pre", "set": "donor"}),
        "neurons": moved(
            {"layer": [0, 2], "unit": [0, 5, 63]},
            RESID | {"site": "mlp_post", "units": "$unit", "set": 3.0},
        ),
        "some neurons": moved(
            {"layer": [0, 2]},
            RESID | {"site": "mlp_post", "units": [3, 1, 40], "set": "donor"},
        ),
    }


def write_sweeps(vector: str) -> dict[str, Sweep]:
    """Sweeps over kinds of writes."""
    noisy = {"prompt": "text", "writes": [CORRUPTED]}
    path = {"prompt": "text", "writes": [FROZEN, SENDER]}
    odd = {"prompt": "donor", "writes": [RESID | {"layer": 0, "set": 0.5}]}
    return {
        "several layers": moved(
            {}, {"site": "mlp_out", "layers": [0, 3], "position": "all", "set": 0.0}
        ),
        "several heads": moved(LAYER, RESID | {"site": "z", "heads": [0, 3], "set": "donor"}),
        "every head": moved(LAYER, RESID | {"site": "z", "heads": "all", "set": 0.0}),
        "noise on heads": moved(
            {"layer": [0, 2]}, RESID | {"site": "z", "heads": "all", "noise": {"std": 1.0}}
        ),
        "another layer": moved(LAYER, RESID | {"set": {"patch": "donor", "layer": 1}}),
        "another place": moved(
            LAYER, RESID | {"set": {"patch": "text", "site": "embed", "position": "second"}}
        ),
        "renormalize": moved(
            {"layer": [0, 2], "scale": [1.0, 4.0]},
            RESID | {"add": {"vector": {"unit": 3}, "scale": "$scale"}},
            RESID | {"renormalize": "text"},
        ),
        "renormalize like the donor": moved(LAYER, RESID | {"renormalize": "donor"}),
        "renormalize to a length": moved(
            {"length": [0.0, 2]}, RESID | {"layer": 1, "renormalize": "$length"}
        ),
        "unit length": moved(
            {"layer": [0, 2]}, RESID | {"add": {"vector": DIFFERENCE | {"normalize": True}}}
        ),
        "file of unit length": moved(
            {"layer": [0, 2]}, RESID | {"add": {"vector": {"file": vector, "normalize": True}}}
        ),
        "mean per token": moved(
            LAYER,
            RESID | {"set": {"mean": "text", "per_token": True}},
            positions={"subject": SUBJECT_END},
        ),
        "resample": moved(
            {"layer": [0, 2], "seed": [0, 1]},
            RESID | {"set": {"resample": "donor", "seed": "$seed"}},
        ),
        "patch from noise": moved(
            LAYER, RESID | {"set": {"patch": "noisy"}}, runs={"noisy": noisy}
        ),
        "path": watched(LAYER, RESID | {"set": {"patch": "path"}}, runs={"path": path}),
        "donor under writes": moved(
            {"layer": [1, 2]},
            RESID | {"mix": {"source": {"patch": "odd"}, "weight": 0.7}},
            runs={"odd": odd},
        ),
    }


def aligned(align: str) -> Sweep:
    """A word of the prompt and the whole donor prompt, which meet as declared."""
    whole = {"text": "word", "donor_text": "source", "align": align}
    place = {"site": "resid_post", "layer": "$layer", "position": "subject", "set": "donor"}
    return moved(LAYER, place, positions={"subject": whole, "second": 1})


def position_sweeps() -> dict[str, Sweep]:
    """Sweeps over kinds of positions."""
    several = {"both": ["second", -1], "end": {"last": 2}, "middle": {"span": [1, 3]}}
    named = {"subject": SUBJECT, "second": 1} | several
    places = [*several, "last"]
    return {
        **{f"aligned {align}": aligned(align) for align in ("first", "last", "mean")},
        "several": moved(
            {"layer": [0, 2], "position": places},
            RESID | {"position": "$position", "set": 0.5},
            positions=named,
        ),
        "several patched": moved(
            {"layer": [0, 2], "position": ["end", "both"]},
            RESID | {"site": "attn_out", "position": "$position", "set": "donor"},
            positions=named,
        ),
    }


SUBJECT_END = {"text": "word", "donor_text": "source_word", "token": "last"}
ESTIMATED = {
    "logit_diff": {"kind": "logit_diff", "answers": ["target", "foil"]},
    "kl": {"kind": "kl"},
    "slope": {"kind": "attribution", "of": "logit_diff"},
    "slope_prob": {"kind": "attribution", "of": "prob"},
    "prob": {"kind": "prob", "answer": "target"},
}


def estimated(axes: Any, *writes: Any, **more: Any) -> Sweep:
    """Writes whose effect is estimated from gradients, too."""
    return sweep_of(axes=axes, writes=list(writes), measures=ESTIMATED, **more)


def generating(writes_at: Any, axes: Any, *writes: Any, **more: Any) -> Sweep:
    """Writes under which every prompt is continued by five tokens."""
    how = {"max_new_tokens": 5, "writes_at": writes_at}
    return sweep_of(axes=axes, writes=list(writes), measures=FEW, generate=how, **more)


STEERED = RESID | {"add": {"vector": {"unit": 3}, "scale": 8.0}}


def generation_sweeps() -> dict[str, Sweep]:
    """Sweeps that generate."""
    return {
        "at the prompt": generating("prompt", LAYER, RESID | {"set": "donor"}),
        "at every step": generating("all", LAYER, STEERED),
        "at one step": generating([2], LAYER, STEERED),
        "at the prompt and later": generating(
            [0, 3], LAYER, STEERED, RESID | {"clamp": {"high": 1.0}}
        ),
        "inside a layer": generating(
            "all",
            {"layer": [1, 2]},
            RESID | {"site": "mlp_out", "set": 0.0},
            RESID | {"site": "z", "head": 1, "set": {"mean": "text"}},
            RESID | {"mix": {"source": {"mean": "donor"}, "weight": 0.5}},
        ),
        "without writes": generating("prompt", {}),
    }


STEPS = {"prompt": "prompt", "all": "all", "first": [0], "later": [2], "both": [0, 2]}
"""Each kind of `writes_at`."""


def watched_generation(writes_at: Any) -> Sweep:
    """Lens and cosine beside five new tokens: at the measured, and at an earlier token."""
    how = {"max_new_tokens": 5, "writes_at": writes_at} if writes_at else None
    axes = {"layer": [0, 2], "position": ["second", "last"]}
    return watched(axes, STEERED | {"position": "$position"}, generate=how)


WHOLE_ANSWERS = {
    "kl": {"kind": "kl"},
    "first": {"kind": "log_prob", "answer": "foil"},
    "whole": {"kind": "log_prob", "answer": "target", "tokens": "sum"},
    "loss": {"kind": "cross_entropy", "answer": "foil", "tokens": "sum"},
    "long": {"kind": "prob", "answer": "long", "tokens": "sum"},
}


def answered(axes: Any, *writes: Any, **more: Any) -> Sweep:
    """Answers of one and of several tokens; the donor's first prompt is one of them."""
    prompts = {"file": "unused", "text": "base", "donor": "source"}
    answers = {"target": "source_word", "foil": "base_answer", "long": "word"}
    how = {"measures": WHOLE_ANSWERS, "prompts": prompts | {"answers": answers}} | more
    return sweep_of(axes=axes, writes=list(writes), **how)


def answer_sweeps() -> dict[str, Sweep]:
    """Sweeps with answers of several tokens."""
    return {
        "patched": answered(
            {"layer": "all", "position": PLACES}, RESID | {"position": "$position", "set": "donor"}
        ),
        "steered": answered(LAYER, STEERED, RESID | {"site": "mlp_out", "set": 0.0}),
        "generated": answered(LAYER, STEERED, generate={"max_new_tokens": 3}),
        "without writes": answered({}),
    }


RECOVERED = {
    "kl": {"kind": "kl"},
    "lens": LENS,
    "of_lens": {"kind": "recovery", "of": "lens", "min_gap": 0.5},
    "at_subject": {"kind": "entropy", "lens": {"layers": [1, 3], "position": "subject"}},
    "of_subject": {"kind": "recovery", "of": "at_subject", "min_gap": 0.05},
}
RECOVERED_SUMS = {
    "of_whole": {"kind": "recovery", "of": "whole", "min_gap": 0.5},
    "of_loss": {"kind": "recovery", "of": "loss", "min_gap": 0.5},
}


def recovery_sweeps() -> dict[str, Sweep]:
    """Recovery of a lens, layer by layer, and of whole answers."""
    part = RESID | {"position": "$position", "mix": {"source": "donor", "weight": 0.6}}
    axes = {"layer": [0, 2], "position": PLACES}
    sums = WHOLE_ANSWERS | RECOVERED_SUMS
    inside = {"inside": {"kind": "entropy", "lens": {"layers": [2]}}}
    both = sums | inside | {"of_inside": {"kind": "recovery", "of": "inside", "min_gap": 0.05}}
    return {
        "lens": sweep_of(axes=axes, writes=[part], measures=RECOVERED),
        "whole answers": answered(axes, part, measures=sums),
        "both while generating": answered(
            axes, part, measures=both, generate={"max_new_tokens": 2}
        ),
    }


def estimate_sweeps() -> dict[str, Sweep]:
    """Sweeps of attribution patching."""
    noisy = {"prompt": "text", "writes": [CORRUPTED]}
    return {
        "stream": estimated(
            {"layer": "all", "position": PLACES}, RESID | {"position": "$position", "set": "donor"}
        ),
        "heads": estimated(EDGE, RESID | {"site": "z", "head": "$head", "set": "donor"}),
        "attention": estimated(LAYER, RESID | {"site": "attn_out", "set": "donor"}),
        "neurons": estimated({"layer": [1, 2]}, RESID | {"site": "mlp_out", "set": 0.0}),
        "embed": estimated({}, {"site": "embed", "position": "subject", "set": "donor"}),
        "twice": estimated(
            {"layer": [0, 2]},
            RESID | {"add": {"vector": {"unit": 2}, "scale": 1.5}},
            RESID | {"renormalize": "text"},
            RESID | {"site": "attn_out", "set": {"patch": "noisy"}},
            runs={"noisy": noisy},
        ),
    }


EDGE = {"layer": [0, 2], "head": [0, 3]}
ATTENTION = {"layer": "$layer", "head": "$head", "position": "last"}


def attention_sweeps() -> dict[str, Sweep]:
    """Sweeps over attention, which need its eager implementation."""
    return {
        "knockout": moved(
            EDGE, ATTENTION | {"site": "attn_scores", "keys": "subject", "knockout": True}
        ),
        "knockout everywhere": moved(
            {},
            {"site": "attn_scores", "layers": "all", "heads": "all", "position": "last"}
            | {"keys": "subject", "knockout": True},
        ),
        "pattern": moved(EDGE, ATTENTION | {"site": "pattern", "keys": "subject", "set": "donor"}),
        "whole pattern": moved(EDGE, ATTENTION | {"site": "pattern", "set": 0.1}),
        "scores": moved(
            EDGE, ATTENTION | {"site": "attn_scores", "keys": "subject", "clamp": {"low": 2.0}}
        ),
        "both": watched(
            EDGE,
            ATTENTION | {"site": "attn_scores", "keys": "second", "knockout": True},
            ATTENTION | {"site": "pattern", "keys": "subject", "set": 0.7},
            RESID | {"set": 0.25},
        ),
    }
