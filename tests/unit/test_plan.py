"""From points and rows to passes and chunks: what is named how, and what depends on what."""

import copy
import json
import subprocess
import sys

import pytest
from examples import (
    ANSWERS,
    PATCH,
    RECORDS,
    alone_of,
    document,
    lying,
    model_of,
    plan_of,
    record,
    rows_of,
    setting,
    sweep_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsweep.chunks import (
    clean_runs,
    forward_passes,
    keys_of,
    naive_passes,
    pass_ids,
    split_chunk,
    split_pass,
)
from nnsweep.errors import UserError
from nnsweep.sites import tap

ALL = {"layer": [0, 1, 2, 3], "position": ["last", "subject", "second"]}
WRITE = {"site": "resid_post", "layer": "$layer", "position": "$position", "set": "donor"}
HEAD = {"site": "z", "layer": "$layer", "head": "$head", "position": "last", "set": 0.0}
NOISE = {"site": "embed", "position": "subject", "noise": {"std": "$loudness", "seed": "$seed"}}
MEAN = {"site": "resid_post", "layer": "$layer", "position": "last", "set": {"mean": "text"}}


def layers_by_positions(**changes):
    return sweep_of(**{"axes": ALL, "writes": [WRITE], "on_bad_row": "exclude"} | changes)


def keys(plan):
    return [point.point_key for point in plan.points]


def ids(plan):
    return [point.point_id for point in plan.points]


def chunk_ids(plan):
    return [chunk["chunk_id"] for chunk in plan.chunks]


def all_passes(plan):
    return [name for chunk in plan.chunks for name in pass_ids(chunk)]


def passes_of(plan):
    return [item for c in plan.chunks for block in c["blocks"] for item in block["passes"]]


def edits_of(plan):
    return [e for c in plan.chunks for b in c["blocks"] for p in b["passes"] for e in p["edits"]]


# --- no torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        f"nnsweep.{name}"
        for name in ("plan", "config", "store", "merge", "figures", "overview", "parity", "mixed")
    ],
)
def test_planning_imports_no_torch(module, repository):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'nnsight' in sys.modules)"
    path = str(repository / "src")
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=False)
    assert done.returncode == 0


def test_a_plan_is_plain_data(tmp_path):
    sweep = layers_by_positions()
    plan = plan_of(sweep, rows_of(sweep, tmp_path))
    for chunk in [*plan.chunks, plan.controls]:
        assert json.loads(json.dumps(chunk, allow_nan=False))["chunk_id"] == chunk["chunk_id"]


# --- every value exactly once -----------------------------------------------------------------


def asked(plan, rows):
    return {(point.point_key, rows[i].row_key) for point in plan.points for i in point.rows}


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["fast", "exact"]))
def test_every_value_is_planned_exactly_once(tmp_path, batch_rows, chunk_passes, recompute):
    sweep = layers_by_positions()
    rows = rows_of(sweep, tmp_path)
    plan = plan_of(
        sweep, rows, batch_rows=batch_rows, chunk_passes=chunk_passes, recompute=recompute
    )
    found = [key for chunk in plan.chunks for key in keys_of(chunk)]
    assert len(found) == len(set(found))
    assert set(found) == asked(plan, rows)
    for chunk in plan.chunks:
        assert len(pass_ids(chunk)) <= chunk_passes
        for block in chunk["blocks"]:
            assert len({len(one) for one in block["ids"]}) == 1
            for item in block["passes"]:
                assert len(item["points"]) * len(block["ids"]) <= max(batch_rows, len(block["ids"]))
                assert len(block["ids"]) <= batch_rows


def test_a_row_that_repeats_another_is_planned_once(tmp_path):
    twin = RECORDS[0] | {"row_id": "twin"}
    sweep = layers_by_positions()
    rows = rows_of(sweep, tmp_path, [*RECORDS, twin])
    assert "row-0" in rows[-1].reason
    found = [key for chunk in plan_of(sweep, rows).chunks for key in keys_of(chunk)]
    assert len(found) == len(set(found))
    with pytest.raises(UserError, match=r"twin: .*row-0"):
        rows_of(sweep_of(), tmp_path, [*RECORDS, twin])


def test_two_names_of_one_position_are_the_same_point(tmp_path):
    """`end: -1` is `last`; a sweep over both asks for one experiment twice."""
    axes = ALL | {"position": ["last", "end"]}
    sweep = layers_by_positions(axes=axes, positions={"end": -1})
    with pytest.raises(UserError, match="end"):
        plan_of(sweep, rows_of(sweep, tmp_path))


def test_a_donor_that_no_write_reads_is_left_alone(tmp_path):
    sweep = sweep_of(axes={"layer": [0]}, writes=[PATCH | {"set": 0.0}])
    plan = plan_of(sweep, rows_of(sweep, tmp_path))
    assert {key for chunk in plan.chunks for key in keys_of(chunk)} == {
        (plan.points[0].point_key, row.row_key) for row in rows_of(sweep, tmp_path)
    }


def test_a_first_row_without_donor_takes_no_donor_from_the_others(tmp_path):
    records = [RECORDS[0] | {"source": ""}, *RECORDS[1:]]
    sweep = layers_by_positions()
    plan = plan_of(sweep, rows_of(sweep, tmp_path, records))
    for chunk in plan.chunks:
        for block in chunk["blocks"]:
            assert len(block["donor_ids"]) == len(block["ids"])


def test_excluded_rows_are_in_no_pass(tmp_path):
    bad = record(9, "The town of {} is", "The town of {} is", "Lagos", "Mali") | {"word": "No"}
    sweep = layers_by_positions()
    rows = rows_of(sweep, tmp_path, [*RECORDS, bad])
    plan = plan_of(sweep, rows)
    by_position = {point.cell["position"]: point.rows for point in plan.points}
    assert by_position["last"] == (0, 1, 2, 3, 4, 5)
    assert by_position["subject"] == (0, 1, 2, 3, 4)
    # Row 4 has a donor of another length, so tokens counted from the start do not correspond.
    assert by_position["second"] == (0, 1, 2, 3, 5)


# --- what composes a pass ---------------------------------------------------------------------


SIBLINGS = [*RECORDS, RECORDS[0] | {"row_id": "sibling", "base_answer": "maybe"}]
"""Two of these rows have the same tokens and other answers."""


@given(st.permutations(range(len(SIBLINGS))), st.sampled_from([1, 2, 3, 7, 1000]))
def test_passes_do_not_depend_on_chunking_or_the_order_of_rows(tmp_path, order, chunk_passes):
    sweep = layers_by_positions()
    plain = plan_of(sweep, rows_of(sweep, tmp_path, SIBLINGS), batch_rows=4)
    shuffled = rows_of(sweep, tmp_path, [SIBLINGS[i] for i in order])
    other = plan_of(sweep, shuffled, batch_rows=4, chunk_passes=chunk_passes)
    assert set(all_passes(other)) == set(all_passes(plain))
    assert keys(other) == keys(plain)
    assert ids(other) == ids(plain)
    content = {p["pass_id"]: p for c in plain.chunks for b in c["blocks"] for p in b["passes"]}
    for chunk in other.chunks:
        for block in chunk["blocks"]:
            for item in block["passes"]:
                assert item == content[item["pass_id"]]


def test_a_chunk_is_named_by_its_passes(tmp_path):
    sweep = layers_by_positions()
    rows = rows_of(sweep, tmp_path)
    small, large = (plan_of(sweep, rows, chunk_passes=n) for n in (2, 3))
    named = {name: pass_ids(chunk) for p in (small, large) for name, chunk in _named(p).items()}
    assert len({tuple(passes) for passes in named.values()}) == len(named)
    assert chunk_ids(plan_of(sweep, rows, chunk_passes=2)) == chunk_ids(small)


def _named(plan):
    return dict(zip(chunk_ids(plan), plan.chunks, strict=True))


@pytest.mark.parametrize("chunk_passes", [1, 5, 64])
def test_planning_again_changes_nothing(tmp_path, chunk_passes):
    """Row 4 is left out at one position, so that points with two sets of rows share a chunk."""
    sweep = layers_by_positions()
    rows = rows_of(sweep, tmp_path)
    plan = plan_of(sweep, rows, chunk_passes=chunk_passes)
    again = plan_of(sweep, rows, chunk_passes=chunk_passes, earlier=lying(plan, finished=False))
    assert chunk_ids(again) == chunk_ids(plan)
    assert again.chunks == plan.chunks


def test_the_first_layer_and_token_that_can_differ(tmp_path):
    sweep = layers_by_positions(axes={"layer": [2], "position": ["subject"]})
    rows = rows_of(sweep, tmp_path)
    for recompute in ("fast", "exact"):
        chunk = plan_of(sweep, rows, recompute=recompute).chunks[0]
        for block in chunk["blocks"]:
            subject = min(min(one) for one in block["positions"]["subject"]["base"])
            for item in block["passes"]:
                assert item["resumes"] == [3]
                assert item["start"] == (subject if recompute == "fast" else 0)


def test_several_writes_resume_at_the_earliest(tmp_path):
    late = {"site": "resid_pre", "layer": 3, "position": "last", "set": 0.0}
    early = {"site": "z", "layer": 1, "head": 0, "position": "subject", "set": 0.0}
    sweep = alone_of(axes={}, writes=[late, early])
    for block in plan_of(sweep, rows_of(sweep, tmp_path)).chunks[0]["blocks"]:
        (item,) = block["passes"]
        assert item["resumes"] == [1]
        assert item["start"] == min(min(one) for one in block["positions"]["subject"]["base"])


def test_measuring_before_the_write_moves_nothing(tmp_path):
    write = WRITE | {"layer": 0, "position": "last"}
    sweep = layers_by_positions(axes={}, writes=[write], measure_at="second")
    rows = rows_of(sweep, tmp_path)
    for recompute, inert in (("fast", True), ("exact", False)):
        plan = plan_of(sweep, rows, recompute=recompute)
        assert {item["inert"] for item in passes_of(plan)} == {inert}
        for block in plan.chunks[0]["blocks"]:
            assert block["measured"] == [1] * len(block["ids"])


# --- points that cannot differ ----------------------------------------------------------------

STREAM = {"site": "resid_post", "layer": 1, "position": "last"}
LAST = {"axes": {}, "on_bad_row": "exclude"}


@pytest.mark.parametrize(
    ("write", "inert"),
    [
        ({"site": "resid_post", "layer": 3, "position": "second", "set": 0.0}, True),
        ({"site": "resid_post", "layer": 3, "position": "last", "set": 0.0}, False),
        ({"site": "resid_post", "layer": 2, "position": "second", "set": 0.0}, False),
        ({"site": "resid_pre", "layer": 3, "position": "second", "set": 0.0}, False),
        ({"site": "z", "layer": 3, "head": 0, "position": "second", "set": 0.0}, True),
        ({"site": "mlp_out", "layer": 3, "position": "second", "set": 0.0}, True),
        ({"site": "attn_out", "layer": 2, "position": "second", "set": 0.0}, False),
        ({"site": "embed", "position": "last", "noise": {"std": 0.0, "seed": 1}}, True),
        ({"site": "embed", "position": "last", "noise": {"std": 0.1, "seed": 1}}, False),
        (STREAM | {"mix": {"source": "donor", "weight": 0}}, True),
        (STREAM | {"mix": {"source": {"mean": "text"}, "weight": 0.5}}, False),
        (STREAM | {"clamp": {"low": 0}}, False),
        # The first tokens of prompt and donor are the same, the subjects are not.
        ({"site": "resid_post", "layer": 1, "position": "second", "set": "donor"}, True),
        ({"site": "resid_post", "layer": 1, "position": "subject", "set": "donor"}, False),
    ],
)
def test_a_point_that_cannot_differ_is_known(tmp_path, write, inert):
    sweep = sweep_of(**LAST, writes=[write])
    rows = rows_of(sweep, tmp_path, [RECORDS[0]])
    plan = plan_of(sweep, rows)
    assert [item["inert"] for item in passes_of(plan)] == [inert]
    assert plan.inert == {plan.points[0].point_key: int(inert)}
    (block,) = plan.chunks[0]["blocks"]
    means = sum(len(one["batches"]) for one in plan.chunks[0]["references"].values())
    assert forward_passes(plan.chunks) == clean_runs(block) + means + (not inert)
    assert not any(item["inert"] for item in passes_of(plan_of(sweep, rows, recompute="exact")))


def test_one_write_that_can_move_something_is_enough(tmp_path):
    still = {"site": "resid_post", "layer": 3, "position": "second", "set": 0.0}
    sweep = sweep_of(**LAST, writes=[still, still | {"layer": 2}])
    plan = plan_of(sweep, rows_of(sweep, tmp_path, [RECORDS[0]]))
    assert [item["inert"] for item in passes_of(plan)] == [False]


# --- what rows have in common -----------------------------------------------------------------


def test_rows_share_the_tokens_that_are_the_same_and_that_nobody_touches(tmp_path):
    def shared(position, records=(RECORDS[0], RECORDS[1]), **how):
        sweep = layers_by_positions(axes={"layer": [0], "position": [position]})
        rows = rows_of(sweep, tmp_path, list(records))
        (block,) = plan_of(sweep, rows, **how).chunks[0]["blocks"]
        return block["shared"], block["donor_shared"]

    subject = rows_of(layers_by_positions(), tmp_path)[0].positions["subject"].base[0]
    assert shared("last") == shared("subject") == (subject, subject)
    assert shared("second") == (1, 1)
    assert shared("last", recompute="exact") == (0, 0)
    alone = rows_of(layers_by_positions(), tmp_path, [RECORDS[0]])[0]
    assert shared("last", [RECORDS[0]]) == (len(alone.ids) - 1, len(alone.donor_ids) - 1)


# --- who shares a pass ------------------------------------------------------------------------


def alone_with(tmp_path, sweep, joins=True, **how):
    """The one block's passes of a sweep over one row."""
    model = model_of()
    model["shape"]["joins"] = joins
    return passes_of(plan_of(sweep, rows_of(sweep, tmp_path, [RECORDS[0]]), model, **how))


def test_points_join_a_pass_at_their_own_layers(tmp_path):
    sweep = layers_by_positions(axes={"layer": [3, 0, 2, 1], "position": ["last"]})
    (item,) = alone_with(tmp_path, sweep)
    assert item["resumes"] == [1, 2, 3, 4]
    assert [edit["tap"]["order"][0] for edit in item["edits"]] == [0, 1, 2, 3]


def test_points_below_every_layer_have_passes_of_their_own(tmp_path):
    axes = {"layer": [0, 1, 2], "head": [0, 1]}
    found = alone_with(tmp_path, alone_of(axes=axes, writes=[HEAD]))
    assert sorted(item["resumes"] for item in found) == [[0, 0], [1, 1, 2, 2]]


def test_where_layers_need_their_rows_a_pass_has_one_first_layer(tmp_path):
    axes = {"layer": [0, 1, 2], "head": [0, 1]}
    found = alone_with(tmp_path, alone_of(axes=axes, writes=[HEAD]), joins=False)
    assert sorted(item["resumes"] for item in found) == [[0, 0], [1, 1], [2, 2]]


def test_few_points_go_along_with_an_earlier_token(tmp_path, monkeypatch):
    sweep = layers_by_positions(axes={"layer": [1, 2], "position": ["last", "subject"]})
    (item,) = alone_with(tmp_path, sweep)
    subject = rows_of(sweep, tmp_path, [RECORDS[0]])[0].positions["subject"].base[0]
    assert (item["start"], item["resumes"]) == (subject, [2, 2, 3, 3])
    monkeypatch.setattr("nnsweep.plan.PASS_COST", 0)
    assert len(alone_with(tmp_path, sweep)) == 2
    assert len(alone_with(tmp_path, sweep, recompute="exact")) == 4


def test_passes_of_long_prompts_hold_fewer_points(tmp_path, monkeypatch):
    sweep = layers_by_positions(axes={"layer": [0, 1, 2, 3], "position": ["last"]})
    monkeypatch.setattr("nnsweep.plan.PASS_TOKENS", 2)
    assert [item["resumes"] for item in alone_with(tmp_path, sweep)] == [[1, 2], [3, 4]]


def test_slices_are_even(tmp_path):
    sweep = alone_of(axes={"layer": [1], "head": "all"}, writes=[HEAD])
    found = alone_with(tmp_path, sweep, batch_rows=3)
    assert [len(item["points"]) for item in found] == [2, 2]


@pytest.mark.parametrize(("batch_rows", "points"), [(3, [1, 1, 1, 1]), (6, [2, 2]), (100, [4])])
def test_points_share_a_pass_up_to_the_batch(tmp_path, batch_rows, points):
    sweep = alone_of(axes={"layer": [1], "head": "all"}, writes=[HEAD])
    records = [RECORDS[0], RECORDS[1], RECORDS[3]]
    plan = plan_of(sweep, rows_of(sweep, tmp_path, records), batch_rows=batch_rows)
    (block,) = plan.chunks[0]["blocks"]
    assert [len(item["points"]) for item in block["passes"]] == points


# --- growth -----------------------------------------------------------------------------------


def grown(tmp_path, before, after, **how):
    """Plan `before`, then `after` with what is known of the first plan."""
    old = plan_of(before, rows_of(before, tmp_path), **how)
    return old, plan_of(after, rows_of(after, tmp_path), earlier=lying(old), **how)


@pytest.mark.parametrize("chunk_passes", [1, 3, 64])
def test_a_new_layer_keeps_the_chunks_before(tmp_path, chunk_passes):
    before = layers_by_positions(axes=ALL | {"layer": [0, 1, 2]})
    after = layers_by_positions()
    old, new = grown(tmp_path, before, after, chunk_passes=chunk_passes, batch_rows=2)
    assert set(keys(old)) < set(keys(new))
    assert set(ids(old)) < set(ids(new))
    assert chunk_ids(new)[: len(old.chunks)] == chunk_ids(old)
    assert set(all_passes(old)) < set(all_passes(new))


@pytest.mark.parametrize(("name", "more"), [("position", "second"), ("layer", 3)])
def test_every_axis_grows_without_new_names_for_old_points(tmp_path, name, more):
    before = layers_by_positions(axes={"layer": [0, 1], "position": ["last", "subject"]})
    axes = dict(before.axes)
    after = layers_by_positions(axes=axes | {name: [*axes[name], more]})
    old, new = grown(tmp_path, before, after)
    kept = [p for p in new.points if p.cell[name] != more]
    assert [point.point_key for point in kept] == keys(old)
    assert [point.point_id for point in kept] == ids(old)


def test_a_new_position_keeps_the_chunks_before(tmp_path):
    before = layers_by_positions(axes=ALL | {"position": ["last", "subject"]})
    old, new = grown(tmp_path, before, layers_by_positions())
    assert set(chunk_ids(old)) <= set(chunk_ids(new))


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": document()["positions"] | {"idle": 0}},
        {"prompts": document()["prompts"] | {"answers": ANSWERS | {"third": "word"}}},
        {"measures": document()["measures"] | {"kl": {"kind": "kl"}}},
    ],
)
def test_what_is_not_read_changes_no_point(tmp_path, changes):
    plain, more = layers_by_positions(), layers_by_positions(**changes)
    assert ids(plan_of(more, rows_of(more, tmp_path))) == ids(
        plan_of(plain, rows_of(plain, tmp_path))
    )


def test_a_grown_sweep_keeps_its_passes(tmp_path):
    """The new layer has a pass of its own, though the earlier pass had room for it."""
    before = layers_by_positions(axes={"layer": [0, 1], "position": ["last"]})
    after = layers_by_positions(axes={"layer": [0, 1, 2], "position": ["last"]})
    old, new = grown(tmp_path, before, after)
    assert [item["resumes"] for item in passes_of(old)] == [[1, 2]] * 3
    assert [item["resumes"] for item in passes_of(new)] == [[1, 2]] * 3 + [[3]] * 3


def values_of(part):
    return part.values, len(keys_of(part.chunk))


@pytest.mark.parametrize("how", [{"batch_rows": 2}, {"chunk_passes": 1}, {"recompute": "exact"}])
def test_what_nobody_has_run_is_cut_as_the_settings_say(tmp_path, how):
    sweep = layers_by_positions()
    rows = rows_of(sweep, tmp_path)
    earlier = lying(plan_of(sweep, rows), finished=False)
    assert plan_of(sweep, rows, earlier=earlier, **how).chunks == plan_of(sweep, rows, **how).chunks


@pytest.mark.parametrize("how", [{"batch_rows": 2}, {"chunk_passes": 1}])
def test_what_is_finished_stays_whatever_the_settings_say(tmp_path, how):
    sweep = layers_by_positions()
    rows = rows_of(sweep, tmp_path)
    old = plan_of(sweep, rows)
    assert plan_of(sweep, rows, earlier=lying(old), **how).chunks == old.chunks


def test_exact_takes_nothing_from_fast(tmp_path):
    sweep = layers_by_positions()
    rows = rows_of(sweep, tmp_path)
    fast, exact = (plan_of(sweep, rows, recompute=how) for how in ("fast", "exact"))
    again = plan_of(sweep, rows, recompute="exact", earlier=lying(fast))
    assert again.chunks == exact.chunks
    assert plan_of(sweep, rows, earlier=lying(exact)).chunks == exact.chunks


def test_fewer_layers_run_nothing_and_take_only_theirs(tmp_path):
    before = layers_by_positions()
    after = layers_by_positions(axes=ALL | {"layer": [3, 1]})
    old, new = grown(tmp_path, before, after, batch_rows=4)
    assert set(chunk_ids(new)) <= set(chunk_ids(old))
    assert sum(part.values for part in new.parts) == sum(len(point.rows) for point in new.points)
    assert new.controls["chunk_id"] == old.controls["chunk_id"]
    assert all(part.values <= len(keys_of(part.chunk)) for part in new.parts)


def test_fewer_rows_run_nothing(tmp_path):
    sweep = layers_by_positions()
    old = plan_of(sweep, rows_of(sweep, tmp_path))
    new = plan_of(sweep, rows_of(sweep, tmp_path, RECORDS[:-1]), earlier=lying(old))
    assert chunk_ids(new) == chunk_ids(old)
    assert sum(part.values for part in new.parts) == sum(len(point.rows) for point in new.points)


def test_a_new_row_has_blocks_of_its_own(tmp_path):
    sweep = layers_by_positions()
    old = plan_of(sweep, rows_of(sweep, tmp_path, RECORDS[:-1]))
    rows = rows_of(sweep, tmp_path)
    new = plan_of(sweep, rows, earlier=lying(old))
    assert chunk_ids(new)[: len(old.chunks)] == chunk_ids(old)
    fresh = new.chunks[len(old.chunks) :]
    assert {key for chunk in fresh for b in chunk["blocks"] for key in b["row_keys"]} == {
        rows[len(RECORDS) - 1].row_key
    }


def test_a_changed_answer_spoils_its_row_alone(tmp_path):
    """The tokens are the same, so the row has the same key: its values must not be taken."""
    sweep = layers_by_positions()
    old = plan_of(sweep, rows_of(sweep, tmp_path))
    records = [RECORDS[0] | {"base_answer": "Lima"}, *RECORDS[1:]]
    rows = rows_of(sweep, tmp_path, records)
    new = plan_of(sweep, rows, earlier=lying(old))
    key = rows[0].row_key
    assert {tuple(part.stale) for part in new.parts} == {(), (key,)}
    fresh = new.chunks[len([part for part in new.parts if part.stale]) :]
    assert all(key in b["row_keys"] for chunk in fresh for b in chunk["blocks"])
    assert sum(part.values for part in new.parts) == sum(len(point.rows) for point in new.points)


def test_fewer_measures_and_new_names_run_nothing(tmp_path):
    more = {"gap": {"kind": "logit_diff", "answers": ["target", "foil"]}, "kl": {"kind": "kl"}}
    before, after = (
        layers_by_positions(measures=one) for one in (more, {"difference": more["gap"]})
    )
    old, new = grown(tmp_path, before, after)
    assert chunk_ids(new) == chunk_ids(old)
    assert [part.names for part in new.parts] == [{"difference": "gap"}] * len(new.parts)
    again = plan_of(before, rows_of(before, tmp_path), earlier=lying(new))
    assert chunk_ids(again) == chunk_ids(old)


def test_another_sweeps_chunks_are_taken_when_half_of_them_is_wanted(tmp_path):
    before = layers_by_positions(axes={"layer": [0, 1, 2, 3], "position": ["last"]})
    old = plan_of(before, rows_of(before, tmp_path))
    for layers, taken in (([0, 1], True), ([0], False)):
        sweep = layers_by_positions(axes={"layer": layers, "position": ["last"]})
        rows = rows_of(sweep, tmp_path)
        new = plan_of(sweep, rows, earlier=lying(old, own=False))
        assert (chunk_ids(new) == chunk_ids(old)) is taken
        assert plan_of(sweep, rows, earlier=lying(old, own=False, finished=False)).chunks == (
            plan_of(sweep, rows).chunks
        )
        assert chunk_ids(plan_of(sweep, rows, earlier=lying(old))) == chunk_ids(old)


@pytest.mark.parametrize("wanted", [{"mean": "text"}, {"resample": "text", "seed": 0}])
def test_another_place_in_one_row_of_a_reference_changes_every_point(tmp_path, wanted):
    """The tokens of that row are the same, but not what the mean is taken over."""
    write = {"site": "resid_post", "layer": 1, "position": "subject", "set": wanted}
    sweep = alone_of(writes=[write], axes={})
    moved = [RECORDS[0] | {"word": "town"}, *RECORDS[1:]]
    plans = [plan_of(sweep, rows_of(sweep, tmp_path, one)) for one in (RECORDS, moved)]
    assert [p.points[0].point_key for p in plans] != [plans[0].points[0].point_key] * 2
    again = plan_of(sweep, rows_of(sweep, tmp_path, moved), earlier=lying(plans[0]))
    assert again.chunks == plans[1].chunks


def test_the_first_whole_answer_leaves_what_is_finished(tmp_path):
    """Passes are made otherwise from then on, but what was measured is the same."""
    gap = {"gap": {"kind": "logit_diff", "answers": ["target", "foil"]}}
    whole = {"whole": {"kind": "log_prob", "answer": "target", "tokens": "sum"}}
    before, after = (layers_by_positions(measures=one) for one in (gap, gap | whole))
    old, new = grown(tmp_path, before, after)
    assert keys(new) == keys(old)
    assert chunk_ids(new)[: len(old.chunks)] == chunk_ids(old)
    fresh = new.chunks[len(old.chunks) :]
    assert {spec["name"] for chunk in fresh for spec in chunk["measures"]} == {"whole"}
    again = plan_of(after, rows_of(after, tmp_path))
    assert set(ids_of_passes(again)).isdisjoint(ids_of_passes(old))


def ids_of_passes(plan):
    return [item["pass_id"] for item in passes_of(plan)]


def test_a_lost_chunk_is_cut_anew(tmp_path):
    sweep = layers_by_positions()
    rows = rows_of(sweep, tmp_path)
    whole = plan_of(sweep, rows, chunk_passes=2)
    again = plan_of(sweep, rows, chunk_passes=2, earlier=lying(whole)[1:])
    assert chunk_ids(again) == [*chunk_ids(whole)[1:], chunk_ids(whole)[0]]


# --- point ids --------------------------------------------------------------------------------


def test_ids_do_not_depend_on_where_and_how_a_plan_runs(tmp_path):
    sweep = layers_by_positions()
    rows = rows_of(sweep, tmp_path)
    plain = plan_of(sweep, rows)
    for how in ({"batch_rows": 1}, {"chunk_passes": 1}, {"recompute": "exact"}):
        assert ids(plan_of(sweep, rows, **how)) == ids(plain)


def test_ids_do_not_depend_on_the_names_of_axes_and_rows(tmp_path):
    plain = layers_by_positions()
    renamed = layers_by_positions(
        axes={"depth": ALL["layer"], "where": ALL["position"]},
        writes=[WRITE | {"layer": "$depth", "position": "$where"}],
        name="other",
    )
    other = [row | {"row_id": f"x{i}"} for i, row in enumerate(RECORDS)]
    assert ids(plan_of(renamed, rows_of(renamed, tmp_path, other))) == ids(
        plan_of(plain, rows_of(plain, tmp_path))
    )


def test_ids_do_not_depend_on_the_names_of_positions(tmp_path):
    def named(name):
        sweep = layers_by_positions(
            positions={name: document()["positions"]["subject"]},
            axes={"layer": [0], "position": [name]},
        )
        return ids(plan_of(sweep, rows_of(sweep, tmp_path)))

    assert named("subject") == named("country")


def test_ids_of_a_folder_do_not_depend_on_its_path(tmp_path):
    sweep = layers_by_positions()
    rows = rows_of(sweep, tmp_path)
    one, two = (model_of(kind="folder", id=name) for name in ("here", "there"))
    assert ids(plan_of(sweep, rows, one)) == ids(plan_of(sweep, rows, two))


@pytest.mark.parametrize(
    "change",
    [{"revision": "other"}, {"dtype": "bfloat16"}, {"attention": "eager"}, {"id": "other"}],
)
def test_ids_depend_on_the_model(tmp_path, change):
    sweep = layers_by_positions()
    rows = rows_of(sweep, tmp_path)
    other = plan_of(sweep, rows, model_of(**change))
    assert not set(ids(other)) & set(ids(plan_of(sweep, rows)))
    assert not set(all_passes(other)) & set(all_passes(plan_of(sweep, rows)))


@pytest.mark.parametrize("field", ["base", "source", "source_answer"])
def test_ids_depend_on_the_prompts(tmp_path, field):
    sweep = layers_by_positions()
    changed = [dict(row) for row in RECORDS]
    changed[0][field] += "x"
    old = plan_of(sweep, rows_of(sweep, tmp_path))
    new = plan_of(sweep, rows_of(sweep, tmp_path, changed))
    assert not set(ids(old)) & set(ids(new))
    # The name of the experiment stays; it is the table's rows that changed.
    assert keys(old) == keys(new)


@pytest.mark.parametrize(
    "changes",
    [
        {"measure_at": "second"},
        {"positions": {"subject": {"text": "word", "donor_text": "word"}, "second": 1}},
        {"positions": document()["positions"] | {"subject": -2}},
    ],
)
def test_ids_depend_on_the_meaning_of_positions(tmp_path, changes):
    records = [row | {"source": row["base"]} for row in RECORDS]
    if "positions" not in changes:
        records = RECORDS
    plain = layers_by_positions(axes={"layer": [0], "position": ["subject"]})
    other = layers_by_positions(axes={"layer": [0], "position": ["subject"]}, **changes)
    one = plan_of(plain, rows_of(plain, tmp_path))
    two = plan_of(other, rows_of(other, tmp_path, records))
    assert ids(one) != ids(two)


def test_different_writes_have_different_ids(tmp_path):
    mean = {"mean": "donor", "minus": "text"}
    place = {"site": "resid_post", "layer": 1, "position": "last"}
    writes = [
        place | {"set": "donor"},
        place | {"set": 0.0},
        place | {"set": 1.0},
        place | {"set": {"mean": "text"}},
        place | {"set": {"mean": "donor"}},
        place | {"add": {"vector": mean}},
        place | {"add": {"vector": mean, "scale": -1.0}},
        place | {"add": {"vector": {"mean": "text", "minus": "donor"}}},
        place | {"add": {"vector": {"file": "a"}}},
        place | {"add": {"vector": {"file": "b"}}},
        place | {"noise": {"std": 1.0}},
        place | {"noise": {"std": 2.0}},
        place | {"noise": {"std": 1.0, "seed": 1}},
        place | {"site": "resid_pre", "set": 0.0},
        place | {"site": "mlp_out", "set": 0.0},
        place | {"layer": 2, "set": 0.0},
        place | {"position": "subject", "set": 0.0},
        {"site": "z", "head": 0, "layer": 1, "position": "last", "set": 0.0},
        {"site": "z", "head": 1, "layer": 1, "position": "last", "set": 0.0},
    ]

    def vector(spec, layer):
        return [float(ord(spec["file"]))] * 32

    found = set()
    for write in writes:
        sweep = (sweep_of if "donor" in str(write) else alone_of)(axes={}, writes=[write])
        plan = plan_of(sweep, rows_of(sweep, tmp_path), load_vector=vector)
        found |= set(ids(plan))
    assert len(found) == len(writes)


def test_a_mean_is_known_by_its_rows(tmp_path):
    sweep = alone_of(axes={"layer": [0]}, writes=[MEAN])
    whole = plan_of(sweep, rows_of(sweep, tmp_path))
    fewer = plan_of(sweep, rows_of(sweep, tmp_path, RECORDS[1:]))
    shuffled = plan_of(sweep, rows_of(sweep, tmp_path, RECORDS[::-1]))
    assert keys(whole) != keys(fewer)
    assert keys(whole) == keys(shuffled)


def test_equal_means_are_taken_once(tmp_path):
    axes = {"layer": [0, 1], "loudness": [1.0], "seed": [0, 1, 2]}
    sweep = alone_of(axes=axes, writes=[MEAN, NOISE])
    plan = plan_of(sweep, rows_of(sweep, tmp_path))
    assert len(plan.points) == 6
    assert [len(chunk["references"]) for chunk in plan.chunks] == [2]


# --- noise ------------------------------------------------------------------------------------


def seeds_of(plan):
    """Per noise edit: row key -> seed."""
    return [
        dict(zip(block["row_keys"], edit["operand"]["seeds"], strict=True))
        for chunk in plan.chunks
        for block in chunk["blocks"]
        for item in block["passes"]
        for edit in item["edits"]
        if edit["op"] == "noise"
    ]


def noisy(tmp_path, records=None, **changes):
    axes = {"layer": [0, 1, 2], "loudness": [0.5, 1.0], "seed": [0]}
    writes = [NOISE, WRITE | {"position": "last"}]
    sweep = (alone_of if changes else sweep_of)(**{"axes": axes, "writes": writes} | changes)
    return plan_of(sweep, rows_of(sweep, tmp_path, records), batch_rows=2)


def test_every_row_has_its_own_noise_and_the_same_at_every_point(tmp_path):
    """One corrupted prompt is one prompt, whatever else a point does and how loud the noise is."""
    by_row = {}
    for edit in seeds_of(noisy(tmp_path)):
        for row, seed in edit.items():
            by_row.setdefault(row, set()).add(seed)
    assert len(by_row) == len(RECORDS)
    assert all(len(found) == 1 for found in by_row.values())
    assert len(set.union(*by_row.values())) == len(RECORDS)
    assert all(0 <= seed < 2**63 for found in by_row.values() for seed in found)


def test_noise_does_not_depend_on_the_other_rows(tmp_path):
    whole, fewer = (seeds_of(noisy(tmp_path, rows)) for rows in (RECORDS, RECORDS[2:]))
    merged = {row: seed for edit in whole for row, seed in edit.items()}
    assert all(merged[row] == seed for edit in fewer for row, seed in edit.items())


def seeds_by_name(tmp_path, records):
    """row_id -> seed of a sweep of one noise write."""
    sweep = sweep_of(axes={"loudness": [1.0], "seed": [0]}, writes=[NOISE], on_bad_row="exclude")
    rows = rows_of(sweep, tmp_path, records)
    names = {row.row_key: row.row_id for row in rows if row.reason is None}
    edits = seeds_of(plan_of(sweep, rows))
    return {names[key]: seed for edit in edits for key, seed in edit.items()}


def test_noise_does_not_depend_on_the_order_of_rows(tmp_path):
    """Also where two rows have the same tokens."""
    found = seeds_by_name(tmp_path, SIBLINGS)
    assert len(found) == len(SIBLINGS)
    assert seeds_by_name(tmp_path, SIBLINGS[::-1]) == found


@pytest.mark.parametrize(
    "more",
    [{"row_id": "other answers", "base_answer": "maybe"}, {"row_id": "repeated"}],
    ids=lambda change: change["row_id"],
)
def test_a_row_of_the_same_tokens_moves_no_noise(tmp_path, more):
    plain = seeds_by_name(tmp_path, RECORDS)
    beside = seeds_by_name(tmp_path, [*RECORDS, RECORDS[0] | more])
    assert {name: beside[name] for name in plain} == plain


def test_another_seed_layer_or_head_is_other_noise(tmp_path):
    z = {"site": "z", "layer": "$layer", "head": "$head", "position": "last"}
    axes = {"layer": [0, 1], "head": [0, 1], "seed": [0, 1]}
    plan = noisy(tmp_path, axes=axes, writes=[z | {"noise": {"std": 1.0, "seed": "$seed"}}])
    by_row = {}
    for edit in seeds_of(plan):
        for row, seed in edit.items():
            by_row.setdefault(row, set()).add(seed)
    assert [len(found) for found in by_row.values()] == [8] * len(RECORDS)


def test_two_places_of_one_point_have_different_noise(tmp_path):
    """Equal noise at two tokens of one prompt would be one draw, not two."""
    write = {"site": "embed", "noise": {"std": 1.0}}
    writes = [write | {"position": "subject"}, write | {"position": "last"}]
    first, second, *_ = seeds_of(noisy(tmp_path, axes={}, writes=writes))
    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())


# --- sites and sizes --------------------------------------------------------------------------


def test_a_head_is_its_own_slice(tmp_path):
    sweep = alone_of(axes={"layer": [1], "head": "all"}, writes=[HEAD])
    taps = [edit["tap"] for edit in edits_of(plan_of(sweep, rows_of(sweep, tmp_path)))]
    slices = {(place["low"], place["high"]) for place in taps}
    assert slices == {(0, 8), (8, 16), (16, 24), (24, 32)}
    assert {place["path"] for place in taps} == {"model.layers.1.self_attn.o_proj"}


def test_a_site_the_family_lacks_is_refused_with_the_reason(tmp_path):
    model = copy.deepcopy(model_of())
    model["shape"]["sites"].pop("z")
    model["shape"]["refused"]["z"] = "no attention output projection was found"
    sweep = sweep_of(axes={"layer": [1], "head": [0]}, writes=[HEAD])
    with pytest.raises(UserError, match=r"site z: no attention output projection .* llama"):
        plan_of(sweep, rows_of(sweep, tmp_path), model)
    with pytest.raises(UserError, match="Sites here: embed"):
        tap(model["shape"], "z", 0, 0)


def test_a_vector_of_another_width_is_refused(tmp_path):
    add = {"vector": {"file": "v.safetensors"}}
    sweep = sweep_of(
        axes={"layer": [0]}, writes=[MEAN | {"set": None, "add": add}], on_bad_row="exclude"
    )
    rows = rows_of(sweep, tmp_path)
    with pytest.raises(UserError, match="has width 3, site resid_post has 32"):
        plan_of(sweep, rows, load_vector=lambda spec, layer: [0.0] * 3)


def test_a_layer_out_of_range_is_refused_before_any_pass(tmp_path):
    sweep = layers_by_positions(axes=ALL | {"layer": [4]})
    with pytest.raises(UserError, match=r"layer 4 is outside 0\.\.3"):
        plan_of(sweep, rows_of(sweep, tmp_path))


def test_ten_thousand_points_are_planned(tmp_path):
    words = [f"w{i}" for i in range(40)]
    records = [
        record(i, "{} " + " ".join(words), "{} " + " ".join(words), f"a{i}", f"b{i}")
        for i in range(3)
    ]
    positions = {f"p{i}": i for i in range(38)}
    axes = {"layer": "all", "head": "all", "position": list(positions)}
    writes = [HEAD | {"position": "$position"}]
    sweep = alone_of(axes=axes, positions=positions, writes=writes)
    plan = plan_of(sweep, rows_of(sweep, tmp_path, records), model_of(30, 9))
    assert len(plan.points) == 30 * 9 * 38 == 10_260
    assert len(set(ids(plan))) == len(set(keys(plan))) == 10_260
    assert sum(len(keys_of(chunk)) for chunk in plan.chunks) == 3 * 10_260
    assert len(plan.chunks) < 300


def test_the_work_is_counted(tmp_path):
    sweep = layers_by_positions(axes={"layer": [0, 1], "position": ["last"]})
    plan = plan_of(sweep, rows_of(sweep, tmp_path), batch_rows=100)
    # Three pairs of lengths, each with its clean run, its donor run, the beginnings that their rows
    # share, and one pass.
    blocks = plan.chunks[0]["blocks"]
    beginnings = [bool(b["shared"]) + bool(b["donor_shared"]) for b in blocks]
    assert [clean_runs(b) for b in blocks] == [2 + more for more in beginnings] == [4, 4, 4]
    assert forward_passes(plan.chunks) == 3 * (4 + 1)
    exact = plan_of(sweep, rows_of(sweep, tmp_path), recompute="exact")
    assert forward_passes(exact.chunks) == 3 * (1 + 1 + 2)
    # A loop without reuse runs prompt and donor for every layer.
    assert naive_passes(plan.chunks) == 3 * 2 * 2


# --- cutting a chunk --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_split_chunk_holds_the_same_passes(tmp_path, size):
    sweep = layers_by_positions(writes=[WRITE, MEAN | {"position": "subject"}])
    plan = plan_of(sweep, rows_of(sweep, tmp_path), batch_rows=2)
    (chunk,) = plan.chunks
    parts = split_chunk(chunk, size)
    assert [name for part in parts for name in pass_ids(part)] == pass_ids(chunk)
    assert [key for part in parts for key in keys_of(part)] == keys_of(chunk)
    assert all(len(pass_ids(part)) <= size for part in parts)
    for part in parts:
        used = {
            str(e["operand"]["plus"])
            for b in part["blocks"]
            for p in b["passes"]
            for e in p["edits"]
            if "plus" in e["operand"]
        }
        assert set(part["references"]) == used


def test_a_split_pass_holds_the_same_points(tmp_path):
    sweep = alone_of(axes={"layer": [1], "head": [0, 1, 2]}, writes=[HEAD])
    plan = plan_of(sweep, rows_of(sweep, tmp_path), chunk_passes=1)
    chunk = plan.chunks[0]
    halves = split_pass(chunk)
    assert [key for half in halves for key in keys_of(half)] == keys_of(chunk)
    lows = [
        [(edit["slot"], edit["tap"]["low"]) for edit in half["blocks"][0]["passes"][0]["edits"]]
        for half in halves
    ]
    assert lows == [[(0, 0), (1, 8)], [(0, 16)]]
    assert split_pass(halves[1]) == []


# --- controls ---------------------------------------------------------------------------------


def controls_of(tmp_path, sweep, records=None):
    plan = plan_of(sweep, rows_of(sweep, tmp_path, records))
    blocks = plan.controls["blocks"]
    return {name: block for block in blocks for p in block["passes"] for name in p["points"]}


def test_controls_are_planned_with_every_sweep(tmp_path):
    found = controls_of(tmp_path, layers_by_positions())
    assert set(found) == {
        f"control:{name}"
        for name in (
            *("clean", "self_patch_0", "self_patch_1", "inert", "zero_steer"),
            *("full_donor", "donor"),
        )
    }
    swapped = found["control:donor"]
    assert swapped["ids"] == found["control:clean"]["donor_ids"]


def test_controls_without_donors_of_equal_length_say_less(tmp_path):
    assert "control:full_donor" not in controls_of(tmp_path, layers_by_positions(), RECORDS[4:])
    prompts = {k: v for k, v in document()["prompts"].items() if k != "donor"}
    behaviour = setting(0.0, prompts=prompts)
    assert "control:donor" not in controls_of(tmp_path, behaviour)


def test_a_sweep_without_usable_rows_has_no_controls(tmp_path):
    write = {"site": "resid_post", "layer": 0, "position": "never", "set": 0.0}
    positions = {"never": {"text": "row_id"}}
    sweep = sweep_of(axes={}, writes=[write], positions=positions, on_bad_row="exclude")
    plan = plan_of(sweep, rows_of(sweep, tmp_path))
    assert plan.controls is None
    assert plan.chunks == []
