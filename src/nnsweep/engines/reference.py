"""Engine `reference`: plain PyTorch hooks, the oracle that every fast path is compared with.

One full forward pass a point, with a donor run of its own; nothing is skipped, stacked, cached or
shared. It reads the same plan as the other engines, but none of the kernel's code.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nnsweep.engines import Result
from nnsweep.engines.machine import claim_gpu, pick_device, served, session_record
from nnsweep.measures import functions
from nnsweep.models import locate
from nnsweep.provenance import versions

Plain = Mapping[str, Any]
Edit = Callable[[Tensor], Tensor]
Hook = tuple[Plain, Edit]
"""A place and what is done to the activation there."""


@dataclass(frozen=True)
class Run:
    """What one run gives the measures: float32 logits (rows, vocab), and reads (rows, width)."""

    logits: Tensor
    reads: list[Tensor]


class ReferenceEngine:
    """Plain forward passes with hooks."""

    def __init__(self, model: Plain, device: str, threads: int) -> None:
        """Load the model with transformers alone (arguments as for `LocalEngine`)."""
        from transformers import AutoModelForCausalLM

        began = time.perf_counter()
        torch.set_num_threads(threads)
        self.threads, self.device = threads, pick_device(device)
        self.claim = claim_gpu() if self.device == "cuda" else None
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
        record = session_record(chunk, 0, facts["seconds_run"]) | {"dtype": facts["dtype"]}
        return Result(torch.cat(parts), facts, [record])

    def _point(self, chunk: Plain, block: Plain, edits: list[Plain]) -> Tensor:
        hooks = [self._hook(chunk, block, edit, "base") for edit in edits]
        spec = next((s for s in chunk["measures"] if s["kind"] == "generate"), None)
        at_prompt = hooks if spec is None or 0 in spec["steps"] else []
        changed = self._run(chunk, block, "base", at_prompt)
        clean = self._run(chunk, block, "base", [])
        donor = self._run(chunk, block, "donor", []) if block["donor_ids"] else clean
        answers = {k: torch.tensor(v, device=self.device) for k, v in block["answers"].items()}
        columns = [
            self._estimate(chunk, block, one, hooks, answers)
            if one["kind"] == "attribution"
            else self._generated(chunk, block, one, edits)
            if one["kind"] == "generate"
            else self._summed(block, one, "base", at_prompt)
            if one.get("tokens") == "sum"
            else self._recovered_sum(chunk, block, one, at_prompt)
            if one["kind"] == "recovery" and one["of"].get("tokens") == "sum"
            else self._column(chunk, one, changed, clean, donor, answers)
            for one in chunk["measures"]
        ]
        return torch.cat(columns, 1).float().cpu()

    def _run(self, chunk: Plain, block: Plain, side: str, hooks: list[Hook]) -> Run:
        """A run of the prompts or of the donors, with what the measures read."""
        prompt = "donor_" if side == "donor" else ""
        ids, at = block[f"{prompt}ids"], block[f"{prompt}measured"]
        logits, seen = self._forward(ids, hooks, [read["tap"] for read in chunk["reads"]])
        reads = []
        for read, whole in zip(chunk["reads"], seen, strict=True):
            places = block["positions"][read["position"]][side]
            reads.append(torch.stack([whole[row, t[-1]] for row, t in enumerate(places)]))
        return Run(torch.stack([logits[row, token] for row, token in enumerate(at)]).float(), reads)

    def _forward(
        self, ids: Any, hooks: list[Hook], taps: Sequence[Plain] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Full forward pass under hooks: logits (rows, tokens, vocab), and what is at `taps`."""
        inputs = torch.tensor(ids, device=self.device)
        seen: list[tuple[int, Tensor]] = []
        keep = [(tap, _keeper(seen, number)) for number, tap in enumerate(taps)]
        with _hooked(self.module, [hook for hook in hooks + keep if hook[0]["side"] != "logits"]):
            logits: Tensor = self.module(inputs, attention_mask=torch.ones_like(inputs)).logits
        for tap, edit in hooks:
            if tap["side"] == "logits":
                logits = edit(logits)
        found = dict(seen)
        whole = [logits if t["side"] == "logits" else found[n] for n, t in enumerate(taps)]
        return logits, [_selected(one, tap, ids) for one, tap in zip(whole, taps, strict=True)]

    def _capture(self, ids: Any, tap: Plain, hooks: Sequence[Hook] = ()) -> Tensor:
        """A place's activation in a run: (rows, tokens, width), or (rows, heads, tokens, keys)."""
        return self._forward(ids, list(hooks), [tap])[1][0]

    def _hook(self, chunk: Plain, block: Plain, edit: Plain, side: str) -> Hook:
        """The edit as a function of a whole activation; its operand is computed here, anew."""
        tap, operand = edit["tap"], self._operand(chunk, block, edit, side)
        places = block["positions"][edit["position"]][side]
        units = tap.get("units", list(range(tap["low"], tap["high"])))

        def write(given: Tensor) -> Tensor:
            value = given.clone().reshape(len(places), -1, given.shape[-1])
            for row, tokens in enumerate(places):
                for k, token in enumerate(tokens):
                    old = value[row, token, units]
                    value[row, token, units] = operand(old, row, k).to(value.dtype)
            return value.reshape(given.shape)

        def write_edges(given: Tensor) -> Tensor:
            value = given.clone()
            for row, tokens in enumerate(places):
                for i, token in enumerate(tokens):
                    for j, key in enumerate(block["positions"][edit["keys"]][side][row]):
                        if key <= token:
                            old = value[row, units, token, key]
                            value[row, units, token, key] = operand(old, row, (i, j))
            return value

        return tap, write_edges if "keys" in edit else write

    def _operand(self, chunk: Plain, block: Plain, edit: Plain, side: str) -> Callable[..., Tensor]:
        """A function (old value, row, k-th token of the position) -> new value."""
        operand, op = edit["operand"], edit["op"]
        if op == "clamp":
            low, high = operand.get("low", -torch.inf), operand.get("high", torch.inf)
            return lambda old, row, k: old.clip(low, high)
        if op == "noise":
            places = block["positions"][edit["position"]][side]
            std, seeds = operand["std"], operand["seeds"]
            return lambda old, row, k: old.float() + std * _noise(seeds[row], places[row], old)[k]
        source = self._source(chunk, block, edit, side)
        if op == "add":
            return lambda old, row, k: old.float() + operand["scale"] * source(old, row, k)
        if op == "mix":
            weight = operand["weight"]
            return lambda old, row, k: (
                (1 - weight) * old.float() + weight * source(old, row, k).float()
            )
        if op == "renormalize":
            fixed = operand["value"] if operand["kind"] == "number" else None
            return lambda old, row, k: _scaled(old, source(old, row, k), fixed)
        return source

    def _source(self, chunk: Plain, block: Plain, edit: Plain, side: str) -> Callable[..., Tensor]:
        """What is set, added or mixed in, as a function like `_operand`'s."""
        operand, kind = edit["operand"], edit["operand"]["kind"]
        if kind in ("donor", "self"):
            return self._patch(chunk, block, edit, side)
        if kind == "number":
            return lambda old, row, k: torch.full_like(old, operand["value"])
        if kind == "lowest":
            return lambda old, row, k: torch.full_like(old, torch.finfo(old.dtype).min)
        if kind == "vector":
            vector = torch.tensor(operand["values"], device=self.device)
            return lambda old, row, k: vector
        rows = self._taken(chunk["references"][operand["plus"]])
        if kind == "resample":
            return lambda old, row, k: rows[operand["partners"][row]][k]
        if chunk["references"][operand["plus"]]["how"] == "tokens":
            return lambda old, row, k: torch.stack([one[k] for one in rows.values()]).mean(0)
        mean = torch.cat(list(rows.values())).mean(0)
        if "minus" in operand:
            others = self._taken(chunk["references"][operand["minus"]])
            mean = mean - torch.cat(list(others.values())).mean(0)
        if operand.get("normalize"):
            mean = mean / mean.square().sum().sqrt()
        return lambda old, row, k: mean

    def _patch(self, chunk: Plain, block: Plain, edit: Plain, side: str) -> Callable[..., Tensor]:
        operand = edit["operand"]
        theirs = "donor" if operand["kind"] == "donor" else "base"
        ids = block["donor_ids"] if theirs == "donor" else block["ids"]
        under = [self._hook(chunk, block, one, theirs) for one in operand.get("under", [])]
        whole = self._capture(ids, operand["tap"], under)
        places = block["positions"][operand["position"]]
        if "keys" in operand:
            keys = block["positions"][operand["keys"]]
            return lambda old, row, ij: whole[
                row, :, places[theirs][row][ij[0]], keys[theirs][row][ij[1]]
            ]

        def patched(old: Tensor, row: int, k: int) -> Tensor:
            tokens = places[theirs][row]
            if places["mean"] and theirs == "donor":
                return whole[row, tokens].float().mean(0)
            return whole[row, tokens[k if len(tokens) > 1 else 0]]

        return patched

    def _taken(self, reference: Plain) -> dict[str, Tensor]:
        """A place of every row of a reference set: key of the row -> float32 (tokens, width)."""
        found = {}
        for batch in reference["batches"]:
            whole = self._capture(batch["ids"], reference["tap"])
            for row, key in enumerate(batch["row_keys"]):
                found[key] = whole[row, batch["at"][row]].float()
        return found

    def _column(
        self, chunk: Plain, spec: Plain, run: Run, clean: Run, donor: Run, answers: Any
    ) -> Tensor:
        """One measure: (rows, columns)."""
        logits, base = run.logits, clean.logits
        if spec["kind"] == "cosine":
            other = (donor if spec["against"] == "donor" else clean).reads[spec["read"]].float()
            ours = run.reads[spec["read"]].float()
            lengths = ours.square().sum(-1).sqrt() * other.square().sum(-1).sqrt()
            return ((ours * other).sum(-1) / lengths)[:, None]
        if spec["kind"] == "recovery":
            of = spec["of"]
            ours, start, end = (
                self._column(chunk, of, one, clean, donor, answers) for one in (run, clean, donor)
            )
            return _ratio(ours, start, end, spec)
        if "lens" in spec:
            shape = chunk["model"]["shape"]
            logits = self._lens(shape, run.reads[spec["lens"]])
            base = self._lens(shape, clean.reads[spec["lens"]])
        if spec["kind"] == "top_k":
            order = logits.argsort(-1, descending=True)[:, : spec["k"]]
            return torch.cat([order.float(), logits.log_softmax(-1).gather(-1, order)], -1)
        names = spec.get("answers") or [spec[key] for key in ("answer",) if key in spec]
        found = functions()[spec["kind"]](logits, base, [answers[name] for name in names])
        return found[:, None]

    def _generated(self, chunk: Plain, block: Plain, spec: Plain, edits: list[Plain]) -> Tensor:
        """A greedy continuation: (rows, 3 * tokens); every step is a full pass over all tokens."""
        ids = [list(row) for row in block["ids"]]
        ended = [False] * len(ids)
        found = torch.full((len(ids), 3, spec["k"]), torch.nan)
        for step in range(spec["k"]):
            grown = {**block, "ids": ids}
            longer = [self._grown(grown, edit, spec, step) for edit in edits]
            hooks = [self._hook(chunk, *pair, "base") for pair in longer]
            logits = self._forward(ids, hooks)[0][:, -1].float()
            spread = logits.log_softmax(-1)
            for row, token in enumerate(logits.argmax(-1).tolist()):
                if not ended[row]:
                    entropy = torch.special.entr(spread[row].exp()).sum()
                    found[row, :, step] = torch.stack(
                        [torch.tensor(float(token)), spread[row, token].cpu(), entropy.cpu()]
                    )
                ended[row] = ended[row] or token in chunk["model"]["shape"]["eos"]
                ids[row].append(token)
        return found.flatten(1)

    def _recovered_sum(self, chunk: Plain, block: Plain, spec: Plain, hooks: list[Hook]) -> Tensor:
        """Recovery of a measure of whole answers: (rows, 1)."""
        of = spec["of"]
        start = self._summed(block, of, "base", [])
        end = self._summed(block, of, "donor", [])
        return _ratio(self._summed(block, of, "base", hooks), start, end, spec)

    def _summed(self, block: Plain, spec: Plain, side: str, hooks: list[Hook]) -> Tensor:
        """A measure of whole answers: (rows, 1); one full pass over prompt and answer."""
        prompts = block["donor_ids" if side == "donor" else "ids"]
        answers, width = block["answer_ids"][spec["answer"]], len(prompts[0])
        longest = max(map(len, answers))
        pairs = zip(prompts, answers, strict=True)
        ids = [[*row, *(answer + [0] * longest)[: longest - 1]] for row, answer in pairs]
        logs = self._forward(ids, hooks)[0].float().log_softmax(-1)
        found = [
            sum(logs[row, width - 1 + k, token] for k, token in enumerate(answer))
            for row, answer in enumerate(answers)
        ]
        total = torch.stack([torch.as_tensor(one) for one in found])[:, None]
        return {"prob": total.exp(), "cross_entropy": -total}.get(spec["kind"], total)

    def _grown(self, block: Plain, edit: Plain, spec: Plain, step: int) -> tuple[Plain, Plain]:
        """Block and edit with the tokens, of the prompt and of those generated, that it writes."""
        places, width = block["positions"][edit["position"]], len(block["ids"][0])
        new = [width - step + s - 1 for s in range(1, step + 1) if s in spec["steps"]]
        tokens = [[*(old if 0 in spec["steps"] else []), *new] for old in places["base"]]
        positions = {**block["positions"], "@grown": {**places, "base": tokens}}
        return {**block, "positions": positions}, {**edit, "position": "@grown"}

    def _estimate(
        self, chunk: Plain, block: Plain, spec: Plain, hooks: list[Hook], answers: Any
    ) -> Tensor:
        """Gradient times change, summed over the places of one point: (rows, 1)."""
        of = spec["of"]
        places = {(tap["path"], tap["side"]): {**tap, "carry": None} for tap, _ in hooks}
        seen: dict[int, Tensor] = {}

        def keep(number: int) -> Edit:
            def kept(value: Tensor) -> Tensor:
                value.retain_grad()
                seen[number] = value
                return value

            return kept

        with torch.enable_grad():
            keepers: list[Hook] = [
                (tap, keep(number)) for number, tap in enumerate(places.values())
            ]
            logits, _ = self._forward(block["ids"], keepers)
            picked = torch.stack([logits[row, t] for row, t in enumerate(block["measured"])])
            run = Run(picked.float(), [])
            total = self._column(chunk, of, run, run, run, answers).sum()
            torch.autograd.backward(total)
        found = torch.zeros(len(block["ids"]), device=self.device)
        for number, place in enumerate(places):
            grad = seen[number].grad
            value = clean = seen[number].detach()
            for tap, edit in hooks:
                if (tap["path"], tap["side"]) == place:
                    value = edit(value)
            assert grad is not None
            found += ((value - clean) * grad).float().reshape(len(found), -1).sum(1)
        self.module.zero_grad()
        return found[:, None]

    def _lens(self, shape: Plain, stream: Tensor) -> Tensor:
        """What the end of the model makes of a stream (rows, width)."""
        hidden = self.module.get_submodule(shape["lens"]["norm"])(stream[:, None])
        logits: Tensor = self.module.get_output_embeddings()(hidden)[:, 0].float()
        cap = shape["lens"]["softcap"]
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _ratio(ours: Tensor, start: Tensor, end: Tensor, spec: Plain) -> Tensor:
    """How much of the way from the clean run to the donor's was gone."""
    ratio = (ours - start) / (end - start)
    ratio[(end - start).abs() < spec["min_gap"]] = torch.nan
    return ratio


def _keeper(seen: list[tuple[int, Tensor]], number: int) -> Edit:
    def keep(value: Tensor) -> Tensor:
        seen.append((number, value.clone()))
        return value

    return keep


def _selected(whole: Tensor, tap: Plain, ids: Any) -> Tensor:
    """The heads or components of a place."""
    units = tap.get("units", list(range(tap["low"], tap["high"])))
    if "edges" in tap:
        return whole[:, units]
    return whole.reshape(len(ids), -1, whole.shape[-1])[..., units]


def _noise(seed: int, tokens: Sequence[int], old: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(tokens), old.shape[-1], generator=generator).to(old.device)


def _scaled(old: Tensor, like: Tensor, fixed: float | None) -> Tensor:
    """A vector with the length of another, or a given one; zero stays zero."""
    own = old.float().square().sum().sqrt()
    length = like.float().square().sum().sqrt() if fixed is None else fixed
    return old.float() * (length / own) if own > 0 else old.float()


@contextmanager
def _hooked(module: nn.Module, hooks: list[Hook]) -> Iterator[None]:
    edges = [hook for hook in hooks if "edges" in hook[0]]
    handles = [
        _hook(module.get_submodule(tap["path"]), tap, edit)
        for tap, edit in hooks
        if "edges" not in tap
    ]
    for path in dict.fromkeys(tap["path"].split(".source.")[0] for tap, _ in edges):
        mine = [hook for hook in edges if hook[0]["path"].startswith(f"{path}.source.")]
        handles += _softmax_hooks(module.get_submodule(path), mine)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _softmax_hooks(attention: nn.Module, hooks: list[Hook]) -> list[Any]:
    """Edit what softmax reads and returns while one attention module runs."""
    plain = torch.nn.functional.softmax

    def edited(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for tap, edit in hooks:
            scores = edit(scores) if tap["side"] == "input" else scores
        pattern = plain(scores, *args, **kwargs)
        for tap, edit in hooks:
            pattern = edit(pattern) if tap["side"] == "output" else pattern
        return pattern

    def enter(*_: Any) -> None:
        torch.nn.functional.softmax = edited  # type: ignore[assignment]

    def leave(*_: Any) -> None:
        torch.nn.functional.softmax = plain

    return [
        attention.register_forward_pre_hook(enter),
        attention.register_forward_hook(leave, always_call=True),
    ]


def _hook(module: nn.Module, tap: Plain, edit: Edit) -> Any:
    """Hook the first tensor that goes into or comes out of a module."""

    def changed(value: Tensor) -> Tensor:
        # The stream between attention and MLP goes on past its reader: the very tensor is changed.
        return value.copy_(edit(value)) if tap.get("carry") else edit(value)

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (changed(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, kwargs | {name: changed(kwargs[name])}

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return edit(output)
        return (edit(output[0]), *output[1:])

    if tap["side"] == "input":
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)
