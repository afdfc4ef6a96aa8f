"""What planning gives: settings, points and chunks as plain data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Plain = dict[str, Any]
VectorLoader = Callable[[Plain, int | None], list[float]]
"""(vector file, layer) -> the vector's values."""


@dataclass(frozen=True)
class Settings:
    """How a plan is cut; none of it is part of the experiment."""

    batch_rows: int = 256
    chunk_passes: int = 64
    recompute: str = "fast"
    parity_points: int = 0


@dataclass
class Point:
    """One point, resolved: its keys, its axis values, its edits and the rows it can use."""

    point_id: str
    point_key: str
    cell: Plain
    writes: list[Plain]
    edits: list[Plain]
    rows: tuple[int, ...]


@dataclass
class Plan:
    """All that a sweep will run, as plain data."""

    points: list[Point]
    measures: list[Plain]
    chunks: list[Plain]
    controls: Plain | None
    sample: Plain | None


def identity(model: Plain) -> Plain:
    """What of a model decides a value; a folder is known by its contents, not by its path."""
    named = {"id": model["id"]} if model["kind"] == "hub" else {}
    return named | {key: model[key] for key in ("revision", "dtype", "attention")}


def without_block(item: Plain) -> Plain:
    """A pass as it stands inside its block."""
    return {key: value for key, value in item.items() if key != "block"}
