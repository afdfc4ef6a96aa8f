"""Compute interventions in plain PyTorch, as an independent check of every other path.

Written for the Llama family (`model.model.layers`), to be read rather than to be fast: one prompt a
forward pass, no batch, no padding, forward hooks only, float32. It shares no code with the package
under test. Positions count the tokens of one unpadded prompt; negative ones count from its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

Logits = Tensor | NDArray[np.floating]
Edit = Callable[[Tensor], Tensor]


# --- the model and its places ---------------------------------------------------------------------


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """Return the token ids of one text, shape (1, tokens)."""
    return torch.tensor([tokenizer(text)["input_ids"]])


def answer_id(tokenizer: PreTrainedTokenizerBase, answer: str) -> int:
    """Return the id of the token that is a space and the answer; refuse more than one."""
    ids = tokenizer(" " + answer, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"answer {answer!r} has {len(ids)} tokens, not one")
    return ids[0]


def span_positions(tokenizer: PreTrainedTokenizerBase, prompt: str, text: str) -> list[int]:
    """Return the positions of the tokens that overlap the only occurrence of a text in a prompt."""
    if prompt.count(text) != 1:
        raise ValueError(f"{text!r} occurs {prompt.count(text)} times in {prompt!r}, not once")
    start = prompt.index(text)
    stop = start + len(text)
    offsets = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    return [i for i, (first, end) in enumerate(offsets) if first < stop and end > start]


def decoder_layer(model: PreTrainedModel, layer: int) -> nn.Module:
    """Return one decoder layer; its output is the residual stream after it."""
    return model.get_submodule(f"model.layers.{layer}")


def output_projection(model: PreTrainedModel, layer: int) -> nn.Module:
    """Return the attention's output projection; its input holds the heads' results side by side."""
    return model.get_submodule(f"model.layers.{layer}.self_attn.o_proj")


def head_slice(model: PreTrainedModel, layer: int, head: int) -> slice:
    """Return where one head lies in the input of the output projection."""
    heads = model.config.num_attention_heads
    if not 0 <= head < heads:
        raise IndexError(f"head {head} is not in 0..{heads - 1}")
    width = output_projection(model, layer).in_features // heads
    return slice(head * width, (head + 1) * width)


# --- hooks ----------------------------------------------------------------------------------------


@contextmanager
def edited_output(module: nn.Module, edit: Edit) -> Iterator[None]:
    """Replace a module's output (1, tokens, hidden) by what `edit` makes of a copy of it."""

    def hook(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> Tensor | tuple:
        if isinstance(output, tuple):
            return (edit(output[0].clone()), *output[1:])
        return edit(output.clone())

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def edited_input(module: nn.Module, edit: Edit) -> Iterator[None]:
    """Replace a module's only input (1, tokens, hidden) by what `edit` makes of a copy of it."""
    handle = module.register_forward_pre_hook(lambda _module, args: (edit(args[0].clone()),))
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def last_logits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """Run one text and return the logits at its last token, shape (vocab,)."""
    return model(input_ids=token_ids(tokenizer, text), use_cache=False).logits[0, -1]


def resid(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, layer: int
) -> Tensor:
    """Return the output of one decoder layer on a text, shape (tokens, hidden)."""
    seen: list[Tensor] = []

    def look(hidden: Tensor) -> Tensor:
        seen.append(hidden[0].clone())
        return hidden

    with edited_output(decoder_layer(model, layer), look):
        last_logits(model, tokenizer, text)
    return seen[0]


def head_results(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, layer: int
) -> Tensor:
    """Return the input of one output projection on a text, shape (tokens, heads * head_dim)."""
    seen: list[Tensor] = []

    def look(hidden: Tensor) -> Tensor:
        seen.append(hidden[0].clone())
        return hidden

    with edited_input(output_projection(model, layer), look):
        last_logits(model, tokenizer, text)
    return seen[0]


# --- interventions: each returns the logits at the last token, shape (vocab,) ---------------------


def set_resid(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    layer: int,
    positions: Sequence[int],
    values: Tensor,
) -> Tensor:
    """Replace a layer's output at some positions by `values`, shape (positions, hidden)."""

    def edit(hidden: Tensor) -> Tensor:
        for position, value in zip(positions, values, strict=True):
            hidden[0, position] = value
        return hidden

    with edited_output(decoder_layer(model, layer), edit):
        return last_logits(model, tokenizer, text)


def patch_resid(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    base: str,
    source: str,
    layer: int,
    base_positions: Sequence[int],
    source_positions: Sequence[int],
) -> Tensor:
    """Run `base` with a layer's output taken from `source`, position by position."""
    donor = resid(model, tokenizer, source, layer)
    values = torch.stack([donor[position] for position in source_positions])
    return set_resid(model, tokenizer, base, layer, base_positions, values)


def zero_resid(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    layer: int,
    positions: Sequence[int],
) -> Tensor:
    """Run a text with a layer's output at some positions set to zero."""
    zeros = torch.zeros(len(positions), model.config.hidden_size)
    return set_resid(model, tokenizer, text, layer, positions, zeros)


def steer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    layer: int,
    positions: Sequence[int],
    vector: Tensor,
    scale: float,
) -> Tensor:
    """Run a text with `scale * vector`, shape (hidden,), added to a layer's output."""

    def edit(hidden: Tensor) -> Tensor:
        for position in positions:
            hidden[0, position] += scale * vector
        return hidden

    with edited_output(decoder_layer(model, layer), edit):
        return last_logits(model, tokenizer, text)


def patch_head(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    base: str,
    source: str,
    layer: int,
    head: int,
    base_position: int,
    source_position: int,
) -> Tensor:
    """Run `base` with one head's result, before the output projection, taken from `source`."""
    part = head_slice(model, layer, head)
    donor = head_results(model, tokenizer, source, layer)[source_position, part]

    def edit(hidden: Tensor) -> Tensor:
        hidden[0, base_position, part] = donor
        return hidden

    with edited_input(output_projection(model, layer), edit):
        return last_logits(model, tokenizer, base)


def mean_resid(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    layer: int,
    positions: Sequence[int],
) -> Tensor:
    """Return a layer's output averaged over texts, one row a position, (positions, hidden).

    The result is what `set_resid` takes as `values`; it is no intervention by itself.
    """
    rows = []
    for text in texts:
        hidden = resid(model, tokenizer, text, layer)
        rows.append(torch.stack([hidden[position] for position in positions]))
    return torch.stack(rows).mean(dim=0)


# --- measures: logits of shape (vocab,), float64, natural logarithms ------------------------------


def as_float64(logits: Logits) -> NDArray[np.float64]:
    """Return logits as a float64 array, shape (vocab,)."""
    return np.asarray(logits, dtype=np.float64)


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Return the log probability of every token, shape (vocab,)."""
    shifted = as_float64(logits) - as_float64(logits).max()
    return shifted - np.log(np.exp(shifted).sum())


def match(logits: Logits, target: int) -> float:
    """Return 1 when the target is the most likely token, else 0."""
    return float(as_float64(logits).argmax() == target)


def logit_diff(logits: Logits, target: int, foil: int) -> float:
    """Return the target's logit minus the foil's."""
    values = as_float64(logits)
    return float(values[target] - values[foil])


def log_prob(logits: Logits, target: int) -> float:
    """Return the target's log probability, in nats."""
    return float(log_softmax(logits)[target])


def prob(logits: Logits, target: int) -> float:
    """Return the target's probability."""
    return float(np.exp(log_prob(logits, target)))


def entropy(logits: Logits) -> float:
    """Return the entropy of the next-token distribution, in nats."""
    probabilities = np.exp(log_softmax(logits))
    return float(-sum(p * np.log(p) for p in probabilities if p > 0))


def js(clean: Logits, patched: Logits) -> float:
    """Return the Jensen-Shannon divergence, from the entropies of both and of their mean."""
    p, q = np.exp(log_softmax(clean)), np.exp(log_softmax(patched))
    mean = entropy(np.log((p + q) / 2))
    return mean - (entropy(clean) + entropy(patched)) / 2


def rank(logits: Logits, target: int) -> int:
    """Return how many tokens have a strictly larger logit than the target."""
    values = as_float64(logits)
    return int((values > values[target]).sum())


def kl(clean: Logits, patched: Logits) -> float:
    """Return the divergence KL(clean || patched), in nats."""
    clean_log, patched_log = log_softmax(clean), log_softmax(patched)
    return float((np.exp(clean_log) * (clean_log - patched_log)).sum())
