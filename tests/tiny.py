"""Tiny models with random weights, one per family, saved to a folder beside a real tokenizer.

Weights are larger than a fresh initialisation makes them, so that every write moves the logits by
much more than the tolerance of any comparison.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

LAYERS = 4
VOCAB = 49152
WINDOW = 6
SPECIAL = ("bos", "eos", "pad")

GROUPED = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
WHOLE = {key: value for key, value in GROUPED.items() if key != "num_key_value_heads"}
SMALL_GPT = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "gpt2": SMALL_GPT,
    "gpt_neox": WHOLE,
    "gemma2": GROUPED | {"head_dim": 16, "sliding_window": WINDOW},
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"hidden_size": 64, "head_dim": 32},
    "mistral": GROUPED | {"sliding_window": WINDOW},
    "phi": WHOLE,
    "opt": {
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
    },
    "gptj": SMALL_GPT | {"rotary_dim": 4},
    "olmo2": GROUPED,
    "bloom": {"hidden_size": 32, "n_layer": LAYERS, "n_head": 4},
    "falcon": {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4},
    "mixtral": GROUPED | {"num_local_experts": 4},
}
"""The configuration of each family. Mistral and Gemma 2 look back WINDOW tokens only, fewer than
some of the tests' prompts have; Qwen 3 has heads wider than hidden / heads."""

NO_SDPA = ("gptj", "bloom")
"""Families for which transformers has no `sdpa` attention."""


def attention_of(family: str) -> str:
    """The attention implementation that a family is tested with unless told otherwise."""
    return "eager" if family in NO_SDPA else "sdpa"


def save_tiny(family: str, folder: Path, tokenizer: Any, **changes: Any) -> Path:
    """Write a tiny model of a family and the tokenizer to `folder`."""
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in SPECIAL}
    plain = FAMILIES[family] | tokens | changes
    config = AutoConfig.for_model(family, vocab_size=VOCAB, **plain)
    torch.manual_seed(sum(map(ord, family)))
    model = AutoModelForCausalLM.from_config(config)
    _enlarge(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def _enlarge(model: torch.nn.Module) -> None:
    """Draw matrices with a standard deviation of 0.3; leave norms and biases near their start."""
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim >= 2:
            parameter.normal_(0.0, 0.3)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        assert torch.isfinite(parameter).all(), name
