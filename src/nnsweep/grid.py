"""Axes become points: values, combinations, exclusions, and every write resolved."""

import itertools
from typing import Any

from nnsweep.errors import UserError
from nnsweep.sweep import HEADED, Range, Sweep, axis_kinds, position_spec, references
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


def check_axes(sweep: Sweep) -> None:
    """All of the axes that can be checked without a model.

    Raises:
        UserError: as `axis_values` and `grid`; what depends on the model's size is left out.
    """
    kinds, fields = axis_kinds(sweep), references(sweep)
    listed = {name: axis for name, axis in sweep.axes.items() if axis != "all"}
    values = {n: _checked_axis(n, axis, kinds[n], fields[n], {}) for n, axis in listed.items()}
    if len(values) == len(sweep.axes):
        grid(sweep, values)


def _checked_axis(
    name: str, axis: Any, kind: str, fields: set[str], limits: dict[str, int]
) -> list[Any]:
    bounds = [limits[field] for field in fields if field in limits]
    if axis == "all" and len(set(bounds)) > 1:
        sizes = {field: limits[field] for field in sorted(fields & limits.keys())}
        raise UserError(f"axes.{name}: 'all' is not one number here: {sizes}. List the values.")
    if axis == "all":
        values: list[Any] = list(range(min(bounds)))
    else:
        values = axis.values() if isinstance(axis, Range) else list(axis)
    if not values:
        raise UserError(f"axes.{name}: no values. Give at least one.")
    wanted = {"index": int, "string": str, "number": (int, float)}[kind]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, wanted):  # type: ignore[arg-type]
            what = {"index": "a whole number", "string": "text", "number": "a number"}[kind]
            raise UserError(f"axes.{name}: {value!r} is not {what}, as ${name} must be.")
        if bounds and not 0 <= value < min(bounds):
            what = " and ".join(sorted(fields & limits.keys())).replace("kv_", "key-value ")
            raise UserError(f"axes.{name}: {what} {value} is outside 0..{min(bounds) - 1}.")
    if len(set(values)) != len(values):
        twice = next(value for value in values if values.count(value) > 1)
        raise UserError(f"axes.{name}: {twice!r} is given twice. Give each value once.")
    return [float(value) for value in values] if kind == "number" else values


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
    return [{name: cell[name] for name in values} for cell in kept]


def _matches(cell: dict[str, Any], rule: dict[str, Any]) -> bool:
    return all(
        cell[name] in (value if isinstance(value, list) else [value])
        for name, value in rule.items()
    )


def resolve_writes(sweep: Sweep, cell: dict[str, Any]) -> list[dict[str, Any]]:
    """The sweep's writes with every `$axis` replaced by this cell's value (plain data)."""

    def at(value: Any) -> Any:
        return cell[value[1:]] if isinstance(value, str) and value.startswith("$") else value

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items() if item is not None}
        return at(value)

    return [plain(write.model_dump()) for write in sweep.writes]


def expand(
    sweep: Sweep, limits: dict[str, int]
) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """All points in order: (axis values, resolved writes).

    Args:
        sweep: The sweep.
        limits: How many of `layer`, `head` and `kv_head` the model has.

    Raises:
        UserError: an index out of range, or two points that are the same experiment.
    """
    values = axis_values(sweep, limits)
    points = [(cell, resolve_writes(sweep, cell)) for cell in grid(sweep, values)]
    seen: dict[str, dict[str, Any]] = {}
    for cell, writes in points:
        for write in writes:
            _in_range(write, limits)
        meaning = [w | {"position": position_spec(sweep, w["position"])} for w in writes]
        twin = seen.setdefault(digest(meaning), cell)
        if twin is not cell:
            raise UserError(f"axes: {twin} and {cell} are the same point. Remove one.")
    return points


def _in_range(write: dict[str, Any], limits: dict[str, int]) -> None:
    for field, kind in (("layer", "layer"), ("head", HEADED.get(write["site"], "head"))):
        value, limit = write.get(field), limits[kind]
        if value is not None and not 0 <= value < limit:
            what = kind.replace("kv_", "key-value ")
            raise UserError(f"writes: {what} {value} is outside 0..{limit - 1}.")
