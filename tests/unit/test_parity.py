"""The check of parity finds every planted fault, and what proves nothing is no success."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from typer.testing import CliRunner

from nnsweep.cli import app
from nnsweep.errors import CheckFailed, NnsweepError, UserError
from nnsweep.log import exit_code
from nnsweep.parity import CLASSES, check_parity, classify, compare, judged, sentence
from nnsweep.tables import read_table, values_schema, write_json, write_table

KINDS = {"gap": "logit_diff", "order": "rank", "back": "recovery"}
SCHEMA = values_schema({"layer": "index", "position": "string"}, list(KINDS))
RUN: dict[str, Any] = {
    "sweep": "example",
    "engine": "local",
    "semantics": 1,
    "kinds": KINDS,
    "dtype": "float32",
    "model": {"revision": "abc", "dtype": "float32", "attention": "sdpa"},
}
POINTS, ROWS = 30, ("austria", "france")
Edit = Callable[[pa.Table], pa.Table]


def table(points: int = POINTS) -> pa.Table:
    """Values of some points on two rows; point 2 on row france has no ratio."""
    size = points * len(ROWS)
    gap = np.linspace(-3, 3, size).astype(np.float32)
    back = [None if i == 5 else value for i, value in enumerate(gap.tolist())]
    columns = {
        "point_id": [f"point{i // 2}" for i in range(size)],
        "layer": [i // 4 for i in range(size)],
        "position": ["last" if i // 2 % 2 else "subject" for i in range(size)],
        "row_id": [ROWS[i % 2] for i in range(size)],
        "status": ["ok"] * size,
        "reason": [None if value is not None else "gap too small" for value in back],
        "gap": gap,
        "order": np.arange(size) % 7,
        "back": back,
    }
    return pa.table(columns).cast(SCHEMA)


def changed(column: str, place: int, value: Any) -> Edit:
    """An edit that changes one value."""

    def edit(before: pa.Table) -> pa.Table:
        values = before[column].to_pylist()
        values[place] = value(values[place]) if callable(value) else value
        array = pa.array(values, SCHEMA.field(column).type)
        return before.set_column(SCHEMA.get_field_index(column), SCHEMA.field(column), array)

    return edit


def moved(column: str, by: float, place: int = 7) -> Edit:
    return changed(column, place, lambda value: value + by)


def same(before: pa.Table) -> pa.Table:
    return before


def judge(ours: Edit, theirs: Edit, dtype: str = "float32") -> dict[str, Any]:
    """The verdict on two edits of the same table."""
    found = classify(ours(table()), theirs(table()), KINDS, dtype)
    return judged(found, ["local", "ndif"], dtype)


def counts(verdict: dict[str, Any]) -> dict[str, int]:
    """The classes that occur, but for `identical`."""
    return {name: n for name, n in verdict["classes"].items() if n and name != "identical"}


@pytest.fixture
def folders(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """A factory of two engines' folders: edits of the second table, changes of its run."""

    def make(edit: Edit = same, **changes: Any) -> tuple[Path, Path]:
        for name, run, values in (
            ("local", RUN, table()),
            ("ndif", RUN | {"engine": "ndif"} | changes, edit(table())),
        ):
            write_json(tmp_path / name / "run.json", run)
            write_table(tmp_path / name / "values.parquet", values, SCHEMA)
        return tmp_path / "local", tmp_path / "ndif"

    return make


# --- planted faults -------------------------------------------------------------------------------


def without(place: int) -> Edit:
    return lambda before: before.filter(pc.not_equal(pa.array(range(len(before))), place))


FAULTS = [
    (moved("gap", 0.01), {"different": 1}, "different at point point3, row france, gap"),
    (moved("order", 1), {"different": 1}, "different at point point3, row france, order"),
    (without(7), {"missing": 3}, "missing at point point3, row france, gap"),
    (changed("gap", 7, None), {"different": 1}, "different at point point3, row france, gap"),
    (changed("back", 7, None), {"different": 1}, "different at point point3, row france, back"),
    (changed("gap", 7, np.inf), {"nonfinite": 1}, "nonfinite at point point3, row france, gap"),
    (changed("row_id", 7, "peru"), {"missing": 3, "extra": 3}, "at point point3, row "),
    (changed("point_id", 7, "point99"), {"missing": 3, "extra": 3}, "row france"),
]


@pytest.mark.parametrize(("edit", "classes", "said"), FAULTS)
def test_a_planted_fault_is_found_and_named(edit: Edit, classes: Any, said: str) -> None:
    verdict = judge(same, edit)
    assert not verdict["holds"]
    assert counts(verdict) == classes
    assert said in sentence(verdict)


def test_what_only_the_second_table_has_is_extra() -> None:
    verdict = judge(without(7), same)
    assert counts(verdict) == {"extra": 3}
    assert "extra at point point3, row france" in sentence(verdict)


@pytest.mark.parametrize("sides", ["first", "second", "both"])
def test_a_row_that_stands_twice_is_named(sides: str) -> None:
    def twice(before: pa.Table) -> pa.Table:
        return pa.concat_tables([before, before.slice(7, 1)])

    edits = {"first": (twice, same), "second": (same, twice), "both": (twice, twice)}
    with pytest.raises(CheckFailed, match="point point3 on row france stands twice"):
        judge(*edits[sides])


def test_every_value_counts() -> None:
    """No fault hides behind another: all values moved are all values different."""
    verdict = judge(same, lambda before: _all_moved(before, 0.01))
    assert counts(verdict) == {"different": POINTS * 2}
    assert len(verdict["worst"]) == 20


def _all_moved(before: pa.Table, by: float) -> pa.Table:
    array = pc.add(before["gap"], pa.scalar(by, pa.float32()))
    return before.set_column(SCHEMA.get_field_index("gap"), SCHEMA.field("gap"), array)


def test_the_worst_come_first_with_their_axes() -> None:
    def edit(before: pa.Table) -> pa.Table:
        return moved("gap", 5e-5, 3)(moved("gap", 0.5, 9)(moved("gap", 0.01)(before)))

    first, second, third = judge(same, edit)["worst"]
    assert [w["class"] for w in (first, second, third)] == ["different", "different", "within"]
    assert (first["point_id"], first["layer"], first["position"]) == ("point4", 2, "subject")
    assert first["distance"] == pytest.approx(0.5)
    assert second["point_id"] == "point3"


# --- what agrees ----------------------------------------------------------------------------------


def test_the_order_of_rows_does_not_matter() -> None:
    order = np.random.default_rng(0).permutation(POINTS * 2)
    verdict = judge(same, lambda before: before.take(order))
    assert verdict["holds"]
    assert counts(verdict) == {}
    assert verdict["classes"]["identical"] == verdict["values"] == POINTS * 2 * 3


@pytest.mark.parametrize("by", [1e-7, 9e-5, -9e-5])
def test_rounding_is_within(by: float) -> None:
    verdict = judge(same, moved("gap", by, 30))
    assert verdict["holds"]
    assert counts(verdict) == {"within": 1}
    assert f"largest distance {abs(by):.2g} (gap)" in sentence(verdict)


def test_a_large_value_is_judged_by_its_last_places() -> None:
    """64 units in the last place of 1000 are about 0.008."""

    def beside(by: float) -> tuple[Edit, Edit]:
        return changed("gap", 7, 1000.0), changed("gap", 7, 1000.0 + by)

    assert judge(*beside(0.005))["holds"]
    assert not judge(*beside(0.02))["holds"]


def test_a_ratio_that_is_guarded_on_both_sides_is_reported_and_proves_nothing() -> None:
    verdict = judge(same, same)
    assert (verdict["holds"], verdict["empty"]) == (True, 1)
    assert "1 guarded values have no number on either side" in sentence(verdict)


@pytest.mark.parametrize("status", ["ok", "error"])
def test_no_number_on_both_sides_is_no_agreement(status: str) -> None:
    def edit(before: pa.Table) -> pa.Table:
        return changed("status", 7, status)(changed("gap", 7, None)(before))

    verdict = judge(edit, edit)
    assert not verdict["holds"]
    assert counts(verdict) == {"nonfinite": 1}


def test_infinity_on_both_sides_is_no_agreement() -> None:
    edit = changed("gap", 7, np.inf)
    assert counts(judge(edit, edit)) == {"nonfinite": 1}


def test_a_row_that_was_asked_of_neither_is_not_compared() -> None:
    def excluded(before: pa.Table) -> pa.Table:
        for column in KINDS:
            before = changed(column, 7, None)(before)
        return changed("status", 7, "excluded")(before)

    verdict = judge(excluded, excluded)
    assert verdict["holds"]
    assert verdict["values"] == (POINTS * 2 - 1) * 3
    assert not judge(same, excluded)["holds"]
    assert not judge(excluded, same)["holds"]


# --- nothing to compare ---------------------------------------------------------------------------


def test_an_empty_comparison_fails() -> None:
    verdict = judge(lambda before: before.slice(0, 0), lambda before: before.slice(0, 0))
    assert not verdict["holds"]
    assert sentence(verdict).startswith("nothing was compared")


def test_an_empty_table_fails() -> None:
    verdict = judge(same, lambda before: before.slice(0, 0))
    assert not verdict["holds"]
    assert counts(verdict) == {"missing": POINTS * 2 * 3}


def test_no_shared_point_fails() -> None:
    def others(before: pa.Table) -> pa.Table:
        names = pa.array([f"other{name}" for name in before["point_id"].to_pylist()])
        return before.set_column(0, "point_id", names)

    verdict = judge(same, others)
    assert not verdict["holds"]
    assert verdict["classes"]["identical"] == 0


def test_nothing_but_guarded_ratios_fails() -> None:
    only = table().slice(5, 1).select([*SCHEMA.names[:6], "back"])
    found = classify(only, only, {"back": "recovery"}, "float32")
    verdict = judged(found, ["local", "ndif"], "float32")
    assert not verdict["holds"]
    assert sentence(verdict).startswith("nothing was compared")


# --- other questions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": RUN["model"] | {"revision": "def"}}, "the model's revision differs"),
        ({"model": RUN["model"] | {"dtype": "bfloat16"}}, "the model's dtype differs"),
        ({"model": RUN["model"] | {"attention": "eager"}}, "the model's attention differs"),
        ({"sweep": "another"}, "sweep differs"),
        ({"semantics": 2}, "semantics differs"),
        ({"kinds": KINDS | {"gap": "logit"}}, "kinds differs"),
        ({"dtype": "float64"}, "dtype float64 is none of float32"),
        ({"dtype": ["float32", "bfloat16"]}, "is none of float32"),
    ],
)
def test_another_question_is_refused(folders: Any, changes: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        compare(*folders(**changes))
    assert exit_code(caught.value) == 2


def test_other_columns_are_refused() -> None:
    with pytest.raises(UserError, match="columns differ"):
        judge(same, lambda before: before.drop_columns(["layer"]))


def test_a_coarser_dtype_has_its_own_tolerance_and_says_so(folders: Any) -> None:
    """One engine served bfloat16: half a unit of a logit is noise, a rank is still a rank."""
    verdict, _ = compare(*folders(moved("gap", 0.5), dtype="bfloat16"))
    assert verdict["holds"]
    assert (verdict["dtype"], verdict["tolerance"]["absolute"]) == ("bfloat16", 1.0)
    assert sentence(verdict).endswith("(dtype bfloat16).")
    assert not compare(*folders(moved("gap", 0.5)))[0]["holds"]
    assert not compare(*folders(moved("gap", 2.0), dtype="bfloat16"))[0]["holds"]
    assert not compare(*folders(moved("order", 1), dtype="bfloat16"))[0]["holds"]


# --- files and command ----------------------------------------------------------------------------


def test_a_check_that_fails_leaves_verdict_table_and_figure(folders: Any, tmp_path: Path) -> None:
    output = tmp_path / "parity" / "local-vs-ndif.json"
    with pytest.raises(CheckFailed, match=r"parity of local and ndif fails: .*point3") as caught:
        check_parity(*folders(moved("gap", 0.01)), output)
    assert (exit_code(caught.value), "\n" in str(caught.value)) == (1, False)
    verdict = json.loads(output.read_text())
    assert (verdict["holds"], verdict["a"], verdict["b"]) == (False, "local", "ndif")
    assert list(verdict["classes"]) == sorted(CLASSES)
    values = read_table(output.with_suffix(".parquet"))
    assert values["class"].to_pylist().count("different") == 1
    assert {"layer", "position", "ulps", "distance"} <= set(values.column_names)
    assert "parity fails" in output.with_suffix(".svg").read_text()


def test_a_check_of_nothing_leaves_its_files_too(folders: Any, tmp_path: Path) -> None:
    local, remote = folders()
    for folder in (local, remote):
        write_table(folder / "values.parquet", table().slice(0, 0), SCHEMA)
    with pytest.raises(CheckFailed, match="nothing was compared"):
        check_parity(local, remote, tmp_path / "parity.json")
    for kind in ("json", "parquet", "svg"):
        assert (tmp_path / f"parity.{kind}").stat().st_size


def test_the_same_comparison_writes_the_same_bytes(folders: Any, tmp_path: Path) -> None:
    outputs = [tmp_path / name / "parity.json" for name in ("first", "second")]
    for output in outputs:
        check_parity(*folders(moved("gap", 5e-5)), output)
    for kind in (".json", ".parquet", ".svg"):
        first, second = (output.with_suffix(kind).read_bytes() for output in outputs)
        assert first == second


@pytest.mark.parametrize(
    ("edit", "code", "said"), [(same, 0, "parity holds: 180 values"), (without(7), 1, "fails")]
)
def test_the_command_says_it_in_one_line(folders: Any, edit: Edit, code: int, said: str) -> None:
    done = CliRunner().invoke(app, ["parity", *map(str, folders(edit))])
    assert done.exit_code == code
    assert said in done.output
    assert done.output.count("\n") == 1


def test_the_command_names_a_table_that_is_not_there(folders: Any) -> None:
    local, _ = folders()
    done = CliRunner().invoke(app, ["parity", str(local), str(local / "none")])
    assert isinstance(done.exception, NnsweepError)
    assert "run.json: not readable" in str(done.exception)


# --- lists of tokens --------------------------------------------------------------------------


def listed(*lists: list[int] | None) -> pa.Table:
    """One list of ids a point."""
    size = len(lists)
    fields = ("id", "log_prob")
    schema = values_schema({}, ["top"], {"top": fields})
    tokens = [ids and [{"id": one, "token": "", "log_prob": 0.0} for one in ids] for ids in lists]
    names = [f"point{i}" for i in range(size)]
    state = {"status": ["ok"] * size, "reason": [None] * size}
    columns = {"point_id": names, "row_id": ["row"] * size} | state | {"top": tokens}
    return pa.table(columns, schema=schema)


def test_lists_are_compared_up_to_their_first_difference() -> None:
    ours = listed([1, 2], [1, 2], [3, 4, 5], None, None, [6], [7])
    theirs = listed([1, 2], [1, 9], [3], [5, 6], None, [8, 6])
    found = classify(ours, theirs, {"top": "top_k"}, "float32").sort_by("point_id").to_pylist()
    assert [(line["a"], line["b"], line["class"]) for line in found] == [
        (1, 1, "identical"),
        (2, 9, "different"),
        (3, 3, "identical"),
        (None, 5, "different"),
        (None, None, "nonfinite"),
        (6, 8, "different"),
        (7, None, "missing"),
    ]
