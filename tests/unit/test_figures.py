"""Pictures: the same bytes every time, and the right number in the right place."""

import re
from itertools import product

import numpy as np
import pyarrow as pa
import pytest
from examples import sweep_of

from nnsweep.config import Bootstrap
from nnsweep.figures import draw, plot_measure
from nnsweep.grid import axis_values, grid
from nnsweep.summary import summarize
from nnsweep.sweep import axis_kinds
from nnsweep.tables import read_table, summary_schema, values_schema, write_table

LAYERS, HEADS, PLACES, SCALES = [0, 2, 5], [0, 3], ["last", "subject"], [-0.5, 1.0]
ALL = {"layer": LAYERS, "head": HEADS, "position": PLACES, "scale": SCALES}
MEASURES = {
    "iia": {"kind": "match", "answer": "target"},
    "diff": {"kind": "logit_diff", "answers": ["target", "foil"]},
    "kl": {"kind": "kl"},
    "rec": {"kind": "recovery", "of": "diff"},
}


def sweep_over(*names, axes=None, **changes):
    """A sweep over some of the axes; each is used by some write."""
    axes = axes or {name: ALL[name] for name in names}
    fixed = {"layer": 0, "head": 0, "position": "last", "scale": 0.0}
    at = {name: f"${name}" if name in axes else value for name, value in fixed.items()}
    place = {name: at[name] for name in ("layer", "head", "position")}
    write = {"site": "z", **place, "set": at["scale"]}
    return sweep_of(axes=axes, writes=[write], measures=MEASURES, **changes)


def value_of(cell, measure, row):
    """Any number that tells cells, measures and rows apart."""
    number = sum(i * hash_of(v) for i, v in enumerate(cell.values(), 1)) + 0.1 * row
    return float(row % 2) if measure == "iia" else number - 3.0


def hash_of(value):
    return PLACES.index(value) if isinstance(value, str) else float(value)


def tables_of(sweep, folder, rows=4, value=value_of):
    """values.parquet and summary.parquet of a made-up run."""
    kinds = axis_kinds(sweep)
    schema = values_schema(kinds, list(sweep.measures))
    records = [
        {"point_id": f"p{i}", **cell, "row_id": f"row{row}", "status": "ok", "reason": None}
        | {measure: value(cell, measure, row) for measure in sweep.measures}
        for i, cell in enumerate(grid(sweep, axis_values(sweep, {"layer": 12, "head": 6})))
        for row in range(rows)
    ]
    values, summary = folder / "values.parquet", folder / "summary.parquet"
    write_table(values, pa.Table.from_pylist(records, schema=schema), schema)
    summarize(sweep, values, summary, Bootstrap(resamples=50))
    return values, summary


def picture(sweep, measure, folder, **how):
    """The SVG of one measure, drawn twice to the same bytes."""
    values, summary = tables_of(sweep, folder, **how)
    outputs = [folder / "one.svg", folder / "two.svg"]
    for output in outputs:
        plot_measure(sweep, measure, summary, values, output)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    return outputs[0].read_text()


def drawn(sweep, measure, folder, **how):
    """The figure of one measure and the means it shows: cell -> mean."""
    _, summary = tables_of(sweep, folder, **how)
    frame = read_table(summary, summary_schema(axis_kinds(sweep))).to_pandas()
    frame = frame[frame["measure"] == measure].reset_index(drop=True)
    means = {tuple(r[name] for name in sweep.axes): r["mean"] for r in frame.to_dict("records")}
    return draw(sweep, measure, frame), means


SWEPT = [
    (),
    ("layer",),
    ("position",),
    ("scale",),
    ("layer", "position"),
    ("layer", "head"),
    ("head", "scale"),
    ("layer", "head", "position"),
    ("layer", "head", "position", "scale"),
]


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("names", SWEPT, ids="-".join)
def test_every_number_of_axes_is_drawn_the_same_twice(tmp_path, names, measure):
    svg = picture(sweep_over(*names), measure, tmp_path)
    for name in names:
        assert name in svg
    assert measure in svg
    assert "example" in svg


@pytest.mark.parametrize("names", SWEPT, ids="-".join)
def test_points_without_values_are_drawn(tmp_path, names):
    picture(sweep_over(*names), "diff", tmp_path, value=lambda *_: None)


@pytest.mark.parametrize("number", [0.0, 0.1, 1 / 3, -2.3])
@pytest.mark.parametrize("names", SWEPT[:5], ids="-".join)
def test_equal_values_are_drawn(tmp_path, names, number):
    for measure in ("diff", "kl"):
        picture(sweep_over(*names), measure, tmp_path, value=lambda *_: number, rows=7)


def test_one_row_is_drawn(tmp_path):
    for names in SWEPT[:6]:
        picture(sweep_over(*names), "kl", tmp_path, rows=1)


def test_a_picture_names_no_time_and_no_version(tmp_path):
    svg = picture(sweep_over("layer", "position"), "iia", tmp_path)
    assert not re.search(r"20\d\d-\d\d-\d\d", svg)
    assert "<dc:date>" not in svg


# --- the right number in the right place ------------------------------------------------------


@pytest.mark.parametrize("names", [("layer", "head"), ("head", "layer"), ("position", "layer")])
def test_a_heat_map_shows_each_mean_in_its_place(tmp_path, names):
    sweep = sweep_over(*names)
    figure, means = drawn(sweep, "diff", tmp_path)
    axis = figure.axes[0]
    other = next(name for name in names if name != "layer")
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("layer", other)
    shown = np.asarray(axis.images[0].get_array())
    assert axis.images[0].origin == "lower"
    for (i, across), (j, up) in product(enumerate(LAYERS), enumerate(ALL[other])):
        cell = {"layer": across, other: up}
        assert shown[j, i] == pytest.approx(means[tuple(cell[name] for name in names)])
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0", "2", "5"]
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        str(value) for value in ALL[other]
    ]


def test_a_line_shows_each_mean_and_interval_in_its_place(tmp_path):
    figure, means = drawn(sweep_over("scale"), "diff", tmp_path)
    axis = figure.axes[0]
    line = axis.lines[0]
    assert list(line.get_xdata()) == SCALES
    assert list(line.get_ydata()) == pytest.approx([means[(scale,)] for scale in SCALES])
    assert axis.get_xlabel() == "scale"
    assert axis.get_ylabel() == "diff (logits)"


def test_named_positions_are_labels_of_a_line(tmp_path):
    figure, _ = drawn(sweep_over("position"), "kl", tmp_path)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == PLACES


def test_further_axes_are_panels_with_their_values(tmp_path):
    sweep = sweep_over("layer", "head", "position")
    figure, means = drawn(sweep, "diff", tmp_path)
    panels = [axis for axis in figure.axes if axis.images]
    assert [axis.get_title() for axis in panels] == ["position last", "position subject"]
    for axis, place in zip(panels, PLACES, strict=True):
        shown = np.asarray(axis.images[0].get_array())
        for (i, layer), (j, head) in product(enumerate(LAYERS), enumerate(HEADS)):
            assert shown[j, i] == pytest.approx(means[layer, head, place])
    limits = {axis.images[0].get_clim() for axis in panels}
    assert len(limits) == 1


def test_signed_measures_are_centred_on_zero_and_fractions_keep_their_bounds(tmp_path):
    sweep = sweep_over("layer", "head")
    low, high = drawn(sweep, "diff", tmp_path)[0].axes[0].images[0].get_clim()
    assert low == -high < 0
    assert drawn(sweep, "iia", tmp_path)[0].axes[0].images[0].get_clim() == (0, 1)


def test_an_excluded_point_is_left_open(tmp_path):
    sweep = sweep_over("layer", "head", exclude=[{"layer": 2, "head": 3}])
    figure, _ = drawn(sweep, "diff", tmp_path)
    shown = np.asarray(figure.axes[0].images[0].get_array(), dtype=float)
    assert np.isnan(shown).sum() == 1
    assert np.isnan(shown[HEADS.index(3), LAYERS.index(2)])


@pytest.mark.parametrize(
    "how",
    [
        {"zip": [["position", "scale"]]},
        {"exclude": [{"position": "subject", "scale": -0.5}]},
        {"zip": [["head", "position", "scale"]]},
    ],
)
def test_no_panel_is_drawn_without_points(tmp_path, how):
    sweep = sweep_over("layer", "head", "position", "scale", **how)
    figure, means = drawn(sweep, "diff", tmp_path)
    panels = [axis for axis in figure.axes if axis.images]
    assert len(panels) == len({cell[2:] for cell in means})
    for axis in panels:
        assert np.isfinite(np.asarray(axis.images[0].get_array(), dtype=float)).any()
    picture(sweep, "diff", tmp_path)


def test_panels_that_are_not_drawn_are_counted(tmp_path):
    axes = {"layer": [0, 1], "head": [0, 1], "scale": [float(x) for x in range(30)]}
    svg = picture(sweep_over(axes=axes), "kl", tmp_path, rows=2)
    assert "6 panels not drawn" in svg


def test_a_sweep_of_one_point_shows_every_row(tmp_path):
    svg = picture(sweep_over(), "diff", tmp_path)
    for row in range(4):
        assert f"row{row}" in svg
