"""Null controls: when they hold, when they do not, and when nothing was compared."""

import pyarrow as pa
import pytest

from nnsweep.controls import EXPECTED, TOLERANCE, judge
from nnsweep.tables import part_schema

KINDS = {"logit_diff": "logit_diff", "kl": "kl", "recovery": "recovery"}
CLEAN, DONOR = (1.0, 0.0, 0.0), (4.0, 2.0, 1.0)
GOOD = {
    "clean": CLEAN,
    "self_patch_0": CLEAN,
    "self_patch_1": CLEAN,
    "inert": CLEAN,
    "zero_steer": CLEAN,
    "full_donor": (4.0, 7.0, 1.0),
    "donor": DONOR,
}


def part(runs, rows=2):
    """A part of the controls' chunk: run -> values, the same on every row."""
    records = [
        {"point_key": f"control:{name}", "row_key": f"row{row}", "status": "ok", "reason": None}
        | dict(zip(KINDS, values, strict=True))
        for name, values in runs.items()
        for row in range(rows)
    ]
    return pa.Table.from_pylist(records, schema=part_schema(list(KINDS)))


def judged(dtype="float32", kinds=KINDS, **changes):
    return judge(part(GOOD | changes), kinds, dtype)


def test_good_controls_hold():
    verdict = judged()
    assert list(verdict) == list(EXPECTED)
    assert all(control["holds"] is True for control in verdict.values())
    assert all(control["rows"] == 2 for control in verdict.values())
    assert all(control["largest"] == 0.0 for control in verdict.values())


@pytest.mark.parametrize("by", [0.5, -0.5])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_control_that_moved_does_not_hold(name, by):
    ours = GOOD[name]
    moved = judged(**{name: (ours[0] + by, *ours[1:])})
    assert {other for other, control in moved.items() if not control["holds"]} == {name}
    assert moved[name]["largest"] == pytest.approx(0.5)


@pytest.mark.parametrize("place", [1, 2])
def test_every_measure_is_compared_with_the_clean_run(place):
    values = list(CLEAN)
    values[place] += 0.5
    assert judged(zero_steer=tuple(values))["zero_steer"]["holds"] is False


def test_measures_that_compare_with_the_clean_run_say_nothing_of_the_donor():
    assert judged(full_donor=(4.0, 99.0, -99.0))["full_donor"]["holds"] is True
    only = {"kl": "kl"}
    verdict = judge(part(GOOD).select(["point_key", "row_key", "kl"]), only, "float32")
    assert verdict["full_donor"]["holds"] is None
    assert "clean run" in verdict["full_donor"]["reason"]
    assert verdict["zero_steer"]["holds"] is True


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_dtype_decides_what_is_allowed(dtype):
    allowed = TOLERANCE[dtype]
    for factor, holds in ((0.5, True), (2.0, False)):
        values = (1.0 + factor * allowed, 0.0, 0.0)
        verdict = judged(dtype, zero_steer=values)["zero_steer"]
        assert verdict["holds"] is holds
        assert verdict["tolerance"] == allowed


def test_the_worst_row_decides():
    rows = part(GOOD).to_pylist()
    rows[-1 - 2]["logit_diff"] += 0.25  # the second row of full_donor
    verdict = judge(pa.Table.from_pylist(rows, schema=part_schema(list(KINDS))), KINDS, "float32")
    assert verdict["full_donor"]["holds"] is False
    assert verdict["full_donor"]["largest"] == pytest.approx(0.25)


def test_a_value_missing_on_one_side_does_not_hold():
    assert judged(zero_steer=(1.0, None, 0.0))["zero_steer"]["holds"] is False
    assert judged(clean=(1.0, 0.0, None))["self_patch_0"]["holds"] is False


def test_a_recovery_missing_on_both_sides_is_no_difference():
    both = (1.0, 0.0, None)
    verdict = judged(clean=both, self_patch_0=both, self_patch_1=both, zero_steer=both)
    assert verdict["self_patch_0"]["holds"] is True


def test_nothing_compared_is_not_agreement():
    nothing = (None, None, None)
    verdict = judged(clean=nothing, zero_steer=nothing)
    assert verdict["zero_steer"]["holds"] is not True


def test_a_control_that_did_not_run_says_why():
    runs = {name: values for name, values in GOOD.items() if name not in ("full_donor", "donor")}
    verdict = judge(part(runs), KINDS, "float32")["full_donor"]
    assert verdict["holds"] is None
    assert verdict["rows"] == 0
    assert "same length" in verdict["reason"]


def test_a_sweep_without_writes_has_no_self_patch():
    runs = {name: GOOD[name] for name in ("clean", "zero_steer")}
    assert set(judge(part(runs), KINDS, "float32")) == {"zero_steer", "full_donor"}
