"""Engine `reference`: plain PyTorch hooks, the oracle that every fast path is compared with.

One full forward pass a point, with a donor run of its own; nothing is skipped, stacked, cached or
shared. It reads the same plan as the other engines, but none of the kernel's code.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nnsweep.engines import Result
from nnsweep.engines.machine import pick_device, served, versions
from nnsweep.measures import functions
from nnsweep.models import locate

Plain = Mapping[str, Any]
Edit = Callable[[Tensor], Tensor]


class ReferenceEngine:
    """Plain forward passes with hooks."""

    def __init__(self, model: Plain, device: str, threads: int) -> None:
        """Load the model with transformers alone (arguments as for `LocalEngine`)."""
        from transformers import AutoModelForCausalLM

        began = time.perf_counter()
        torch.set_num_threads(threads)
        self.threads, self.device = threads, pick_device(device)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            locate(model), dtype=model["dtype"], attn_implementation=model["attention"]
        )
        self.module: Any = loaded.to(self.device).eval()
        self.seconds_load = time.perf_counter() - began

    def run(self, chunk: Plain, report: Callable[[str], None]) -> Result:
        """Run one chunk, a point at a time."""
        began = time.perf_counter()
        parts = []
        with torch.no_grad():
            for block in chunk["blocks"]:
                for item in block["passes"]:
                    for slot in range(len(item["points"])):
                        edits = [edit for edit in item["edits"] if edit["slot"] == slot]
                        parts.append(self._point(chunk, block, edits))
                        report(f"{len(parts)} points")
        facts = served(self.module) | {
            "device": self.device,
            "threads": self.threads,
            "versions": versions(),
            "seconds_load": self.seconds_load,
            "seconds_run": time.perf_counter() - began,
        }
        return Result(torch.cat(parts), facts, [])

    def _point(self, chunk: Plain, block: Plain, edits: list[Plain]) -> Tensor:
        hooks = [(edit["tap"], self._edit(chunk, block, edit)) for edit in edits]
        changed = self._logits(block["ids"], block["measured"], hooks)
        clean = self._logits(block["ids"], block["measured"], [])
        donor = clean
        if block["donor_ids"]:
            donor = self._logits(block["donor_ids"], block["donor_measured"], [])
        answers = {k: torch.tensor(v, device=self.device) for k, v in block["answers"].items()}
        columns = [
            _column(chunk, spec, changed, clean, donor, answers) for spec in chunk["measures"]
        ]
        return torch.stack(columns, 1).float().cpu()

    def _logits(self, ids: Any, at: list[int], hooks: list[tuple[Plain, Edit]]) -> Tensor:
        """Full forward pass under hooks; float32 logits (rows, vocab) at the tokens `at`."""
        inputs = torch.tensor(ids, device=self.device)
        with _hooked(self.module, [hook for hook in hooks if hook[0]["side"] != "logits"]):
            logits = self.module(inputs, attention_mask=torch.ones_like(inputs)).logits
        for tap, edit in hooks:
            if tap["side"] == "logits":
                logits = edit(logits)
        return torch.stack([logits[row, token] for row, token in enumerate(at)]).float()

    def _capture(self, ids: Any, tap: Plain) -> Tensor:
        """A place's activation in a run without writes: (rows, tokens, width)."""
        seen: list[Tensor] = []

        def keep(value: Tensor) -> Tensor:
            seen.append(value.clone())
            return value

        if tap["side"] == "logits":
            inputs = torch.tensor(ids, device=self.device)
            logits: Tensor = self.module(inputs, attention_mask=torch.ones_like(inputs)).logits
            return logits
        self._logits(ids, [0] * len(ids), [(tap, keep)])
        whole = seen[0].reshape(len(ids), len(ids[0]), -1)
        return whole[..., tap["low"] : tap["high"]]

    def _edit(self, chunk: Plain, block: Plain, edit: Plain) -> Edit:
        """The edit as a function of a whole activation; its operand is computed here, anew."""
        tap, places = edit["tap"], block["positions"][edit["position"]]
        operand = self._operand(chunk, block, edit)

        def write(given: Tensor) -> Tensor:
            value = given.clone().reshape(len(block["ids"]), len(block["ids"][0]), -1)
            for row, tokens in enumerate(places["base"]):
                for k, token in enumerate(tokens):
                    old = value[row, token, tap["low"] : tap["high"]]
                    value[row, token, tap["low"] : tap["high"]] = operand(old, row, k)
            return value.reshape(given.shape)

        return write

    def _operand(self, chunk: Plain, block: Plain, edit: Plain) -> Callable[..., Tensor]:
        """A function (old value, row, k-th token of the position) -> new value."""
        operand, places = edit["operand"], block["positions"][edit["position"]]
        kind = operand["kind"]
        if edit["op"] == "clamp":
            low, high = operand.get("low", -torch.inf), operand.get("high", torch.inf)
            return lambda old, row, k: old.clip(low, high)
        if edit["op"] == "mix":
            whole = self._operand(chunk, block, {**edit, "op": "set"})
            weight = operand["weight"]
            return lambda old, row, k: (
                (1 - weight) * old.float() + weight * whole(old, row, k).float()
            ).to(old.dtype)
        if kind in ("donor", "self"):
            side = "donor" if kind == "donor" else "base"
            ids = block["donor_ids"] if kind == "donor" else block["ids"]
            source = self._capture(ids, edit["tap"])
            return lambda old, row, k: source[row, places[side][row][k]]
        if kind == "number":
            return lambda old, row, k: torch.full_like(old, operand["value"])
        if kind == "noise":
            return lambda old, row, k: (
                old.float() + operand["std"] * _noise(operand["seeds"][row], places, row, old)[k]
            ).to(old.dtype)
        vector = self._vector(chunk, operand)
        if edit["op"] == "set":
            return lambda old, row, k: vector.to(old.dtype)
        return lambda old, row, k: (old.float() + operand["scale"] * vector).to(old.dtype)

    def _vector(self, chunk: Plain, operand: Plain) -> Tensor:
        if operand["kind"] == "vector":
            return torch.tensor(operand["values"], device=self.device)
        vector = self._mean(chunk["references"][str(operand["plus"])])
        if "minus" in operand:
            vector = vector - self._mean(chunk["references"][str(operand["minus"])])
        return vector

    def _mean(self, batches: list[Plain]) -> Tensor:
        rows = []
        for batch in batches:
            whole = self._capture(batch["ids"], batch["tap"])
            for row, tokens in enumerate(batch["at"]):
                rows += [whole[row, token].float() for token in tokens]
        return torch.stack(rows).mean(0)


def _noise(seed: int, places: Plain, row: int, old: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = len(places["base"][row])
    return torch.randn(count, old.shape[-1], generator=generator).to(old.device)


def _column(
    chunk: Plain, spec: Plain, logits: Tensor, clean: Tensor, donor: Tensor, answers: Any
) -> Tensor:
    if spec["kind"] == "recovery":
        of = next(other for other in chunk["measures"] if other["name"] == spec["of"])
        ours, base, theirs = (
            _column(chunk, of, run, clean, donor, answers) for run in (logits, clean, donor)
        )
        ratio = (ours - base) / (theirs - base)
        ratio[(theirs - base).abs() < spec["min_gap"]] = torch.nan
        return ratio
    names = spec.get("answers") or [spec[key] for key in ("answer",) if key in spec]
    return functions()[spec["kind"]](logits, clean, [answers[name] for name in names])


@contextmanager
def _hooked(module: nn.Module, hooks: list[tuple[Plain, Edit]]) -> Iterator[None]:
    handles = [_hook(module.get_submodule(tap["path"]), tap["side"], edit) for tap, edit in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(module: nn.Module, side: str, edit: Edit) -> Any:
    """Hook the first tensor that goes into or comes out of a module."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (edit(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, kwargs | {name: edit(kwargs[name])}

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return edit(output)
        return (edit(output[0]), *output[1:])

    if side == "input":
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)
