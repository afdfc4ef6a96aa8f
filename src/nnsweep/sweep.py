"""The sweep document: what may stand in it, and what must fit together.

A sweep is one file. Its axes span a grid; each point of the grid is one set of writes. Nothing
here knows a tokenizer or a tensor: positions are names, layers and heads are integers.
"""

import itertools
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)

from nnsweep.documents import Strict
from nnsweep.errors import UserError

NAME = r"^[a-z0-9][a-z0-9_]{0,63}$"
SITES = (
    *("embed", "resid_pre", "ln1", "q", "k", "v", "attn_scores", "pattern", "z", "attn_out"),
    *("resid_mid", "ln2", "mlp_pre", "mlp_post", "mlp_out", "resid_post", "ln_final", "logits"),
)
HEADED = {
    **{"q": "head", "k": "kv_head", "v": "kv_head", "z": "head"},
    **{"attn_scores": "head", "pattern": "head"},
}
"""Sites with heads, and whose: under grouped-query attention keys and values have fewer."""
UNITED = ("mlp_pre", "mlp_post")
"""Sites whose components are neurons, of which a write may choose some."""
EDGES = ("attn_scores", "pattern")
"""Sites with one number for each query and key token."""
LAYERLESS = ("embed", "ln_final", "logits")
MEASURES: dict[str, tuple[str, ...]] = {
    "match": ("answer",),
    "logit": ("answer",),
    "log_prob": ("answer", "answers"),
    "cross_entropy": ("answer",),
    "prob": ("answer", "answers"),
    "rank": ("answer",),
    "logit_diff": ("answers",),
    "entropy": (),
    "kl": (),
    "js": (),
    "top_k": ("k",),
    "cosine": ("read",),
    "contains": ("answer",),
    "recovery": ("of",),
    "attribution": ("of",),
}
"""The field each kind of measure asks for, or one of several (definitions: `nnsweep.measures`)."""

AGAINST_CLEAN = ("kl", "js", "cosine", "recovery", "attribution")
"""Kinds that compare with the clean run of the same prompt."""

GUARDED = ("recovery", "cosine")
"""Kinds that are no number where they would divide by nothing; such a value is null, no error."""

TEXTS = ("contains",)
"""Kinds that read the generated text."""

GENERATED = ("generated", "text")
"""Columns of values.parquet that hold what was generated: tokens, and their text."""

NO_LENS = ("cosine", "contains", "recovery", "attribution")
"""Kinds that read no logits of their own."""

PROMPTS = {"text", "donor"}
"""The runs without writes that a write may patch from."""

BUILT_IN_POSITIONS: dict[str, int | Literal["all"]] = {"last": -1, "all": "all"}
FORMS: dict[str, tuple[str, ...]] = {
    "last": (),
    "span": (),
    "text": ("donor_text", "occurrence", "token"),
    "segment": ("occurrence", "token"),
    "union": (),
}
"""The forms of a position that is written with keys, and which keys go with each (and `align`)."""

NO_VARIABLES = {
    *("conversation", "messages", "tokenize", "chat_template", "strftime_now"),
    *("add_generation_prompt", "continue_final_message", "tools", "documents"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}
"""Names that mean something else to transformers than a variable of a chat template."""

GENERATION = "generation"
"""The segment of a chat prompt that the template appends for the model to go on from."""

Ref = Annotated[str, Field(pattern=r"^\$[a-z][a-z0-9_]*$")]
Name = Annotated[str, Field(pattern=NAME)]
Scalar = StrictInt | StrictFloat | StrictStr
Index = Annotated[int, Field(strict=True, ge=0)] | Ref
Number = StrictFloat | StrictInt | Ref


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


Whole = Annotated[int, Field(strict=True)]
Members = Annotated[list[Whole | Name], Field(min_length=1)]


class Tokens(Strict):
    """Tokens of each prompt. Exactly one of `last`, `span`, `text`, `segment`, `union`."""

    last: Annotated[int, Field(strict=True, ge=1)] | None = Field(
        None, description="how many tokens from the end"
    )
    span: list[Whole | None] | None = Field(
        None, description="[a, b]: tokens a up to, not including, b; b null is the end"
    )
    text: str | None = Field(None, description="column holding the text to find in the prompt")
    donor_text: str | None = Field(None, description="column for the donor; null is `text`")
    segment: str | None = Field(
        None, description="role of a chat message, or `generation`, the generation prompt"
    )
    union: Members | None = Field(None, description="indices and names of positions, with `align`")
    occurrence: Whole | None = Field(
        None, description="1 is the first, -1 the last; null refuses what is found twice"
    )
    token: Literal["all", "first", "last"] = Field(
        "all", description="which tokens of what is found"
    )
    align: Literal["first", "last", "mean"] | None = Field(
        None,
        description="how tokens meet the donor's where these are more or fewer; null refuses them",
    )

    @field_validator("occurrence")
    @classmethod
    def _not_zero(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("occurrences count from 1 (first) or -1 (last)")
        return value

    @field_validator("span")
    @classmethod
    def _bounds(cls, value: list[int | None] | None) -> list[int | None] | None:
        if value is None:
            return None
        low, high = value if len(value) == 2 else (None, None)
        if low is None:
            raise ValueError(f"got {value}, expected [a, b], where b may be null (to the end)")
        if high is not None and (low < 0) == (high < 0) and low >= high:
            raise ValueError(f"{value} holds no token; b is not included")
        return value

    @model_validator(mode="after")
    def _one_form(self) -> "Tokens":
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(FORMS)} (given: {given or 'none'})")
        for name, default in (("donor_text", None), ("occurrence", None), ("token", "all")):
            if getattr(self, name) != default and name not in FORMS[self.form]:
                raise ValueError(f"{self.form} takes no '{name}'")
        if self.segment == GENERATION and self.occurrence is not None:
            raise ValueError("segment generation takes no 'occurrence'")
        if self.union and self.align is None:
            raise ValueError(f"without align, write the list alone: {self.union}")
        return self

    @property
    def form(self) -> str:
        """Which of the forms is given."""
        return next(name for name in FORMS if getattr(self, name) is not None)


Position = Whole | Literal["all"] | Members | Tokens


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


Selection = Literal["all"] | list[Annotated[int, Field(strict=True, ge=0)]]
"""Several layers or heads."""

Site = Literal[
    "embed",
    "resid_pre",
    "ln1",
    "q",
    "k",
    "v",
    "attn_scores",
    "pattern",
    "z",
    "attn_out",
    "resid_mid",
    "ln2",
    "mlp_pre",
    "mlp_post",
    "mlp_out",
    "resid_post",
    "ln_final",
    "logits",
]


class Mean(Strict):
    """The mean activation over all usable rows, at the same site, layer and position."""

    mean: Literal["text", "donor"] = Field(description="over which prompts")
    per_token: bool = Field(
        False, description="one mean for each token of the position, instead of one for all"
    )


class Resample(Strict):
    """The activation of another row, drawn at random for each row, at the same place."""

    resample: Literal["text", "donor"] = Field(description="from which prompts")
    seed: Index = Field(0, description="seed, or `$axis`")


class Patch(Strict):
    """The activation of another run; also of another site, layer, head or position of it."""

    patch: Name = Field(description="`donor`, `text` (the clean run) or a name under `runs`")
    site: Site | None = Field(None, description="null: the site of the write")
    layer: Index | None = Field(None, description="null: the layer of the write")
    head: Index | None = Field(None, description="null: the head of the write")
    position: str | None = Field(None, description="null: the position of the write")


class MeanDifference(Strict):
    """A difference of means: mean over one set of prompts minus mean over the other."""

    mean: Literal["text", "donor"] = Field(description="minuend")
    minus: Literal["text", "donor"] = Field(description="subtrahend")
    normalize: bool = Field(False, description="scaled to length 1")


class VectorFile(Strict):
    """A vector from a safetensors file, shape [width] or [layers, width]."""

    file: str = Field(description="safetensors file, relative to the working directory")
    key: str = Field("vector", description="name of the tensor in the file")
    normalize: bool = Field(False, description="scaled to length 1")


class Unit(Strict):
    """A unit direction: 1 in one component, 0 in all others."""

    unit: Index = Field(description="component, from 0, or `$axis`")


class Add(Strict):
    """Add a vector with a scale (steering)."""

    vector: VectorFile | MeanDifference | Unit = Field(description="what is added")
    scale: Number = Field(1.0, description="factor, or `$axis`")


class Noise(Strict):
    """Add Gaussian noise, drawn from the identity of the point and the row."""

    std: Number = Field(description="standard deviation, or `$axis`")
    seed: Index = Field(0, description="seed, or `$axis`")


class Mix(Strict):
    """Move the activation part of the way to another: (1 - weight) x old + weight x source."""

    source: Literal["donor"] | Patch | Mean | Resample = Field(
        description="`donor`, {patch: donor, ...}, {mean: text} or {resample: text}"
    )
    weight: Number = Field(description="0 leaves it, 1 replaces it; or `$axis`")


class Clamp(Strict):
    """Keep every component of the activation between two numbers."""

    low: Number | None = Field(None, description="smallest value, or `$axis`")
    high: Number | None = Field(None, description="largest value, or `$axis`")

    @model_validator(mode="after")
    def _bounds(self) -> "Clamp":
        if self.low is None and self.high is None:
            raise ValueError("give low, high or both")
        return self


OPERATIONS = ("set", "add", "noise", "mix", "clamp", "renormalize", "knockout")


class Write(Strict):
    """One change of one activation. Exactly one operation, from `set` to `knockout`."""

    site: Site
    layer: Index | None = Field(None, description="layer, from 0, or `$axis`")
    layers: Selection | None = Field(None, description="several layers, or `all`; the same in each")
    head: Index | None = Field(
        None, description="head, from 0 (q and z: query head; k and v: key-value head), or `$axis`"
    )
    heads: Selection | None = Field(None, description="several heads, or `all`; the same in each")
    units: Index | list[Annotated[int, Field(strict=True, ge=0)]] | None = Field(
        None, description="mlp_pre and mlp_post: one neuron, `$axis` or a list; null is all"
    )
    position: str = Field(description="name of a position, or `$axis`; at edges, the query tokens")
    keys: str | None = Field(
        None, description="attn_scores and pattern: position of the key tokens; null is all"
    )
    set: Literal["donor"] | Patch | Mean | Resample | Number | None = Field(
        None,
        description="`donor`, {patch: ...}, a number, {mean: ...}, {resample: ...} or `$axis`",
    )
    add: Add | None = Field(None, description="vector and scale")
    noise: Noise | None = Field(None, description="standard deviation and seed")
    mix: Mix | None = Field(None, description="what to move towards, and how far")
    clamp: Clamp | None = Field(None, description="bounds of every component")
    renormalize: Literal["text", "donor"] | Number | None = Field(
        None, description="length to scale to: that of the clean run, of the donor, or a number"
    )
    knockout: Literal[True] | None = Field(
        None, description="attn_scores: no attention from `position` to `keys`"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Write":
        given = [name for name in OPERATIONS if getattr(self, name) is not None]
        if len(given) != 1:
            allowed = ", ".join(OPERATIONS)
            raise ValueError(f"give exactly one of {allowed} (given: {given or 'none'})")
        for problem in _misplaced(self):
            raise ValueError(problem)
        return self


def _misplaced(write: Write) -> Iterator[str]:
    """What a write selects that its site does not have."""
    site = write.site
    layers = sum(value is not None for value in (write.layer, write.layers))
    heads = sum(value is not None for value in (write.head, write.heads))
    if layers != (site not in LAYERLESS):
        yield f"site {site} takes {'no layer' if site in LAYERLESS else 'layer or layers'}"
    if heads != (site in HEADED):
        yield f"site {site} takes {'head or heads' if site in HEADED else 'no head'}"
    if write.units is not None and site not in UNITED:
        yield f"site {site} takes no units; they are of {' and '.join(UNITED)}"
    if write.keys is not None and site not in EDGES:
        yield f"site {site} takes no keys; they are of {' and '.join(EDGES)}"
    if write.knockout and (site != "attn_scores" or write.keys is None):
        yield "knockout takes site attn_scores, position (query tokens) and keys (key tokens)"
    vectors = (write.add, write.noise, write.renormalize)
    if site in EDGES and any(operation is not None for operation in vectors):
        yield f"site {site} takes no add, noise or renormalize; they are of vectors"
    if site in EDGES and any(isinstance(source, Mean | Resample) for source in sources(write)):
        yield f"site {site} takes a number or a patch; prompts differ in their tokens"


class Run(Strict):
    """A run under writes, whose activations can be patched in (a chain)."""

    prompt: Literal["text", "donor"] = Field(description="which prompt is run")
    writes: list[Write] = Field(description="under which writes", min_length=1)


class Read(Strict):
    """A place that a measure reads under the writes."""

    site: Site
    layer: Annotated[int, Field(strict=True, ge=0)] | None = Field(None, description="from 0")
    head: Annotated[int, Field(strict=True, ge=0)] | None = Field(None, description="from 0")
    position: str = Field("last", description="of several tokens, the last is read")

    @model_validator(mode="after")
    def _place(self) -> "Read":
        if (self.layer is None) != (self.site in LAYERLESS):
            need = "no layer" if self.site in LAYERLESS else "a layer"
            raise ValueError(f"site {self.site} takes {need}")
        if (self.head is None) == (self.site in HEADED):
            raise ValueError(f"site {self.site} takes {'a' if self.site in HEADED else 'no'} head")
        if self.site in (*EDGES, "logits"):
            raise ValueError(f"site {self.site} is no vector of the model's inside; read another")
        return self


class Lens(Strict):
    """The logit lens: final norm and output embedding on the stream inside the model."""

    site: Literal["resid_pre", "resid_mid", "resid_post"] = Field(
        "resid_post", description="which stream is read"
    )
    layers: Selection = Field("all", description="a column for each layer")
    position: str | None = Field(
        None, description="of several tokens, the last is read; null is `measure_at`"
    )


class Measure(Strict):
    """One number per point and prompt row, computed from the logits."""

    kind: Literal[
        "match",
        "logit",
        "log_prob",
        "cross_entropy",
        "prob",
        "rank",
        "logit_diff",
        "entropy",
        "kl",
        "js",
        "top_k",
        "cosine",
        "contains",
        "recovery",
        "attribution",
    ]
    answer: str | None = Field(None, description="name of an answer")
    answers: list[str] | None = Field(
        None, description="[target, foil]; of prob and log_prob a set, summed", min_length=2
    )
    of: str | None = Field(None, description="the measure that is recovered or estimated")
    min_gap: float = Field(0.1, gt=0, description="smallest clean-to-donor gap of `of` that counts")
    k: Annotated[int, Field(strict=True, ge=1, le=100)] | None = Field(
        None, description="top_k: how many tokens"
    )
    read: Read | None = Field(None, description="cosine: which activation is compared")
    against: Literal["text", "donor"] = Field("text", description="cosine: with which clean run")
    lens: Lens | None = Field(None, description="read logits inside the model (logit lens)")

    @model_validator(mode="after")
    def _fields_of_kind(self) -> "Measure":
        allowed = MEASURES[self.kind]
        fields = ("answer", "answers", "of", "k", "read")
        given = [name for name in fields if getattr(self, name) is not None]
        for field in given:
            if field not in allowed:
                raise ValueError(f"kind {self.kind} takes no '{field}'")
        if len(given) != bool(allowed):
            raise ValueError(f"kind {self.kind} needs '{"' or '".join(allowed)}'")
        if self.kind == "logit_diff" and len(self.answers or []) != 2:
            raise ValueError("kind logit_diff needs two answers, [target, foil]")
        if self.lens and self.kind in NO_LENS:
            raise ValueError(f"kind {self.kind} takes no lens")
        return self


class Generate(Strict):
    """Greedy continuation of every prompt under the writes of every point."""

    max_new_tokens: Annotated[int, Field(strict=True, ge=1, le=1000)] = Field(
        description="tokens at most; a row ends earlier at the model's end-of-text token"
    )
    writes_at: Literal["prompt", "all"] | list[Annotated[int, Field(strict=True, ge=0)]] = Field(
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
    runs: dict[Name, Run] = Field(default={}, description="name -> a run that writes patch from")
    writes: list[Write] = Field(default=[], description="none measures behaviour")
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


def sources(write: Write) -> list[Any]:
    """What a write sets or mixes in, as it is declared."""
    return [source for source in (write.set, write.mix and write.mix.source) if source is not None]


def patches(write: Write) -> list[Patch]:
    """The patches of a write; `donor` is one for short."""
    found = [Patch(patch="donor") if source == "donor" else source for source in sources(write)]
    return [source for source in found if isinstance(source, Patch)]


def roles(write: Write) -> set[str]:
    """Which prompts or runs a write reads: `text`, `donor` or names of runs."""
    found = {patch.patch for patch in patches(write)}
    found |= {source.mean for source in sources(write) if isinstance(source, Mean)}
    found |= {source.resample for source in sources(write) if isinstance(source, Resample)}
    vector = write.add.vector if write.add else None
    if isinstance(vector, MeanDifference):
        found |= {vector.mean, vector.minus}
    return found | (PROMPTS & {write.renormalize})


def vector_files(sweep: Sweep) -> list[str]:
    """The vector files that the sweep's writes read."""
    adds = [write.add.vector for write in all_writes(sweep) if write.add]
    return list(dict.fromkeys(v.file for v in adds if isinstance(v, VectorFile)))


def references(sweep: Sweep) -> dict[str, set[str]]:
    """Axis name -> the fields (`layer`, `kv_head`, `number`, ...) that refer to it."""
    found: dict[str, set[str]] = {}
    for write in all_writes(sweep):
        for field, value in _leaves(write):
            if isinstance(value, str) and value.startswith("$"):
                found.setdefault(value[1:], set()).add(field)
    return found


def _leaves(write: Write) -> Iterator[tuple[str, Any]]:
    """(field, value) of everything in a write that an axis may stand for."""
    yield from _place_leaves(write.site, write)
    yield from [("position", write.keys), ("unit", write.units)]
    for patch in patches(write):
        yield from _place_leaves(patch.site or write.site, patch)
    yield from (("number", source) for source in sources(write) if source != "donor")
    yield ("number", write.renormalize if write.renormalize not in PROMPTS else None)
    yield from (("index", s.seed) for s in sources(write) if isinstance(s, Resample))
    if write.add:
        yield ("number", write.add.scale)
        if isinstance(write.add.vector, Unit):
            yield ("index", write.add.vector.unit)
    if write.noise:
        yield from [("number", write.noise.std), ("index", write.noise.seed)]
    if write.mix:
        yield ("number", write.mix.weight)
    if write.clamp:
        yield from [("number", write.clamp.low), ("number", write.clamp.high)]


def _place_leaves(site: str, place: Any) -> list[tuple[str, Any]]:
    head = HEADED.get(site, "head")
    return [("layer", place.layer), (head, place.head), ("position", place.position)]


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
    found = [leaf for write in all_writes(sweep) for leaf in _leaves(write)]
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
        fits = _smooth if measure.kind == "attribution" else _recoverable
        if measure.of and not fits(sweep.measures.get(measure.of, measure)):
            allowed = [k for k, m in sweep.measures.items() if fits(m)]
            problems.append(f"measures.{name}.of: '{measure.of}' is not one of {allowed}")
    return problems


def value_measures(sweep: Sweep) -> list[str]:
    """Measures and what else has columns in values.parquet, in order."""
    return [*sweep.measures, *(GENERATED if sweep.generate else ())]


def _bad_generation(sweep: Sweep) -> Iterator[str]:
    if sweep.generate is None:
        named = [name for name, measure in sweep.measures.items() if measure.kind in TEXTS]
        yield from (f"measures.{name} reads the generated text; add generate" for name in named)
    elif sweep.position(sweep.measure_at) != -1:
        yield "generate goes on from the last token; leave measure_at out"
    elif sweep.generate.writes_at != "prompt":
        for number, write in enumerate(sweep.writes):
            if not _repeatable(write):
                yield (
                    f"writes.{number} cannot be repeated at new tokens, which no other prompt has; "
                    "set generate.writes_at: prompt, or write a number, a mean or a vector"
                )


def _repeatable(write: Write) -> bool:
    """Whether a write can be done at a token that no prompt has."""
    fixed = not patches(write) and not any(isinstance(s, Resample) for s in sources(write))
    means = [source for source in sources(write) if isinstance(source, Mean)]
    lengths = write.renormalize not in PROMPTS and write.noise is None
    per_token = any(mean.per_token for mean in means)
    return fixed and lengths and not per_token and write.site not in (*EDGES, "logits")


def _recoverable(measure: Measure) -> bool:
    """Whether a measure is one number of a run alone, whose recovery can be asked for."""
    return measure.kind not in (*AGAINST_CLEAN, *TEXTS, "top_k") and measure.lens is None


def _smooth(measure: Measure) -> bool:
    """Whether a measure has a gradient."""
    return _recoverable(measure) and measure.kind not in ("match", "rank")


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
