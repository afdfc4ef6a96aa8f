"""Writes in a sweep file: one change of one activation, and the runs they patch from."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

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
    units: Index | Numbers | None = Field(
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


def leaves(write: Write) -> Iterator[tuple[str, Any]]:
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


def repeatable(write: Write) -> bool:
    """Whether a write can be done at a token that no prompt has."""
    fixed = not patches(write) and not any(isinstance(s, Resample) for s in sources(write))
    means = [source for source in sources(write) if isinstance(source, Mean)]
    lengths = write.renormalize not in PROMPTS and write.noise is None
    per_token = any(mean.per_token for mean in means)
    return fixed and lengths and not per_token and write.site not in (*EDGES, "logits")
