"""The sweep document: what may stand in it, and what must fit together.

A sweep is one file. Its axes span a grid; each point of the grid is one set of writes. Nothing
here knows a tokenizer or a tensor: positions are names, layers and heads are integers.
"""

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
from nnsweep.errors import UserError
from nnsweep.sweep_measures import TEXTS, Measure, recoverable, smooth
from nnsweep.sweep_positions import BUILT_IN_POSITIONS, FORMS, Position, Tokens
from nnsweep.sweep_words import (
    NAME,
    PROMPTS,
    Name,
    Numbers,
    Scalar,
)
from nnsweep.sweep_writes import Run, VectorFile, Write, leaves, places_of, repeatable, roles

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

    def values(self) -> list[int | float]:
        """The numbers, computed in decimal so that 0.1 steps stay 0.1 steps."""
        start, stop = (Decimal(str(x)) for x in self.range[:2])
        step = Decimal(str(self.range[2])) if len(self.range) == 3 else Decimal(1)
        if step == 0:
            raise UserError(f"axes: range {self.range} has step 0. Give a step other than 0.")
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
        checks = (_bad_positions, _bad_refs, _bad_measures, _bad_axes, _bad_generation)
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
    return [*sweep.writes, *(write for run in sweep.runs.values() for write in run.writes)]


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
    for write in all_writes(sweep):
        for field, value in leaves(write):
            if isinstance(value, str) and value.startswith("$"):
                found.setdefault(value[1:], set()).add(field)
    return found


def _bad_refs(sweep: Sweep) -> list[str]:
    known = set(sweep.axes)
    problems = [
        f"writes refer to ${name}, which is no axis. Axes: {', '.join(known) or 'none'}"
        for name in references(sweep)
        if name not in known
    ]
    idle = [name for name in sweep.axes if name not in references(sweep)]
    if idle:
        problems.append(f"axis '{idle[0]}' is used by no write. Use ${idle[0]} or remove the axis")
    for name in sorted({*named_positions(sweep), sweep.measure_at}):
        declared = {**sweep.positions, **BUILT_IN_POSITIONS}
        if name == sweep.measure_at and name.startswith("$"):
            problems.append("measure_at is one position for the whole sweep, not an axis")
        elif not name.startswith("$") and name not in declared:
            problems.append(_no_position(sweep, name))
    if uses_donor(sweep) and sweep.prompts.donor is None:
        problems.append("a write or measure reads the donor, but prompts.donor is not given")
    return problems + _bad_runs(sweep)


def _fields(sweep: Sweep) -> list[tuple[str, Any]]:
    """(field, value) of everything that stands in a write or is read by a measure."""
    found = [leaf for write in all_writes(sweep) for leaf in leaves(write)]
    return found + [("position", name) for name in watched_positions(sweep)]


def watched_positions(sweep: Sweep) -> list[str]:
    """Positions at which something is measured."""
    measures = sweep.measures.values()
    read = [one.position for m in measures for one in (m.read, m.lens) if one and one.position]
    return list(dict.fromkeys([sweep.measure_at, *read]))


def named_positions(sweep: Sweep) -> list[str]:
    """Every position, or `$axis`, that a write, a run or a measure names."""
    return [name for field, name in _fields(sweep) if field == "position" and name]


def _bad_runs(sweep: Sweep) -> list[str]:
    problems = [f"runs.{name} is built in; call it otherwise" for name in PROMPTS & {*sweep.runs}]
    asked = {name for write in sweep.writes for name in roles(write)}
    known = ", ".join([*sorted(PROMPTS), *sweep.runs])
    problems += [f"patch: '{n}' is no run. Runs: {known}" for n in asked - PROMPTS - {*sweep.runs}]
    problems += [f"runs.{name} is patched from by no write" for name in {*sweep.runs} - asked]
    for name, run in sweep.runs.items():
        for deep in sorted({n for w in run.writes for n in roles(w)} - PROMPTS):
            problems.append(f"runs.{name} patches from '{deep}'; a run patches from text and donor")
    return problems


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
    known = ", ".join({**sweep.positions, **BUILT_IN_POSITIONS})
    return f"position '{name}' is not declared. Positions: {known}"


def _bad_measures(sweep: Sweep) -> list[str]:
    problems = []
    if not sweep.writes and any(m.kind == "attribution" for m in sweep.measures.values()):
        problems.append("attribution estimates what writes do; this sweep has none")
    for name, measure in sweep.measures.items():
        for answer in [measure.answer, *(measure.answers or [])]:
            if answer is not None and answer not in sweep.prompts.answers:
                known = ", ".join(sweep.prompts.answers) or "none"
                problems.append(f"measures.{name}: answer '{answer}' is not one of: {known}")
        fits = smooth if measure.kind == "attribution" else recoverable
        if measure.of and not fits(sweep.measures.get(measure.of, measure)):
            allowed = [k for k, m in sweep.measures.items() if fits(m)]
            problems.append(f"measures.{name}.of: '{measure.of}' is not one of {allowed}")
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


def _bad_generation(sweep: Sweep) -> Iterator[str]:
    if sweep.generate is None:
        named = [name for name, measure in sweep.measures.items() if measure.kind in TEXTS]
        yield from (f"measures.{name} reads the generated text; add generate" for name in named)
    if goes_on(sweep) and sweep.position(sweep.measure_at) != -1:
        yield "generate and tokens: sum go on from the last token; leave measure_at out"
    elif sweep.generate and _latest(sweep.generate) >= sweep.generate.max_new_tokens:
        yield (
            f"generate.writes_at: step {_latest(sweep.generate)} never comes; the last one is "
            f"{sweep.generate.max_new_tokens - 1}"
        )
    elif sweep.generate and sweep.generate.writes_at != "prompt":
        for number, write in enumerate(sweep.writes):
            if not repeatable(write):
                yield (
                    f"writes.{number} cannot be repeated at new tokens, which no other prompt has; "
                    "set generate.writes_at: prompt, or write a number, a mean or a vector"
                )


RESERVED = {
    *("point_id", "point_key", "row_id", "row_key", "status", "reason", "writes", "excluded"),
    "inert_rows",
    *GENERATED,
    *("measure", "n", "mean", "std", "ci_low", "ci_high", "a", "b", "distance", "ulps", "class"),
}
"""Columns of our tables, which no axis and no measure may be called."""


def _bad_axes(sweep: Sweep) -> list[str]:
    names = [*sweep.axes, *sweep.measures]
    problems = [
        f"'{n}' is a column of every table. Call the axis or measure otherwise"
        for n in names
        if n in RESERVED
    ]
    problems += [
        f"'{n}' is both an axis and a measure. Rename one"
        for n in sweep.axes
        if n in sweep.measures
    ]
    zipped = [name for group in sweep.zip for name in group]
    for name in zipped + [key for rule in sweep.exclude for key in rule]:
        if name not in sweep.axes:
            problems.append(f"'{name}' in zip or exclude is no axis. Axes: {list(sweep.axes)}")
    if len(zipped) != len(set(zipped)):
        problems.append("zip: an axis stands in two groups")
    for name, fields in references(sweep).items():
        axis = sweep.axes.get(name)
        if axis == "all" and not fields & {"layer", "head", "kv_head", "unit"}:
            problems.append(f"axes.{name}: 'all' is for layers, heads and units. List the values")
        if "position" in fields and isinstance(axis, list):
            known = {**sweep.positions, **BUILT_IN_POSITIONS}
            problems += [_no_position(sweep, str(x)) for x in axis if x not in known]
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
