"""Axes become points: values, combinations, exclusions, and every write resolved."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from nnsweep.errors import UserError
from nnsweep.sweep import (
    Range,
    Sweep,
    all_writes,
    axis_kinds,
    placed_writes,
    position_spec,
    references,
)
from nnsweep.sweep_words import HEADED, LAYERLESS, edges_name
from nnsweep.sweep_writes import Write, crossed, patches, source_key
from nnsweep.tables import digest


def axis_values(sweep: Sweep, limits: dict[str, int]) -> dict[str, list[Any]]:
    """Every axis as a list; `all` becomes the model's layers or heads.

    Raises:
        UserError: an empty axis, a value twice, or one of the wrong type or out of range.
    """
    kinds = axis_kinds(sweep)
    return {
        name: _checked_axis(name, axis, kinds[name], references(sweep)[name], limits)
        for name, axis in sweep.axes.items()
    }


ONE = dict.fromkeys(("layer", "head", "kv_head", "unit"), 1)
"""The smallest model: enough to tell whether two points write the same."""


def check_axes(sweep: Sweep) -> None:
    """All of the axes that can be checked without a model.

    Raises:
        UserError: as `axis_values`, `grid` and `expand`, but for what depends on the model's size.
    """
    kinds, fields = axis_kinds(sweep), references(sweep)
    listed = {name: axis for name, axis in sweep.axes.items() if axis != "all"}
    values = {n: _checked_axis(n, axis, kinds[n], fields[n], {}) for n, axis in listed.items()}
    bound = {name for group in (*sweep.zip, *sweep.exclude) for name in group}
    # What an axis of unknown length moves with or leaves out is known with the model only.
    if bound <= values.keys():
        cells = grid(sweep, values)
        if len(values) == len(sweep.axes):
            _check_distinct(sweep, [(cell, resolve_writes(sweep, cell, ONE)) for cell in cells])


COUNTED = {"layer", "head", "kv_head", "unit"}
"""What an index can stand for that has no negative values."""


def _checked_axis(
    name: str, axis: Any, kind: str, fields: set[str], limits: dict[str, int]
) -> list[Any]:
    bounds = [limits[field] for field in fields if field in limits]
    if axis == "all" and len(set(bounds)) > 1:
        sizes = {field: limits[field] for field in sorted(fields & limits.keys())}
        raise UserError(f"axes.{name}: 'all' is not one number here: {sizes}. List the values.")
    if axis == "all" and not bounds:
        raise UserError(f"axes.{name}: this model has no {' or '.join(sorted(fields))} to count.")
    if axis == "all":
        values: list[Any] = list(range(min(bounds)))
    else:
        values = axis.values() if isinstance(axis, Range) else list(axis)
    if not values:
        raise UserError(f"axes.{name}: {_empty(axis)}")
    wanted = {"index": int, "string": str, "number": (int, float)}[kind]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, wanted):  # type: ignore[arg-type]
            what = {"index": "a whole number", "string": "text", "number": "a number"}[kind]
            raise UserError(f"axes.{name}: {value!r} is not {what}, as ${name} must be.")
        if "size" in fields and value < 0:
            raise UserError(f"axes.{name}: {value} is negative. Lengths and deviations are not.")
        if not bounds and kind == "index" and value < 0 and fields & COUNTED:
            raise UserError(f"axes.{name}: {value} is negative. Layers and heads count from 0.")
        if bounds and not 0 <= value < min(bounds):
            what = " and ".join(sorted(fields & limits.keys())).replace("kv_", "key-value ")
            raise UserError(f"axes.{name}: {what} {value} is outside 0..{min(bounds) - 1}.")
    if len(set(values)) != len(values):
        twice = next(value for value in values if values.count(value) > 1)
        raise UserError(f"axes.{name}: {twice!r} is given twice. Give each value once.")
    return [float(value) for value in values] if kind == "number" else values


def _empty(axis: Any) -> str:
    """Why an axis has no values."""
    if not isinstance(axis, Range) or axis.range[0] == axis.range[1]:
        return "no values. Give at least one."
    low, high, *step = axis.range
    back = f"[{high}, {low}]" if not step else f"the step {-step[0]}"
    return f"no values: range {axis.range} runs the other way. Give {back}."


def grid(sweep: Sweep, values: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """All combinations, first axis slowest; zipped axes move together, exclusions left out."""
    groups = [list(group) for group in sweep.zip]
    zipped = {name: group for group in groups for name in group}
    order = [zipped.get(name, [name]) for name in values]
    steps = [group for i, group in enumerate(order) if group not in order[:i]]
    for group in groups:
        lengths = {name: len(values[name]) for name in group}
        if len(set(lengths.values())) > 1:
            raise UserError(f"zip: {lengths} differ in length. Zipped axes need equal lengths.")
    columns = [
        [
            dict(zip(group, row, strict=True))
            for row in zip(*(values[n] for n in group), strict=True)
        ]
        for group in steps
    ]
    cells = [
        {k: v for part in parts for k, v in part.items()} for parts in itertools.product(*columns)
    ]
    for number, rule in enumerate(sweep.exclude):
        if not any(_matches(cell, rule) for cell in cells):
            raise UserError(f"exclude.{number}: {rule} matches no point. Mend or remove it.")
    kept = [cell for cell in cells if not any(_matches(cell, rule) for rule in sweep.exclude)]
    if not kept:
        raise UserError("exclude: no point is left. Remove an exclusion.")
    _check_bounds(sweep, kept)
    return [{name: cell[name] for name in values} for cell in kept]


def _check_bounds(sweep: Sweep, cells: Sequence[dict[str, Any]]) -> None:
    """Refuse a clamp of which an axis puts one bound above the other."""
    bounds = [(where, w.clamp.low, w.clamp.high) for where, w in placed_writes(sweep) if w.clamp]
    for where, *limits in bounds:
        for cell in cells if any(isinstance(limit, str) for limit in limits) else []:
            low, high = (_value(limit, cell) for limit in limits)
            problem = crossed(low, high)
            if problem:
                raise UserError(f"{where}.clamp: {problem}, or exclude the point {cell}.")


def _value(value: Any, cell: dict[str, Any]) -> Any:
    """A value of the file, with an axis replaced by its value here."""
    return cell.get(value[1:]) if isinstance(value, str) and value.startswith("$") else value


def _matches(cell: dict[str, Any], rule: dict[str, Any]) -> bool:
    return all(
        cell[name] in (value if isinstance(value, list) else [value])
        for name, value in rule.items()
    )


WHOLE = ("set", "mix", "clamp", "knockout")
"""Operations that act on each component alone, so that all heads are one write."""


def resolve_writes(
    sweep: Sweep, cell: dict[str, Any], limits: dict[str, int]
) -> list[dict[str, Any]]:
    """The sweep's writes with every `$axis` replaced by this cell's value (plain data).

    One write a layer and head; a patch says where it reads, and under which writes.
    """
    runs = {
        name: {"prompt": run.prompt, "under": _resolved(run.writes, cell, limits)}
        for name, run in sweep.runs.items()
    }
    return [_chained(write, runs) for write in _resolved(sweep.writes, cell, limits)]


def _resolved(
    writes: Sequence[Write], cell: dict[str, Any], limits: dict[str, int]
) -> list[dict[str, Any]]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items() if item is not None}
        return cell[value[1:]] if isinstance(value, str) and value.startswith("$") else value

    found = (one for write in writes for one in _spread(plain(write.model_dump()), limits))
    return [_patched(write) for write in found]


def _spread(write: dict[str, Any], limits: dict[str, int]) -> list[dict[str, Any]]:
    """One write for each layer and head; all heads at once where the operation allows it."""
    layers, heads = write.pop("layers", None), write.pop("heads", None)
    if isinstance(write.get("units"), int):
        write["units"] = [write["units"]]
    found = [write]
    if layers is not None:
        every = range(limits["layer"]) if layers == "all" else layers
        found = [one | {"layer": layer} for one in found for layer in every]
    if heads == "all" and any(op in write for op in WHOLE):
        return [one | {"heads": "all"} for one in found]
    if heads is not None:
        every = range(limits[HEADED[write["site"]]]) if heads == "all" else heads
        found = [one | {"head": head} for one in found for head in every]
    return found


class Origin(NamedTuple):
    """Where in the sweep file a resolved write comes from."""

    where: str
    """Path of the write, as `writes.0`."""
    write: Write
    under: "tuple[Origin, ...]" = ()
    """The same of the writes of the run that it patches from."""

    def key(self, name: str, of_patch: bool = False) -> str:
        """Path of the key that says layer, head or another part of a place."""
        if of_patch:
            at = f"{self.where}.{source_key(self.write)}"
            own = [patch for patch in patches(self.write) if getattr(patch, name, None) is not None]
            return f"{at}.{name}" if own else at
        several = getattr(self.write, f"{name}s", None) is not None
        return f"{self.where}.{name}s" if several else f"{self.where}.{name}"


def origins(sweep: Sweep, limits: dict[str, int]) -> list[Origin]:
    """Where each of the writes that `resolve_writes` gives comes from, at every point."""
    return list(_origins(sweep, "writes", sweep.writes, limits))


def _origins(
    sweep: Sweep, path: str, writes: Sequence[Write], limits: dict[str, int]
) -> Iterator[Origin]:
    for number, write in enumerate(writes):
        run = next((p.patch for p in patches(write) if p.patch in sweep.runs), None)
        inner = sweep.runs[run].writes if run else []
        under = tuple(_origins(sweep, f"runs.{run}.writes", inner, limits))
        for _ in _spread(write.model_dump(exclude_none=True), limits):
            yield Origin(f"{path}.{number}", write, under)


PLACE = ("site", "layer", "head", "heads", "units", "position", "keys")


def _patched(write: dict[str, Any]) -> dict[str, Any]:
    """The write with the place of its patch filled in from its own."""
    source = write["mix"]["source"] if "mix" in write else write.get("set")
    if source == "donor":
        source = {"patch": "donor"}
    if not isinstance(source, dict) or "patch" not in source:
        return write
    site = source.get("site", write["site"])
    own = {name: write[name] for name in PLACE if name in write}
    if site not in HEADED or "head" in source:
        own.pop("heads", None)
    if site not in HEADED:
        own.pop("head", None)
    if site in LAYERLESS:
        own.pop("layer", None)
    return _with_source(write, own | source)


def _with_source(write: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
    if "mix" in write:
        return write | {"mix": write["mix"] | {"source": source}}
    return write | {"set": source}


def _chained(write: dict[str, Any], runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The write with the run that its patch names, in the place of the name."""
    source = write["mix"]["source"] if "mix" in write else write.get("set")
    if not isinstance(source, dict) or source.get("patch") not in runs:
        return write
    run = runs[source["patch"]]
    return _with_source(write, source | {"patch": run["prompt"], "under": run["under"]})


def position_names(write: dict[str, Any]) -> set[str]:
    """Names of all positions that a resolved write touches or reads, and of its edges."""
    source = write["mix"]["source"] if "mix" in write else write.get("set")
    found = _names_of(write)
    if isinstance(source, dict) and "patch" in source:
        found |= _names_of(source)
        found |= {name for under in source.get("under", []) for name in position_names(under)}
    return found


def _names_of(place: dict[str, Any]) -> set[str]:
    if "keys" not in place:
        return {place["position"]}
    return {place["position"], place["keys"], edges_name(place["position"], place["keys"])}


def edges_of(sweep: Sweep) -> list[tuple[str, str, bool]]:
    """(position, keys, whether in the donor) of all edges that some point writes or patches from.

    Axes that stand for the model's layers or heads are left out: they choose no position.
    """
    if not any(write.keys for write in all_writes(sweep)):
        return []
    kinds, fields = axis_kinds(sweep), references(sweep)
    listed = {name: axis for name, axis in sweep.axes.items() if axis != "all"}
    values = {n: _checked_axis(n, axis, kinds[n], fields[n], {}) for n, axis in listed.items()}
    rules = [rule for rule in sweep.exclude if rule.keys() <= values.keys()]
    groups = [kept for group in sweep.zip if (kept := [name for name in group if name in values])]
    known = sweep.model_copy(update={"zip": groups, "exclude": rules})
    cells = grid(known, values)
    found = [
        (str(_value(position, cell)), str(_value(keys, cell)), donor)
        for position, keys, donor in _edge_places(sweep)
        for cell in cells
    ]
    return list(dict.fromkeys(found))


def _edge_places(sweep: Sweep) -> Iterator[tuple[str, str, bool]]:
    """The same with axes in the place of their values."""
    theirs = {"donor"} | {name for name, run in sweep.runs.items() if run.prompt == "donor"}
    for where, write in placed_writes(sweep):
        if write.keys is not None:
            run = where.split(".")[1] if where.startswith("runs.") else ""
            yield write.position, write.keys, run in theirs
            for patch in patches(write):
                yield patch.position or write.position, write.keys, patch.patch in theirs


def by_content(sweep: Sweep, write: dict[str, Any]) -> dict[str, Any]:
    """A resolved write with the meaning of its positions in the place of their names."""
    return {key: _by_content(sweep, key, value) for key, value in write.items()}


def _by_content(sweep: Sweep, key: str, value: Any) -> Any:
    if key in ("position", "keys"):
        return position_spec(sweep, value)
    if isinstance(value, dict):
        return by_content(sweep, value)
    if key == "under":
        return [by_content(sweep, under) for under in value]
    return value


def expand(
    sweep: Sweep, limits: dict[str, int]
) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """All points in order: (axis values, resolved writes).

    Args:
        sweep: The sweep.
        limits: How many of `layer`, `head`, `kv_head` and `unit` the model has.

    Raises:
        UserError: an index out of range, or two points that are the same experiment.
    """
    values = axis_values(sweep, limits)
    points = [(cell, resolve_writes(sweep, cell, limits)) for cell in grid(sweep, values)]
    declared = origins(sweep, limits)
    for _, writes in points:
        for write, origin in zip(writes, declared, strict=True):
            _in_range(write, origin, limits)
    _check_distinct(sweep, points)
    return points


def _check_distinct(
    sweep: Sweep, points: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]]
) -> None:
    """Refuse two points that are the same experiment under other names."""
    seen: dict[str, dict[str, Any]] = {}
    for cell, writes in points:
        twin = seen.setdefault(digest([by_content(sweep, write) for write in writes]), cell)
        if twin is not cell:
            raise UserError(f"axes: {twin} and {cell} are the same point. Remove one.")


def _in_range(write: dict[str, Any], origin: Origin, limits: dict[str, int]) -> None:
    """Refuse a layer, head or neuron that the model does not have, also of what is patched in."""
    source = write["mix"]["source"] if "mix" in write else write.get("set")
    patch = source if isinstance(source, dict) and "patch" in source else {}
    for place, of_patch in ((write, False), (patch, True)):
        head = HEADED.get(place.get("site", ""), "head")
        found = [("layer", "layer", place.get("layer")), ("head", head, place.get("head"))]
        found += [("units", "unit", unit) for unit in place.get("units", [])]
        for key, kind, value in found:
            if value is not None and not 0 <= value < limits.get(kind, value + 1):
                what = "key-value head " if kind == "kv_head" else ""
                path = origin.key(key, of_patch)
                raise UserError(f"{path}: {what}{value} is outside 0..{limits[kind] - 1}.")
    for under, inner in zip(patch.get("under", []), origin.under, strict=False):
        _in_range(under, inner, limits)
