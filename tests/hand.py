"""A transformer of the Llama family, written by hand to be read: one prompt, no batch, no hooks.

Every activation that has a name in the sweep language is a variable here, and an edit is a function
applied to it before anything reads it. It shares no code with the package under test and none with
transformers but the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

Key = tuple[str, int | None]
"""A site and its layer; None for `embed`, `ln_final` and `logits`."""

Edits = Mapping[Key, Callable[[Tensor], Tensor]]


class Activations(dict[Key, Tensor]):
    """Every activation of one prompt, as it stands after the edits.

    Shapes: (tokens, width); `q`, `k`, `v`, `z` (tokens, heads, head width); `attn_scores` and
    `pattern` (heads, query tokens, key tokens); `logits` (tokens, vocabulary).
    """


class HandLlama:
    """The weights of one model and what its forward pass does with them."""

    def __init__(self, folder: str | Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.weights = {name: value.detach() for name, value in model.state_dict().items()}
        config = model.config
        self.layers = config.num_hidden_layers
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.hidden = config.hidden_size
        self.theta = config.rope_parameters["rope_theta"]
        self.epsilon = config.rms_norm_eps
        embedding = self.weights["model.embed_tokens.weight"]
        self.output = embedding if config.tie_word_embeddings else self.weights["lm_head.weight"]

    def run(self, ids: Sequence[int], edits: Edits | None = None, grad: bool = False) -> Any:
        """One forward pass; under `grad`, `.grad` of every activation is kept by a backward."""
        with torch.set_grad_enabled(grad):
            return _Pass(self, edits or {}, grad).forward(torch.tensor(list(ids)))

    def unembed(self, stream: Tensor) -> Tensor:
        """Final norm and output embedding on a residual stream: the logit lens."""
        return self.norm(stream, "model.norm.weight") @ self.output.T

    def norm(self, x: Tensor, weight: str) -> Tensor:
        """Divide by the root of the mean square, times a weight."""
        return self.weights[weight] * x / (x.pow(2).mean(-1, keepdim=True) + self.epsilon).sqrt()

    def rotate(self, x: Tensor) -> Tensor:
        """Turn the pairs (i, i + half) of (tokens, heads, width) by an angle of their token."""
        half = x.shape[-1] // 2
        speed = self.theta ** (-torch.arange(half).double() / half)
        angle = torch.arange(len(x)).double()[:, None] * speed
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        one, other = x[..., :half], x[..., half:]
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class _Pass:
    """One forward pass, which keeps every activation."""

    def __init__(self, model: HandLlama, edits: Edits, grad: bool) -> None:
        self.model, self.edits, self.grad = model, edits, grad
        self.found = Activations()

    def forward(self, ids: Tensor) -> Activations:
        """All layers, the final norm and the output embedding."""
        model = self.model
        embed = model.weights["model.embed_tokens.weight"][ids]
        stream = self.site("embed", None, embed.requires_grad_() if self.grad else embed)
        for layer in range(model.layers):
            stream = self.layer(layer, stream)
        ln_final = self.site("ln_final", None, model.norm(stream, "model.norm.weight"))
        self.site("logits", None, ln_final @ model.output.T)
        unknown = set(self.edits) - set(self.found)
        assert not unknown, f"no such place: {unknown}"
        return self.found

    def site(self, name: str, layer: int | None, value: Tensor) -> Tensor:
        """What the rest of the pass reads at a place."""
        edit = self.edits.get((name, layer))
        value = edit(value.clone()) if edit else value
        if self.grad:
            value = value * 1.0
            value.retain_grad()
        self.found[name, layer] = value
        return value

    def layer(self, layer: int, stream: Tensor) -> Tensor:
        """Attention and MLP, each behind its norm and added to the residual stream."""
        name = f"model.layers.{layer}."
        resid_pre = self.site("resid_pre", layer, stream)
        ln1 = self.model.norm(resid_pre, name + "input_layernorm.weight")
        attn_out = self.attention(layer, self.site("ln1", layer, ln1))
        resid_mid = self.site("resid_mid", layer, resid_pre + attn_out)
        ln2 = self.model.norm(resid_mid, name + "post_attention_layernorm.weight")
        mlp_out = self.mlp(layer, self.site("ln2", layer, ln2))
        return self.site("resid_post", layer, resid_mid + mlp_out)

    def attention(self, layer: int, x: Tensor) -> Tensor:
        """Grouped-query attention with a causal mask."""
        model, tokens = self.model, len(x)
        q = self.site("q", layer, self.project(layer, "self_attn.q_proj", x, model.heads))
        k = self.site("k", layer, self.project(layer, "self_attn.k_proj", x, model.kv_heads))
        v = self.site("v", layer, self.project(layer, "self_attn.v_proj", x, model.kv_heads))
        shared = [head * model.kv_heads // model.heads for head in range(model.heads)]
        turned, keys, values = model.rotate(q), model.rotate(k)[:, shared], v[:, shared]
        scores = torch.einsum("qhd,khd->hqk", turned, keys) / math.sqrt(model.head_dim)
        behind = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(behind, torch.finfo(torch.float32).min)
        scores = self.site("attn_scores", layer, scores)
        pattern = self.site("pattern", layer, scores.softmax(-1))
        z = self.site("z", layer, torch.einsum("hqk,khd->qhd", pattern, values))
        out = z.reshape(tokens, -1) @ self.weight(layer, "self_attn.o_proj").T
        return self.site("attn_out", layer, out)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """A gate, through SiLU, times a projection, projected back."""
        mlp_pre = self.site("mlp_pre", layer, x @ self.weight(layer, "mlp.gate_proj").T)
        up = x @ self.weight(layer, "mlp.up_proj").T
        mlp_post = self.site("mlp_post", layer, silu(mlp_pre) * up)
        return self.site("mlp_out", layer, mlp_post @ self.weight(layer, "mlp.down_proj").T)

    def project(self, layer: int, name: str, x: Tensor, heads: int) -> Tensor:
        """A projection, split by head: (tokens, heads, head width)."""
        return (x @ self.weight(layer, name).T).reshape(len(x), heads, -1)

    def weight(self, layer: int, name: str) -> Tensor:
        """The matrix of a projection."""
        return self.model.weights[f"model.layers.{layer}.{name}.weight"]
