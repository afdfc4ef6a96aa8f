"""From points and prompt rows to passes and chunks: integers and strings only.

Which points and rows share a forward pass is decided here, from the points and `batch_rows`
alone. A chunk is a list of whole passes, so chunking, engine and resume cannot move a bit.
Rows that share a pass have prompts of equal length (and donors of equal length): there is never
a padding token, hence no padding to go wrong.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nnsweep import SEMANTICS
from nnsweep.chunks import GENERATE, block_name, in_session, refs, slices
from nnsweep.errors import UserError
from nnsweep.grid import expand, position_names
from nnsweep.prompts import PromptRow
from nnsweep.sites import EDGES, ORDER, limits_of, resumes_at, tap
from nnsweep.sweep import GENERATED, Sweep, position_spec, uses_donor, watched_positions
from nnsweep.sweep_measures import Measure
from nnsweep.sweep_words import HEADED
from nnsweep.tables import digest

Plain = dict[str, Any]
VectorLoader = Callable[[Plain, int | None], list[float]]
"""(vector file, layer) -> the vector's values."""


PASS_TOKENS = 32_768
"""Most tokens that one pass computes anew, whatever `batch_rows` allows."""

INERT = -1
"""The kind of points that run nothing (see `_Context._kind`)."""

PASS_COST = 1000
"""What a pass costs besides its tokens, in layers x tokens (measured: about 60 ms on a 2-core CPU,
where one layer of a 135M model takes 0.07 ms a token)."""


@dataclass(frozen=True)
class Settings:
    """How a plan is cut; none of it is part of the experiment."""

    batch_rows: int = 256
    chunk_passes: int = 64
    recompute: str = "fast"
    parity_points: int = 0


@dataclass
class Point:
    """One point, resolved: its keys, its axis values, its edits and the rows it can use."""

    point_id: str
    point_key: str
    cell: Plain
    writes: list[Plain]
    edits: list[Plain]
    rows: tuple[int, ...]


@dataclass
class Plan:
    """All that a sweep will run, as plain data."""

    points: list[Point]
    measures: list[Plain]
    chunks: list[Plain]
    controls: Plain | None
    sample: Plain | None


def make_plan(
    sweep: Sweep,
    model: Plain,
    rows: Sequence[PromptRow],
    settings: Settings,
    load_vector: VectorLoader,
    earlier: Sequence[Sequence[Plain]] = (),
) -> Plan:
    """Plan a sweep.

    Args:
        sweep: The sweep.
        model: The prepared model (see `nnsweep.models.prepare`).
        rows: All prompt rows, in file order.
        settings: How passes and chunks are cut.
        load_vector: Reads vector files.
        earlier: `pass_records` of each chunk of an earlier plan; passes and chunks that are still
            wanted are kept as they are, so that a grown sweep runs only what is new.

    Raises:
        UserError: a site, layer or head that the model does not have.
    """
    cells = expand(sweep, limits_of(model["shape"]))
    context = _Context(sweep, model, rows, settings, load_vector, cells)
    points = [context.point(cell, writes) for cell, writes in cells]
    known = [record for records in earlier for record in records]
    passes = [p for rowset in _rowsets(points) for p in context.passes(points, rowset, known)]
    groups = _chunked(passes, settings.chunk_passes, earlier)
    chunks = [context.chunk(group) for group in groups]
    sample = context.sample(points, passes) if settings.parity_points else None
    return Plan(points, context.measures, chunks, context.controls(points), sample)


def identity(model: Plain) -> Plain:
    """What of a model decides a value; a folder is known by its contents, not by its path."""
    named = {"id": model["id"]} if model["kind"] == "hub" else {}
    return named | {key: model[key] for key in ("revision", "dtype", "attention")}


def _rowsets(points: Iterable[Point]) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(point.rows for point in points))


def _chunked(
    passes: list[Plain], size: int, earlier: Sequence[Sequence[Plain]]
) -> list[list[Plain]]:
    """Cut passes into chunks of at most `size`, keeping earlier chunks that are still whole."""
    left = {item["pass_id"]: item for item in passes}
    groups = []
    for records in earlier:
        ids = [record["pass_id"] for record in records]
        if 0 < len(ids) <= size and all(name in left for name in ids):
            groups.append([left.pop(name) for name in ids])
    rest = list(left.values())
    return groups + [rest[i : i + size] for i in range(0, len(rest), size)]


class _Context:
    """The fixed surroundings of planning: one sweep, one model, one prompt table."""

    def __init__(
        self,
        sweep: Sweep,
        model: Plain,
        rows: Sequence[PromptRow],
        settings: Settings,
        load_vector: VectorLoader,
        cells: Sequence[tuple[Plain, list[Plain]]],
    ) -> None:
        self.sweep, self.model, self.rows = sweep, model, rows
        self.settings, self.load_vector = settings, load_vector
        self.shape = model["shape"]
        self.references: list[Plain] = []
        self.measures, self.reads = measure_list(sweep, model["shape"])
        measures = sweep.measures.values()
        self.answers = sorted({n for m in measures for n in [m.answer, *(m.answers or [])] if n})
        self.donors = uses_donor(sweep)
        self.estimates_only = all(spec["kind"] == "attribution" for spec in self.measures)
        self.generating = sweep.generate is not None
        self.watched = set(watched_positions(sweep))
        named = {name for _, writes in cells for write in writes for name in position_names(write)}
        self.touched = named | self.watched

    # --- points ---------------------------------------------------------------------------

    def point(self, cell: Plain, writes: list[Plain]) -> Point:
        """Resolve one point: its rows, its edits and its ids."""
        names = {n for write in writes for n in position_names(write)} | self.watched
        rows = self._usable(names)
        edits = [self._edit(write) for write in writes]
        self._check_estimates(edits)
        self._check_spans(edits, rows)
        key = digest(
            {
                "semantics": SEMANTICS,
                "model": identity(self.model),
                "writes": [self._meaning(edit) for edit in edits],
                "measure_at": position_spec(self.sweep, self.sweep.measure_at),
            }
            | ({"generate": self.sweep.generate.model_dump()} if self.sweep.generate else {})
        )
        facts = sorted(digest(self._row_facts(i, edits)) for i in rows)
        return Point(digest([key, facts]), key, cell, writes, edits, rows)

    def _row_facts(self, row: int, edits: Sequence[Plain]) -> list[Any]:
        """What of a row decides the values of a point: tokens, answers, resolved positions."""
        found = self.rows[row]
        names = [name for edit in edits for name in _edit_positions(edit) if name != "@all"]
        places = [found.positions[name] for name in [*names, *sorted(self.watched)]]
        answers = {name: found.answers[name] for name in self.answers}
        return [found.row_key, answers, [[place.base, place.donor] for place in places]]

    def _usable(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple(
            i
            for i, row in enumerate(self.rows)
            if row.reason is None and not any(row.positions[name].reason for name in names)
        )

    def _edit(self, write: Plain) -> Plain:
        """A write as the kernel reads it: place, position name, operation, operand."""
        where = self._where(write)
        op, operand = self._operand(write, where)
        resume = resumes_at(write["site"], write.get("layer"), self.shape["layers"])
        # Generation goes on from the keys and values of every layer.
        resume = 0 if self.generating else resume
        return where | {"op": op, "operand": operand, "resume": resume}

    def _where(self, write: Plain) -> Plain:
        """tap, position and, of edges, keys of a write or of what a patch reads."""
        site, layer, head = write["site"], write.get("layer"), write.get("head")
        if site not in HEADED and head is not None:
            raise UserError(f"writes: site {site} has no heads. Remove head from the patch.")
        if site in HEADED and head is None and "heads" not in write:
            raise UserError(f"writes: a patch from site {site} needs a head. Give it one.")
        place = tap(self.shape, site, layer, head, write.get("units"))
        if write.get("heads") == "all":
            count = limits_of(self.shape)[HEADED[site]]
            place["high"] = (place["high"] - place["low"]) * count
        found = {"tap": place, "position": write["position"]}
        return found | ({"keys": write.get("keys", "@all")} if site in EDGES else {})

    def _operand(self, write: Plain, where: Plain) -> tuple[str, Plain]:
        if "add" in write:
            return "add", self._vector(write, where) | {"scale": float(write["add"]["scale"])}
        if "noise" in write:
            noise = write["noise"]
            if noise["std"] < 0:
                raise UserError(f"writes: noise std {noise['std']} is negative. Give 0 or more.")
            return "noise", {"kind": "noise", "std": float(noise["std"]), "seed": noise["seed"]}
        if "clamp" in write:
            bounds = {name: float(value) for name, value in write["clamp"].items()}
            if bounds.get("low", -math.inf) > bounds.get("high", math.inf):
                raise UserError(f"writes: clamp {bounds}: low is above high. Swap them.")
            return "clamp", {"kind": "clamp"} | bounds
        if "mix" in write:
            source = self._source(write["mix"]["source"], where)
            return "mix", source | {"weight": float(write["mix"]["weight"])}
        if "knockout" in write:
            return "set", {"kind": "lowest"}
        if "renormalize" in write:
            return "renormalize", self._length(write["renormalize"], where)
        return "set", self._source(write["set"], where)

    def _length(self, value: Any, where: Plain) -> Plain:
        """What a renormalized activation takes its length from."""
        if isinstance(value, str):
            return where | {"kind": "donor" if value == "donor" else "self"}
        if value < 0:
            raise UserError(f"writes: renormalize {value} is negative. Give a length of 0 or more.")
        return {"kind": "number", "value": float(value)}

    def _source(self, value: Any, where: Plain) -> Plain:
        if not isinstance(value, dict):
            return {"kind": "number", "value": float(value)}
        if "patch" in value:
            return self._patch(value, where)
        if "resample" in value:
            number = self._reference(value["resample"], where, "rows")
            return {"kind": "resample", "plus": number, "seed": value["seed"]}
        how = "tokens" if value["per_token"] else "mean"
        return {"kind": "mean", "plus": self._reference(value["mean"], where, how)}

    def _patch(self, value: Plain, where: Plain) -> Plain:
        """The activation of a run: which prompt, where, under which writes."""
        theirs = self._where(value)
        ours = where["tap"]
        if _width(theirs["tap"]) != _width(ours) or ("keys" in theirs) != ("keys" in where):
            raise UserError(
                f"writes: the patch reads {_width(theirs['tap'])} numbers a token at site "
                f"{value['site']}, the write takes {_width(ours)}. Patch from a site of that width."
            )
        found = theirs | {"kind": "donor" if value["patch"] == "donor" else "self"}
        under = [self._edit(write) for write in value.get("under", [])]
        return found | ({"under": under} if under else {})

    def _vector(self, write: Plain, where: Plain) -> Plain:
        vector, width = write["add"]["vector"], _width(where["tap"])
        if "unit" in vector:
            if vector["unit"] >= width:
                raise UserError(
                    f"writes: unit {vector['unit']} is outside 0..{width - 1} at {write['site']}."
                )
            return {"kind": "vector", "values": [float(i == vector["unit"]) for i in range(width)]}
        if "file" in vector:
            return {"kind": "vector", "values": self._loaded(vector, write, width)}
        plus, minus = (self._reference(vector[name], where, "mean") for name in ("mean", "minus"))
        found = {"kind": "mean", "plus": plus, "minus": minus}
        return found | ({"normalize": True} if vector["normalize"] else {})

    def _loaded(self, vector: Plain, write: Plain, width: int) -> list[float]:
        values = self.load_vector(vector, write.get("layer"))
        if len(values) != width:
            raise UserError(
                f"writes: {vector['file']} has width {len(values)}, site {write['site']} "
                f"has {width}. Give a vector of that width."
            )
        if not vector["normalize"]:
            return values
        length = math.sqrt(math.fsum(value * value for value in values))
        if length == 0:
            raise UserError(f"writes: {vector['file']} is all zeros. It cannot be normalized.")
        return [value / length for value in values]

    def _reference(self, role: str, where: Plain, how: str) -> int:
        """Number of what is to be taken over the rows (see the kernel); equal ones once."""
        rows = self._usable([where["position"]])
        wanted = where | {"role": role, "how": how, "rows": list(rows)}
        if wanted not in self.references:
            if how == "tokens":
                self._check_per_token(wanted)
            self.references.append(wanted)
        return self.references.index(wanted)

    def _check_per_token(self, wanted: Plain) -> None:
        donor = wanted["role"] == "donor"
        counts = {len(_place(self.rows[i], wanted["position"], donor)) for i in wanted["rows"]}
        own = {len(_place(self.rows[i], wanted["position"], False)) for i in wanted["rows"]}
        if len(counts | own) > 1:
            raise UserError(
                f"writes: per_token needs as many tokens in every row, position "
                f"{wanted['position']} has {sorted(counts | own)}. Leave per_token out."
            )

    def _check_spans(self, edits: Sequence[Plain], rows: Sequence[int]) -> None:
        """Refuse a patch whose tokens do not correspond to those that it is written to."""
        for edit in edits:
            operand = edit["operand"]
            self._check_spans(operand.get("under", []), rows)
            if "tap" in operand:
                for name in ("position", "keys"):
                    if name in edit:
                        self._check_span(edit[name], operand, name, rows)
                self._check_edges(edit, rows)
        self._check_knockouts(edits, rows)

    def _check_span(self, ours: str, operand: Plain, name: str, rows: Sequence[int]) -> None:
        donor, theirs = operand["kind"] == "donor", operand[name]
        if ours == theirs and ours != "@all":
            return  # The same position was compared when the rows were prepared.
        for i in rows:
            row = self.rows[i]
            have, want = len(_tokens(row, theirs, donor)), len(_tokens(row, ours, False))
            if have != want and (name == "keys" or have != 1):
                raise UserError(
                    f"writes: row {row.row_id}: {theirs.strip('@')} has {have} tokens, "
                    f"{ours.strip('@')} {want}. Patch from one token or from as many."
                )

    def _check_estimates(self, edits: Sequence[Plain]) -> None:
        """Refuse writes whose effect has no first-order estimate."""
        for edit in edits if any(s["kind"] == "attribution" for s in self.measures) else []:
            if edit["tap"]["side"] == "logits" or edit["operand"]["kind"] == "lowest":
                raise UserError(
                    "measures: attribution estimates writes inside the model, and no knockout. "
                    "Measure this sweep by running it."
                )

    def _check_edges(self, edit: Plain, rows: Sequence[int]) -> None:
        """Refuse edges of which one exists in one prompt alone: its key is behind its query."""
        operand = edit["operand"]
        for row in (self.rows[i] for i in rows if "keys" in operand):
            ours = _seen(row, edit, False)
            if ours != _seen(row, operand, operand["kind"] == "donor"):
                raise UserError(
                    f"writes: row {row.row_id}: a key lies behind its query in one of the prompts "
                    "only. Choose positions in the same order in both."
                )

    def _check_knockouts(self, edits: Sequence[Plain], rows: Sequence[int]) -> None:
        """Refuse to leave a token without anything to attend to: its attention would be noise."""
        cut = [edit for edit in edits if edit["operand"]["kind"] == "lowest"]
        for path in {edit["tap"]["path"] for edit in cut}:
            here = [edit for edit in cut if edit["tap"]["path"] == path]
            for row in (self.rows[i] for i in rows):
                blind = _blind_tokens(row, here)
                if blind:
                    raise UserError(
                        f"writes: row {row.row_id}: knockout leaves token {min(blind)} of "
                        f"{row.tokens} no token to attend to. Leave it one, as the first."
                    )

    def _meaning(self, edit: Plain) -> Plain:
        """What of a write decides a value: places and operands by content, not by name."""
        found = {}
        for key, value in edit.items():
            if key in ("position", "keys"):
                found[key] = position_spec(self.sweep, value) if value != "@all" else value
            elif key == "operand":
                found[key] = self._meaning(value)
            elif key == "under":
                found[key] = [self._meaning(under) for under in value]
            elif key in ("plus", "minus"):
                reference = self.references[value]
                keys = sorted(self.rows[i].row_key for i in reference["rows"])
                found[key] = [reference["role"], reference["how"], digest(keys)]
            else:
                found[key] = value
        return found

    # --- passes ---------------------------------------------------------------------------

    def passes(
        self, points: Sequence[Point], rowset: tuple[int, ...], earlier: Sequence[Plain]
    ) -> list[Plain]:
        """All passes of the points that use this set of rows."""
        mine = {point.point_key: point for point in points if point.rows == rowset}
        found = []
        for block in self._blocks(rowset):
            kept = self._kept(mine, block, earlier)
            done = {key for item in kept for key in item["points"]}
            left = [point for key, point in mine.items() if key not in done]
            found += kept + self._composed(left, block)
        return found

    def _kept(
        self, points: dict[str, Point], block: tuple[int, ...], earlier: Sequence[Plain]
    ) -> list[Plain]:
        """Passes of an earlier plan over these rows, whose points are all still wanted."""
        left, name, kept = dict(points), block_name([self.rows[i].row_key for i in block]), []
        for record in earlier:
            keys, start = record["points"], record["start"]
            if record["block"] != name or not all(key in left for key in keys):
                continue
            members = [left[key] for key in keys]
            first = min(self._start(point, block) for point in members)
            if start > first or len(keys) > self._points_a_pass(block, start):
                continue
            item = self._pass(block, members, start)
            if item["pass_id"] == record["pass_id"]:
                kept.append(item)
                left = {key: point for key, point in left.items() if key not in keys}
        return kept

    def _composed(self, points: Sequence[Point], block: tuple[int, ...]) -> list[Plain]:
        """Passes of points that no earlier pass holds."""
        return [
            self._pass(block, part, start)
            for start, members in self._grouped(points, block)
            for part in _even_slices(members, self._points_a_pass(block, start))
        ]

    def _points_a_pass(self, block: Sequence[int], start: int) -> int:
        """How many points may share a pass; alone, a point keeps the bits of a full pass."""
        if self.settings.recompute == "exact":
            return 1
        rows, width = len(block), len(self.rows[block[0]].ids)
        return max(1, min(self.settings.batch_rows, PASS_TOKENS // (width - start)) // rows)

    def _blocks(self, rowset: Iterable[int]) -> list[tuple[int, ...]]:
        """Rows that may share a pass: equal lengths, at most batch_rows, in order of key."""
        by_length: dict[tuple[int, int], list[int]] = {}
        for i in rowset:
            row = self.rows[i]
            lengths = (len(row.ids), len(row.donor_ids) if self.donors else 0)
            by_length.setdefault(lengths, []).append(i)
        blocks = []
        for lengths in sorted(by_length):
            members = sorted(by_length[lengths], key=lambda i: self.rows[i].row_key)
            size = min(self.settings.batch_rows, max(1, PASS_TOKENS // max(lengths)))
            blocks += [tuple(part) for part in slices(members, size)]
        return blocks

    def _grouped(
        self, points: Sequence[Point], block: Sequence[int]
    ) -> Iterator[tuple[int, list[Point]]]:
        """(start, points) of points that may share a pass, in the order in which they join it.

        Points that start at the same token share passes; a small group goes along with an earlier
        token where computing a few tokens more costs less than a pass of its own.
        """
        groups: dict[tuple[int, int], list[Point]] = {}
        for point in points:
            kind = self._kind(point, block)
            start = 0 if kind == INERT else self._start(point, block)
            groups.setdefault((kind, start), []).append(point)
        for kind, start in sorted(groups, reverse=True):
            members = groups.pop((kind, start))
            target = next((key for key in sorted(groups, reverse=True) if key[0] == kind), None)
            if target and self._goes_along(members, groups[target], block, start, target[1]):
                groups[target] += members
            else:
                yield start, sorted(members, key=_resume)

    def _kind(self, point: Point, block: Sequence[int]) -> int:
        """Points of one kind may share a pass."""
        if self._is_inert(point, block):
            return INERT
        return 1 if self.shape["joins"] and _resume(point) else -2 - _resume(point)

    def _goes_along(
        self,
        few: Sequence[Point],
        others: Sequence[Point],
        block: Sequence[int],
        start: int,
        earlier: int,
    ) -> bool:
        """Whether points that start at a token had better start at an earlier one with others."""
        more = (start - earlier) * len(block)
        cost = more * sum(self.shape["layers"] - _resume(point) for point in few)
        room = self._points_a_pass(block, earlier)
        return len(few) + len(others) <= room and cost <= PASS_COST

    def _start(self, point: Point, block: Sequence[int]) -> int:
        """First token that must be computed anew (0: all).

        A layer with a sliding window keeps only the keys inside it, so a prompt that is longer
        than the window is computed from its first token on.
        """
        window, width = self.shape["window"], len(self.rows[block[0]].ids)
        beyond = (window is not None and width >= window) or self.generating
        if self.settings.recompute == "exact" or not point.edits or beyond:
            return 0
        names = [edit["position"] for edit in point.edits] + [self.sweep.measure_at]
        return min(min(self.rows[i].positions[name].base) for i in block for name in names)

    def _pass(
        self,
        block: tuple[int, ...],
        points: Sequence[Point],
        start: int,
        more: Any = None,
        inert: bool | None = None,
    ) -> Plain:
        if inert is None:
            inert = self._is_inert(points[0], block)
        keys = [point.point_key for point in points]
        row_keys = [self.rows[i].row_key for i in block]
        edits = [
            self._drawn(edit, block) | {"slot": slot}
            for slot, point in enumerate(points)
            for edit in point.edits
        ]
        rows = [self._row_facts(i, edits) for i in block]
        facts = [SEMANTICS, keys, row_keys, rows, start, inert, self.measures, more]
        return {
            "pass_id": digest(facts),
            "block": block,
            "points": keys,
            "resumes": [_resume(point) for point in points],
            "start": start,
            "inert": inert,
            "estimated": not inert and self.estimates_only,
            "edits": edits,
        }

    def _is_inert(self, point: Point, block: Sequence[int]) -> bool:
        """Whether no write of a point can move what is measured on any of these rows.

        `exact` runs such points too: where experts share tokens, even they can move a bit.
        """
        return (
            self.settings.recompute == "fast"
            and not self.generating
            and all(
                _cannot_move(edit, self.rows[i], self.watched, self.shape["layers"])
                for edit in point.edits
                for i in block
            )
        )

    def _drawn(self, edit: Plain, block: Sequence[int]) -> Plain:
        """An edit with everything that is drawn at random for the rows of a block.

        Neither the point's other axes nor the standard deviation of noise enter, so that a
        corrupted prompt is the same prompt at every point that corrupts it the same way.
        """
        operand = edit["operand"]
        if "under" in operand:
            under = [self._drawn(one, block) for one in operand["under"]]
            return edit | {"operand": operand | {"under": under, "chain": digest(under)}}
        if "seed" not in operand:
            return edit
        tap, rows = edit["tap"], [self.rows[i] for i in block]
        place = [operand["seed"], tap["path"], tap["side"], tap["low"], *tap.get("units", [])]
        # From the tokens, not from the key, which may have to tell rows of equal tokens apart.
        facts = [[*place, row.positions[edit["position"]].base, row.key()] for row in rows]
        seeds = [int(digest(fact)[:15], 16) for fact in facts]
        if operand["kind"] == "noise":
            return edit | {"operand": operand | {"seeds": seeds}}
        partners = [
            self._partner(i, operand["plus"], seed) for i, seed in zip(block, seeds, strict=True)
        ]
        return edit | {"operand": operand | {"partners": partners}}

    def _partner(self, row: int, reference: int, seed: int) -> str:
        """Key of the row that a row is resampled from: another one, with as many tokens."""
        wanted = self.references[reference]
        name, donor = wanted["position"], wanted["role"] == "donor"
        count = len(_place(self.rows[row], name, False))
        others = [self.rows[i] for i in wanted["rows"] if i != row]
        keys = sorted(o.row_key for o in others if len(_place(o, name, donor)) == count)
        if not keys:
            raise UserError(
                f"writes: row {self.rows[row].row_id}: no other row has {count} tokens at "
                f"position {name} to resample from. Use token: last, or more rows."
            )
        return keys[seed % len(keys)]

    # --- chunks ---------------------------------------------------------------------------

    def chunk(self, passes: Sequence[Plain]) -> Plain:
        """A self-contained job: everything a session needs, and nothing of where it runs."""
        blocks = [
            self._block(block)
            | {"passes": [_without_block(p) for p in passes if p["block"] == block]}
            for block in dict.fromkeys(p["block"] for p in passes)
        ]
        references = sorted({n for p in passes for e in p["edits"] for n in refs(e)})
        return {
            "chunk_id": digest([p["pass_id"] for block in blocks for p in block["passes"]]),
            "model": self.model,
            "measures": in_session(self.measures),
            "reads": self.reads,
            "references": {str(n): self._reference_set(self.references[n]) for n in references},
            "blocks": blocks,
        }

    def _block(self, block: Sequence[int], swap: bool = False) -> Plain:
        """The rows of a block; `swap` runs the donor prompts in the place of the prompts."""
        rows = [self.rows[i] for i in block]
        names = list(rows[0].positions)
        measured = self.sweep.measure_at
        base = [row.donor_ids if swap else row.ids for row in rows]
        return {
            "row_keys": [row.row_key for row in rows],
            "ids": base,
            "donor_ids": [row.donor_ids for row in rows] if self.donors else [],
            "shared": 0 if swap else self._shared(rows, donor=False),
            "donor_shared": self._shared(rows, donor=True) if self.donors and not swap else 0,
            "measured": [_last(row, measured, donor=swap) for row in rows],
            "donor_measured": [_last(row, measured, donor=True) for row in rows]
            if self.donors
            else [],
            "answers": {name: [row.answers[name][0] for row in rows] for name in self.answers},
            "positions": {
                name: {
                    "base": [_place(row, name, donor=swap) for row in rows],
                    "donor": [row.positions[name].donor for row in rows],
                    "mean": _aligned_by_mean(self.sweep, name),
                }
                for name in names
            }
            | {
                "@all": {
                    "base": [list(range(len(ids))) for ids in base],
                    "donor": [list(range(len(row.donor_ids))) for row in rows],
                    "mean": False,
                }
            },
        }

    def _shared(self, rows: Sequence[PromptRow], donor: bool) -> int:
        """How many leading tokens are the same in all rows and are read and written by no point."""
        ids = [row.donor_ids if donor else row.ids for row in rows]
        window = self.shape["window"]
        if self.settings.recompute == "exact" or (window is not None and len(ids[0]) >= window):
            return 0
        places = [_place(row, name, donor) for row in rows for name in self.touched]
        touched = min((min(place) for place in places if place), default=0)
        same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*ids, strict=True))
        return min(touched, sum(1 for _ in same))

    def _reference_set(self, reference: Plain) -> Plain:
        """What is taken over the rows of a reference set, in batches of prompts of one length."""
        donor = reference["role"] == "donor"
        by_length: dict[int, list[PromptRow]] = {}
        for i in reference["rows"]:
            row = self.rows[i]
            by_length.setdefault(len(row.donor_ids if donor else row.ids), []).append(row)
        batches = []
        for length in sorted(by_length):
            members = sorted(by_length[length], key=lambda row: row.row_key)
            for part in slices(members, self.settings.batch_rows):
                batches.append(
                    {
                        "row_keys": [row.row_key for row in part],
                        "ids": [row.donor_ids if donor else row.ids for row in part],
                        "at": [_place(row, reference["position"], donor) for row in part],
                    }
                )
        return {"tap": reference["tap"], "how": reference["how"], "batches": batches}

    def sample(self, points: Sequence[Point], passes: Sequence[Plain]) -> Plain | None:
        """A chunk of whole passes that holds `parity_points` points, evenly spread, or None."""
        wanted = self.settings.parity_points
        if wanted >= len(points):
            return None
        places = {round(i * (len(points) - 1) / max(1, wanted - 1)) for i in range(wanted)}
        keys = {points[place].point_key for place in places}
        chunk = self.chunk([p for p in passes if keys & set(p["points"])])
        return chunk | {"chunk_id": digest(["sample", chunk["chunk_id"]])}

    # --- null controls --------------------------------------------------------------------

    def controls(self, points: Sequence[Point]) -> Plain | None:
        """A chunk of null controls on a few rows (see docs/checks.md), or None without rows."""
        rows = max((point.rows for point in points), key=len)
        if not rows:
            return None
        blocks = [block[:8] for block in self._blocks(rows)]
        equal = [b for b in blocks if self.donors and _equal_lengths(self.rows[b[0]])]
        inert = {b: self._first_inert(points, b) for b in equal or blocks}
        block = next((b for b in inert if inert[b]), (equal or blocks)[0])
        first, last = points[0], points[-1]
        passes = [self._control(block, "clean", [])]
        passes += [
            self._control(block, f"self_patch_{n}", self._self_patch(p), p)
            for n, p in enumerate([first, last])
            if p.edits and set(block) <= set(p.rows)
        ]
        if idle := inert[block]:
            passes.append(self._control(block, "inert", idle.edits, idle))
        passes.append(self._control(block, "zero_steer", [self._zero_steer()]))
        if equal:
            passes.append(self._control(block, "full_donor", [self._full_donor()]))
        chunk = self.chunk(passes)
        chunk["measures"] = controlled(chunk["measures"])
        # Controls read and write every token.
        nothing = {"shared": 0, "donor_shared": 0}
        chunk["blocks"] = [each | nothing for each in chunk["blocks"]]
        if equal:
            donor = self._block(block, swap=True)
            alone = self._control(block, "donor", [])
            chunk["blocks"].append(donor | {"passes": [_without_block(alone)]})
        return chunk | {"chunk_id": digest(["controls", chunk["chunk_id"]])}

    def _first_inert(self, points: Sequence[Point], block: tuple[int, ...]) -> Point | None:
        """A point that cannot differ on these rows."""
        return next(
            (
                p
                for p in points
                if p.edits and set(block) <= set(p.rows) and self._is_inert(p, block)
            ),
            None,
        )

    def _control(
        self, block: tuple[int, ...], name: str, edits: list[Plain], like: Point | None = None
    ) -> Plain:
        key = f"control:{name}"
        point = Point(key, key, {}, [], edits, block)
        start = self._start(like, block) if like else 0
        # The key of a control says nothing of its model and places, its pass must.
        return self._pass(block, [point], start, [identity(self.model), edits], inert=False)

    def _self_patch(self, point: Point) -> list[Plain]:
        return [edit | {"op": "set", "operand": _place_of(edit, "self")} for edit in point.edits]

    def _zero_steer(self) -> Plain:
        place = tap(self.shape, "resid_post", self.shape["layers"] // 2, None)
        values = [1.0] * (place["high"] - place["low"])
        operand = {"kind": "vector", "values": values, "scale": 0.0}
        return self._plain_edit(place, "add", operand, self.shape["layers"] // 2 + 1)

    def _full_donor(self) -> Plain:
        place = tap(self.shape, "resid_post", self.shape["layers"] - 1, None)
        operand = _place_of({"tap": place, "position": "@all"}, "donor")
        return self._plain_edit(place, "set", operand, self.shape["layers"])

    def _plain_edit(self, place: Plain, op: str, operand: Plain, resume: int) -> Plain:
        return {"tap": place, "position": "@all", "op": op, "operand": operand, "resume": resume}


def _place_of(edit: Plain, kind: str) -> Plain:
    """An operand that reads the very place of an edit in a run without writes."""
    return {"kind": kind} | {key: edit[key] for key in ("tap", "position", "keys") if key in edit}


def measure_list(sweep: Sweep, shape: Plain) -> tuple[list[Plain], list[Plain]]:
    """The measures as plain data, in the order of their columns, and the places they read.

    A lens is one measure a layer, called NAME.LAYER; `lens` and `read` become numbers of a place.

    Raises:
        UserError: a place that the model does not have.
    """
    measures: list[Plain] = []
    reads: list[Plain] = []
    for name, measure in sweep.measures.items():
        plain = {"name": name, **measure.model_dump(exclude_none=True)}
        if measure.lens is not None:
            for layer, read in _lens_reads(sweep, measure, shape):
                number = _numbered(read, reads)
                measures.append(plain | {"name": f"{name}.{layer}", "lens": number})
        elif measure.read is not None:
            place = measure.read
            where = tap(shape, place.site, place.layer, place.head)
            read = {"tap": where, "position": place.position}
            measures.append(plain | {"read": _numbered(read, reads)})
        else:
            measures.append(plain)
    if sweep.generate is not None:
        how = sweep.generate
        steps = {"prompt": [0], "all": list(range(how.max_new_tokens))}.get(
            str(how.writes_at), how.writes_at
        )
        measures.append(
            {"name": GENERATED[0], "kind": GENERATE, "k": how.max_new_tokens, "steps": steps}
        )
    return measures, reads


def _lens_reads(sweep: Sweep, measure: Measure, shape: Plain) -> Iterator[tuple[int, Plain]]:
    """(layer, place) of every layer that a lens reads."""
    lens = measure.lens
    if lens is None or shape["lens"] is None:
        raise UserError(f"lens: how logits come from the stream of {shape['family']} is not known.")
    layers = range(shape["layers"]) if lens.layers == "all" else lens.layers
    for layer in layers:
        if layer >= shape["layers"]:
            raise UserError(f"lens: layer {layer} is outside 0..{shape['layers'] - 1}.")
        where = tap(shape, lens.site, layer)
        yield layer, {"tap": where, "position": lens.position or sweep.measure_at}


def controlled(measures: Sequence[Plain]) -> list[Plain]:
    """The measures that null controls compute: all but what is generated."""
    return [spec for spec in in_session(measures) if spec["kind"] != GENERATE]


def _numbered(item: Plain, items: list[Plain]) -> int:
    """The number of an item in a list, put at its end where it is new."""
    if item not in items:
        items.append(item)
    return items.index(item)


def _width(place: Plain) -> int:
    """How many numbers a token a place has."""
    return len(place["units"]) if "units" in place else place["high"] - place["low"]


def _edit_positions(edit: Plain) -> list[str]:
    """Names of the positions that an edit touches or reads."""
    operand = edit["operand"]
    found = [one[key] for one in (edit, operand) for key in ("position", "keys") if key in one]
    return found + [name for under in operand.get("under", []) for name in _edit_positions(under)]


def _aligned_by_mean(sweep: Sweep, name: str) -> bool:
    spec = position_spec(sweep, name)
    return isinstance(spec, dict) and spec.get("align") == "mean"


def _tokens(row: PromptRow, name: str, donor: bool) -> list[int]:
    """Tokens of a position; `@all` is every token."""
    if name == "@all":
        return list(range(len(row.donor_ids if donor else row.ids)))
    return _place(row, name, donor)


def _seen(row: PromptRow, where: Plain, donor: bool) -> list[list[int]]:
    """Which of the keys each query token of a position can see, by their place in the list."""
    keys = _tokens(row, where["keys"], donor)
    tokens = _tokens(row, where["position"], donor)
    return [[place for place, key in enumerate(keys) if key <= token] for token in tokens]


def _blind_tokens(row: PromptRow, edits: Sequence[Plain]) -> set[int]:
    """Query tokens of a row for which some head loses every key."""
    lost: dict[tuple[int, int], set[int]] = {}
    for edit in edits:
        keys = _tokens(row, edit["keys"], False)
        for token in _tokens(row, edit["position"], False):
            for head in range(edit["tap"]["low"], edit["tap"]["high"]):
                lost.setdefault((token, head), set()).update(k for k in keys if k <= token)
    return {token for (token, _), keys in lost.items() if len(keys) == token + 1}


def _even_slices[Item](items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """As few slices as `size` allows, and all about as long."""
    count = -(-len(items) // size)
    edges = [round(i * len(items) / max(1, count)) for i in range(count + 1)]
    return [items[low:high] for low, high in itertools.pairwise(edges)]


def _resume(point: Point) -> int:
    """The first layer that a point's writes can touch."""
    return min((edit["resume"] for edit in point.edits), default=0)


def _cannot_move(edit: Plain, row: PromptRow, watched: Iterable[str], layers: int) -> bool:
    """Whether an edit of one row leaves what is measured as it is.

    It does where it writes what is there already, behind every measured token, or where nothing but
    its own token is computed any more.
    """
    operand = edit["operand"]
    measured = {_last(row, name, donor=False) for name in watched}
    if 0 in (operand.get("scale"), operand.get("std"), operand.get("weight")):
        return True
    base = _tokens(row, edit["position"], False)
    if _puts_back(edit) and _same_prefix(row, base, _tokens(row, edit["position"], True)):
        return True
    layer, rank = edit["tap"]["order"]
    # From the scores of the last layer on, no token reads another one any more.
    alone = layer >= layers - 1 and rank >= ORDER.index("attn_scores")
    return all(token > max(measured) or (alone and token not in measured) for token in base)


def _puts_back(edit: Plain) -> bool:
    """Whether an edit takes its very own place from the donor prompt without writes."""
    operand = edit["operand"]
    same = all(edit.get(key) == operand.get(key) for key in ("tap", "position"))
    plain = edit["op"] in ("set", "mix") and "keys" not in edit and "under" not in operand
    return operand["kind"] == "donor" and same and plain


def _same_prefix(row: PromptRow, base: Sequence[int], donor: Sequence[int]) -> bool:
    """Whether the donor is the same prompt up to the last token of a position."""
    end = max(base) + 1
    return base == donor and row.ids[:end] == row.donor_ids[:end]


def _without_block(item: Plain) -> Plain:
    return {key: value for key, value in item.items() if key != "block"}


def _place(row: PromptRow, name: str, donor: bool) -> list[int]:
    place = row.positions[name]
    return place.donor if donor else place.base


def _last(row: PromptRow, name: str, donor: bool) -> int:
    """The token whose next-token logits are measured: the last one of the position."""
    return _place(row, name, donor)[-1]


def _equal_lengths(row: PromptRow) -> bool:
    return len(row.ids) == len(row.donor_ids)
