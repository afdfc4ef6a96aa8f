"""What planning gives: settings, points and chunks as plain data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Plain = dict[str, Any]
PLAN_FORMAT = 2
"""Form of plan.json and of the chunks that it names."""

VectorLoader = Callable[[Plain, int | None], list[float]]
"""(vector file, layer) -> the vector's values."""


@dataclass(frozen=True)
class Settings:
    """How a plan is cut; none of it is part of the experiment."""

    batch_rows: int = 256
    chunk_passes: int = 64
    recompute: str = "fast"
    parity_points: int = 0
    calibration_points: int = 0


@dataclass
class Point:
    """One point, resolved: its keys, its axis values, its edits and the rows it can use."""

    point_id: str
    point_key: str
    cell: Plain
    writes: list[Plain]
    edits: list[Plain]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Kept:
    """A chunk of a plan and what is taken of it.

    Attributes:
        chunk: The chunk.
        values: How many of its values are taken.
        stale: Keys of the rows of which none is taken: their answers or positions have changed.
        names: Measure of the sweep -> what the chunk calls it.
        whole: Whether every value of the sweep's points and rows in it is taken.
    """

    chunk: Plain
    values: int
    stale: list[str]
    names: dict[str, str]
    whole: bool = True


@dataclass
class Plan:
    """All that a sweep will run, as plain data.

    Attributes:
        points: Every point in order.
        measures: Every measure as plain data, those of generated text included.
        parts: The chunks and what is taken of each; an earlier one wins where two hold a value.
        inert: point_key -> on how many rows its values are those of the clean run.
        controls: The chunk of null controls.
        control_names: Measure of the sweep -> what the controls call it.
        sample: Chunks of whole passes that a second engine runs for parity.
        calibration: The like, run by both sides before a mixed run.
    """

    points: list[Point]
    measures: list[Plain]
    parts: list[Kept]
    inert: dict[str, int]
    controls: Plain | None
    control_names: dict[str, str]
    sample: list[Kept]
    calibration: list[Kept]

    @property
    def chunks(self) -> list[Plain]:
        """The chunks alone."""
        return [part.chunk for part in self.parts]


def identity(model: Plain) -> Plain:
    """What of a model decides a value; a folder is known by its contents, not by its path."""
    named = {"id": model["id"]} if model["kind"] == "hub" else {}
    return named | {key: model[key] for key in ("revision", "dtype", "attention")}


def without_block(item: Plain) -> Plain:
    """A pass as it stands inside its block."""
    return {key: value for key, value in item.items() if key != "block"}
