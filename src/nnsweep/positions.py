"""Positions of one row: which tokens a name means in the prompt and in its donor, and their pairs.

Each prompt is looked at on its own; only then are the two lists brought together. A position that
has no tokens, or none that correspond, is a reason and never a neighbouring token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nnsweep.chat import Chat, nth, span_of
from nnsweep.sweep import Sweep, align_of, members_of
from nnsweep.sweep_positions import Position, Tokens


@dataclass
class Place:
    """One named position in one row: base and donor token indices, or why there are none.

    The k-th base token corresponds to the k-th donor token, but where `align` is `mean`: there the
    lists may differ in length, and every base token meets the mean over the donor's.
    """

    base: list[int] = field(default_factory=list)
    donor: list[int] = field(default_factory=list)
    reason: str | None = None
    align: str | None = None


@dataclass(frozen=True)
class Encoded:
    """One text as tokens: ids, printable tokens, character offsets; a chat with its messages."""

    ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]
    text: str
    chat: Chat | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Sides:
    """What positions of one row are resolved in; no donor where the sweep reads none."""

    sweep: Sweep
    record: Mapping[str, str]
    base: Encoded
    donor: Encoded | None


def place_of(sides: Sides, name: str) -> Place:
    """Resolve a position by its name in one row."""
    label = f"position {name}"
    for encoded, where in ((sides.base, ""), (sides.donor, " in the donor")):
        if encoded and encoded.problem:
            return Place(reason=f"{label}{where}: {encoded.problem}")
    return _resolve(sides, label, sides.sweep.position(name), None)


def _resolve(sides: Sides, label: str, position: Position, inherited: str | None) -> Place:
    """A position's place; `inherited` is the list's alignment, for what has none of its own."""
    members, align = members_of(position), align_of(position) or inherited
    if members is not None:
        return _union(sides, label, members, align)
    ours = _indices(sides, position, for_donor=False)
    if isinstance(ours, str):
        return Place(reason=f"{label}: {ours}")
    if sides.donor is None:
        return Place(ours, align=align)
    theirs = _indices(sides, position, for_donor=True)
    if isinstance(theirs, str):
        return Place(reason=f"{label} in the donor: {theirs}")
    if align is None:
        reason = _misaligned(position, sides.base, sides.donor, ours, theirs)
        return Place(ours, theirs, reason and f"{label}: {reason}")
    return Place(*trimmed(ours, theirs, align), align=align)


def edges_place(name: str, queries: Place, keys: Place, donor: bool) -> Place:
    """The query tokens of edges, or why nothing is there to write: a token sees none behind it.

    Args:
        name: What the edges are called.
        queries: The position of the query tokens.
        keys: The position of the key tokens.
        donor: Whether the edges are the donor's.
    """
    known = queries.reason or keys.reason
    ours, theirs = (queries.donor, keys.donor) if donor else (queries.base, keys.base)
    if known or not ours or not theirs or min(theirs) <= max(ours):
        return Place(queries.base, queries.donor, known)
    side = " in the donor" if donor else ""
    return Place(
        reason=f"edges {name}{side}: the key tokens {theirs} come after the query tokens {ours}, "
        "which do not see them; there is nothing to write"
    )


def trimmed(ours: list[int], theirs: list[int], align: str) -> tuple[list[int], list[int]]:
    """The first or the last tokens of both, as many as the shorter has; a mean takes them all."""
    size = min(len(ours), len(theirs))
    if align == "mean":
        return ours, theirs
    if align == "first":
        return ours[:size], theirs[:size]
    return ours[len(ours) - size :], theirs[len(theirs) - size :]


def _union(sides: Sides, label: str, members: Sequence[int | str], align: str | None) -> Place:
    """The tokens of several positions, in the prompt's order, each once and with its own partner.

    A list is the union of its members' pairs, so that a short member shifts no other.
    """
    named = [
        (f"{label} ({member})", sides.sweep.position(member))
        if isinstance(member, str)
        else (label, member)
        for member in members
    ]
    places = [_resolve(sides, name, position, align) for name, position in named]
    bad = next((place.reason for place in places if place.reason), None)
    if bad:
        return Place(reason=bad)
    if sides.donor is None or align == "mean":
        base = sorted({i for place in places for i in place.base})
        donor = sorted({i for place in places for i in place.donor})
        return Place(base, donor, align=align)
    pairs = sorted({p for place in places for p in zip(place.base, place.donor, strict=True)})
    reason = _torn(pairs, sides.base, sides.donor)
    ours, theirs = [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
    return Place(ours, theirs, reason and f"{label}: {reason}", align)


def _torn(pairs: Sequence[tuple[int, int]], base: Encoded, donor: Encoded) -> str | None:
    """Why pairs of several positions are not one to one."""
    for side, one, other in ((0, base, "donor's"), (1, donor, "prompt's")):
        numbers = [pair[side] for pair in pairs]
        twice = next((number for number in numbers if numbers.count(number) > 1), None)
        if twice is not None:
            partners = [pair[1 - side] for pair in pairs if pair[side] == twice]
            return (
                f"token [{twice}] {one.tokens[twice]!r} would meet the {other} tokens {partners}; "
                "take fewer positions together, or align: mean"
            )
    return None


def _misaligned(
    position: Position, base: Encoded, donor: Encoded, ours: list[int], theirs: list[int]
) -> str | None:
    """Why base and donor tokens do not correspond; from the end and by text they may."""
    if _from_start(position) and len(base.ids) != len(donor.ids):
        sizes = f"{len(base.ids)} and {len(donor.ids)} tokens"
        return (
            f"prompt and donor have {sizes}: {base.tokens} / {donor.tokens}; "
            f"count from the end, use a text position, or write {_aligned(position)}"
        )
    if len(ours) != len(theirs):
        pairs = f"{[base.tokens[i] for i in ours]} / {[donor.tokens[i] for i in theirs]}"
        return (
            f"spans of unequal length {pairs}; use token: first or last, "
            "or align: first, last or mean"
        )
    return None


def _from_start(position: Position) -> bool:
    """Whether a position counts from the first token, if only to its end."""
    if isinstance(position, Tokens):
        return any(bound is not None and bound >= 0 for bound in position.span or [])
    return position == "all" or (isinstance(position, int) and position >= 0)


def _aligned(position: Position) -> str:
    """The same position with an alignment, for a message."""
    if isinstance(position, int):
        return f"{{span: [{position}, {position + 1}], align: first}}"
    bounds = position.span if isinstance(position, Tokens) and position.span else [0, None]
    low, high = ("null" if bound is None else bound for bound in bounds)
    return f"{{span: [{low}, {high}], align: first}} (or last, or mean)"


def _indices(sides: Sides, position: Position, for_donor: bool) -> list[int] | str:
    """Token indices of a position in one text, or the reason why there are none."""
    encoded = sides.donor if for_donor and sides.donor else sides.base
    if isinstance(position, int):
        return _index(encoded, position)
    if not isinstance(position, Tokens):
        return list(range(len(encoded.ids)))
    if position.last is not None:
        return _span(encoded, -position.last, None)
    if position.span is not None:
        return _span(encoded, position.span[0] or 0, position.span[1])
    found = _found(sides, encoded, position, for_donor)
    if isinstance(found, str):
        return found
    return {"all": found, "first": found[:1], "last": found[-1:]}[position.token]


def _index(encoded: Encoded, index: int) -> list[int] | str:
    size = len(encoded.ids)
    if -size <= index < size:
        return [index % size]
    return f"index {index} is outside the {size} tokens {encoded.tokens}"


def _span(encoded: Encoded, low: int, high: int | None) -> list[int] | str:
    """Tokens low up to, not including, high; never fewer than asked for."""
    size = len(encoded.ids)
    start = low + size if low < 0 else low
    end = size if high is None else high + size if high < 0 else high
    shown = f"tokens [{low}, {'end' if high is None else high})"
    if start < 0 or end > size or start > size or end < 0:
        return f"{shown} are not all among the {size} tokens {encoded.tokens}"
    return list(range(start, end)) or f"{shown} of the {size} tokens {encoded.tokens} are none"


def _found(sides: Sides, encoded: Encoded, position: Tokens, for_donor: bool) -> list[int] | str:
    """Tokens of a text or of a chat segment."""
    if position.text is not None:
        column = position.donor_text or position.text if for_donor else position.text
        return _find(encoded, sides.record[column], position.occurrence)
    if encoded.chat is None or position.segment is None:
        return "the prompt is no chat"
    span = span_of(encoded.chat, position.segment, position.occurrence)
    return span if isinstance(span, str) else _covering(encoded, *span)


def _find(encoded: Encoded, text: str, occurrence: int | None) -> list[int] | str:
    if not text:
        return "the text to find is empty"
    starts = [i for i in range(len(encoded.text)) if encoded.text.startswith(text, i)]
    if not starts:
        return f"'{text}' is not in '{encoded.text}'"
    if occurrence is None and len(starts) > 1:
        return f"'{text}' is {len(starts)} times in '{encoded.text}'; give an occurrence"
    place = nth(len(starts), occurrence)
    if place is None:
        return f"'{text}' is only {len(starts)} times in '{encoded.text}'"
    return _covering(encoded, starts[place], starts[place] + len(text))


def _covering(encoded: Encoded, start: int, end: int) -> list[int] | str:
    """Tokens whose characters lie in [start, end), leading white space apart."""
    found = []
    for i, (low, high) in enumerate(encoded.offsets):
        if low < end and high > start and low < high:
            piece = encoded.text[low:high]
            low += len(piece) - len(piece.lstrip())
            if low < start or high > end:
                return f"'{encoded.text[start:end]}' is only a part of the token {piece!r}"
            found.append(i)
    return found or f"no token covers '{encoded.text[start:end]}'"
