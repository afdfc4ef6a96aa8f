"""The sweep document: what may stand in it, and what must fit together.

A sweep is one file. Its axes span a grid; each point of the grid is one set of writes. Nothing
here knows a tokenizer or a tensor: positions are names, layers and heads are integers.
"""

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    StrictBool,
    field_validator,
    model_validator,
)

from nnsweep.documents import Strict
from nnsweep.sweep_measures import TEXTS, Measure, unfit
from nnsweep.sweep_positions import BUILT_IN_POSITIONS, FORMS, Position, Tokens
from nnsweep.sweep_words import (
    EDGES,
    NAME,
    PROMPTS,
    Name,
    Numbers,
    Scalar,
)
from nnsweep.sweep_writes import (
    Leaf,
    Run,
    VectorFile,
    Write,
    leaves,
    misread,
    places_of,
    repeatable,
    roles,
)

GENERATED = ("generated", "text")
"""Columns of values.parquet that hold what was generated: tokens, and their text."""

NO_VARIABLES = {
    *("conversation", "messages", "tokenize", "chat_template", "strftime_now"),
    *("add_generation_prompt", "continue_final_message", "tools", "documents"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}
"""Names that mean something else to transformers than a variable of a chat template."""


class ModelSpec(Strict):
    """Which model answers."""

    id: str = Field(description="`smollm2-135m`, a Hugging Face id, or a local folder")
    revision: str | None = Field(None, description="branch, tag or commit; null is the default")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="dtype of weights and activations"
    )
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="attention implementation")

    @field_validator("revision", mode="before")
    @classmethod
    def _revision_is_text(cls, value: Any) -> Any:
        if isinstance(value, int | float):
            raise ValueError(f"got the number {value}; put the revision in quotes")
        return value


class Prompts(Strict):
    """Where the prompt rows come from and which columns mean what."""

    file: str = Field(description="csv, jsonl or parquet, relative to the working directory")
    text: str = Field(description="column run under the writes")
    donor: str | None = Field(None, description="column whose activations are patched in")
    row_id: str = Field("row_id", description="column that names the rows")
    answers: dict[str, str] = Field(default={}, description="answer name -> column")
    answer_prefix: str | None = Field(
        None,
        description="what joins a prompt and its answer; null is a space, or what a chat template "
        "puts there (mostly nothing)",
    )
    chat: StrictBool | Annotated[dict[str, StrictBool | Scalar], Field(min_length=1)] = Field(
        False,
        description="true: the columns text and donor hold lists of {role, content} messages, for "
        "the model's chat template; or {NAME: value} of the template's own variables",
    )

    @field_validator("chat")
    @classmethod
    def _free_names(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name in NO_VARIABLES:
                raise ValueError(f"'{name}' is no variable to set; it follows from the messages")
        return value


class Range(Strict):
    """Numbers from a up to, not including, b."""

    range: list[int | float] = Field(
        description="[a, b] or [a, b, step]", min_length=2, max_length=3
    )

    @field_validator("range")
    @classmethod
    def _moves(cls, value: list[int | float]) -> list[int | float]:
        if value[2:] == [0]:
            raise ValueError(f"{value} has step 0; give a step other than 0")
        return value

    def values(self) -> list[int | float]:
        """The numbers, computed in decimal so that 0.1 steps stay 0.1 steps."""
        start, stop = (Decimal(str(x)) for x in self.range[:2])
        step = Decimal(str(self.range[2])) if len(self.range) == 3 else Decimal(1)
        count = max(0, math.ceil((stop - start) / step))
        whole = all(isinstance(x, int) for x in self.range)
        return [int(x) if whole else float(x) for x in (start + step * i for i in range(count))]


Axis = list[Scalar] | Range | Literal["all"]


class Generate(Strict):
    """Greedy continuation of every prompt under the writes of every point."""

    max_new_tokens: Annotated[int, Field(strict=True, ge=1, le=1000)] = Field(
        description="tokens at most; a row ends earlier at the model's end-of-text token"
    )
    writes_at: Literal["prompt", "all"] | Numbers = Field(
        "prompt",
        description="steps under the writes: 0 is the prompt, n the n-th new token; all is each",
    )


class Sweep(Strict):
    """A sweep of interventions on a language model."""

    name: Name = Field(description="lower-case letters, digits and _, as the file is named")
    model: ModelSpec
    prompts: Prompts
    positions: dict[Name, Position] = Field(default={}, description="name -> tokens of a prompt")
    measure_at: str = Field(
        "last",
        description="position whose next-token logits are measured; of several tokens, the last",
    )
    axes: dict[Name, Axis] = Field(default={}, description="name -> values; the first is slowest")
    zip: list[list[str]] = Field(default=[], description="axes that move together")
    exclude: list[dict[str, Scalar | list[Scalar]]] = Field(
        default=[], description="points left out: axis -> value or values"
    )
    writes: list[Write] = Field(default=[], description="none measures behaviour")
    runs: dict[Name, Run] = Field(default={}, description="name -> a run that writes patch from")
    generate: Generate | None = Field(None, description="continue every prompt; null does not")
    measures: dict[Name, Measure] = Field(description="name -> measure", min_length=1)
    on_bad_row: Literal["refuse", "exclude"] = Field(
        "refuse", description="what to do when a prompt row cannot be used"
    )

    @field_validator("name", mode="before")
    @classmethod
    def _plain_name(cls, value: Any) -> Any:
        if not isinstance(value, str) or not re.match(NAME, value):
            raise ValueError(f"got {value!r}, use lower-case letters, digits and _ (at most 64)")
        return value

    @model_validator(mode="after")
    def _references(self) -> "Sweep":
        checks = (_bad_positions, _bad_refs, _bad_writes, _bad_measures, _bad_axes, _bad_generation)
        for problem in itertools.chain.from_iterable(check(self) for check in checks):
            raise ValueError(problem)
        return self

    def position(self, name: str) -> Position:
        """The declaration of a position, built-in names included."""
        return {**BUILT_IN_POSITIONS, **self.positions}[name]


def position_spec(sweep: Sweep, name: str) -> dict[str, Any]:
    """A position's meaning as plain data, whatever it is called; `align` is always among the keys.

    The names in a list stand for what they mean.
    """
    position = sweep.position(name)
    members = members_of(position)
    if members is not None:
        inner = [position_spec(sweep, m) if isinstance(m, str) else _index(m) for m in members]
        return {"union": inner, "align": align_of(position)}
    if isinstance(position, Tokens):
        keys = {position.form, *FORMS[position.form], "align"}
        return position.model_dump(mode="json", include=keys)
    return _index(position)


def _index(index: Any) -> dict[str, Any]:
    return {"index": index, "align": None}


def members_of(position: Position) -> list[int | str] | None:
    """What a list of positions holds: indices and names; None for any other position."""
    if isinstance(position, Tokens):
        return position.union
    return position if isinstance(position, list) else None


def align_of(position: Position) -> str | None:
    """How a position's tokens meet the donor's."""
    return position.align if isinstance(position, Tokens) else None


def all_writes(sweep: Sweep) -> list[Write]:
    """The writes of the sweep and of its runs."""
    return [write for _, write in placed_writes(sweep)]


def placed_writes(sweep: Sweep) -> list[tuple[str, Write]]:
    """The same, each with its path in the file, as `writes.0` or `runs.NAME.writes.0`."""
    lists = {"writes": sweep.writes}
    lists |= {f"runs.{name}.writes": run.writes for name, run in sweep.runs.items()}
    return [
        (f"{path}.{i}", write) for path, found in lists.items() for i, write in enumerate(found)
    ]


def placed_leaves(sweep: Sweep) -> list[Leaf]:
    """What axes may stand for, in all writes, with whole paths."""
    return [
        leaf._replace(path=f"{where}.{leaf.path}")
        for where, write in placed_writes(sweep)
        for leaf in leaves(write)
    ]


def uses_donor(sweep: Sweep) -> bool:
    """Whether any write or measure reads the donor prompts."""
    measures = sweep.measures.values()
    return (
        any("donor" in roles(write) for write in all_writes(sweep))
        or any(run.prompt == "donor" for run in sweep.runs.values())
        or any(m.kind == "recovery" or (m.read and m.against == "donor") for m in measures)
    )


def donor_positions(sweep: Sweep) -> set[str]:
    """Positions whose tokens in the donor are read; only those must be there, and correspond."""
    if not uses_donor(sweep):
        return set()
    donors = {"donor"} | {name for name, run in sweep.runs.items() if run.prompt == "donor"}
    reading = [write for write in all_writes(sweep) if roles(write) & donors]
    reading += [w for run in sweep.runs.values() if run.prompt == "donor" for w in run.writes]
    named = {name for write in reading for name in places_of(write)}
    return named_values(sweep, named) | set(watched_positions(sweep))


def named_values(sweep: Sweep, names: Iterable[str]) -> set[str]:
    """Names with every `$axis` in the place of which its values stand."""
    found: set[str] = set()
    for name in names:
        axis = sweep.axes[name[1:]] if name.startswith("$") else [name]
        found |= {str(value) for value in axis} if isinstance(axis, list) else set()
    return found


def vector_files(sweep: Sweep) -> list[str]:
    """The vector files that the sweep's writes read."""
    adds = [write.add.vector for write in all_writes(sweep) if write.add]
    return list(dict.fromkeys(v.file for v in adds if isinstance(v, VectorFile)))


def references(sweep: Sweep) -> dict[str, set[str]]:
    """Axis name -> the fields (`layer`, `kv_head`, `number`, ...) that refer to it."""
    found: dict[str, set[str]] = {}
    for leaf in placed_leaves(sweep):
        if isinstance(leaf.value, str) and leaf.value.startswith("$"):
            found.setdefault(leaf.value[1:], set()).add(leaf.field)
    return found


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
    for path, name in _named(sweep):
        if not _is_axis(name) and name not in _declared(sweep):
            yield f"{path}: {_no_position(sweep, name)}"
    if uses_donor(sweep) and sweep.prompts.donor is None:
        yield "prompts.donor: a write or measure reads the donor; name its column"
    yield from _bad_runs(sweep)


def _is_axis(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("$")


def _declared(sweep: Sweep) -> list[str]:
    return [*{**sweep.positions, **BUILT_IN_POSITIONS}]


def _named(sweep: Sweep) -> list[tuple[str, str]]:
    """(path, position or `$axis`) of all that a write, a run or a measure names."""
    found = [(leaf.path, leaf.value) for leaf in placed_leaves(sweep) if leaf.field == "position"]
    found.append(("measure_at", sweep.measure_at))
    for name, measure in sweep.measures.items():
        for key, place in (("read", measure.read), ("lens", measure.lens)):
            found += [(f"measures.{name}.{key}.position", place.position)] if place else []
    return [(path, name) for path, name in found if name is not None]


def watched_positions(sweep: Sweep) -> list[str]:
    """Positions at which something is measured."""
    watched = [name for path, name in _named(sweep) if path.startswith("measure")]
    return list(dict.fromkeys(watched))


def named_positions(sweep: Sweep) -> list[str]:
    """Every position, or `$axis`, that a write, a run or a measure names."""
    return [name for _, name in _named(sweep)]


def _bad_writes(sweep: Sweep) -> Iterator[str]:
    """What of its own a write cannot mean, whatever the model."""
    estimating = any(m.kind == "attribution" for m in sweep.measures.values())
    for where, write in placed_writes(sweep):
        for path, sentence in misread(write):
            yield f"{where}.{path}: {sentence}"
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
    for name, measure in sweep.measures.items():
        for answer in [measure.answer, *(measure.answers or [])]:
            if answer is not None and answer not in sweep.prompts.answers:
                known = ", ".join(sweep.prompts.answers) or "none"
                problems.append(f"measures.{name}: answer '{answer}' is not one of: {known}")
        if measure.of is not None:
            of = sweep.measures.get(measure.of)
            problem = "is no measure" if of is None else unfit(measure, of)
            fit = [k for k, each in sweep.measures.items() if unfit(measure, each) is None]
            known = f"Possible: {', '.join(fit) or 'none here'}"
            problems += (
                [f"measures.{name}.of: '{measure.of}' {problem}. {known}"] if problem else []
            )
    return problems


def goes_on(sweep: Sweep) -> bool:
    """Whether anything is computed behind the prompt: new tokens, or answers of several."""
    summed = any(measure.tokens == "sum" for measure in sweep.measures.values())
    return sweep.generate is not None or summed


def value_measures(sweep: Sweep) -> list[str]:
    """Measures and what else has columns in values.parquet, in order."""
    return [*sweep.measures, *(GENERATED if sweep.generate else ())]


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
        f"{kind}.{n}: '{n}' is a column of every table. Choose another name"
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


INDICES = {"layer", "head", "kv_head", "unit", "index"}
"""Fields that take whole numbers from 0."""


def axis_kinds(sweep: Sweep) -> dict[str, str]:
    """Axis name -> `index` (layers, heads, seeds), `string` (positions) or `number`."""
    kinds = {}
    for name, fields in references(sweep).items():
        if "position" in fields:
            kinds[name] = "string"
        else:
            kinds[name] = "index" if fields <= INDICES else "number"
    return {name: kinds[name] for name in sweep.axes}
