"""Which values of earlier chunks a plan takes instead of computing them again.

A chunk is kept whole or not at all, since what shares a pass decides last bits. It may hold more
than is wanted: points, rows and measures that the sweep no longer has are left out by the merge;
or less: measures that it lacks are computed in chunks of their own.
A value is taken only where everything that decides it is the same: its point, the tokens of its
row, the row's answers and every position, and the meaning of the measure.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from nnsweep import SEMANTICS
from nnsweep.chunks import in_session, keys_of, pass_ids
from nnsweep.measure_plan import answers_of, controlled
from nnsweep.planned import Kept, Plain, Point, identity
from nnsweep.row_places import place_of
from nnsweep.tables import digest

if TYPE_CHECKING:
    from nnsweep.plan import Context
    from nnsweep.prompts import PromptRow


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


class Cell(NamedTuple):
    """A point on a row, as a chunk has it.

    Attributes:
        point: Its key.
        row: Number of the row.
        stale: Whether the row's answers or positions are others now.
        inert: Whether the chunk gives the values of the clean run.
    """

    point: str
    row: int
    stale: bool
    inert: bool


@dataclass
class Reuse:
    """What is left to compute, and what is taken.

    Attributes:
        missing: point_key -> number of the row -> measures that no kept chunk has.
        moved: point_key -> rows on which a chunk computed more than the clean run.
        kept: The kept chunks, in the order in which their values are taken.
    """

    missing: dict[str, dict[int, frozenset[str]]]
    moved: dict[str, set[int]]
    kept: list[Kept] = field(default_factory=list)

    def groups(
        self, points: Iterable[Point]
    ) -> dict[frozenset[str], dict[tuple[int, ...], list[Point]]]:
        """Measures that are missing together -> rows -> the points that lack them there."""
        found: dict[frozenset[str], dict[tuple[int, ...], list[Point]]] = {}
        for point in points:
            rows: dict[frozenset[str], list[int]] = {}
            for row, names in self.missing[point.point_key].items():
                rows.setdefault(names, []).append(row)
            for names, numbers in rows.items():
                if names:
                    found.setdefault(names, {}).setdefault(tuple(numbers), []).append(point)
        return found

    def ran(self, passes: Iterable[Plain]) -> None:
        """Note on which rows new passes compute more than the clean run."""
        for item in (item for item in passes if not item["inert"]):
            for key in item["points"]:
                self.moved[key].update(item["block"])


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

    def names(self, chunk: Plain) -> dict[str, str]:
        """Measure -> what the chunk calls it, of those that it has."""
        theirs = _meanings(chunk["measures"], chunk["reads"], chunk["positions"])
        found = {}
        for name, what in self.measures.items():
            same = [other for other, meaning in theirs.items() if meaning == what]
            if same:
                found[name] = name if name in same else same[0]
        return found

    def stale(self, chunk: Plain, blocks: Sequence[Plain], names: Collection[str]) -> set[str]:
        """Keys of rows whose answers, as some measures read them, or positions are others now."""
        named = {digest(spec): name for name, spec in chunk["positions"].items()}
        pairs = [(named[what], ours) for what, ours in self.positions.items() if what in named]
        answers = answers_of(s for s in self.context.measures if s["name"] in names)
        return {
            key
            for block in blocks
            for place, key in enumerate(block["row_keys"])
            if key in self.numbers
            and not self._same(block, place, self.context.rows[self.numbers[key]], answers, pairs)
        }

    def _same(
        self,
        block: Plain,
        place: int,
        row: "PromptRow",
        answers: Iterable[str],
        pairs: Sequence[tuple[str, str]],
    ) -> bool:
        return all(
            name in block["answer_ids"] and block["answer_ids"][name][place] == row.answers[name]
            for name in answers
        ) and all(
            block["positions"][theirs]["base"][place] == place_of(row, ours, donor=False)
            and block["positions"][theirs]["donor"][place] == place_of(row, ours, donor=True)
            for theirs, ours in pairs
        )


def _meanings(
    measures: Sequence[Plain], reads: Sequence[Plain], positions: Mapping[str, Any]
) -> dict[str, str]:
    """Measure -> digest of what it means, whatever it and its positions are called."""

    def plain(spec: Plain) -> Plain:
        found = {key: value for key, value in spec.items() if key != "name"}
        for key in ("lens", "read"):
            if key in found:
                read = reads[found[key]]
                found[key] = [read["tap"], positions[read["position"]]]
        if "of" in found:
            found["of"] = plain(found["of"])
        return found

    return {spec["name"]: digest(plain(spec)) for spec in in_session(measures)}


def reuse(context: "Context", points: Sequence[Point], earlier: Sequence[Earlier]) -> Reuse:
    """Take what earlier chunks have, in their order.

    Args:
        context: The plan's surroundings.
        points: The points that are wanted.
        earlier: Chunks that lie about; those of this sweep first.
    """
    every = frozenset(spec["name"] for spec in in_session(context.measures))
    found = Reuse(
        {point.point_key: dict.fromkeys(point.rows, every) for point in points},
        {point.point_key: set() for point in points},
    )
    comparison = Comparison(context)
    for one in earlier:
        if one.role == "values" and comparison.answers(one.chunk):
            _take(context, comparison, one, found)
    return found


def _take(context: "Context", comparison: Comparison, one: Earlier, found: Reuse) -> None:
    """Keep a chunk where that saves work."""
    names = comparison.names(one.chunk)
    has = frozenset(names)
    stale = comparison.stale(one.chunk, one.chunk["blocks"], has)
    asked = list(_cells(one.chunk, comparison, stale, found.missing))
    cells = [c for c in asked if not c.stale and found.missing[c.point][c.row] & has]
    covered = all(found.missing[cell.point][cell.row] <= has for cell in cells)
    whole = len(cells) == len(asked) and all(found.missing[c.point][c.row] >= has for c in cells)
    if not cells or not _worthwhile(context, one, len(cells), covered):
        return
    left: dict[frozenset[str], frozenset[str]] = {}
    for cell in cells:
        missing = found.missing[cell.point]
        missing[cell.row] = left.setdefault(missing[cell.row], missing[cell.row] - has)
        if not cell.inert:
            found.moved[cell.point].add(cell.row)
    chunk = one.chunk | {"model": context.model}
    found.kept.append(Kept(chunk, len(cells), sorted(stale), names, whole))


def _cells(
    chunk: Plain, comparison: Comparison, stale: set[str], asked: Mapping[str, Mapping[int, Any]]
) -> Iterator[Cell]:
    """Every cell of a chunk that is asked for."""
    for block in chunk["blocks"]:
        keys = [key for key in block["row_keys"] if key in comparison.numbers]
        rows = [(comparison.numbers[key], key in stale) for key in keys]
        for item in block["passes"]:
            for point in (key for key in item["points"] if key in asked):
                for row, old in rows:
                    if row in asked[point]:
                        yield Cell(point, row, old, item["inert"])


def _worthwhile(context: "Context", one: Earlier, cells: int, covered: bool) -> bool:
    """Whether to keep a chunk of which so many values are taken.

    What this sweep has finished is never computed again. What another sweep has finished must be
    half wanted, since an engine that lacks it would compute all of it. What nobody has finished
    must be wanted whole, and be cut as a plan would cut it now. Only chunks of this sweep may leave
    measures to be computed (`covered` is false): another engine then runs their points twice.
    """
    settings, total = context.settings, len(keys_of(one.chunk))
    if settings.recompute == "exact" and one.chunk["recompute"] != "exact":
        return False
    if one.finished:
        return one.own or (covered and 2 * cells >= total)
    fits = len(pass_ids(one.chunk)) <= settings.chunk_passes and all(
        _fits(context, block) for block in one.chunk["blocks"]
    )
    same = one.chunk["recompute"] == settings.recompute
    return one.own and covered and cells == total and fits and same


def _fits(context: "Context", block: Plain) -> bool:
    """Whether the passes of a block are no larger than the settings allow."""
    rows, width = len(block["row_keys"]), len(block["ids"][0])
    return rows <= context.settings.batch_rows and all(
        len(item["points"]) <= context.room(rows, width - item["start"]) for item in block["passes"]
    )


def kept_controls(context: "Context", earlier: Sequence[Earlier]) -> Kept | None:
    """The null controls of an earlier plan that still speak for the rows and measures, or None."""
    comparison = Comparison(context)
    wanted = {spec["name"] for spec in controlled(context.measures)}
    for one in earlier:
        if one.role != "controls" or not comparison.answers(one.chunk):
            continue
        names, first = comparison.names(one.chunk), one.chunk["blocks"][:1]
        known = all(key in comparison.numbers for block in first for key in block["row_keys"])
        if wanted <= names.keys() and known and not comparison.stale(one.chunk, first, wanted):
            chunk = one.chunk | {"model": context.model}
            return Kept(chunk, len(keys_of(chunk)), [], names, True)
    return None
