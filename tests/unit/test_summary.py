"""Summaries against a plain computation, point by point."""

import statistics

import numpy as np
import pyarrow as pa
import pytest
from examples import sweep_of
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsweep.config import Bootstrap
from nnsweep.summary import extremes, summarize, summary_frame
from nnsweep.tables import read_table, summary_schema, values_schema, write_table

BOOTSTRAP = Bootstrap(resamples=300)
AXES = {"layer": "index"}
SCHEMA = values_schema(AXES, ["one", "two"])
MEASURES = ("one", "two")
number = st.floats(-100, 100, width=32)


def table_of(cells):
    """cells[point][row] = (one, two); points and rows are named by their places."""
    records = [
        {
            "point_id": f"p{point}",
            "layer": point,
            "row_id": f"r{row}",
            "status": "ok",
            "reason": None,
            "one": one,
            "two": two,
        }
        for point, line in enumerate(cells)
        for row, (one, two) in enumerate(line)
    ]
    return pa.Table.from_pylist(records, schema=SCHEMA)


def summarized(cells, bootstrap=BOOTSTRAP):
    """(point_id, measure) -> record."""
    frame = summary_frame(table_of(cells), ["layer"], list(MEASURES), bootstrap)
    return {(r["point_id"], r["measure"]): r for r in frame.to_dict("records")}


def grid_of(values):
    return st.integers(1, 4).flatmap(
        lambda points: st.integers(1, 6).flatmap(
            lambda rows: st.lists(
                st.lists(st.tuples(values, values), min_size=rows, max_size=rows),
                min_size=points,
                max_size=points,
            )
        )
    )


@settings(max_examples=50)
@given(grid_of(st.none() | number))
def test_statistics_are_those_of_the_values_there_are(cells):
    found = summarized(cells)
    assert len(found) == 2 * len(cells)
    for point, line in enumerate(cells):
        for place, measure in enumerate(MEASURES):
            record = found[f"p{point}", measure]
            there = [pair[place] for pair in line if pair[place] is not None]
            assert record["n"] == len(there)
            assert record["layer"] == point
            _expect(record["mean"], statistics.fmean(there) if there else None)
            _expect(record["std"], statistics.stdev(there) if len(there) > 1 else None)
            assert np.isnan(record["ci_low"]) == np.isnan(record["ci_high"]) == (len(there) < 2)


def _expect(found, expected):
    if expected is None:
        assert np.isnan(found)
    else:
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(max_examples=50)
@given(grid_of(number))
def test_the_interval_contains_the_mean_and_lies_between_the_extremes(cells):
    for (point, measure), record in summarized(cells).items():
        if record["n"] > 1:
            values = [pair[MEASURES.index(measure)] for pair in cells[int(point[1:])]]
            slack = 1e-9 * (1 + max(map(abs, values)))
            low, high = record["ci_low"], record["ci_high"]
            assert min(values) - slack <= low <= high <= max(values) + slack
            assert low - slack <= record["mean"] <= high + slack


def test_the_interval_is_that_of_a_bootstrap_drawn_otherwise():
    """A resample a time, from another generator: the interval agrees within its own noise."""
    values = np.random.default_rng(3).gamma(2.0, size=40)
    record = summarized([[(v, 0.0) for v in values.tolist()]], Bootstrap(resamples=20_000))[
        "p0", "one"
    ]
    generator = np.random.default_rng(99)
    means = [generator.choice(values, size=40).mean() for _ in range(20_000)]
    low, high = np.quantile(means, [0.025, 0.975])
    error = values.std() / np.sqrt(40)
    assert record["ci_low"] == pytest.approx(low, abs=0.1 * error)
    assert record["ci_high"] == pytest.approx(high, abs=0.1 * error)
    assert 3.4 < (record["ci_high"] - record["ci_low"]) / error < 4.2


def test_the_confidence_decides_the_width():
    cells = [[(float(v), 0.0) for v in range(20)]]
    widths = []
    for confidence in (0.5, 0.9, 0.99):
        record = summarized(cells, Bootstrap(resamples=2000, confidence=confidence))["p0", "one"]
        widths.append(record["ci_high"] - record["ci_low"])
    assert widths == sorted(set(widths))


def test_the_seed_decides_the_interval_and_nothing_else_does():
    cells = [[(float(v), -float(v)) for v in range(7)] for _ in range(3)]
    one, again, other = (summarized(cells, Bootstrap(resamples=300, seed=s)) for s in (1, 1, 2))
    assert one == again
    assert one["p0", "one"]["ci_low"] != other["p0", "one"]["ci_low"]
    assert one["p0", "one"]["mean"] == other["p0", "one"]["mean"]


@given(grid_of(number))
def test_a_point_does_not_depend_on_the_other_points(cells):
    whole, alone = summarized(cells), summarized(cells[:1])
    for measure in MEASURES:
        for name, value in alone["p0", measure].items():
            if isinstance(value, float):
                assert whole["p0", measure][name] == pytest.approx(value, rel=1e-9, nan_ok=True)


@given(grid_of(number), st.randoms(use_true_random=False))
def test_the_order_of_rows_moves_nothing(cells, random):
    order = list(range(len(cells[0])))
    random.shuffle(order)
    shuffled = summarized([[line[i] for i in order] for line in cells])
    for key, record in summarized(cells).items():
        for name in ("n", "mean", "std", "ci_low", "ci_high"):
            assert shuffled[key][name] == pytest.approx(record[name], nan_ok=True, abs=1e-9)


@given(grid_of(number), st.randoms(use_true_random=False))
def test_the_order_of_points_moves_nothing(cells, random):
    order = list(range(len(cells)))
    random.shuffle(order)
    shuffled = summarized([cells[i] for i in order])
    plain = summarized(cells)
    for new, old in enumerate(order):
        for name in ("n", "mean", "std", "ci_low", "ci_high"):
            assert shuffled[f"p{new}", "one"][name] == pytest.approx(
                plain[f"p{old}", "one"][name], nan_ok=True, rel=1e-9, abs=1e-12
            )


def test_the_extremes_count_their_ties():
    cells = [[(1.0, 0.0)], [(3.0, 0.0)], [(3.0, 0.0)], [(2.0, None)]]
    frame = summary_frame(table_of(cells), ["layer"], list(MEASURES), BOOTSTRAP)
    most, least = extremes(frame, ["layer"], "one")
    assert (most.mean, most.where, most.ties, most.rows) == (3.0, "layer 1", 1, 1)
    assert (least.mean, least.where, least.ties) == (1.0, "layer 0", 0)
    assert [found.ties for found in extremes(frame, ["layer"], "two")] == [2, 2]
    assert extremes(frame, ["layer"], "three") == []


def test_missing_values_bring_the_interval_of_the_rest():
    line = [(float(v), 0.0) for v in range(9)]
    gaps = [*line[:4], (None, 0.0), *line[4:], (None, 0.0)]
    whole, holed = summarized([line])["p0", "one"], summarized([gaps])["p0", "one"]
    for name in ("n", "mean", "std", "ci_low", "ci_high"):
        assert holed[name] == pytest.approx(whole[name])


def test_a_point_without_values_has_nulls(tmp_path):
    sweep = _sweep()
    table = table_of([[(None, 1.0), (None, 2.0)]])
    write_table(tmp_path / "values.parquet", table, SCHEMA)
    summarize(sweep, tmp_path / "values.parquet", tmp_path / "summary.parquet", BOOTSTRAP)
    first, second = read_table(tmp_path / "summary.parquet", summary_schema(AXES)).to_pylist()
    assert first == {
        "point_id": "p0",
        "layer": 0,
        "measure": "one",
        "n": 0,
        "mean": None,
        "std": None,
        "ci_low": None,
        "ci_high": None,
    }
    assert second["n"] == 2


def test_the_table_is_in_order_and_has_the_same_bytes_twice(tmp_path):
    cells = [[(float(p + r), float(p * r)) for r in range(5)] for p in range(12)]
    write_table(tmp_path / "values.parquet", table_of(cells), SCHEMA)
    outputs = [tmp_path / "one.parquet", tmp_path / "two.parquet"]
    for output in outputs:
        summarize(_sweep(), tmp_path / "values.parquet", output, BOOTSTRAP)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    records = read_table(outputs[0], summary_schema(AXES)).to_pylist()
    assert [(r["point_id"], r["measure"]) for r in records] == [
        (f"p{point}", measure) for point in range(12) for measure in MEASURES
    ]


def _sweep():
    measures = {"one": {"kind": "kl"}, "two": {"kind": "match", "answer": "target"}}
    return sweep_of(measures=measures)


@pytest.mark.parametrize("value", [1.0, 0.1, -3.3, 1e-30])
def test_equal_values_have_an_interval_of_no_width(value):
    """They add up to a little more or less, by how many each is drawn."""
    found = summarized([[(value, None)] * 7])["p0", "one"]
    assert found["ci_low"] == found["ci_high"] == np.float32(value)
    assert found["mean"] == pytest.approx(np.float32(value), rel=1e-15)
