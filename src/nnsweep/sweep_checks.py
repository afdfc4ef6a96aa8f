"""What must fit together in a sweep: one sentence a problem, with the path of the key."""

import difflib
from collections.abc import Iterator
from typing import Any

from nnsweep.sweep import (
    GENERATED,
    Generate,
    Sweep,
    align_of,
    goes_on,
    members_of,
    named_places,
    placed_leaves,
    placed_measures,
    placed_writes,
    references,
    uses_donor,
)
from nnsweep.sweep_measures import TEXTS, Inner, unfit
from nnsweep.sweep_positions import BUILT_IN_POSITIONS, Tokens
from nnsweep.sweep_words import EDGES, PROMPTS
from nnsweep.sweep_writes import MeanDifference, misread, repeatable, roles


def problems(sweep: Sweep) -> Iterator[str]:
    """All that a document says that its parts, each for itself, allow and together do not."""
    for check in (
        _bad_positions,
        _bad_refs,
        _bad_writes,
        _bad_measures,
        _bad_axes,
        _bad_generation,
    ):
        yield from check(sweep)


def _bad_refs(sweep: Sweep) -> Iterator[str]:
    for leaf in placed_leaves(sweep):
        if _is_axis(leaf.value) and leaf.value[1:] not in sweep.axes:
            known = ", ".join(sweep.axes) or "none"
            yield f"{leaf.path}: {leaf.value} is no axis. Axes: {known}"
    for name in sweep.axes:
        if name not in references(sweep):
            yield f"axes.{name}: used by no write. Use ${name} or remove the axis"
    if sweep.measure_at.startswith("$"):
        known = ", ".join(_declared(sweep))
        yield f"measure_at: one position for the whole sweep, no axis. Positions: {known}"
    for path, name in named_places(sweep):
        if not _is_axis(name) and name not in _declared(sweep):
            yield f"{path}: {_no_position(sweep, name)}"
    if uses_donor(sweep) and sweep.prompts.donor is None:
        yield "prompts.donor: a write or measure reads the donor; name its column"
    yield from _bad_runs(sweep)


def _is_axis(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("$")


def _declared(sweep: Sweep) -> list[str]:
    return [*{**sweep.positions, **BUILT_IN_POSITIONS}]


def _bad_writes(sweep: Sweep) -> Iterator[str]:
    """What of its own a write cannot mean, whatever the model."""
    estimating = any(m.kind == "attribution" for m in sweep.measures.values())
    for where, write in placed_writes(sweep):
        for path, sentence in misread(write):
            yield f"{where}.{path}: {sentence}"
        vector = write.add.vector if write.add else None
        if isinstance(vector, MeanDifference) and vector.mean == vector.minus:
            yield f"{where}.add.vector: a mean minus itself is nothing; take text from donor"
        if write.site in EDGES and sweep.model.attention != "eager":
            yield f"{where}.site: {write.site} needs `attention: eager` under `model`"
        if (
            estimating
            and where.startswith("writes.")
            and (write.site == "logits" or write.knockout)
        ):
            yield (
                f"{where}: attribution estimates writes inside the model, and no knockout. "
                "Measure this sweep by running it"
            )


def _bad_runs(sweep: Sweep) -> Iterator[str]:
    for name in sorted(PROMPTS & {*sweep.runs}):
        yield f"runs.{name}: built in; call it otherwise"
    known = ", ".join([*sorted(PROMPTS), *sweep.runs])
    asked = set()
    for where, write in placed_writes(sweep):
        inner = not where.startswith("writes.")
        for name in sorted(roles(write) - PROMPTS):
            if inner:
                yield f"{where}: patches from '{name}'; a run patches from text and donor"
            elif name not in sweep.runs:
                yield f"{where}: patches from '{name}', which is no run. Runs: {known}"
            asked.add(name)
    for name in sweep.runs:
        if name not in asked:
            yield f"runs.{name}: patched from by no write; patch from it or remove it"


def _bad_positions(sweep: Sweep) -> Iterator[str]:
    chat = bool(sweep.prompts.chat)
    for name, meaning in BUILT_IN_POSITIONS.items():
        if sweep.positions.get(name, meaning) != meaning:
            yield f"positions.{name}: built in, as {meaning!r}; call it otherwise"
    for name, position in sweep.positions.items():
        if isinstance(position, Tokens) and position.segment is not None and not chat:
            yield f"positions.{name}: segments are of chat prompts. Set prompts.chat: true"
        for member in _names_in(sweep, name):
            if member not in {**sweep.positions, **BUILT_IN_POSITIONS}:
                yield f"positions.{name}: {_no_position(sweep, member)}"
    for name in sweep.positions:
        path = _cycle(sweep, [name])
        if path:
            yield f"positions.{name}: the list holds itself ({' -> '.join(path)})"
    for name, position in sweep.positions.items():
        means = [m for m in _names_in(sweep, name) if align_of(sweep.position(m)) == "mean"]
        if means and align_of(position) != "mean":
            yield (
                f"positions.{name}: '{means[0]}' is aligned by its mean, which a list can only be "
                "as a whole. Write {union: [...], align: mean}, or make two writes"
            )


def _names_in(sweep: Sweep, name: str) -> list[str]:
    """The names in a declared list."""
    members = members_of(sweep.positions[name]) if name in sweep.positions else None
    return [member for member in members or [] if isinstance(member, str)]


def _cycle(sweep: Sweep, path: list[str]) -> list[str]:
    """The way from the first of some names back to it, if its list holds itself."""
    for member in _names_in(sweep, path[-1]):
        if member == path[0]:
            return [*path, member]
        found = [] if member in path else _cycle(sweep, [*path, member])
        if found:
            return found
    return []


def _no_position(sweep: Sweep, name: str) -> str:
    known = _declared(sweep)
    close = difflib.get_close_matches(name, known, n=1)
    meant = f", did you mean '{close[0]}'?" if close else "."
    return f"position '{name}' is not declared{meant} Positions: {', '.join(known)}"


def _bad_measures(sweep: Sweep) -> list[str]:
    problems = []
    if not sweep.writes and any(m.kind == "attribution" for m in sweep.measures.values()):
        problems.append("measures: attribution estimates what writes do; this sweep has none")
    for where, measure in placed_measures(sweep):
        answers = measure.answers or []
        if len(set(answers)) < len(answers):
            problems.append(f"{where}.answers: {answers} names an answer twice")
        for answer in [measure.answer, *answers]:
            if answer is not None and answer not in sweep.prompts.answers:
                known = ", ".join(sweep.prompts.answers) or "none"
                problems.append(f"{where}: answer '{answer}' is not one of: {known}")
    return problems + list(_bad_of(sweep))


def _bad_of(sweep: Sweep) -> Iterator[str]:
    """Recoveries and attributions of what they cannot be taken of."""
    for name, measure in sweep.measures.items():
        if isinstance(measure.of, Inner):
            if problem := unfit(measure, measure.of):
                yield f"measures.{name}.of: {measure.of.kind} {problem}"
        elif measure.of is not None:
            of = sweep.measures.get(measure.of)
            problem = "is no measure" if of is None else unfit(measure, of)
            fit = [k for k, each in sweep.measures.items() if unfit(measure, each) is None]
            known = f"Possible: {', '.join(fit) or 'none here'}"
            if problem:
                yield f"measures.{name}.of: '{measure.of}' {problem}. {known}"


def _latest(how: Generate) -> int:
    """The last step that is written at, as far as steps are listed."""
    return max(how.writes_at, default=0) if isinstance(how.writes_at, list) else 0


def _bad_estimates(sweep: Sweep) -> Iterator[str]:
    """Estimates of what nothing writes: measures are taken at the prompt, which is step 0."""
    steps = sweep.generate.writes_at if sweep.generate else "prompt"
    if isinstance(steps, list) and 0 not in steps:
        for name, measure in sweep.measures.items():
            if measure.kind == "attribution":
                yield (
                    f"measures.{name}: attribution estimates what is written at the prompt, and "
                    f"generate.writes_at {steps} leaves the prompt (step 0) out; add 0, or "
                    "remove the measure"
                )


def _bad_generation(sweep: Sweep) -> Iterator[str]:
    if sweep.generate is None:
        named = [name for name, measure in sweep.measures.items() if measure.kind in TEXTS]
        yield from (f"measures.{name}: it reads the generated text; add generate" for name in named)
    if goes_on(sweep) and sweep.position(sweep.measure_at) != -1:
        yield "measure_at: generate and tokens: sum go on from the last token; leave measure_at out"
    elif sweep.generate and _latest(sweep.generate) >= sweep.generate.max_new_tokens:
        yield (
            f"generate.writes_at: step {_latest(sweep.generate)} never comes; the last one is "
            f"{sweep.generate.max_new_tokens - 1}"
        )
    elif sweep.generate and sweep.generate.writes_at != "prompt":
        yield from _bad_estimates(sweep)
        for number, write in enumerate(sweep.writes):
            if not repeatable(write):
                yield (
                    f"writes.{number}: it cannot be repeated at new tokens, which no other prompt "
                    "has; set generate.writes_at: prompt, or write a number, a mean or a vector"
                )


RESERVED = {
    *("point_id", "point_key", "row_id", "row_key", "status", "reason", "writes", "excluded"),
    "inert_rows",
    *GENERATED,
    *("measure", "n", "mean", "std", "ci_low", "ci_high", "a", "b", "distance", "ulps", "class"),
}
"""Columns of our tables, which no axis and no measure may be called."""


def _bad_axes(sweep: Sweep) -> list[str]:
    names = [("axes", name) for name in sweep.axes]
    names += [("measures", name) for name in sweep.measures]
    problems = [
        f"{kind}.{n}: '{n}' is a column of one of our tables (docs/tables.md). Choose another name"
        for kind, n in names
        if n in RESERVED
    ]
    problems += [
        f"axes.{n}: '{n}' is both an axis and a measure. Rename one"
        for n in sweep.axes
        if n in sweep.measures
    ]
    zipped = [name for group in sweep.zip for name in group]
    used = [(f"zip.{i}", name) for i, group in enumerate(sweep.zip) for name in group]
    used += [(f"exclude.{i}", name) for i, rule in enumerate(sweep.exclude) for name in rule]
    for path, name in used:
        if name not in sweep.axes:
            problems.append(f"{path}: '{name}' is no axis. Axes: {', '.join(sweep.axes) or 'none'}")
    if len(zipped) != len(set(zipped)):
        problems.append("zip: an axis stands in two groups")
    for name, fields in references(sweep).items():
        axis = sweep.axes.get(name)
        if axis == "all" and not fields & {"layer", "head", "kv_head", "unit"}:
            problems.append(f"axes.{name}: 'all' is for layers, heads and units. List the values")
        if "position" in fields and isinstance(axis, list):
            unknown = [str(value) for value in axis if value not in _declared(sweep)]
            problems += [f"axes.{name}: {_no_position(sweep, each)}" for each in unknown]
    return problems
