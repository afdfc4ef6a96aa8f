"""The sweeps that every family is put through: each site, each write, each kind of position."""

from pathlib import Path
from typing import Any

import torch
from harness import sweep_of
from safetensors.torch import save_file

from nnsweep.sweep import HEADED, Sweep

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
