"""What a chunk is: its passes, its keys, what it costs, and how it is cut smaller."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from nnsweep.sweep_measures import TEXTS

Plain = dict[str, Any]


def in_order(records: Mapping[str, Plain]) -> dict[str, Plain]:
    """Chunks of plan.json in the plan's order, which JSON does not keep."""
    return dict(sorted(records.items(), key=lambda item: item[1]["place"]))


def pass_ids(chunk: Plain) -> list[str]:
    """The ids of a chunk's passes, in order."""
    return [p["pass_id"] for block in chunk["blocks"] for p in block["passes"]]


def split_chunk(chunk: Plain, size: int) -> list[Plain]:
    """Cut a chunk into parts of at most `size` whole passes; no pass changes."""
    places = [
        (b, p) for b, block in enumerate(chunk["blocks"]) for p in range(len(block["passes"]))
    ]
    if len(places) <= size:
        return [chunk]
    return [_part(chunk, part) for part in slices(places, size)]


def _part(chunk: Plain, places: Sequence[tuple[int, int]]) -> Plain:
    blocks = []
    for number, block in enumerate(chunk["blocks"]):
        kept = [block["passes"][p] for b, p in places if b == number]
        if kept:
            blocks.append(block | {"passes": kept})
    used = {n for b in blocks for p in b["passes"] for e in p["edits"] for n in refs(e)}
    references = {n: wanted for n, wanted in chunk["references"].items() if n in used}
    return chunk | {"blocks": blocks, "references": references}


def split_pass(chunk: Plain) -> list[Plain]:
    """Cut the only pass of a chunk into two halves of its points; none if it holds one point."""
    block = chunk["blocks"][0]
    item = block["passes"][0]
    slots = range(len(item["points"]))
    if len(slots) < 2:
        return []
    return [
        _part(chunk | {"blocks": [block | {"passes": [_slots(item, part)]}]}, [(0, 0)])
        for part in slices(slots, (len(slots) + 1) // 2)
    ]


def halves_of(part: Plain) -> list[Plain]:
    """Two smaller parts, or none when the part is a single point."""
    count = len(pass_ids(part))
    if count > 1:
        return split_chunk(part, (count + 1) // 2)
    return split_pass(part)


def with_points(chunk: Plain, points: Collection[str]) -> Plain | None:
    """The passes of a chunk that hold some of the points, or None."""
    places = [
        (b, p)
        for b, block in enumerate(chunk["blocks"])
        for p, item in enumerate(block["passes"])
        if not set(points).isdisjoint(item["points"])
    ]
    return _part(chunk, places) if places else None


def joined(chunks: Sequence[Plain]) -> Plain:
    """Chunks of one model and the same measures as one."""
    references = {name: one for chunk in chunks for name, one in chunk["references"].items()}
    blocks = [block for chunk in chunks for block in chunk["blocks"]]
    return chunks[0] | {"blocks": blocks, "references": references}


def _slots(item: Plain, kept: Sequence[int]) -> Plain:
    edits = [e | {"slot": e["slot"] - kept[0]} for e in item["edits"] if e["slot"] in kept]
    points, resumes = ([item[name][slot] for slot in kept] for name in ("points", "resumes"))
    return item | {"points": points, "resumes": resumes, "edits": edits}


def keys_of(chunk: Plain) -> list[tuple[str, str]]:
    """(point_key, row_key) of every value row a chunk returns, in the kernel's order."""
    return [
        (point, row)
        for block in chunk["blocks"]
        for p in block["passes"]
        for point in p["points"]
        for row in block["row_keys"]
    ]


def clean_runs(block: Plain) -> int:
    """Model calls without writes: prompts, donors, and the beginnings that their rows share."""
    beginnings = bool(block["shared"]) + bool(block["donor_shared"])
    return 1 + bool(block["donor_ids"]) + beginnings


def backward_runs(measures: Sequence[Plain]) -> int:
    """Forward passes that a block needs for gradients."""
    return any(spec["kind"] == "attribution" for spec in measures)


def pass_runs(item: Plain) -> int:
    """Model calls of a pass: its own, and one for each prompt that its patches run under writes."""
    chained = {edit["operand"]["kind"] for edit in item["edits"] if "chain" in edit["operand"]}
    return 0 if item["inert"] else (not item["estimated"]) + len(chained)


def forward_passes(chunks: Iterable[Plain]) -> int:
    """Model calls of some chunks: clean runs, reference runs and passes."""
    return sum(
        sum(len(wanted["batches"]) for wanted in chunk["references"].values())
        + sum(
            sum(pass_runs(item) for item in block["passes"])
            + clean_runs(block)
            + backward_runs(chunk["measures"])
            for block in chunk["blocks"]
        )
        for chunk in chunks
    )


def naive_passes(chunks: Iterable[Plain]) -> int:
    """Model calls of a loop over the same rows that runs prompt and donor anew for every point."""
    calls = {
        (point, rows): 1 + bool(block["donor_ids"])
        for chunk in chunks
        for block in chunk["blocks"]
        for rows in [" ".join(block["row_keys"])]
        for item in block["passes"]
        for point in item["points"]
    }
    return sum(calls.values())


def slices[Item](items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Items in slices of `size`, the last one with what is left."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def refs(edit: Plain) -> list[str]:
    """Names of the reference sets that an edit reads, also through the writes of a chain."""
    operand = edit["operand"]
    own = [operand[side] for side in ("plus", "minus") if side in operand]
    return own + [number for under in operand.get("under", []) for number in refs(under)]


WIDTHS = {"top_k": 2, "generate": 3}
"""Numbers that a measure returns for each of its `k`: id and log-probability; also entropy."""

GENERATE = "generate"
"""Kind of the list of tokens that a sweep generates."""


def in_session(measures: Sequence[Plain]) -> list[Plain]:
    """The measures that a session computes; those of the generated text are computed from it."""
    return [spec for spec in measures if spec["kind"] not in TEXTS]


def every(measures: Iterable[Plain]) -> list[Plain]:
    """The measures and those that they are taken of."""
    found = {spec["name"]: spec for spec in measures}
    taken = {spec["of"]["name"]: spec["of"] for spec in found.values() if "of" in spec}
    return list((taken | found).values())


def columns(measures: Sequence[Plain]) -> list[str]:
    """Names of the columns that a session returns: NAME, or NAME.0, NAME.1, ... of a list."""
    found = []
    for spec in in_session(measures):
        count = WIDTHS.get(spec["kind"], 0) * spec.get("k", 0)
        found += [f"{spec['name']}.{i}" for i in range(count)] or [spec["name"]]
    return found
