"""What a sweep means, read word by word: the sweep language over the model written by hand.

A sweep is the plain document here, as it stands in a file. Nothing is shared with the package:
positions, points, sources, operations and measures are worked out again from the documentation.
"""

import itertools
import math
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import oracle
from hand import Activations, HandLlama

EDGES = ("attn_scores", "pattern")
HEADED = ("q", "k", "v", "z")
BASE, DONOR = "base", "donor"
SIDES = {"text": BASE, "donor": DONOR}


class Row:
    """One prompt row: its columns, and where things stand in it."""

    def __init__(self, record: dict[str, str], document: dict[str, Any], tokenizer: Any) -> None:
        prompts = document["prompts"]
        self.record, self.tokenizer = record, tokenizer
        self.name = record["row_id"]
        self.declared = {"last": -1, "all": "all"} | document.get("positions", {})
        self.texts = {BASE: record[prompts["text"]]}
        if prompts.get("donor"):
            self.texts[DONOR] = record[prompts["donor"]]
        self.ids = {side: tokenizer(text)["input_ids"] for side, text in self.texts.items()}
        self.whole = {
            name: tokenizer(" " + record[column], add_special_tokens=False)["input_ids"]
            for name, column in prompts["answers"].items()
        }
        self.answers = {
            name: oracle.answer_id(tokenizer, record[prompts["answers"][name]])
            for name, ids in self.whole.items()
            if len(ids) == 1
        }

    def tokens(self, position: Any, side: str) -> list[int]:
        """Tokens of a position in one prompt, in the prompt's order."""
        spec = self.declared[position] if isinstance(position, str) else position
        length = len(self.ids[side])
        if isinstance(spec, int):
            return [spec % length]
        if spec == "all":
            return list(range(length))
        if isinstance(spec, list) or "union" in spec:
            members = spec if isinstance(spec, list) else spec["union"]
            return sorted({token for member in members for token in self.tokens(member, side)})
        if "last" in spec:
            return list(range(length - spec["last"], length))
        if "span" in spec:
            return list(range(length))[slice(*spec["span"])]
        return self._word(spec, side)

    def _word(self, spec: dict[str, str], side: str) -> list[int]:
        column = spec.get("donor_text", spec["text"]) if side == DONOR else spec["text"]
        text, word = self.texts[side], self.record[column]
        if "occurrence" not in spec:
            found = oracle.span_positions(self.tokenizer, text, word)
        else:
            starts = [i for i in range(len(text)) if text.startswith(word, i)]
            start = starts[spec["occurrence"] - (spec["occurrence"] > 0)]
            offsets = self.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
            stop = start + len(word)
            found = [i for i, (low, high) in enumerate(offsets) if low < stop and high > start]
        cut = {"all": slice(None), "first": slice(1), "last": slice(-1, None)}
        return found[cut[spec.get("token", "all")]]

    def pairs(self, position: Any, align: str | None = None) -> list[tuple[int, list[int]]]:
        """Every token of the prompt with the donor's tokens whose mean it meets."""
        spec = self.declared[position] if isinstance(position, str) else position
        own = spec.get("align") if isinstance(spec, dict) else None
        align = own or align
        listed = isinstance(spec, list) or (isinstance(spec, dict) and "union" in spec)
        if listed and align != "mean":
            members = spec if isinstance(spec, list) else spec["union"]
            found = [pair for member in members for pair in self.pairs(member, align)]
            return sorted({base: (base, donor) for base, donor in found}.values())
        ours, theirs = self.tokens(position, BASE), self.tokens(position, DONOR)
        if align == "mean":
            return [(token, theirs) for token in ours]
        if align is None:
            return [(a, [b]) for a, b in zip(ours, theirs, strict=True)]
        count = min(len(ours), len(theirs))
        cut = slice(count) if align == "first" else slice(-count, None)
        return [(a, [b]) for a, b in zip(ours[cut], theirs[cut], strict=True)]


class Meaning:
    """The values of a sweep, one row and one point at a time."""

    def __init__(
        self,
        model: HandLlama,
        document: dict[str, Any],
        records: list[dict[str, str]],
        tokenizer: Any,
        draws: dict[str, Tensor] | None = None,
    ) -> None:
        self.model, self.document = model, document
        self.rows = [Row(record, document, tokenizer) for record in records]
        self.draws = draws or {}
        self.partner: Row | None = None
        self._clean: dict[tuple[str, str], Activations] = {}

    # --- points -----------------------------------------------------------------------------------

    def axes(self) -> dict[str, list[Any]]:
        """Axis -> its values."""
        counts = {"layer": self.model.layers, "head": self.model.heads}
        return {
            name: list(range(counts[name])) if values == "all" else values
            for name, values in self.document.get("axes", {}).items()
        }

    def values(self) -> dict[tuple[tuple[Any, ...], str], dict[str, Any]]:
        """(axis values, row name) -> measure -> value."""
        axes = self.axes()
        return {
            (cell, row.name): self.point(row, dict(zip(axes, cell, strict=True)))
            for cell in itertools.product(*axes.values())
            for row in self.rows
        }

    def point(self, row: Row, cell: dict[str, Any]) -> dict[str, Any]:
        """The measures of one point on one row."""
        writes = _filled(self.document["writes"], cell)
        runs = {
            name: (SIDES[run["prompt"]], _filled(run["writes"], cell))
            for name, run in self.document.get("runs", {}).items()
        }
        chained = {
            name: (side, self.under(row, side, inner, {})) for name, (side, inner) in runs.items()
        }
        found = self.under(row, BASE, writes, chained)
        return Reading(self, row, found, writes, chained).measures()

    # --- runs -------------------------------------------------------------------------------------

    def clean(self, row: Row, side: str) -> Activations:
        """The run of a prompt without writes."""
        key = (row.name, side)
        if key not in self._clean:
            self._clean[key] = self.model.run(row.ids[side])
        return self._clean[key]

    def under(self, row: Row, side: str, writes: list[Any], chained: Any) -> Activations:
        """The run of a prompt under writes."""
        return self.model.run(row.ids[side], self.edits(row, side, writes, chained))

    def edits(self, row: Row, side: str, writes: list[Any], chained: Any) -> Any:
        """Place -> one function that applies all of its writes in their order."""
        steps: dict[Any, list[Any]] = {}
        for write in writes:
            for layer in self._layers(write):
                place = _one_name(write["site"], layer)
                steps.setdefault(place, []).append(Step(self, row, side, write, layer, chained))
        return {place: _in_turn(found) for place, found in steps.items()}

    def _layers(self, write: dict[str, Any]) -> list[int | None]:
        if write.get("layers") == "all":
            return list(range(self.model.layers))
        return write.get("layers") or [write.get("layer")]


def _one_name(site: str, layer: int | None) -> tuple[str, int | None]:
    """What leaves a layer enters the next: one stream under two names, so one place of writes."""
    return ("resid_post", layer - 1) if site == "resid_pre" and layer else (site, layer)


def _in_turn(steps: list[Any]) -> Any:
    def edit(value: Tensor) -> Tensor:
        for step in steps:
            value = step(value)
        return value

    return edit


def _filled(value: Any, cell: dict[str, Any]) -> Any:
    """`$axis` replaced by its value, wherever it stands."""
    if isinstance(value, dict):
        return {key: _filled(inner, cell) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, cell) for inner in value]
    return cell[value[1:]] if isinstance(value, str) and value.startswith("$") else value


class Step:
    """One write in one layer of one row's run."""

    def __init__(
        self, meaning: Meaning, row: Row, side: str, write: Any, layer: int | None, chained: Any
    ) -> None:
        self.meaning, self.row, self.side, self.write = meaning, row, side, write
        self.layer, self.chained = layer, chained
        self.site, self.position = write["site"], write["position"]

    def __call__(self, value: Tensor) -> Tensor:
        """The activation after this write."""
        change = self.edge if self.site in EDGES else self.vector
        for head in self.heads():
            value = change(value.clone(), head)
        return value

    def heads(self) -> list[int | None]:
        """The heads that are written."""
        model = self.meaning.model
        if self.write.get("heads") == "all":
            return list(range(model.kv_heads if self.site in "kv" else model.heads))
        return self.write.get("heads") or [self.write.get("head")]

    # --- vectors ----------------------------------------------------------------------------------

    def vector(self, value: Tensor, head: int | None) -> Tensor:
        """One head of all tokens of the position, each for itself."""
        source = self.write.get("set", self.write.get("mix", {}).get("source"))
        targets = self.targets(source)
        units = self.write.get("units", slice(None))
        before = value.clone()
        for number, token in enumerate(targets):
            place = (token, units) if head is None else (token, head)
            value[place] = self.changed(before[place], number, head, units)
        return value

    def targets(self, source: Any) -> list[int]:
        """Tokens that are written: of a patch from a donor, those that have a partner."""
        mine = self.row.tokens(self.position, self.side)
        if self._role(source) == DONOR and self.side == BASE and not self._elsewhere(source):
            return [base for base, _ in self.row.pairs(self.position)]
        return mine

    def changed(self, old: Tensor, number: int, head: int | None, units: Any) -> Tensor:
        """What one token's vector becomes."""
        write = self.write
        if "set" in write:
            return self.source(write["set"], old, number, head, units)
        if "mix" in write:
            weight = write["mix"]["weight"]
            new = self.source(write["mix"]["source"], old, number, head, units)
            return (1 - weight) * old + weight * new
        if "add" in write:
            return old + write["add"].get("scale", 1.0) * self.direction(old, head)
        if "clamp" in write:
            return old.clamp(write["clamp"].get("low"), write["clamp"].get("high"))
        if "noise" in write:
            return old + write["noise"]["std"] * self.meaning.draws[self.row.name][number]
        return self.rescaled(old, number, head, units)

    def rescaled(self, old: Tensor, number: int, head: int | None, units: Any) -> Tensor:
        """The same direction at another length."""
        length = self.write["renormalize"]
        if isinstance(length, str):
            length = self.source({"patch": length}, old, number, head, units).norm()
        return old / old.norm() * length

    # --- sources ----------------------------------------------------------------------------------

    def source(self, source: Any, old: Tensor, number: int, head: Any, units: Any) -> Tensor:
        """What is put in place of one token's vector."""
        if isinstance(source, int | float):
            return torch.full_like(old, float(source))
        if source == "donor":
            source = {"patch": "donor"}
        if "patch" in source:
            return self.patched(source, number, head, units)
        if "mean" in source:
            only = number if source.get("per_token") else None
            return self.mean(SIDES[source["mean"]], head, units, only)
        side = SIDES[source["resample"]]
        assert self.meaning.partner is not None
        other = self.meaning.partner
        (token,) = other.tokens(self.position, side)
        found = self.meaning.clean(other, side)[self.site, self.layer]
        return _pick(found, token, head, units)

    def patched(self, source: dict[str, Any], number: int, head: Any, units: Any) -> Tensor:
        """One vector of another run, or the mean of several tokens."""
        found, side = self.run_of(source["patch"])
        site = source.get("site", self.site)
        layer = source.get("layer", self.layer)
        head = source.get("head", head) if site in HEADED else None
        tokens = self.partners(source, side)[number]
        value = found[site, None if site in ("embed", "ln_final", "logits") else layer]
        return torch.stack([_pick(value, token, head, units) for token in tokens]).mean(0)

    def run_of(self, name: str) -> tuple[Activations, str]:
        """The activations of a run, and which prompt it runs."""
        if name in SIDES:
            return self.meaning.clean(self.row, SIDES[name]), SIDES[name]
        side, found = self.chained[name]
        return found, side

    def partners(self, source: dict[str, Any], side: str) -> list[list[int]]:
        """For each written token, the tokens of the other run that it meets."""
        if self._elsewhere(source):
            count = len(self.row.tokens(self.position, self.side))
            theirs = self.row.tokens(source["position"], side)
            return [[token] for token in theirs] if len(theirs) > 1 else [theirs] * count
        if side == self.side:
            return [[token] for token in self.row.tokens(self.position, side)]
        pairs = self.row.pairs(self.position)
        return [theirs if side == DONOR else [mine] for mine, theirs in pairs]

    def _role(self, source: Any) -> str | None:
        """Which prompt a patch reads; None of any other source."""
        if source == "donor" or self.write.get("renormalize") == "donor":
            return DONOR
        if not isinstance(source, dict) or "patch" not in source:
            return None
        return self.run_of(source["patch"])[1]

    @staticmethod
    def _elsewhere(source: Any) -> bool:
        return isinstance(source, dict) and "position" in source

    def mean(self, side: str, head: Any, units: Any, only: int | None = None) -> Tensor:
        """The mean over all rows, and over the tokens of the position or only the n-th."""
        parts = []
        for row in self.meaning.rows:
            found = self.meaning.clean(row, side)[self.site, self.layer]
            tokens = row.tokens(self.position, side)
            kept = tokens if only is None else [tokens[only]]
            parts += [_pick(found, token, head, units) for token in kept]
        return torch.stack(parts).mean(0)

    def direction(self, old: Tensor, head: int | None) -> Tensor:
        """The vector that is added."""
        spec = self.write["add"]["vector"]
        if "unit" in spec:
            return torch.zeros_like(old).index_fill_(0, torch.tensor(spec["unit"]), 1.0)
        if "file" in spec:
            vector = load_file(spec["file"])[spec.get("key", "vector")]
            vector = vector[self.layer] if vector.ndim == 2 else vector
        else:
            sides = [SIDES[spec[end]] for end in ("mean", "minus")]
            one, other = (self.mean(side, head, slice(None)) for side in sides)
            vector = one - other
        return vector / vector.norm() if spec.get("normalize") else vector

    # --- attention --------------------------------------------------------------------------------

    def edge(self, value: Tensor, head: int | None) -> Tensor:
        """One head of all pairs of a query token and a key token that it can see."""
        queries = self.row.tokens(self.position, self.side)
        keys = self.row.tokens(self.write.get("keys") or "all", self.side)
        before = value.clone()
        for (i, query), (j, key) in itertools.product(enumerate(queries), enumerate(keys)):
            if key <= query:
                value[head, query, key] = self.weight(before[head, query, key], i, j, head)
        return value

    def weight(self, old: Tensor, query: int, key: int, head: int | None) -> Any:
        """What one edge becomes."""
        write = self.write
        if "knockout" in write:
            return torch.finfo(old.dtype).min
        if "clamp" in write:
            return old.clamp(write["clamp"].get("low"), write["clamp"].get("high"))
        source = write["set"] if "set" in write else write["mix"]["source"]
        if isinstance(source, int | float):
            return source
        source = {"patch": "donor"} if source == "donor" else source
        found, side = self.run_of(source["patch"])
        value = found[self.site, source.get("layer", self.layer)]
        queries = self.row.tokens(source.get("position", self.position), side)
        keys = self.row.tokens(write.get("keys") or "all", side)
        new = value[source.get("head", head), queries[query], keys[key]]
        return new if "set" in write else torch.lerp(old, new, write["mix"]["weight"])


def _pick(value: Tensor, token: int, head: int | None, units: Any) -> Tensor:
    return value[token, units] if head is None else value[token, head]


class Reading:
    """The measures of one run under writes."""

    def __init__(
        self, meaning: Meaning, row: Row, found: Activations, writes: Any, chained: Any
    ) -> None:
        self.meaning, self.row, self.found = meaning, row, found
        self.writes, self.chained = writes, chained
        self.at = row.tokens(meaning.document.get("measure_at", "last"), BASE)[-1]
        self.clean = meaning.clean(row, BASE)

    def measures(self) -> dict[str, Any]:
        """Measure -> number, or a list of numbers, or for a lens `NAME.layer` -> number."""
        out: dict[str, Any] = {}
        for name, spec in self.meaning.document["measures"].items():
            if "lens" in spec:
                out |= {f"{name}.{key}": v for key, v in self.lens(spec, spec["lens"]).items()}
            elif spec["kind"] == "cosine":
                out[name] = self.cosine(spec)
            elif spec["kind"] == "recovery":
                out |= self.recovery(name, spec)
            elif spec.get("tokens") == "sum":
                out[name] = self.whole(spec, BASE, self.writes)
            elif spec["kind"] == "attribution":
                out[name] = self.attribution(self.of(spec))
            else:
                logits = self.found["logits", None][self.at]
                out[name] = self.number(spec, logits, self.clean["logits", None][self.at])
        return out

    def of(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The measure that another one is taken of: named, or written in its place."""
        found: dict[str, Any] = spec["of"]
        return self.meaning.document["measures"][found] if isinstance(found, str) else found

    def number(self, spec: dict[str, Any], logits: Tensor, clean: Tensor) -> Any:
        """A measure of next-token logits."""
        kind, answers = spec["kind"], self.answers(spec)
        if kind == "logit":
            return float(logits[answers[0]])
        if kind == "logit_diff":
            return float(logits[answers[0]] - logits[answers[1]])
        if kind == "rank":
            return _ranks(logits, answers[0])
        logs = logits.double().log_softmax(-1)
        if kind == "kl":
            base = clean.double().log_softmax(-1)
            return float((base.exp() * (base - logs)).sum())
        if kind == "top_k":
            order = logs.topk(spec["k"] + 1).indices.tolist()
            return [(token, float(logs[token])) for token in order]
        assert kind in ("prob", "log_prob"), kind
        return float(logs[answers[0]].exp() if kind == "prob" else logs[answers[0]])

    def answers(self, spec: dict[str, Any]) -> list[int]:
        """Ids of the answers that a measure names."""
        names = spec.get("answers") or [name for name in [spec.get("answer")] if name]
        return [self.row.answers[name] for name in names]

    def lens(self, spec: dict[str, Any], lens: dict[str, Any]) -> dict[int, Any]:
        """Layer -> the measure of what the head makes of the stream there."""
        model, site = self.meaning.model, lens.get("site", "resid_post")
        layers = lens.get("layers", "all")
        position = lens.get("position")
        at = self.row.tokens(position, BASE)[-1] if position else self.at
        return {
            layer: self.number(
                spec,
                model.unembed(self.found[site, layer][at]),
                model.unembed(self.clean[site, layer][at]),
            )
            for layer in (range(model.layers) if layers == "all" else layers)
        }

    def whole(self, spec: dict[str, Any], side: str, writes: list[Any]) -> float:
        """A measure of a whole answer: the prompt with the answer behind it, written as before."""
        ids, answer = self.row.ids[side], self.row.whole[spec["answer"]]
        edits = self.meaning.edits(self.row, side, writes, self.chained)
        logits = self.meaning.model.run([*ids, *answer[:-1]], edits)["logits", None].double()
        total = sum(
            float(logits[len(ids) - 1 + k].log_softmax(-1)[token]) for k, token in enumerate(answer)
        )
        return {"log_prob": total, "cross_entropy": -total, "prob": math.exp(total)}[spec["kind"]]

    def recovery(self, name: str, spec: dict[str, Any]) -> dict[str, float]:
        """How far from the clean run's number to the donor's; one for each layer of a lens."""
        of = self.of(spec)
        ours, start, end = (
            self.alone(of, *run)
            for run in (
                (self.found, BASE, self.writes),
                (self.clean, BASE, []),
                (self.meaning.clean(self.row, DONOR), DONOR, []),
            )
        )
        out = {}
        for layer, value in ours.items():
            gap = end[layer] - start[layer]
            small = abs(gap) < spec.get("min_gap", 0.1)
            column = name if layer is None else f"{name}.{layer}"
            out[column] = math.nan if small else (value - start[layer]) / gap
        return out

    def alone(
        self, spec: dict[str, Any], run: Activations, side: str, writes: list[Any]
    ) -> dict[int | None, float]:
        """A measure of one run: layer (None without a lens) -> number."""
        if spec.get("tokens") == "sum":
            return {None: self.whole(spec, side, writes)}
        at = self.row.tokens(self.meaning.document.get("measure_at", "last"), side)[-1]
        if "lens" not in spec:
            return {None: self.number(spec, run["logits", None][at], run["logits", None][at])}
        lens, model = spec["lens"], self.meaning.model
        token = self.row.tokens(lens["position"], side)[-1] if "position" in lens else at
        layers = lens.get("layers", "all")
        streams = {
            layer: model.unembed(run[lens.get("site", "resid_post"), layer][token])
            for layer in (range(model.layers) if layers == "all" else layers)
        }
        return {layer: self.number(spec, seen, seen) for layer, seen in streams.items()}

    def cosine(self, spec: dict[str, Any]) -> float:
        """Cosine of the angle between a vector here and the same of a clean run."""
        read = spec["read"]
        place = (read["site"], read.get("layer"))
        side = SIDES[spec.get("against", "text")]
        other = self.meaning.clean(self.row, side)
        position = read.get("position", "last")
        one, two = (
            run[place][self.row.tokens(position, where)[-1]]
            for run, where in ((self.found, BASE), (other, side))
        )
        if "head" in read:
            one, two = one[read["head"]], two[read["head"]]
        return float(one.double() @ two.double() / (one.double().norm() * two.double().norm()))

    def attribution(self, spec: dict[str, Any]) -> float:
        """Gradient in the clean run times what the writes change there, summed over places."""
        run = self.meaning.model.run(self.row.ids[BASE], grad=True)
        logits = run["logits", None][self.at]
        answers = self.answers(spec)
        smooth = {
            "logit": lambda: logits[answers[0]],
            "prob": lambda: logits.softmax(-1)[answers[0]],
            "log_prob": lambda: logits.log_softmax(-1)[answers[0]],
            "logit_diff": lambda: logits[answers[0]] - logits[answers[1]],
        }
        smooth[spec["kind"]]().backward()
        edits = self.meaning.edits(self.row, BASE, self.writes, self.chained)
        total = 0.0
        for place, edit in edits.items():
            old = run[place]
            change = edit(old.detach().clone()) - old.detach()
            total += float((old.grad.double() * change.double()).sum())
        return total


def _ranks(logits: Tensor, answer: int) -> tuple[int, int]:
    """The smallest and largest rank that rounding of the logits allows."""
    lead = logits - logits[answer]
    lead[answer] = -1.0
    return int((lead > 2e-4).sum()), int((lead > -2e-4).sum()) - int(lead[answer] > -2e-4)
