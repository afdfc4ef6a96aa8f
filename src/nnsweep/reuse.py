"""Which values of earlier chunks a plan takes instead of computing them again.

A chunk is kept whole or not at all, since what shares a pass decides last bits. It may hold more
than is wanted: points, rows and measures that the sweep no longer has are left out by the merge.
A value is taken only where everything that decides it is the same: its point, the tokens of its
row, the row's answers and every position, and the meaning of the measure.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nnsweep import SEMANTICS
from nnsweep.chunks import in_session, keys_of, pass_ids
from nnsweep.planned import Kept, Plain, Point, identity
from nnsweep.row_places import place_of
from nnsweep.tables import digest

if TYPE_CHECKING:
    from nnsweep.plan import Context


@dataclass(frozen=True)
class Earlier:
    """A chunk that an earlier plan made.

    Attributes:
        chunk: The chunk.
        own: Whether the plan was one of this sweep.
        finished: Whether an engine has its values.
        role: `values`, or `controls` for a chunk of null controls.
    """

    chunk: Plain
    own: bool
    finished: bool
    role: str = "values"


@dataclass
class Reuse:
    """What is left to compute, and what is taken.

    Attributes:
        asked: point_key -> numbers of its rows.
        wanted: The same, without what a kept chunk has.
        kept: The kept chunks, in the order in which their values are taken.
        inert: point_key -> on how many taken rows its values are those of the clean run.
    """

    asked: dict[str, frozenset[int]]
    wanted: dict[str, set[int]]
    kept: list[Kept] = field(default_factory=list)
    inert: Counter[str] = field(default_factory=Counter)


class Comparison:
    """What of a plan an earlier chunk must agree with."""

    def __init__(self, context: "Context") -> None:
        """Look at the rows, positions and measures of a plan once."""
        self.context = context
        rows = context.rows
        self.numbers = {row.row_key: i for i, row in enumerate(rows) if row.reason is None}
        self.positions = {digest(spec): name for name, spec in context.specs.items()}
        self.measures = _meanings(context.measures, context.reads, context.specs)

    def answers(self, chunk: Plain) -> bool:
        """Whether a chunk asks the same model in the same language."""
        same = chunk.get("semantics") == SEMANTICS
        return same and identity(chunk["model"]) == identity(self.context.model)

    def names(self, chunk: Plain, wanted: Sequence[Plain]) -> dict[str, str] | None:
        """Measure -> what the chunk calls it, or None where it lacks one."""
        theirs = _meanings(chunk["measures"], chunk["reads"], chunk["positions"])
        found = {}
        for spec in in_session(wanted):
            same = [name for name, what in theirs.items() if what == self.measures[spec["name"]]]
            if not same:
                return None
            found[spec["name"]] = spec["name"] if spec["name"] in same else same[0]
        return found

    def stale(self, chunk: Plain, blocks: Sequence[Plain]) -> list[str]:
        """Keys of rows whose answers or positions are others now."""
        named = {digest(spec): name for name, spec in chunk["positions"].items()}
        pairs = [(named[what], ours) for what, ours in self.positions.items() if what in named]
        return sorted(
            {
                key
                for block in blocks
                for place, key in enumerate(block["row_keys"])
                if key in self.numbers and not self._same(block, place, self.numbers[key], pairs)
            }
        )

    def _same(
        self, block: Plain, place: int, number: int, pairs: Sequence[tuple[str, str]]
    ) -> bool:
        row = self.context.rows[number]
        return all(
            name in block["answer_ids"] and block["answer_ids"][name][place] == row.answers[name]
            for name in self.context.answers
        ) and all(
            block["positions"][theirs]["base"][place] == place_of(row, ours, donor=False)
            and block["positions"][theirs]["donor"][place] == place_of(row, ours, donor=True)
            for theirs, ours in pairs
        )


def _meanings(
    measures: Sequence[Plain], reads: Sequence[Plain], positions: Mapping[str, Any]
) -> dict[str, str]:
    """Measure -> digest of what it means, whatever it and its positions are called."""
    specs = {spec["name"]: spec for spec in in_session(measures)}

    def plain(spec: Plain) -> Plain:
        found = {key: value for key, value in spec.items() if key != "name"}
        for key in ("lens", "read"):
            if key in found:
                read = reads[found[key]]
                found[key] = [read["tap"], positions[read["position"]]]
        if "of" in found:
            found["of"] = plain(specs[found["of"]])
        return found

    return {name: digest(plain(spec)) for name, spec in specs.items()}


def reuse(context: "Context", points: Sequence[Point], earlier: Sequence[Earlier]) -> Reuse:
    """Take what earlier chunks have, in their order.

    Args:
        context: The plan's surroundings.
        points: The points that are wanted.
        earlier: Chunks that lie about; those of this sweep first.
    """
    rows = {point.rows: frozenset(point.rows) for point in points}
    asked = {point.point_key: rows[point.rows] for point in points}
    found = Reuse(asked, {key: set(numbers) for key, numbers in asked.items()})
    comparison = Comparison(context)
    for one in earlier:
        if one.role == "values" and comparison.answers(one.chunk):
            _take(context, comparison, one, found)
    return found


def _take(context: "Context", comparison: Comparison, one: Earlier, found: Reuse) -> None:
    """Keep a chunk where that saves work."""
    names = comparison.names(one.chunk, context.measures)
    if names is None:
        return
    stale = comparison.stale(one.chunk, one.chunk["blocks"])
    cells = list(_cells(one.chunk, comparison, set(stale), found.wanted))
    asked = sum(1 for _ in _cells(one.chunk, comparison, set(), found.asked))
    if not cells or not _worthwhile(context, one, len(cells)):
        return
    for point, row, inert in cells:
        found.wanted[point].discard(row)
        found.inert[point] += inert
    chunk = one.chunk | {"model": context.model}
    whole = len(cells) == asked
    found.kept.append(Kept(chunk, len(cells), stale, names, whole))


def _cells(
    chunk: Plain, comparison: Comparison, stale: set[str], wanted: Mapping[str, Collection[int]]
) -> Iterator[tuple[str, int, bool]]:
    """(point_key, number of the row, inert) of every value that is wanted and still true."""
    for block in chunk["blocks"]:
        keys = [key for key in block["row_keys"] if key not in stale]
        rows = [comparison.numbers[key] for key in keys if key in comparison.numbers]
        for item in block["passes"]:
            for point in (key for key in item["points"] if key in wanted):
                yield from ((point, row, item["inert"]) for row in rows if row in wanted[point])


def _worthwhile(context: "Context", one: Earlier, cells: int) -> bool:
    """Whether to keep a chunk of which so many values are taken.

    What this sweep has finished is never computed again. What another sweep has finished must be
    half wanted, since an engine that lacks it would compute all of it. What nobody has finished
    must be wanted whole, and be cut as a plan would cut it now.
    """
    settings, total = context.settings, len(keys_of(one.chunk))
    if settings.recompute == "exact" and one.chunk["recompute"] != "exact":
        return False
    if one.finished:
        return one.own or 2 * cells >= total
    fits = len(pass_ids(one.chunk)) <= settings.chunk_passes and all(
        _fits(context, block) for block in one.chunk["blocks"]
    )
    return one.own and cells == total and fits and one.chunk["recompute"] == settings.recompute


def _fits(context: "Context", block: Plain) -> bool:
    """Whether the passes of a block are no larger than the settings allow."""
    rows, width = len(block["row_keys"]), len(block["ids"][0])
    return rows <= context.settings.batch_rows and all(
        len(item["points"]) <= context.room(rows, width - item["start"]) for item in block["passes"]
    )


def kept_controls(context: "Context", earlier: Sequence[Earlier]) -> Kept | None:
    """The null controls of an earlier plan that still speak for the rows and measures, or None."""
    comparison = Comparison(context)
    wanted = [spec for spec in in_session(context.measures) if spec["kind"] != "generate"]
    for one in earlier:
        if one.role != "controls" or not comparison.answers(one.chunk):
            continue
        names, first = comparison.names(one.chunk, wanted), one.chunk["blocks"][:1]
        known = all(key in comparison.numbers for block in first for key in block["row_keys"])
        if names is not None and known and not comparison.stale(one.chunk, first):
            chunk = one.chunk | {"model": context.model}
            return Kept(chunk, len(keys_of(chunk)), [], names, True)
    return None
