"""Measures as a session reads them: one a column, and the places inside the model they read."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from nnsweep.chunks import GENERATE, every, in_session
from nnsweep.errors import UserError
from nnsweep.sites import limits_of, require_site, tap
from nnsweep.sweep import GENERATED, Sweep, measure_of
from nnsweep.sweep_measures import Inner, Lens, Measure, Read, Reading
from nnsweep.sweep_words import HEADED

Plain = dict[str, Any]
READING = {"lens", "read"}
"""Keys of a measure that hold the number of a place."""


def measure_list(sweep: Sweep, shape: Plain) -> tuple[list[Plain], list[Plain]]:
    """The measures as plain data, in the order of their columns, and the places they read.

    A lens is one measure a layer, called NAME.LAYER, and so is a recovery of it; `lens` and `read`
    become numbers of a place, and `of` the measure itself.

    Raises:
        UserError: a place that the model does not have.
    """
    reads: list[Plain] = []
    measures: list[Plain] = []
    for name, measure in sweep.measures.items():
        measures += _columns_of(sweep, shape, name, measure, reads)
    if sweep.generate is not None:
        how = sweep.generate
        steps = {"prompt": [0], "all": list(range(how.max_new_tokens))}.get(
            str(how.writes_at), how.writes_at
        )
        measures.append(
            {"name": GENERATED[0], "kind": GENERATE, "k": how.max_new_tokens, "steps": steps}
        )
    return measures, reads


def _columns_of(
    sweep: Sweep, shape: Plain, name: str, measure: Reading, reads: list[Plain]
) -> list[Plain]:
    """One measure of a sweep, or the one of each layer; places that it reads go into `reads`."""
    plain = {"name": name, **measure.model_dump(exclude_none=True)}
    if measure.lens is not None:
        return [
            plain | {"name": f"{name}.{layer}", "lens": _numbered(read, reads)}
            for layer, read in _lens_reads(f"measures.{name}.lens", sweep, measure.lens, shape)
        ]
    if isinstance(measure, Measure) and measure.read is not None:
        place = measure.read
        _check_read(f"measures.{name}.read", place, shape)
        where = tap(shape, place.site, place.layer, place.head)
        read = {"tap": where, "position": place.position}
        return [plain | {"read": _numbered(read, reads)}]
    if isinstance(measure, Measure) and measure.of is not None:
        inner = isinstance(measure.of, Inner)
        of_name = f"{name}.of" if inner else str(measure.of)
        found = _columns_of(sweep, shape, of_name, measure_of(sweep, measure)[1], reads)
        tails = [one["name"].removeprefix(of_name) for one in found]
        return [plain | {"name": name + t, "of": one} for t, one in zip(tails, found, strict=True)]
    return [plain]


def _check_read(path: str, place: Read, shape: Plain) -> None:
    """Refuse a place that the model does not have."""
    require_site(shape, place.site, f"{path}.site")
    limits = limits_of(shape)
    for key, kind in (("layer", "layer"), ("head", HEADED.get(place.site, "head"))):
        value = getattr(place, key)
        if value is not None and value >= limits[kind]:
            raise UserError(f"{path}.{key}: {value} is outside 0..{limits[kind] - 1}.")


def _lens_reads(path: str, sweep: Sweep, lens: Lens, shape: Plain) -> Iterator[tuple[int, Plain]]:
    """(layer, place) of every layer that a lens reads."""
    if shape["lens"] is None:
        raise UserError(f"{path}: it is not known how {shape['family']} makes logits of a stream.")
    require_site(shape, lens.site, f"{path}.site")
    for layer in _lens_layers(lens, shape):
        if layer >= shape["layers"]:
            raise UserError(f"{path}.layers: {layer} is outside 0..{shape['layers'] - 1}.")
        where = tap(shape, lens.site, layer)
        yield layer, {"tap": where, "position": lens.position or sweep.measure_at}


def _lens_layers(lens: Lens, shape: Plain) -> Sequence[int]:
    return range(shape["layers"]) if lens.layers == "all" else lens.layers


def controlled(measures: Sequence[Plain]) -> list[Plain]:
    """The measures that null controls compute: all but what is generated."""
    return [spec for spec in in_session(measures) if spec["kind"] != GENERATE]


def answers_of(measures: Iterable[Plain]) -> set[str]:
    """The answers that some measures read."""
    asked = every(measures)
    found = {name for spec in asked for name in spec.get("answers") or []}
    return found | {spec["answer"] for spec in asked if "answer" in spec}


def restricted(
    measures: Sequence[Plain], reads: Sequence[Plain], names: Collection[str]
) -> tuple[list[Plain], list[Plain]]:
    """The measures that a session needs for some of them, and the places that those read.

    What is generated belongs to them, since it decides at which tokens writes are made.
    """
    places: list[Plain] = []

    def moved(spec: Plain) -> Plain:
        own = {key: _numbered(reads[spec[key]], places) for key in READING & spec.keys()}
        return spec | own | ({"of": moved(spec["of"])} if "of" in spec else {})

    found = [
        moved(spec)
        for spec in in_session(measures)
        if spec["name"] in names or spec["kind"] == GENERATE
    ]
    return found, places


def _numbered(item: Plain, items: list[Plain]) -> int:
    """The number of an item in a list, put at its end where it is new."""
    if item not in items:
        items.append(item)
    return items.index(item)
