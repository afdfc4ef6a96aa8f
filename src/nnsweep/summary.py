"""Means, spreads and bootstrap intervals over prompt rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from nnsweep.config import Bootstrap
from nnsweep.sweep import Sweep, axis_kinds, value_measures
from nnsweep.tables import (
    measure_of,
    number_columns,
    read_values,
    summary_schema,
    write_table,
)

LENS_AXIS = "layer read by the lens"
"""What the layers of a lens are called beside the axes of a sweep."""


def summarize(sweep: Sweep, values: Path, output: Path, bootstrap: Bootstrap) -> None:
    """Rule summarize: one row per point and measure."""
    kinds = axis_kinds(sweep)
    table = read_values(values, kinds, value_measures(sweep))
    frame = summary_frame(table, list(kinds), number_columns(table, kinds), bootstrap)
    schema = summary_schema(kinds)
    whole = pa.Table.from_pandas(frame[schema.names], schema=schema, preserve_index=False)
    write_table(output, whole, schema)


def summary_frame(
    values: pa.Table, axes: list[str], measures: list[str], bootstrap: Bootstrap
) -> pd.DataFrame:
    """Summaries in the order point, measure.

    n counts the rows with a value; std has n - 1 in its denominator; the interval is the
    percentile bootstrap of the mean over rows (Efron and Tibshirani, 1993). A point without
    values has n 0 and nulls.
    """
    points = values.select(["point_id", *axes]).to_pandas().drop_duplicates("point_id")
    rows = values.num_rows // max(1, len(points))
    parts = []
    for order, measure in enumerate(measures):
        column = values[measure].to_numpy(zero_copy_only=False).astype(np.float64)
        stats = _statistics(column.reshape(len(points), rows), bootstrap)
        parts.append(points.assign(measure=measure, **stats, **{"@order": order}))
    whole = pd.concat(parts)
    whole["@place"] = np.tile(np.arange(len(points)), len(measures))
    return whole.sort_values(["@place", "@order"], ignore_index=True)


def _statistics(cells: np.ndarray, bootstrap: Bootstrap) -> dict[str, np.ndarray]:
    """Statistics of each row of `cells` (points, prompt rows); nulls are NaN and left out."""
    there = ~np.isnan(cells)
    n = there.sum(axis=1)
    filled = np.where(there, cells, 0.0)
    mean = np.divide(filled.sum(axis=1), n, out=np.full(len(n), np.nan), where=n > 0)
    square = np.where(there, (cells - mean[:, None]) ** 2, 0.0).sum(axis=1)
    std = np.sqrt(np.divide(square, n - 1, out=np.full(len(n), np.nan), where=n > 1))
    low, high = _intervals(filled, there, n, bootstrap)
    return {"n": n.astype(np.int32), "mean": mean, "std": std, "ci_low": low, "ci_high": high}


def _intervals(
    filled: np.ndarray, there: np.ndarray, n: np.ndarray, bootstrap: Bootstrap
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile intervals; points with equally many rows share their resamples."""
    low, high = np.full(len(n), np.nan), np.full(len(n), np.nan)
    tail = (1 - bootstrap.confidence) / 2
    for count in np.unique(n[n > 1]):
        members = np.flatnonzero(n == count)
        weights = _weights(int(count), bootstrap)
        for start in range(0, len(members), 1024):
            some = members[start : start + 1024]
            # In order of value, so that the order of the prompt file moves no interval.
            dense = np.sort(filled[some][there[some]].reshape(len(some), count), axis=1)
            means = dense @ weights.T
            # Rounding must not carry the mean of equal values out of them.
            ends = np.quantile(means, [tail, 1 - tail], axis=1)
            low[some], high[some] = np.clip(ends, dense[:, 0], dense[:, -1])
    return low, high


def _weights(count: int, bootstrap: Bootstrap) -> np.ndarray:
    """Resampling weights (resamples, rows) from the seed and the number of rows alone."""
    generator = np.random.default_rng([bootstrap.seed, count])
    even = np.full(count, 1 / count)
    return generator.multinomial(count, even, size=bootstrap.resamples) / count


def of_measure(frame: pd.DataFrame, measure: str) -> pd.DataFrame:
    """The lines of one measure in a summary; the layers of a lens become an axis."""
    frame = frame[frame["measure"].map(measure_of) == measure].reset_index(drop=True)
    layers = frame["measure"].map(lambda column: column.partition(".")[2])
    return frame if (layers == "").all() else frame.assign(**{LENS_AXIS: layers.astype(int)})


@dataclass(frozen=True)
class Extreme:
    """The point where a measure's mean is largest or smallest.

    Attributes:
        word: largest or smallest; mean, where there is one point.
        mean, low, high: The mean and its interval.
        rows: How many prompt rows the mean is over.
        where: The axis values of the first such point.
        ties: How many other points have the very same mean.
    """

    word: str
    mean: float
    low: float
    high: float
    rows: int
    where: str
    ties: int


def extremes(frame: pd.DataFrame, axes: Sequence[str], measure: str) -> list[Extreme]:
    """The largest and the smallest mean of a measure in a summary; none without values."""
    part = of_measure(frame, measure)
    part = part[part["mean"].notna()]
    if part.empty:
        return []
    axes = [*axes, LENS_AXIS] if LENS_AXIS in part else axes
    if not axes:
        return [_extreme(part, axes, "mean", part.index[0])]
    places = [("largest", part["mean"].idxmax()), ("smallest", part["mean"].idxmin())]
    return [_extreme(part, axes, word, place) for word, place in places]


def _extreme(part: pd.DataFrame, axes: Sequence[str], word: str, place: Any) -> Extreme:
    row = part.loc[place]
    where = ", ".join(f"{name} {row[name]}" for name in axes) or "the one point"
    ties = int((part["mean"] == row["mean"]).sum()) - 1
    return Extreme(word, row["mean"], row["ci_low"], row["ci_high"], int(row["n"]), where, ties)
