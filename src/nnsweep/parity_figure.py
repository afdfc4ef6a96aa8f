"""The picture of a parity check: how far apart the two engines are, value by value."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nnsweep.figures import STYLE
from nnsweep.tables import measure_of, write_atomically

COLOURS = {
    "identical": "#2b8a3e",
    "within": "#1c7ed6",
    "different": "#c92a2a",
    "missing": "#e67700",
    "extra": "#e67700",
    "nonfinite": "#862e9c",
}


def plot_parity(verdict: Mapping[str, Any], frame: pd.DataFrame, output: Path) -> None:
    """Draw classes and distances, one panel a measure, as SVG."""
    frame = frame.assign(measure=frame["measure"].map(measure_of))
    measures = list(dict.fromkeys(frame["measure"])) or ["nothing"]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 1.2 + 1.5 * len(measures)), layout="constrained")
        for place, measure in enumerate(measures):
            part = frame[frame["measure"] == measure]
            _classes(figure.add_subplot(len(measures), 2, 2 * place + 1), measure, part)
            _distances(figure.add_subplot(len(measures), 2, 2 * place + 2), verdict, part)
        word = "holds" if verdict["holds"] else "fails"
        title = f"{verdict['a']} against {verdict['b']}: parity {word}, {verdict['values']} values"
        figure.suptitle(title, fontsize=10)

        def write(path: Path) -> None:
            figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")

        write_atomically(output, write)


def _classes(axis: Axes, measure: str, part: pd.DataFrame) -> None:
    counts = part["class"].value_counts()
    names = [name for name in COLOURS if counts.get(name, 0)]
    axis.barh(names, [counts[name] for name in names], color=[COLOURS[name] for name in names])
    for place, name in enumerate(names):
        share = counts[name] / len(part)
        axis.annotate(
            f" {counts[name]} ({share:.1%})", (0, place), va="center", color="white", fontsize=8
        )
    axis.set_xlabel(f"values of {measure}")


def _distances(axis: Axes, verdict: Mapping[str, Any], part: pd.DataFrame) -> None:
    distance = part["distance"].to_numpy(dtype=float)
    moved = distance[np.isfinite(distance) & (distance > 0)]
    if len(moved):
        axis.hist(np.log10(moved), bins=30, color="#1c7ed6")
        axis.axvline(np.log10(verdict["tolerance"]["absolute"]), color="#c92a2a", linewidth=1)
        axis.set_xlabel("log10 of the distance (red: tolerance)")
    else:
        axis.text(0.5, 0.5, "no value moved", ha="center", transform=axis.transAxes)
        axis.set_xticks([])
    axis.set_ylabel("values")
