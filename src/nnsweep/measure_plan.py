"""Measures as a session reads them: one a column, and the places inside the model they read."""

from collections.abc import Iterator, Sequence
from typing import Any

from nnsweep.chunks import GENERATE, in_session
from nnsweep.errors import UserError
from nnsweep.sites import tap
from nnsweep.sweep import GENERATED, Sweep
from nnsweep.sweep_measures import Measure

Plain = dict[str, Any]


def measure_list(sweep: Sweep, shape: Plain) -> tuple[list[Plain], list[Plain]]:
    """The measures as plain data, in the order of their columns, and the places they read.

    A lens is one measure a layer, called NAME.LAYER; `lens` and `read` become numbers of a place.

    Raises:
        UserError: a place that the model does not have.
    """
    measures: list[Plain] = []
    reads: list[Plain] = []
    for name, measure in sweep.measures.items():
        plain = {"name": name, **measure.model_dump(exclude_none=True)}
        if measure.lens is not None:
            for layer, read in _lens_reads(sweep, measure, shape):
                number = _numbered(read, reads)
                measures.append(plain | {"name": f"{name}.{layer}", "lens": number})
        elif measure.read is not None:
            place = measure.read
            where = tap(shape, place.site, place.layer, place.head)
            read = {"tap": where, "position": place.position}
            measures.append(plain | {"read": _numbered(read, reads)})
        else:
            measures.append(plain)
    if sweep.generate is not None:
        how = sweep.generate
        steps = {"prompt": [0], "all": list(range(how.max_new_tokens))}.get(
            str(how.writes_at), how.writes_at
        )
        measures.append(
            {"name": GENERATED[0], "kind": GENERATE, "k": how.max_new_tokens, "steps": steps}
        )
    return measures, reads


def _lens_reads(sweep: Sweep, measure: Measure, shape: Plain) -> Iterator[tuple[int, Plain]]:
    """(layer, place) of every layer that a lens reads."""
    lens = measure.lens
    if lens is None or shape["lens"] is None:
        raise UserError(f"lens: how logits come from the stream of {shape['family']} is not known.")
    layers = range(shape["layers"]) if lens.layers == "all" else lens.layers
    for layer in layers:
        if layer >= shape["layers"]:
            raise UserError(f"lens: layer {layer} is outside 0..{shape['layers'] - 1}.")
        where = tap(shape, lens.site, layer)
        yield layer, {"tap": where, "position": lens.position or sweep.measure_at}


def controlled(measures: Sequence[Plain]) -> list[Plain]:
    """The measures that null controls compute: all but what is generated."""
    return [spec for spec in in_session(measures) if spec["kind"] != GENERATE]


def _numbered(item: Plain, items: list[Plain]) -> int:
    """The number of an item in a list, put at its end where it is new."""
    if item not in items:
        items.append(item)
    return items.index(item)
