"""The sweep document: what may stand in it (what must fit together: `sweep_checks`).

A sweep is one file. Its axes span a grid; each point of the grid is one set of writes. Nothing
here knows a tokenizer or a tensor: positions are names, layers and heads are integers.
"""

import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    StrictBool,
    field_validator,
    model_validator,
)

from nnsweep.documents import Strict
from nnsweep.sweep_measures import Inner, Measure, Reading
from nnsweep.sweep_positions import BUILT_IN_POSITIONS, FORMS, Position, Tokens
from nnsweep.sweep_words import (
    NAME,
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
    places_of,
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
    row_id: str = Field(
        "row_id", description="column that names the rows; left out and not there: numbers"
    )
    answers: dict[str, str] = Field(default={}, description="answer name -> column")
    answer_prefix: str | None = Field(
        None,
        description="what joins a prompt and its answer; null is a space, or what a chat template "
        "puts there (mostly nothing); an answer that begins with white space is joined as it is",
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
        from nnsweep.sweep_checks import problems  # It reads finished sweeps.

        for problem in problems(self):
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


def named_places(sweep: Sweep) -> list[tuple[str, str]]:
    """(path, position or `$axis`) of all that a write, a run or a measure names."""
    found = [(leaf.path, leaf.value) for leaf in placed_leaves(sweep) if leaf.field == "position"]
    found.append(("measure_at", sweep.measure_at))
    for where, measure in placed_measures(sweep):
        read = measure.read if isinstance(measure, Measure) else None
        for key, place in (("read", read), ("lens", measure.lens)):
            found += [(f"{where}.{key}.position", place.position)] if place else []
    return [(path, name) for path, name in found if name is not None]


def placed_measures(sweep: Sweep) -> list[tuple[str, Reading]]:
    """Measures with their path in the file, those that others are taken of in place included."""
    found: list[tuple[str, Reading]] = []
    for name, measure in sweep.measures.items():
        found.append((f"measures.{name}", measure))
        if isinstance(measure.of, Inner):
            found.append((f"measures.{name}.of", measure.of))
    return found


def measure_of(sweep: Sweep, measure: Measure) -> tuple[str, Reading]:
    """The measure that a recovery or an attribution is taken of, and its name or kind."""
    if isinstance(measure.of, Inner):
        return measure.of.kind, measure.of
    return str(measure.of), sweep.measures[str(measure.of)]


def watched_positions(sweep: Sweep) -> list[str]:
    """Positions at which something is measured."""
    watched = [name for path, name in named_places(sweep) if path.startswith("measure")]
    return list(dict.fromkeys(watched))


def named_positions(sweep: Sweep) -> list[str]:
    """Every position, or `$axis`, that a write, a run or a measure names."""
    return [name for _, name in named_places(sweep)]


def goes_on(sweep: Sweep) -> bool:
    """Whether anything is computed behind the prompt: new tokens, or answers of several."""
    summed = any(measure.tokens == "sum" for _, measure in placed_measures(sweep))
    return sweep.generate is not None or summed


def value_measures(sweep: Sweep) -> list[str]:
    """Measures and what else has columns in values.parquet, in order."""
    return [*sweep.measures, *(GENERATED if sweep.generate else ())]


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
