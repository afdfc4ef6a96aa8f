"""The vocabulary of sites and where each lives in each family.

A shape is plain data: sizes of a model, and for every site a module path, a side and a width.
It is found once, without weights, through nnterp's standard names; afterwards a plain path is all
that travels.
"""

from collections.abc import Mapping
from typing import Any

from nnsweep.errors import UserError

SHAPE_VERSION = 3
"""Raised whenever a shape says more or something else, so that models are described again."""

ORDER = (
    *("embed", "resid_pre", "q", "k", "v", "z", "attn_out", "mlp_out", "resid_post", "logits"),
)
"""Order in which one forward pass reaches the sites of a layer."""

DEFINITIONS = {
    "embed": "output of the token embedding module (before any position embedding)",
    "resid_pre": "residual stream entering a layer",
    "q": "output of the query projection, split by query head (before norm and rotary embedding)",
    "k": "output of the key projection, split by key-value head (before norm and rotary embedding)",
    "v": "output of the value projection, split by key-value head",
    "z": "input of the attention output projection, split by query head",
    "attn_out": "what attention adds to the residual stream (after a post-norm, if there is one)",
    "mlp_out": "what the MLP adds to the residual stream (after a post-norm, if there is one)",
    "resid_post": "residual stream leaving a layer",
    "logits": "next-token logits of the model (after a softcap, if there is one)",
}

PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense")
"""Names of the attention output projection, relative to the attention module."""

ATTENTION_ADDS = {
    "gemma2": "post_attention_layernorm",
    "gemma3": "post_attention_layernorm",
    "gemma3_text": "post_attention_layernorm",
    "olmo2": "post_attention_layernorm",
    "bloom": "self_attention.dense",
}
"""Families whose attention module's output is not what reaches the residual stream: post-norm
families norm it first, bloom's module adds the residual itself. Relative to the layer."""

MLP_ADDS = {
    "gemma2": "post_feedforward_layernorm",
    "gemma3": "post_feedforward_layernorm",
    "gemma3_text": "post_feedforward_layernorm",
    "olmo2": "post_feedforward_layernorm",
    "bloom": "mlp.dense_4h_to_h",
    "opt": "fc2",
}


JOINS = {
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox", "gptj", "opt", "olmo2"),
    *("falcon", "mixtral", "phi"),
}
"""Families whose layers take any number of rows, whatever number the mask and the position ids
have: points that skip different numbers of layers can share a pass. Bloom's layers do not, since
its position biases are made for each row before the first layer."""


PLAIN_HEADS = JOINS - {"gemma2"} | {"bloom"}
"""Families whose logits are what the output embedding returns, with no softcap or scale behind."""


def site_table(family: str, paths: Mapping[str, str | None], sizes: Mapping[str, int]) -> Any:
    """Where every site lives.

    Args:
        family: The config's model_type.
        paths: Module paths with `{layer}`: embed, layer, attn, mlp, projection, q, k, v (or None).
        sizes: hidden, vocab, heads and head_dim.

    Returns:
        (sites, refused): site -> {path, side, width}, and site -> reason for the others.
    """
    layer, hidden, wide = paths["layer"], sizes["hidden"], sizes["head_dim"]
    attention = f"{layer}.{ATTENTION_ADDS[family]}" if family in ATTENTION_ADDS else paths["attn"]
    mlp = f"{layer}.{MLP_ADDS[family]}" if family in MLP_ADDS else paths["mlp"]
    found = {
        "embed": (paths["embed"], "output", hidden),
        "resid_pre": (layer, "input", hidden),
        **{site: (paths[site], "output", wide) for site in ("q", "k", "v")},
        "z": (paths["projection"], "input", wide),
        "attn_out": (attention, "output", hidden),
        "mlp_out": (mlp, "output", hidden),
        "resid_post": (layer, "output", hidden),
        "logits": ("", "logits", sizes["vocab"]),
    }
    sites = {
        site: {"path": path, "side": side, "width": width}
        for site, (path, side, width) in found.items()
        if path is not None
    }
    fused = "no projection makes it alone"
    reasons = {"z": "no attention output projection was found", "mlp_out": "no MLP was found"}
    reasons |= {"q": fused, "k": fused, "v": fused}
    refused = {site: reasons.get(site, "no such module") for site in found if site not in sites}
    return sites, refused


def limits_of(shape: Mapping[str, Any]) -> dict[str, int]:
    """How many layers, query heads and key-value heads a model has."""
    return {"layer": shape["layers"], "head": shape["heads"], "kv_head": shape["kv_heads"]}


def tap(shape: Mapping[str, Any], site: str, layer: int | None, head: int | None) -> dict[str, Any]:
    """One place in the model as plain data.

    Returns:
        path and side of the module, order (layer, rank) in the forward pass, and the slice
        [low, high) of the last dimension.

    Raises:
        UserError: the family has no such site.
    """
    if site not in shape["sites"]:
        reason = shape["refused"].get(site, "unknown site")
        allowed = ", ".join(shape["sites"])
        raise UserError(f"site {site}: {reason} in {shape['family']}. Sites here: {allowed}.")
    if site == "resid_pre" and layer:
        # The same stream; what goes into a layer can hold all keys and values besides.
        return tap(shape, "resid_post", layer - 1, None) | {"order": [layer - 1, len(ORDER) - 1]}
    place = shape["sites"][site]
    low = 0 if head is None else head * place["width"]
    return {
        "path": place["path"].format(layer=layer),
        "side": place["side"],
        "order": [_layer_order(site, layer, shape["layers"]), ORDER.index(site)],
        "low": low,
        "high": low + place["width"],
    }


def _layer_order(site: str, layer: int | None, layers: int) -> int:
    if site == "embed":
        return -1
    return layers if layer is None else layer


def resumes_at(site: str, layer: int | None, layers: int) -> int:
    """How many leading layers a write at this site leaves untouched."""
    if site == "logits":
        return layers
    if layer is None:
        return 0
    return layer + 1 if site == "resid_post" else layer
