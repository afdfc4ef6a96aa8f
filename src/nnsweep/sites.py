"""The vocabulary of sites and where each lives in each family.

A shape is plain data: sizes of a model, and for every site a module path, a side and a width.
It is found once, without weights, through nnterp's standard names; afterwards a plain path is all
that travels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nnsweep.errors import UserError

SHAPE_VERSION = 5
"""Raised whenever a shape says more or something else, so that models are described again."""

ORDER = (
    *("embed", "resid_pre", "ln1", "q", "k", "v", "attn_scores", "pattern", "z", "attn_out"),
    *("resid_mid", "ln2", "mlp_pre", "mlp_post", "mlp_out", "resid_post", "ln_final", "logits"),
)
"""Order in which one forward pass reaches the sites of a layer."""

DEFINITIONS = {
    "embed": "output of the token embedding module (before any position embedding)",
    "resid_pre": "residual stream entering a layer",
    "ln1": "output of the norm before attention (with its weight and bias)",
    "q": "output of the query projection, split by query head (before norm and rotary embedding)",
    "k": "output of the key projection, split by key-value head (before norm and rotary embedding)",
    "v": "output of the value projection, split by key-value head",
    "attn_scores": "what the softmax of attention reads, mask included: (query head, query, key)",
    "pattern": "what the softmax of attention returns: (query head, query token, key token)",
    "z": "input of the attention output projection, split by query head",
    "attn_out": "what attention adds to the residual stream (after a post-norm, if there is one)",
    "resid_mid": "residual stream between attention and MLP",
    "ln2": "output of the norm before the MLP (with its weight and bias)",
    "mlp_pre": "neurons of the MLP before the activation function (of a gated MLP, the gate's)",
    "mlp_post": "neurons of the MLP as the down projection reads them",
    "mlp_out": "what the MLP adds to the residual stream (after a post-norm, if there is one)",
    "resid_post": "residual stream leaving a layer",
    "ln_final": "output of the norm before the output embedding",
    "logits": "next-token logits of the model (after a softcap, if there is one)",
}

EDGES = ("attn_scores", "pattern")
"""Sites with one number for each head, query token and key token."""

SOFTMAX = {
    "gptj": "self__attn_0.source.nn_functional_softmax_0",
    "bloom": "F_softmax_0",
    "falcon": "F_softmax_0",
}
"""Where the softmax of attention stands in the source of the attention module, by nnsight's names
for the operations of a function."""

SHARED_SOFTMAX = "attention_interface_1.source.nn_functional_softmax_0"
"""The same in families that use the attention functions of transformers."""

ATTENTION_NORMS = ("input_layernorm", "ln_1", "self_attn_layer_norm", "ln_attn")
"""Names of the norm before attention, relative to the layer."""

MLP_NORMS = (
    *("pre_feedforward_layernorm", "ln_2", "post_attention_layernorm", "final_layer_norm"),
)
"""Names of the norm before the MLP, relative to the layer; the first that is there."""

UP = ("gate_proj", "c_fc", "dense_h_to_4h", "fc_in", "fc1")
"""Names of the projection that makes the neurons, relative to the MLP."""

DOWN = ("down_proj", "c_proj", "dense_4h_to_h", "fc_out", "fc2")
"""Names of the projection that reads the neurons, relative to the MLP."""

POST_NORMED = ("olmo2",)
"""Families whose layers norm what attention and MLP return, and not what they read."""

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

LENS_FAMILIES = PLAIN_HEADS | {"gemma2"}
"""Families whose logits are the final norm, the output embedding and at most a softcap."""

REASONS = {
    **dict.fromkeys("qkv", "no projection makes it alone"),
    "z": "no attention output projection was found",
    "mlp_out": "no MLP was found",
    "ln1": "no norm stands before attention",
    "ln2": "no norm of its own stands before the MLP",
    "resid_mid": "attention and MLP read the same stream",
    "mlp_pre": "no projection of the MLP makes the neurons alone",
    "mlp_post": "no projection of the MLP reads the neurons alone",
    "ln_final": "no final norm was found",
    **dict.fromkeys(EDGES, "it needs `attention: eager` under `model`"),
}
"""Why a family has no such site."""


def site_table(family: str, paths: Mapping[str, str | None], sizes: Mapping[str, int]) -> Any:
    """Where every site lives.

    Args:
        family: The config's model_type.
        paths: Module paths with `{layer}`: embed, layer, attn, mlp, projection, q, k, v, ln1, ln2,
            mid (what reads the stream between attention and MLP), up, down, softmax, ln_final; None
            for those that the model does not have.
        sizes: hidden, vocab, heads, head_dim and neurons.

    Returns:
        (sites, refused): site -> {path, side, width}, and site -> reason for the others.
    """
    layer, hidden, wide = paths["layer"], sizes["hidden"], sizes["head_dim"]
    attention = f"{layer}.{ATTENTION_ADDS[family]}" if family in ATTENTION_ADDS else paths["attn"]
    mlp = f"{layer}.{MLP_ADDS[family]}" if family in MLP_ADDS else paths["mlp"]
    found = {
        "embed": (paths["embed"], "output", hidden),
        "resid_pre": (layer, "input", hidden),
        "ln1": (paths["ln1"], "output", hidden),
        **{site: (paths[site], "output", wide) for site in ("q", "k", "v")},
        "attn_scores": (paths["softmax"], "input", 1),
        "pattern": (paths["softmax"], "output", 1),
        "z": (paths["projection"], "input", wide),
        "attn_out": (attention, "output", hidden),
        "resid_mid": (paths["mid"], "input", hidden),
        "ln2": (paths["ln2"], "output", hidden),
        "mlp_pre": (paths["up"], "output", sizes["neurons"]),
        "mlp_post": (paths["down"], "input", sizes["neurons"]),
        "mlp_out": (mlp, "output", hidden),
        "resid_post": (layer, "output", hidden),
        "ln_final": (paths["ln_final"], "output", hidden),
        "logits": ("", "logits", sizes["vocab"]),
    }
    sites = {
        site: {"path": path, "side": side, "width": width}
        for site, (path, side, width) in found.items()
        if path is not None
    }
    refused = {site: REASONS.get(site, "no such module") for site in found if site not in sites}
    return sites, refused


def limits_of(shape: Mapping[str, Any]) -> dict[str, int]:
    """How many layers, query heads, key-value heads and neurons a layer a model has, if any."""
    names = {"layer": "layers", "head": "heads", "kv_head": "kv_heads", "unit": "neurons"}
    return {name: shape[size] for name, size in names.items() if shape[size]}


def require_site(shape: Mapping[str, Any], site: str, path: str) -> None:
    """Refuse a site that the family does not have; `path` is the key in the sweep file."""
    if site not in shape["sites"]:
        reason = shape["refused"].get(site, "unknown site")
        allowed, at = ", ".join(shape["sites"]), f"{path}: " if path else ""
        raise UserError(f"{at}site {site}: {reason} in {shape['family']}. Sites here: {allowed}.")


def tap(
    shape: Mapping[str, Any],
    site: str,
    layer: int | None,
    head: int | None = None,
    units: Sequence[int] | None = None,
) -> dict[str, Any]:
    """One place in the model as plain data.

    Returns:
        path and side of the module; order (layer, rank) in the forward pass; the slice [low, high)
        of the last dimension, or `units` of it; of `attn_scores` and `pattern`, `edges` and the
        slice of heads; of `resid_mid`, `carry`, the place where a write joins the stream again.

    Raises:
        UserError: the family has no such site.
    """
    require_site(shape, site, "")
    if site == "resid_pre" and layer:
        # The same stream; what goes into a layer can hold all keys and values besides.
        rank = ORDER.index("resid_post")
        return tap(shape, "resid_post", layer - 1) | {"order": [layer - 1, rank]}
    place = shape["sites"][site]
    low = 0 if head is None else head * place["width"]
    found = {
        "path": place["path"].format(layer=layer),
        "side": place["side"],
        "order": [_layer_order(site, layer, shape["layers"]), ORDER.index(site)],
        "low": low,
        "high": low + place["width"],
    }
    if units is not None:
        found["units"] = list(units)
    if site in EDGES:
        found["edges"] = True
    if site == "resid_mid":
        # Its reader, a norm or an MLP, is not all that goes on with the stream.
        found["carry"] = tap(shape, "resid_post", layer) | {
            "order": [layer, ORDER.index("resid_post") - 0.5]
        }
    return found


def _layer_order(site: str, layer: int | None, layers: int) -> int:
    if site == "embed":
        return -1
    return layers if layer is None else layer


def resumes_at(site: str, layer: int | None, layers: int) -> int:
    """How many leading layers a write at this site leaves untouched."""
    if site in ("logits", "ln_final"):
        return layers
    if layer is None:
        return 0
    return layer + 1 if site == "resid_post" else layer
