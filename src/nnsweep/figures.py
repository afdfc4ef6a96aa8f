"""Pictures of a summary: a line over one axis, a heat map over two, small multiples over more."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure

from nnsweep.registry import REGISTRY
from nnsweep.summary import LENS_AXIS, of_measure
from nnsweep.sweep import Sweep, axis_kinds, measure_of, value_measures
from nnsweep.tables import (
    read_table,
    read_values,
    summary_schema,
    write_atomically,
)

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "nnsweep",
    "svg.fonttype": "none",
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
MOST_PANELS = 24
FIRST = (LENS_AXIS, "layer")
"""Axes that run to the right."""
ABOUT_ZERO = ("logit_diff", "recovery", "attribution")
"""Kinds of measure whose sign matters: drawn with a diverging map centred on zero."""


def plot_measure(sweep: Sweep, measure: str, summary: Path, values: Path, output: Path) -> None:
    """Rule plot_measures: draw one measure as SVG (the same bytes every time)."""
    kinds = axis_kinds(sweep)
    frame = of_measure(read_table(summary, summary_schema(kinds)).to_pandas(), measure)
    with mpl.rc_context(STYLE):
        if len(frame) == 1 and frame["measure"][0] == measure:
            rows = read_values(values, kinds, value_measures(sweep))
            figure = draw_rows(sweep, measure, frame, rows.select(["row_id", measure]).to_pandas())
        else:
            figure = draw(sweep, measure, frame)

        def write(part: Path) -> None:
            figure.savefig(part, format="svg", metadata={"Date": None}, bbox_inches="tight")

        write_atomically(output, write)


def draw(sweep: Sweep, measure: str, frame: pd.DataFrame) -> Figure:
    """Choose the picture from the number of swept axes."""
    axes = [
        name for name in [*sweep.axes, LENS_AXIS] if name in frame and frame[name].nunique() > 1
    ]
    if not axes and LENS_AXIS in frame:
        axes = [LENS_AXIS]
    shown, panels = _split(sweep, axes)
    cells = [dict(zip(panels, cell, strict=True)) for cell in _cells(frame, panels)]
    kept = cells[:MOST_PANELS]
    columns = min(len(kept), 3 if panels else 1)
    rows = math.ceil(len(kept) / columns)
    figure = Figure(figsize=_size(frame, shown, columns, rows), layout="constrained")
    norm = _norm(sweep, measure, frame)
    for place, cell in enumerate(kept):
        axis = figure.add_subplot(rows, columns, place + 1)
        part = frame[
            np.logical_and.reduce([frame[k] == v for k, v in cell.items()] or [frame.index >= 0])
        ]
        _panel(axis, sweep, measure, part, shown, norm)
        axis.set_title(", ".join(f"{k} {v}" for k, v in cell.items()), fontsize=9)
    if len(shown) == 2:
        _colour_bar(figure, sweep, measure)
    figure.suptitle(_title(sweep, measure, frame, len(cells) - len(kept)), fontsize=10)
    return figure


def _cells(frame: pd.DataFrame, panels: list[str]) -> list[tuple[Any, ...]]:
    """The combinations of panel axes that have points; zipped axes have few of them."""
    return list(dict.fromkeys(frame[panels].itertuples(index=False, name=None))) or [()]


def draw_rows(sweep: Sweep, measure: str, frame: pd.DataFrame, rows: pd.DataFrame) -> Figure:
    """A sweep of one point: every prompt row as a dot, the mean with its interval as a band."""
    rows = rows.dropna().sort_values([measure, "row_id"], ignore_index=True)
    figure = Figure(figsize=(6.4, min(12.0, 1.4 + 0.16 * len(rows))), layout="constrained")
    axis = figure.add_subplot()
    mean = frame.iloc[0]
    axis.axvspan(mean["ci_low"], mean["ci_high"], alpha=0.2, linewidth=0)
    axis.axvline(mean["mean"], linewidth=1)
    axis.plot(rows[measure], rows.index, "o", markersize=3)
    step = max(1, math.ceil(len(rows) / 70))
    axis.set_yticks(rows.index[::step], rows["row_id"][::step], fontsize=6)
    axis.set_xlabel(_unit(sweep, measure))
    title = f"{_title(sweep, measure, frame, 0)}: {mean['mean']:.3g}"
    figure.suptitle(title, fontsize=10)
    return figure


def _split(sweep: Sweep, axes: Sequence[str]) -> tuple[list[str], list[str]]:
    """Axes drawn inside a panel (layers first), and axes that become panels."""
    order = sorted(axes, key=lambda name: (name not in FIRST, _is_text(sweep, name)))
    return order[:2], order[2:]


def _size(
    frame: pd.DataFrame, shown: Sequence[str], columns: int, rows: int
) -> tuple[float, float]:
    if len(shown) < 2:
        return (6.4 * min(columns, 2), 3.6 * rows)
    wide, high = (frame[name].nunique() for name in shown)
    return (columns * min(9.0, 2.6 + 0.26 * wide), rows * min(8.0, 1.5 + 0.3 * high))


def _norm(sweep: Sweep, measure: str, frame: pd.DataFrame) -> Normalize:
    entry = REGISTRY[sweep.measures[measure].kind]
    values = frame["mean"].dropna()
    low, high = (values.min(), values.max()) if len(values) else (0.0, 1.0)
    if sweep.measures[measure].kind in ABOUT_ZERO:
        reach = max(abs(low), abs(high)) or 1.0
        return TwoSlopeNorm(0, -reach, reach)
    if entry.low is not None and entry.high is not None:
        return Normalize(entry.low, entry.high)
    return Normalize(low, high if high > low else low + 1)


def _panel(
    axis: Axes,
    sweep: Sweep,
    measure: str,
    frame: pd.DataFrame,
    shown: Sequence[str],
    norm: Normalize,
) -> None:
    if len(shown) == 2:
        _heat_map(axis, sweep, measure, frame, shown, norm)
    else:
        _line(axis, sweep, measure, frame, shown[0])


def _heat_map(
    axis: Axes,
    sweep: Sweep,
    measure: str,
    frame: pd.DataFrame,
    shown: Sequence[str],
    norm: Normalize,
) -> None:
    """First axis to the right, second upwards (names downwards); a missing point stays grey."""
    across, up = (list(frame[name].unique()) for name in shown)
    grid = frame.pivot(index=shown[1], columns=shown[0], values="mean").reindex(up, columns=across)
    diverging = sweep.measures[measure].kind in ABOUT_ZERO
    axis.set_facecolor("0.85")
    axis.imshow(
        grid.to_numpy(dtype=float),
        cmap="RdBu_r" if diverging else "viridis",
        norm=norm,
        aspect="auto",
        origin="lower",
        interpolation="nearest",
    )
    for ticks, labels, values in (
        (axis.set_xticks, axis.set_xticklabels, across),
        (axis.set_yticks, axis.set_yticklabels, up),
    ):
        step = max(1, math.ceil(len(values) / 16))
        ticks(range(0, len(values), step))
        labels([_label(value) for value in values[::step]])
    axis.set_xlabel(shown[0])
    axis.set_ylabel(shown[1])
    if _is_text(sweep, shown[1]):
        axis.invert_yaxis()


def _line(axis: Axes, sweep: Sweep, measure: str, frame: pd.DataFrame, name: str) -> None:
    numeric = not _is_text(sweep, name)
    place = frame[name].to_numpy(dtype=float) if numeric else np.arange(len(frame))
    axis.fill_between(place, frame["ci_low"], frame["ci_high"], alpha=0.25, linewidth=0)
    axis.plot(place, frame["mean"], marker="o", markersize=3)
    if not numeric:
        axis.set_xticks(place, [str(value) for value in frame[name]])
    axis.set_xlabel(name)
    axis.set_ylabel(_unit(sweep, measure))
    axis.axhline(0, color="0.7", linewidth=0.8, zorder=0)


def _colour_bar(figure: Figure, sweep: Sweep, measure: str) -> None:
    panels = figure.axes
    bar: Any = figure.colorbar(panels[0].images[0], ax=panels, shrink=0.9)
    bar.set_label(_unit(sweep, measure))
    bar.outline.set_visible(False)


def _unit(sweep: Sweep, measure: str) -> str:
    spec = sweep.measures[measure]
    if spec.kind == "attribution" and spec.of is not None:
        return f"{measure} ({REGISTRY[measure_of(sweep, spec)[1].kind].unit})"
    return f"{measure} ({REGISTRY[spec.kind].unit})"


def _title(sweep: Sweep, measure: str, frame: pd.DataFrame, hidden: int) -> str:
    spec = sweep.measures[measure]
    what = spec.kind.replace("_", " ")
    if spec.answers:
        what += f" of {spec.answers[0]} over {spec.answers[1]}"
    elif spec.answer or spec.of:
        what += f" of {spec.answer or measure_of(sweep, spec)[0]}"
    low, high = frame["n"].min(), frame["n"].max()
    rows = f"n = {low}" if low == high else f"n = {low} to {high}"
    more = f", {hidden} panels not drawn" if hidden else ""
    return f"{sweep.name}: {what}, mean over prompt rows ({rows}{more})"


def _is_text(sweep: Sweep, name: str) -> bool:
    return axis_kinds(sweep).get(name) == "string"


def _label(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float | np.number) else str(value)
