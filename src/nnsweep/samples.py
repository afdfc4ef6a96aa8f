"""Samples of a plan: whole passes that a second engine also runs, for parity or calibration."""

from collections.abc import Sequence

from nnsweep.chunks import joined, keys_of, pass_ids, with_points
from nnsweep.planned import Kept, Plain, Point
from nnsweep.tables import digest


def for_parity(points: Sequence[Point], parts: Sequence[Kept], wanted: int) -> list[Kept]:
    """The sample that is compared with the table; none where the whole table is compared.

    Only of chunks of which everything is taken: what they give is in the table.
    """
    if wanted >= len(points):
        return []
    return sample(points, [part for part in parts if part.whole], wanted)


def sample(points: Sequence[Point], parts: Sequence[Kept], wanted: int) -> list[Kept]:
    """Chunks of whole passes that hold `wanted` points, evenly spread.

    Chunks whose measures differ cannot be one.
    """
    held = {key for part in parts for key, _ in keys_of(part.chunk)}
    known = [point.point_key for point in points if point.point_key in held]
    places = {round(i * (len(known) - 1) / max(1, wanted - 1)) for i in range(wanted)}
    picked = {known[place] for place in places if place < len(known)}
    groups: dict[str, list[Plain]] = {}
    names: dict[str, dict[str, str]] = {}
    for part in parts:
        if found := with_points(part.chunk, picked):
            kind = digest([found[key] for key in ("measures", "reads", "positions")])
            groups.setdefault(kind, []).append(found)
            names[kind] = part.names
    return [_sampled(joined(chunks), names[kind]) for kind, chunks in groups.items()]


def _sampled(chunk: Plain, names: dict[str, str]) -> Kept:
    named = chunk | {"chunk_id": digest(["sample", pass_ids(chunk)])}
    return Kept(named, len(keys_of(named)), [], names)
