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
from nnsweep.chunks import block_name, refs, slices
from nnsweep.errors import UserError
from nnsweep.grid import expand
from nnsweep.prompts import PromptRow
from nnsweep.sites import ORDER, limits_of, resumes_at, tap
from nnsweep.sweep import Sweep, position_spec, uses_donor
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
    touched = {write["position"] for _, writes in cells for write in writes} | {sweep.measure_at}
    context = _Context(sweep, model, rows, settings, load_vector, touched)
    points = [context.point(cell, writes) for cell, writes in cells]
    known = [record for records in earlier for record in records]
    passes = [p for rowset in _rowsets(points) for p in context.passes(points, rowset, known)]
    groups = _chunked(passes, settings.chunk_passes, earlier)
    chunks = [context.chunk(group) for group in groups]
    sample = context.sample(points, passes) if settings.parity_points else None
    return Plan(points, chunks, context.controls(points), sample)


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
        touched: set[str],
    ) -> None:
        self.sweep, self.model, self.rows = sweep, model, rows
        self.settings, self.load_vector = settings, load_vector
        self.shape = model["shape"]
        self.references: list[Plain] = []
        self.measures = measure_list(sweep)
        measures = sweep.measures.values()
        self.answers = sorted({n for m in measures for n in [m.answer, *(m.answers or [])] if n})
        self.donors = uses_donor(sweep)
        self.touched = touched

    # --- points ---------------------------------------------------------------------------

    def point(self, cell: Plain, writes: list[Plain]) -> Point:
        """Resolve one point: its rows, its edits and its ids."""
        edits = [self._edit(write) for write in writes]
        names = {write["position"] for write in writes} | {self.sweep.measure_at}
        rows = self._usable(names)
        key = digest(
            {
                "semantics": SEMANTICS,
                "model": identity(self.model),
                "writes": [self._meaning(w, e) for w, e in zip(writes, edits, strict=True)],
                "measure_at": position_spec(self.sweep, self.sweep.measure_at),
            }
        )
        facts = sorted(digest(self._row_facts(i, edits)) for i in rows)
        return Point(digest([key, facts]), key, cell, writes, edits, rows)

    def _row_facts(self, row: int, edits: Sequence[Plain]) -> list[Any]:
        """What of a row decides the values of a point: tokens, answers, resolved positions."""
        found = self.rows[row]
        names = [edit["position"] for edit in edits if edit["position"] != "@all"]
        places = [found.positions[name] for name in [*names, self.sweep.measure_at]]
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
        place = tap(self.shape, write["site"], write.get("layer"), write.get("head"))
        op, operand = self._operand(write, place)
        resume = resumes_at(write["site"], write.get("layer"), self.shape["layers"])
        return {
            "tap": place,
            "position": write["position"],
            "op": op,
            "operand": operand,
            "resume": resume,
        }

    def _operand(self, write: Plain, place: Plain) -> tuple[str, Plain]:
        if write.get("add"):
            add = write["add"]
            return "add", self._vector(write, place) | {"scale": float(add["scale"])}
        if write.get("noise"):
            noise = write["noise"]
            if noise["std"] < 0:
                raise UserError(f"writes: noise std {noise['std']} is negative. Give 0 or more.")
            return "noise", {"kind": "noise", "std": float(noise["std"]), "seed": noise["seed"]}
        if write.get("clamp"):
            bounds = {name: float(value) for name, value in write["clamp"].items()}
            if bounds.get("low", -math.inf) > bounds.get("high", math.inf):
                raise UserError(f"writes: clamp {bounds}: low is above high. Swap them.")
            return "clamp", {"kind": "clamp"} | bounds
        if write.get("mix"):
            mix = write["mix"]
            return "mix", self._source(mix["source"], write, place) | {
                "weight": float(mix["weight"])
            }
        return "set", self._source(write["set"], write, place)

    def _source(self, value: Any, write: Plain, place: Plain) -> Plain:
        if value == "donor":
            return {"kind": "donor"}
        if isinstance(value, dict):
            reference = self._reference(value["mean"], place, write["position"])
            return {"kind": "mean", "plus": reference}
        return {"kind": "number", "value": float(value)}

    def _vector(self, write: Plain, place: Plain) -> Plain:
        vector = write["add"]["vector"]
        if "file" in vector:
            values = self.load_vector(vector, write.get("layer"))
            width = place["high"] - place["low"]
            if len(values) != width:
                raise UserError(
                    f"writes: {vector['file']} has width {len(values)}, site {write['site']} "
                    f"has {width}. Give a vector of that width."
                )
            return {"kind": "vector", "values": values}
        plus, minus = (
            self._reference(vector[name], place, write["position"]) for name in ("mean", "minus")
        )
        return {"kind": "mean", "plus": plus, "minus": minus}

    def _reference(self, role: str, place: Plain, position: str) -> int:
        """Number of a mean to be taken; equal means are taken once."""
        rows = self._usable([position])
        wanted = {"role": role, "tap": place, "position": position, "rows": list(rows)}
        if wanted not in self.references:
            self.references.append(wanted)
        return self.references.index(wanted)

    def _meaning(self, write: Plain, edit: Plain) -> Plain:
        """What of a write decides a value: positions and operands by content, not by name."""
        operand = dict(edit["operand"])
        for side in ("plus", "minus"):
            if side in operand:
                reference = self.references[operand[side]]
                keys = sorted(self.rows[i].row_key for i in reference["rows"])
                operand[side] = [reference["role"], digest(keys)]
        plain = {key: write.get(key) for key in ("site", "layer", "head")}
        position = position_spec(self.sweep, write["position"])
        return plain | {"position": position, "op": edit["op"], "operand": operand}

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
        beyond = window is not None and width >= window
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
            self._seeded(edit, block) | {"slot": slot}
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
            "edits": edits,
        }

    def _is_inert(self, point: Point, block: Sequence[int]) -> bool:
        """Whether no write of a point can move what is measured on any of these rows.

        `exact` runs such points too: where experts share tokens, even they can move a bit.
        """
        return self.settings.recompute == "fast" and all(
            _cannot_move(edit, self.rows[i], self.sweep.measure_at, self.shape["layers"])
            for edit in point.edits
            for i in block
        )

    def _seeded(self, edit: Plain, block: Sequence[int]) -> Plain:
        """Give a noise edit one seed a row, from the write's place and the row's identity.

        Neither the point's other axes nor the standard deviation enter, so that a corrupted prompt
        is the same prompt at every point that corrupts it the same way.
        """
        if edit["op"] != "noise":
            return edit
        tap = edit["tap"]
        place = [edit["operand"]["seed"], tap["path"], tap["side"], tap["low"]]
        rows = [self.rows[i] for i in block]
        # From the tokens, not from the key, which may have to tell rows of equal tokens apart.
        facts = [[*place, row.positions[edit["position"]].base, row.key()] for row in rows]
        seeds = [int(digest(fact)[:15], 16) for fact in facts]
        return edit | {"operand": edit["operand"] | {"seeds": seeds}}

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
            "measures": self.measures,
            "references": {str(n): self._reference_batches(self.references[n]) for n in references},
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
                }
                for name in names
            }
            | {
                "@all": {
                    "base": [list(range(len(ids))) for ids in base],
                    "donor": [list(range(len(row.donor_ids))) for row in rows],
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

    def _reference_batches(self, reference: Plain) -> list[Plain]:
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
                        "tap": reference["tap"],
                        "ids": [row.donor_ids if donor else row.ids for row in part],
                        "at": [_place(row, reference["position"], donor) for row in part],
                    }
                )
        return batches

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
        return [edit | {"op": "set", "operand": {"kind": "self"}} for edit in point.edits]

    def _zero_steer(self) -> Plain:
        place = tap(self.shape, "resid_post", self.shape["layers"] // 2, None)
        values = [1.0] * (place["high"] - place["low"])
        operand = {"kind": "vector", "values": values, "scale": 0.0}
        return self._plain_edit(place, "add", operand, self.shape["layers"] // 2 + 1)

    def _full_donor(self) -> Plain:
        place = tap(self.shape, "resid_post", self.shape["layers"] - 1, None)
        return self._plain_edit(place, "set", {"kind": "donor"}, self.shape["layers"])

    def _plain_edit(self, place: Plain, op: str, operand: Plain, resume: int) -> Plain:
        return {"tap": place, "position": "@all", "op": op, "operand": operand, "resume": resume}


def measure_list(sweep: Sweep) -> list[Plain]:
    """The measures as plain data, in the order of their columns."""
    return [
        {"name": name, **measure.model_dump(exclude_none=True)}
        for name, measure in sweep.measures.items()
    ]


def _even_slices[Item](items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """As few slices as `size` allows, and all about as long."""
    count = -(-len(items) // size)
    edges = [round(i * len(items) / max(1, count)) for i in range(count + 1)]
    return [items[low:high] for low, high in itertools.pairwise(edges)]


def _resume(point: Point) -> int:
    """The first layer that a point's writes can touch."""
    return min((edit["resume"] for edit in point.edits), default=0)


def _cannot_move(edit: Plain, row: PromptRow, measured_at: str, layers: int) -> bool:
    """Whether an edit of one row leaves its measured logits as they are.

    It does where it writes what is there already, behind the measured token, or where nothing but
    its own token is computed any more.
    """
    operand, measured = edit["operand"], _last(row, measured_at, donor=False)
    if 0 in (operand.get("scale"), operand.get("std"), operand.get("weight")):
        return True
    all_tokens = edit["position"] == "@all"
    base = list(range(len(row.ids))) if all_tokens else row.positions[edit["position"]].base
    donor = base if all_tokens else row.positions[edit["position"]].donor
    if operand["kind"] == "donor" and _same_prefix(row, base, donor):
        return True
    layer, rank = edit["tap"]["order"]
    alone = layer >= layers - 1 and rank >= ORDER.index("z")
    return all(token > measured or (alone and token != measured) for token in base)


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
