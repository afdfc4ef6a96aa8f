"""Writes in a sweep file: one change of one activation, and the runs they patch from."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from nnsweep.documents import Strict
from nnsweep.sweep_words import (
    EDGES,
    HEADED,
    LAYERLESS,
    PROMPTS,
    UNITED,
    Index,
    Name,
    Number,
    Numbers,
    Selection,
    Site,
)


class Mean(Strict):
    """The mean activation over all usable rows, at the same site, layer and position."""

    mean: Literal["text", "donor"] = Field(
        description="over which prompts; of an aligned position, over the tokens that are kept"
    )
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

    unit: Index = Field(
        description="component, from 0, or `$axis`; where `units` are written, counted within them"
    )


class Add(Strict):
    """Add a vector with a scale (steering)."""

    vector: VectorFile | MeanDifference | Unit = Field(description="what is added")
    scale: Number = Field(1.0, description="factor, or `$axis`")


class Noise(Strict):
    """Add Gaussian noise, drawn from the identity of the point and the row."""

    std: Number = Field(description="standard deviation, or `$axis`")
    seed: Index = Field(0, description="seed, or `$axis`")

    @field_validator("std")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return not_negative(value)


class Mix(Strict):
    """Move the activation part of the way to another: (1 - weight) x old + weight x source."""

    source: Literal["donor"] | Patch | Mean | Resample = Field(
        description="`donor`, {patch: donor, ...}, {mean: text} or {resample: text}"
    )
    weight: Number = Field(description="0 leaves it, 1 replaces it; or `$axis`")


def not_negative(value: Any) -> Any:
    """Refuse a number below 0 where a length or a standard deviation is asked for."""
    if isinstance(value, int | float) and value < 0:
        raise ValueError(f"got {value}, expected 0 or more")
    return value


def crossed(low: Any, high: Any) -> str | None:
    """What is wrong with two bounds, as far as they are numbers."""
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        return f"low {low} is above high {high}; swap them"
    return None


class Clamp(Strict):
    """Keep every component of the activation between two numbers."""

    low: Number | None = Field(None, description="smallest value, or `$axis`")
    high: Number | None = Field(None, description="largest value, or `$axis`")

    @model_validator(mode="after")
    def _bounds(self) -> "Clamp":
        if self.low is None and self.high is None:
            raise ValueError("give low, high or both")
        problem = crossed(self.low, self.high)
        if problem:
            raise ValueError(problem)
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
    units: Index | Numbers | None = Field(
        None, description="mlp_pre and mlp_post: one neuron, `$axis` or a list; null is all"
    )
    position: str = Field(description="name of a position, or `$axis`; at edges, the query tokens")
    keys: str | None = Field(
        None,
        description="attn_scores and pattern: position of the key tokens, of which those at or "
        "before the query token are written; null is all",
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

    @field_validator("renormalize")
    @classmethod
    def _length(cls, value: Any) -> Any:
        return not_negative(value)

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
    if layers == 2:
        yield "layer and layers exclude each other; give one of them"
    if heads == 2:
        yield "head and heads exclude each other; give one of them"
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


def sources(write: Write) -> list[Any]:
    """What a write sets or mixes in, as it is declared."""
    return [source for source in (write.set, write.mix and write.mix.source) if source is not None]


def patches(write: Write) -> list[Patch]:
    """The patches of a write; `donor` is one for short."""
    found = [Patch(patch="donor") if source == "donor" else source for source in sources(write)]
    return [source for source in found if isinstance(source, Patch)]


def places_of(write: Write) -> list[str]:
    """Positions, or `$axis`, that a write names."""
    named = [write.position, write.keys, *(patch.position for patch in patches(write))]
    return [name for name in named if name is not None]


def roles(write: Write) -> set[str]:
    """Which prompts or runs a write reads: `text`, `donor` or names of runs."""
    found = {patch.patch for patch in patches(write)}
    found |= {source.mean for source in sources(write) if isinstance(source, Mean)}
    found |= {source.resample for source in sources(write) if isinstance(source, Resample)}
    vector = write.add.vector if write.add else None
    if isinstance(vector, MeanDifference):
        found |= {vector.mean, vector.minus}
    return found | (PROMPTS & {write.renormalize})


class Leaf(NamedTuple):
    """A value in a write that an axis may stand for, and where it stands."""

    path: str
    """Keys below the write, as `add.scale`."""
    field: str
    """What it is: layer, head, kv_head, position, unit, index, size (0 or more) or number."""
    value: Any


def leaves(write: Write) -> Iterator[Leaf]:
    """Everything in a write that an axis may stand for."""
    yield from _place_leaves("", write.site, write)
    yield from [Leaf("keys", "position", write.keys), Leaf("units", "unit", write.units)]
    at = source_key(write)
    for patch in patches(write):
        yield from _place_leaves(f"{at}.", patch.site or write.site, patch)
    for source in sources(write):
        yield Leaf(at, "number", source if source != "donor" else None)
        if isinstance(source, Resample):
            yield Leaf(f"{at}.seed", "index", source.seed)
    yield from _operand_leaves(write)


def _operand_leaves(write: Write) -> Iterator[Leaf]:
    length = write.renormalize if write.renormalize not in PROMPTS else None
    yield Leaf("renormalize", "size", length)
    if write.add:
        yield Leaf("add.scale", "number", write.add.scale)
        if isinstance(write.add.vector, Unit):
            yield Leaf("add.vector.unit", "index", write.add.vector.unit)
    if write.noise:
        yield Leaf("noise.std", "size", write.noise.std)
        yield Leaf("noise.seed", "index", write.noise.seed)
    if write.mix:
        yield Leaf("mix.weight", "number", write.mix.weight)
    if write.clamp:
        yield Leaf("clamp.low", "number", write.clamp.low)
        yield Leaf("clamp.high", "number", write.clamp.high)


def _place_leaves(path: str, site: str, place: Any) -> list[Leaf]:
    found = [("layer", "layer"), ("head", HEADED.get(site, "head")), ("position", "position")]
    return [Leaf(f"{path}{key}", field, getattr(place, key)) for key, field in found]


def source_key(write: Write) -> str:
    """The key under which stands what a write sets or mixes in."""
    return "mix.source" if write.mix else "set"


def misread(write: Write) -> Iterator[tuple[str, str]]:
    """What of its own a write's patch cannot read: (path below the write, sentence)."""
    at = source_key(write)
    for patch in patches(write):
        site = patch.site or write.site
        layer = (patch.layer, write.layer, write.layers)
        head = (patch.head, write.head, write.heads)
        if patch.layer is not None and site in LAYERLESS:
            yield f"{at}.layer", f"site {site} takes no layer; remove it"
        if site not in LAYERLESS and not any(value is not None for value in layer):
            yield f"{at}.layer", f"a patch from site {site} needs a layer; give it one"
        if patch.head is not None and site not in HEADED:
            yield f"{at}.head", f"site {site} has no heads; remove it"
        if site in HEADED and not any(value is not None for value in head):
            yield f"{at}.head", f"a patch from site {site} needs a head; give it one"
        if write.units is not None and site not in UNITED:
            yield f"{at}.site", f"site {site} has no units; patch from {' or '.join(UNITED)}"
        if (site in EDGES) != (write.site in EDGES):
            yield f"{at}.site", f"site {write.site} takes no patch from {site}; {_ALIKE}"


_ALIKE = f"{' and '.join(EDGES)} are of pairs of tokens, the others of tokens"


def repeatable(write: Write) -> bool:
    """Whether a write can be done at a token that no prompt has."""
    fixed = not patches(write) and not any(isinstance(s, Resample) for s in sources(write))
    means = [source for source in sources(write) if isinstance(source, Mean)]
    lengths = write.renormalize not in PROMPTS and write.noise is None
    per_token = any(mean.per_token for mean in means)
    return fixed and lengths and not per_token and write.site not in (*EDGES, "logits")
