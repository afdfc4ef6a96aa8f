"""Samples of a plan: whole passes that a second engine also runs, for parity or calibration."""

from collections.abc import Collection, Sequence

from nnsweep.chunks import joined, keys_of, pass_ids, with_points
from nnsweep.planned import Kept, Plain, Point
from nnsweep.tables import digest


def for_parity(
    points: Sequence[Point], parts: Sequence[Kept], measures: Collection[str], wanted: int
) -> list[Kept]:
    """The sample that is compared with the table; none where the whole table is compared.

    Only of chunks of which everything is taken: what they give is in the table.
    """
    if wanted >= len(points):
        return []
    return sample(points, [part for part in parts if part.whole], measures, wanted)


def sample(
    points: Sequence[Point], parts: Sequence[Kept], measures: Collection[str], wanted: int
) -> list[Kept]:
    """Chunks of whole passes that hold all measures of `wanted` points, evenly spread.

    Chunks whose measures or stale rows differ cannot be one, nor any that may hold the same value.
    """
    held = {key for key, _ in _complete(parts, measures)}
    known = [point.point_key for point in points if point.point_key in held]
    places = {round(i * (len(known) - 1) / max(1, wanted - 1)) for i in range(wanted)}
    picked = {known[place] for place in places if place < len(known)}
    groups: dict[str, list[Plain]] = {}
    first: dict[str, Kept] = {}
    for part in parts:
        if found := with_points(part.chunk, picked):
            alike = [found[key] for key in ("measures", "reads", "positions")]
            alone = None if part.whole else part.chunk["chunk_id"]
            kind = digest([*alike, part.names, part.stale, alone])
            groups.setdefault(kind, []).append(found)
            first.setdefault(kind, part)
    return [_sampled(joined(chunks), first[kind]) for kind, chunks in groups.items()]


def _complete(parts: Sequence[Kept], measures: Collection[str]) -> set[tuple[str, str]]:
    """(point_key, row_key) of what some parts have all measures of."""
    cells: dict[frozenset[str], set[tuple[str, str]]] = {}
    for part in parts:
        cells.setdefault(frozenset(part.names), set()).update(keys_of(part.chunk))
    having = [[found for names, found in cells.items() if name in names] for name in measures]
    return set.intersection(*(set().union(*one) for one in having))


def _sampled(chunk: Plain, part: Kept) -> Kept:
    named = chunk | {"chunk_id": digest(["sample", pass_ids(chunk)])}
    return Kept(named, len(keys_of(named)), part.stale, part.names)
