"""Plain PyTorch runs of a tiny model, written for the tests alone.

Nothing here reads a plan or a site table: modules are named by the test that uses them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


def load(model: dict[str, Any]) -> Any:
    """The model as transformers alone opens it."""
    return AutoModelForCausalLM.from_pretrained(
        Path(model["id"]), dtype=torch.float32, attn_implementation=model["attention"]
    ).eval()


@contextmanager
def changed_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change a module's first positional input."""
    handle = module.register_forward_pre_hook(lambda _, args: (change(args[0].clone()), *args[1:]))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def changed_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change a module's output, or the first of its outputs."""

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return change(output.clone())
        return (change(output[0].clone()), *output[1:])

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def last_logits(module: Any, ids: Sequence[int]) -> Tensor:
    """Logits after the last token of one prompt, alone: (vocab,)."""
    return module(torch.tensor([list(ids)])).logits[0, -1]


@torch.no_grad()
def seen(module: Any, place: nn.Module, side: str, ids: Sequence[int]) -> Tensor:
    """What goes into or comes out of a place on one prompt: (tokens, width)."""
    found: list[Tensor] = []

    def look(value: Tensor) -> Tensor:
        found.append(value.clone())
        return value

    change = changed_input if side == "input" else changed_output
    with change(place, look):
        last_logits(module, ids)
    return found[0].reshape(len(ids), -1)
