"""From points and prompt rows to passes and chunks: integers and strings only.

Which points and rows share a forward pass is decided here, from the points and `batch_rows`
alone. A chunk is a list of whole passes, so chunking, engine and resume cannot move a bit.
Rows that share a pass have prompts of equal length (and donors of equal length): there is never
a padding token, hence no padding to go wrong.
"""

import copy
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nnsweep import SEMANTICS
from nnsweep.chunks import (
    every,
    in_session,
    keys_of,
    refs,
    slices,
)
from nnsweep.edits import Edits, edit_positions
from nnsweep.errors import UserError
from nnsweep.grid import expand, position_names
from nnsweep.inert import cannot_move
from nnsweep.measure_plan import answers_of, measure_list, restricted
from nnsweep.null_controls import NullControls
from nnsweep.planned import (
    Kept,
    Plain,
    Plan,
    Point,
    Settings,
    VectorLoader,
    identity,
    without_block,
)
from nnsweep.prompts import PromptRow
from nnsweep.reuse import Earlier, Reuse, kept_controls, reuse
from nnsweep.row_places import last_of, place_of
from nnsweep.samples import for_parity, sample
from nnsweep.sites import limits_of
from nnsweep.sweep import Sweep, position_spec, uses_donor, watched_positions
from nnsweep.sweep_words import BETWEEN
from nnsweep.tables import digest

PASS_TOKENS = 32_768
"""Most tokens that one pass computes anew, whatever `batch_rows` allows."""

INERT = -1
"""The kind of points that run nothing (see `_Context._kind`)."""

PASS_COST = 1000
"""What a pass costs besides its tokens, in layers x tokens (measured: about 60 ms on a 2-core CPU,
where one layer of a 135M model takes 0.07 ms a token)."""


def make_plan(
    sweep: Sweep,
    model: Plain,
    rows: Sequence[PromptRow],
    settings: Settings,
    load_vector: VectorLoader,
    earlier: Sequence[Earlier] = (),
) -> Plan:
    """Plan a sweep.

    Args:
        sweep: The sweep.
        model: The prepared model (see `nnsweep.models.prepare`).
        rows: All prompt rows, in file order.
        settings: How passes and chunks are cut.
        load_vector: Reads vector files.
        earlier: Chunks that lie about. Their values are taken where they are still true (see
            `nnsweep.reuse`), so that a sweep that changes runs only what is new.

    Raises:
        UserError: a site, layer or head that the model does not have.
    """
    cells = expand(sweep, limits_of(model["shape"]))
    context = Context(sweep, model, rows, settings, load_vector, cells)
    points = [context.point(cell, writes) for cell, writes in cells]
    found = reuse(context, points, earlier)
    new = [
        chunk
        for names, groups in found.groups(points).items()
        for chunk in _new_chunks(context, names, groups, found)
    ]
    parts = found.kept + new
    kept = None if new else kept_controls(context, earlier)
    controls = kept.chunk if kept else NullControls(context).controls(points)
    names = [spec["name"] for spec in in_session(context.measures)]
    calibration = min(settings.calibration_points, len(points))
    return Plan(
        points,
        context.measures,
        parts,
        {point.point_key: len(point.rows) - len(found.moved[point.point_key]) for point in points},
        controls,
        kept.names if kept else _own_names(controls),
        for_parity(points, parts, names, settings.parity_points),
        sample(points, parts, names, calibration),
    )


def _new_chunks(
    context: "Context",
    names: frozenset[str],
    groups: Mapping[tuple[int, ...], Sequence[Point]],
    found: Reuse,
) -> list[Kept]:
    """Chunks that compute some measures of points on rows that lack them."""
    asking = context.asking(names)
    passes = [item for rows, points in groups.items() for item in asking.passes(points, rows)]
    found.ran(passes)
    chunks = [asking.chunk(group) for group in slices(passes, context.settings.chunk_passes)]
    own = {spec["name"]: spec["name"] for spec in in_session(context.measures)}
    taken = {name: name for name in own if name in names}
    return [Kept(chunk, len(keys_of(chunk)), [], taken) for chunk in chunks]


def _own_names(chunk: Plain | None) -> dict[str, str]:
    return {spec["name"]: spec["name"] for spec in chunk["measures"]} if chunk else {}


class Context:
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
        """Look at everything once (arguments as for `make_plan`); `cells` are all points."""
        self.sweep, self.model, self.rows = sweep, model, rows
        self.settings, self.shape = settings, model["shape"]
        self.measures, self.reads = measure_list(sweep, model["shape"])
        self.answers = sorted(answers_of(self.measures))
        self.donors = uses_donor(sweep)
        self.estimates_only = all(spec["kind"] == "attribution" for spec in self.measures)
        self.edits = Edits(sweep, self.shape, rows, load_vector)
        self.goes_on = self.edits.goes_on
        self._check_window()
        self.watched = set(watched_positions(sweep))
        names = [name for name in rows[0].positions if BETWEEN not in name] if rows else []
        self.specs = {name: position_spec(sweep, name) for name in names}
        named = {name for _, writes in cells for write in writes for name in position_names(write)}
        self.touched = named | self.watched

    def asking(self, names: Collection[str]) -> "Context":
        """The same surroundings for some of the measures."""
        found = copy.copy(self)
        found.measures, found.reads = restricted(self.measures, self.reads, names)
        found.estimates_only = all(spec["kind"] == "attribution" for spec in found.measures)
        return found

    def _check_window(self) -> None:
        """Refuse whole answers behind prompts of which a sliding window forgets the beginning."""
        window = self.shape["window"]
        whole = {s["answer"] for s in every(self.measures) if s.get("tokens") == "sum"}
        theirs = any(s["of"].get("tokens") == "sum" for s in self.measures if "of" in s)
        for row in self.rows if window is not None else []:
            prompt = max(len(row.ids), len(row.donor_ids) if theirs else 0)
            length = prompt + max((len(row.answers[name]) for name in whole), default=0)
            if whole and row.reason is None and length > window:
                raise UserError(
                    f"row {row.row_id}: tokens: sum takes prompt and answer within the sliding "
                    f"window of {window} tokens, they have {length}. Use shorter prompts."
                )

    def point(self, cell: Plain, writes: list[Plain]) -> Point:
        """Resolve one point: its rows, its edits and its ids."""
        names = {n for write in writes for n in position_names(write)} | self.watched
        rows = self.edits.usable(names)
        edits = self.edits.edits(writes)
        self.edits.check(edits, rows)
        key = digest(
            {
                "semantics": SEMANTICS,
                "model": identity(self.model),
                "writes": [self.edits.meaning(edit) for edit in edits],
                "measure_at": position_spec(self.sweep, self.sweep.measure_at),
            }
            | ({"generate": self.sweep.generate.model_dump()} if self.sweep.generate else {})
        )
        facts = sorted(digest(self._row_facts(i, edits)) for i in rows)
        return Point(digest([key, facts]), key, cell, writes, edits, rows)

    def _row_facts(self, row: int, edits: Sequence[Plain]) -> list[Any]:
        """What of a row decides the values of a point: tokens, answers, resolved positions."""
        found = self.rows[row]
        names = [name for edit in edits for name in edit_positions(edit) if name != "@all"]
        places = [found.positions[name] for name in [*names, *sorted(self.watched)]]
        answers = {name: found.answers[name] for name in self.answers}
        return [found.row_key, answers, [[place.base, place.donor] for place in places]]

    def passes(self, points: Sequence[Point], rowset: tuple[int, ...]) -> list[Plain]:
        """All passes of some points over some rows."""
        return [
            self.one_pass(block, part, start)
            for block in self.blocks(rowset)
            for start, members in self._grouped(points, block)
            for part in _even_slices(members, self._points_a_pass(block, start))
        ]

    def _points_a_pass(self, block: Sequence[int], start: int) -> int:
        return self.room(len(block), len(self.rows[block[0]].ids) - start)

    def room(self, rows: int, tokens: int) -> int:
        """How many points may share a pass over so many rows and tokens of each.

        Alone, a point keeps the bits of a full pass.
        """
        if self.settings.recompute == "exact":
            return 1
        return max(1, min(self.settings.batch_rows, PASS_TOKENS // tokens) // rows)

    def blocks(self, rowset: Iterable[int]) -> list[tuple[int, ...]]:
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
            start = 0 if kind == INERT else self.start(point, block)
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
        if self.is_inert(point, block):
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

    def start(self, point: Point, block: Sequence[int]) -> int:
        """First token that must be computed anew (0: all).

        A layer with a sliding window keeps only the keys inside it, so a prompt that is longer
        than the window is computed from its first token on.
        """
        window, width = self.shape["window"], len(self.rows[block[0]].ids)
        beyond = (window is not None and width >= window) or self.goes_on
        if self.settings.recompute == "exact" or not point.edits or beyond:
            return 0
        names = [edit["position"] for edit in point.edits] + [self.sweep.measure_at]
        return min(min(self.rows[i].positions[name].base) for i in block for name in names)

    def one_pass(
        self,
        block: tuple[int, ...],
        points: Sequence[Point],
        start: int,
        more: Any = None,
        inert: bool | None = None,
    ) -> Plain:
        """One pass over some rows; `more` goes into its id, `inert` overrides what is known."""
        if inert is None:
            inert = self.is_inert(points[0], block)
        keys = [point.point_key for point in points]
        row_keys = [self.rows[i].row_key for i in block]
        edits = [
            self.edits.drawn(edit, block) | {"slot": slot}
            for slot, point in enumerate(points)
            for edit in point.edits
        ]
        rows = [self._row_facts(i, edits) for i in block]
        asked = in_session(self.measures)
        resumes = [_resume(point) for point in points]
        facts = [SEMANTICS, keys, row_keys, rows, start, resumes, inert, asked, more]
        return {
            "pass_id": digest(facts),
            "block": block,
            "points": keys,
            "resumes": resumes,
            "start": start,
            "inert": inert,
            "estimated": not inert and self.estimates_only,
            "edits": edits,
        }

    def is_inert(self, point: Point, block: Sequence[int]) -> bool:
        """Whether no write of a point can move what is measured on any of these rows.

        `exact` runs such points too: where experts share tokens, even they can move a bit.
        """
        return (
            self.settings.recompute == "fast"
            and not self.goes_on
            and all(
                cannot_move(edit, self.rows[i], self.watched, self.shape["layers"])
                for edit in point.edits
                for i in block
            )
        )

    def chunk(self, passes: Sequence[Plain]) -> Plain:
        """A self-contained job: everything a session needs, and nothing of where it runs."""
        blocks = [
            self.block(block)
            | {"passes": [without_block(p) for p in passes if p["block"] == block]}
            for block in dict.fromkeys(p["block"] for p in passes)
        ]
        size = self.settings.batch_rows
        references = sorted({n for p in passes for e in p["edits"] for n in refs(e)})
        return {
            "chunk_id": digest([p["pass_id"] for block in blocks for p in block["passes"]]),
            "semantics": SEMANTICS,
            "recompute": self.settings.recompute,
            "positions": self.specs,
            "model": self.model,
            "measures": in_session(self.measures),
            "reads": self.reads,
            "references": {name: self.edits.reference_set(name, size) for name in references},
            "blocks": blocks,
        }

    def block(self, block: Sequence[int], swap: bool = False) -> Plain:
        """The rows of a block; `swap` runs the donor prompts in the place of the prompts."""
        rows = [self.rows[i] for i in block]
        names = list(self.specs)
        measured = self.sweep.measure_at
        base = [row.donor_ids if swap else row.ids for row in rows]
        return {
            "row_keys": [row.row_key for row in rows],
            "ids": base,
            "donor_ids": [row.donor_ids for row in rows] if self.donors else [],
            "shared": 0 if swap else self._shared(rows, donor=False),
            "donor_shared": self._shared(rows, donor=True) if self.donors and not swap else 0,
            "measured": [last_of(row, measured, donor=swap) for row in rows],
            "donor_measured": [last_of(row, measured, donor=True) for row in rows]
            if self.donors
            else [],
            "answers": {name: [row.answers[name][0] for row in rows] for name in self.answers},
            "answer_ids": {name: [row.answers[name] for row in rows] for name in self.answers},
            "positions": {
                name: {
                    "base": [place_of(row, name, donor=swap) for row in rows],
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
        places = [place_of(row, name, donor) for row in rows for name in self.touched]
        touched = min((min(place) for place in places if place), default=0)
        same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*ids, strict=True))
        return min(touched, sum(1 for _ in same))


def _aligned_by_mean(sweep: Sweep, name: str) -> bool:
    spec = position_spec(sweep, name)
    return isinstance(spec, dict) and spec.get("align") == "mean"


def _even_slices[Item](items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """As few slices as `size` allows, and all about as long."""
    count = -(-len(items) // size)
    edges = [round(i * len(items) / max(1, count)) for i in range(count + 1)]
    return [items[low:high] for low, high in itertools.pairwise(edges)]


def _resume(point: Point) -> int:
    """The first layer that a point's writes can touch."""
    return min((edit["resume"] for edit in point.edits), default=0)
