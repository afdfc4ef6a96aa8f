"""From axes to points."""

import itertools
import json
import math
import re
from decimal import Decimal

import pytest
import yaml
from examples import document, setting, sweep_of
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from nnsweep.documents import parse
from nnsweep.errors import UserError
from nnsweep.grid import axis_values, expand
from nnsweep.registry import REGISTRY
from nnsweep.sites import DEFINITIONS, ORDER
from nnsweep.sweep import Range, Sweep, axis_kinds, references, uses_donor
from nnsweep.sweep_measures import MEASURES
from nnsweep.sweep_words import SITES

LAYERS, HEADS = 12, 6
LIMITS = {"layer": LAYERS, "head": HEADS, "kv_head": 2}
HEAD = {"site": "z", "layer": "$layer", "head": "$head", "position": "$position", "set": "$value"}


def heads_of(**changes):
    """A sweep over up to four axes; an axis that is not given is fixed."""
    axes = changes.pop("axes")
    fixed = {"layer": 0, "head": 0, "position": "last", "set": 0.0}
    write = {"site": "z"} | {
        field: f"${name}" if name in axes else fixed[field]
        for field, name in zip(fixed, ("layer", "head", "position", "value"), strict=True)
    }
    return sweep_of(axes=axes, writes=[write], **changes)


def cells_of(sweep):
    return [cell for cell, _ in expand(sweep, LIMITS)]


def refused(build, pattern):
    with pytest.raises((UserError, ValidationError), match=pattern):
        build()


# --- the grid ---------------------------------------------------------------------------------

axes_strategy = st.fixed_dictionaries(
    {"layer": st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=4, unique=True)},
    optional={
        "head": st.lists(st.integers(0, HEADS - 1), min_size=1, max_size=3, unique=True),
        "position": st.lists(
            st.sampled_from(["last", "subject", "second"]), min_size=1, unique=True
        ),
        "value": st.lists(
            st.floats(-3, 3, allow_subnormal=False).map(lambda x: x + 0.0),
            min_size=1,
            max_size=3,
            unique=True,
        ),
    },
)


@given(axes_strategy, st.data())
def test_points_are_the_product_less_the_exclusions(axes, data):
    rules = data.draw(
        st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    name: st.sampled_from(values)
                    | st.lists(st.sampled_from(values), min_size=1, max_size=2)
                    for name, values in axes.items()
                },
            ).filter(bool),
            max_size=2,
        )
    )

    def matches(cell, rule):
        return all(cell[k] in (v if isinstance(v, list) else [v]) for k, v in rule.items())

    def excluded(cell):
        return any(matches(cell, rule) for rule in rules)

    product = [dict(zip(axes, cell, strict=True)) for cell in itertools.product(*axes.values())]
    expected = [cell for cell in product if not excluded(cell)]
    assume(expected)
    if not all(any(matches(cell, rule) for cell in product) for rule in rules):
        refused(lambda: cells_of(heads_of(axes=axes, exclude=rules)), "matches no point")
        return
    found = cells_of(heads_of(axes=axes, exclude=rules))
    assert found == expected
    assert len({json.dumps(cell) for cell in found}) == len(found)


@given(axes_strategy, st.integers(0, LAYERS - 1))
def test_a_grown_axis_keeps_the_order_of_the_points_before(axes, layer):
    assume(layer not in axes["layer"])
    before = cells_of(heads_of(axes=axes))
    after = cells_of(heads_of(axes=axes | {"layer": [*axes["layer"], layer]}))
    assert [cell for cell in after if cell["layer"] != layer] == before
    assert len(after) == len(before) // len(axes["layer"]) * (len(axes["layer"]) + 1)


@given(st.integers(1, 5), st.integers(1, 3))
def test_zipped_axes_move_together(count, positions):
    axes = {
        "layer": list(range(count)),
        "position": ["last", "subject", "second"][:positions],
        "value": [float(10 * i) for i in range(count)],
    }
    found = cells_of(heads_of(axes=axes, zip=[["value", "layer"]]))
    assert len(found) == count * positions
    assert all(cell["value"] == 10.0 * cell["layer"] for cell in found)
    assert [list(cell) for cell in found] == [list(axes)] * len(found)


def test_the_first_axis_is_the_slowest():
    found = cells_of(heads_of(axes={"position": ["last", "subject"], "layer": [3, 1]}))
    assert [tuple(cell.values()) for cell in found] == [
        ("last", 3),
        ("last", 1),
        ("subject", 3),
        ("subject", 1),
    ]


def test_zipped_axes_of_unequal_length_are_refused():
    sweep = heads_of(axes={"layer": [0, 1], "value": [1.0]}, zip=[["layer", "value"]])
    refused(lambda: cells_of(sweep), "zip.*'layer': 2.*'value': 1")


def test_an_axis_stands_in_one_group_only():
    refused(
        lambda: heads_of(axes={"layer": [0], "head": [0]}, zip=[["layer", "head"], ["head"]]),
        "zip: an axis stands in two groups",
    )


@pytest.mark.parametrize("where", ["zip", "exclude"])
def test_zip_and_exclude_name_axes_only(where):
    rule = [["layer", "hed"]] if where == "zip" else [{"hed": 1}]
    refused(lambda: heads_of(axes={"layer": [0]}, **{where: rule}), "'hed'.*no axis.*layer")


def test_nothing_left_is_refused():
    refused(lambda: cells_of(heads_of(axes={"layer": [0, 1]}, exclude=[{"layer": [0, 1]}])), "left")


def test_a_sweep_without_axes_has_one_point():
    assert cells_of(setting(0.0)) == [{}]
    assert cells_of(sweep_of(axes={}, writes=[])) == [{}]


# --- axes -------------------------------------------------------------------------------------


def test_all_is_every_layer_or_head_of_the_model():
    values = axis_values(heads_of(axes={"layer": "all", "head": "all"}), LIMITS)
    assert values == {"layer": list(range(LAYERS)), "head": list(range(HEADS))}


@pytest.mark.parametrize("name", ["value", "position"])
def test_all_is_for_layers_and_heads(name):
    refused(lambda: heads_of(axes={name: "all"}), f"axes.{name}")


@pytest.mark.parametrize(
    ("name", "values", "pattern"),
    [
        ("layer", [0, LAYERS], rf"axes.layer: layer {LAYERS} is outside 0..{LAYERS - 1}"),
        ("layer", [-1], r"axes.layer: layer -1 is outside 0..11"),
        ("head", [HEADS], rf"axes.head: head {HEADS} is outside 0..{HEADS - 1}"),
        ("head", [-1], r"axes.head: head -1 is outside 0..5"),
        ("layer", [1, 1], r"axes.layer: 1 is given twice"),
        ("value", [0.5, 1, 0.5], r"axes.value: 0.5 is given twice"),
        ("value", [0.0, -0.0], r"axes.value: 0(\.0)? is given twice"),
        ("position", ["last", "last"], r"axes.position: 'last' is given twice"),
        ("layer", [], r"axes.layer: no values"),
        ("layer", {"range": [3, 3]}, r"axes.layer: no values"),
        ("layer", {"range": [3, 0]}, r"axes.layer: no values"),
        ("layer", {"range": [0, 4, 0]}, r"step"),
        ("layer", [1.5], r"axes.layer: 1.5"),
        ("layer", ["first"], r"axes.layer: 'first'"),
        ("layer", {"range": [0, 1, 0.5]}, r"axes.layer: "),
        ("value", ["much"], r"axes.value: 'much'"),
        ("position", [3], r"position '3' is not declared"),
        ("position", ["verb"], r"position 'verb' is not declared"),
    ],
)
def test_a_bad_axis_is_refused_by_name(name, values, pattern):
    refused(lambda: cells_of(heads_of(axes={name: values})), pattern)


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("layer", LAYERS, r"writes\.0\.layer: 12 is outside 0..11"),
        ("head", HEADS, r"writes\.0\.head: 6 is outside 0..5"),
    ],
)
def test_an_index_that_is_no_axis_is_checked_too(field, value, pattern):
    write = {"site": "z", "layer": 0, "head": 0, "position": "last", "set": 0.0} | {field: value}
    refused(lambda: cells_of(sweep_of(axes={}, writes=[write])), pattern)


def test_all_of_an_axis_shared_by_different_numbers_is_refused():
    write = {"site": "z", "layer": "$both", "head": "$both", "position": "last", "set": 0.0}
    sweep = sweep_of(axes={"both": "all"}, writes=[write])
    refused(lambda: axis_values(sweep, LIMITS), "'all' is not one number here")


@pytest.mark.parametrize(("site", "heads"), [("q", HEADS), ("k", 2), ("v", 2), ("z", HEADS)])
def test_every_site_has_its_own_heads(site, heads):
    """Case C11: under grouped-query attention keys and values have fewer heads."""
    write = {"site": site, "layer": 0, "head": "$head", "position": "last", "set": 0.0}
    sweep = sweep_of(axes={"head": "all"}, writes=[write])
    assert axis_values(sweep, LIMITS) == {"head": list(range(heads))}
    for bad in (heads, -1):
        message = f"head {heads} is outside 0..{heads - 1}" if bad > 0 else "head"
        refused(lambda bad=bad: cells_of(sweep_of(axes={"head": [bad]}, writes=[write])), message)
        alone = write | {"head": bad}
        message = message.replace("head ", "key-value head " if heads == 2 else "head: ")
        refused(lambda alone=alone: cells_of(sweep_of(axes={}, writes=[alone])), message)


def test_an_unused_axis_is_refused():
    refused(lambda: setting(0.0, axes={"layer": [0, 1]}), "axes.layer: used by no write")


def test_a_reference_to_no_axis_is_refused():
    refused(lambda: setting("$alpha", axes={}), r"writes\.0\.set: \$alpha is no axis")


def test_an_undeclared_position_is_refused():
    write = {"site": "embed", "position": "verb", "set": 0.0}
    refused(lambda: sweep_of(axes={}, writes=[write]), "position 'verb' is not declared.*subject")
    refused(lambda: sweep_of(measure_at="verb"), "position 'verb' is not declared")


@pytest.mark.parametrize("name", ["$layer", "$position"])
def test_the_measured_position_is_no_axis(name):
    """Every value of one table is measured at the same position."""
    refused(lambda: sweep_of(measure_at=name), "measure_at")


@pytest.mark.parametrize("name", ["n", "mean", "std", "row_id", "status", "point_id", "measure"])
def test_no_axis_and_no_measure_is_called_like_a_column(name):
    refused(lambda: setting(f"${name}", axes={name: [0.0]}), f"'{name}' is a column")
    refused(lambda: sweep_of(measures={name: {"kind": "kl"}}), f"'{name}' is a column")


def test_no_axis_is_called_like_a_measure():
    refused(lambda: setting("$kl", axes={"kl": [0.0]}, measures={"kl": {"kind": "kl"}}), "both")


def test_kinds_of_axes_follow_their_use():
    writes = [
        HEAD,
        {"site": "embed", "position": "last", "noise": {"std": "$loudness", "seed": "$s"}},
    ]
    axes = {
        "s": [0],
        "loudness": [1],
        "value": [1],
        "position": ["last"],
        "head": [0],
        "layer": [0],
    }
    kinds = axis_kinds(sweep_of(axes=axes, writes=writes))
    assert kinds == {
        "s": "index",
        "loudness": "number",
        "value": "number",
        "position": "string",
        "head": "index",
        "layer": "index",
    }
    assert list(kinds) == list(axes)


def test_numbers_are_floats_and_indices_integers():
    cells = cells_of(heads_of(axes={"layer": [2], "value": [1, 2.5]}))
    assert [type(cell["value"]) for cell in cells] == [float, float]
    assert [type(cell["layer"]) for cell in cells] == [int, int]


# --- ranges -----------------------------------------------------------------------------------


def numbers(*limits):
    return Range(range=list(limits)).values()


@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(-7, 7).filter(bool))
def test_a_range_of_integers_is_pythons(start, stop, step):
    assert numbers(start, stop, step) == list(range(start, stop, step))


@given(
    st.integers(-300, 300), st.integers(-300, 300), st.integers(1, 50), st.sampled_from([1, 2, 3])
)
def test_a_range_of_decimals_has_no_rounding(start, stop, step, digits):
    """Numbers with few digits come out as they would be typed."""
    low, high, by = (float(Decimal(n).scaleb(-digits)) for n in (start, stop, step))
    typed = [float(Decimal(n).scaleb(-digits)) for n in range(start, stop, step)]
    assert numbers(low, high, by) == typed


def test_examples_of_ranges():
    assert numbers(0, 0.5, 0.1) == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert numbers(0, 1, 0.25)[-1] == 0.75
    assert numbers(2, 30, 3) == [2, 5, 8, 11, 14, 17, 20, 23, 26, 29]
    assert numbers(1.5, 0, -0.5) == [1.5, 1.0, 0.5]
    assert numbers(0, 3) == [0, 1, 2]


# --- references and duplicates ----------------------------------------------------------------


def test_references_are_resolved_to_the_cells_values():
    axes = {"layer": [4], "head": [2], "position": ["subject"], "value": [0.5]}
    (_, writes), *rest = expand(sweep_of(axes=axes, writes=[HEAD]), LIMITS)
    assert writes == [{"site": "z", "layer": 4, "head": 2, "position": "subject", "set": 0.5}]
    assert not rest


def test_a_reference_inside_a_vector_is_resolved():
    add = {"vector": {"mean": "donor", "minus": "text"}, "scale": "$scale"}
    write = {"site": "resid_post", "layer": 1, "position": "last", "add": add}
    points = expand(sweep_of(axes={"scale": [-1, 2]}, writes=[write]), LIMITS)
    assert [writes[0]["add"]["scale"] for _, writes in points] == [-1.0, 2.0]


def test_every_use_of_an_axis_is_found():
    write = dict(HEAD, layer="$x", head="$x")
    sweep = sweep_of(axes={"x": [0], "position": ["last"], "value": [1]}, writes=[write])
    assert references(sweep)["x"] == {"layer", "head"}


@given(axes_strategy)
def test_no_two_points_are_the_same_experiment(axes):
    writes = [json.dumps(writes) for _, writes in expand(heads_of(axes=axes), LIMITS)]
    assert len(set(writes)) == len(writes) == math.prod(len(values) for values in axes.values())


# --- writes and measures ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "pattern"),
    [
        ({"site": "resid_post", "layer": 0, "position": "last"}, "exactly one of set, add, noise"),
        (
            {"site": "z", "layer": 0, "head": 0, "position": "last", "set": 0, "noise": {"std": 1}},
            "exactly one of",
        ),
        ({"site": "resid_post", "position": "last", "set": 0}, "takes layer or layers"),
        ({"site": "embed", "layer": 0, "position": "last", "set": 0}, "takes no layer"),
        ({"site": "logits", "layer": 0, "position": "last", "set": 0}, "takes no layer"),
        ({"site": "z", "layer": 0, "position": "last", "set": 0}, "takes head or heads"),
        ({"site": "mlp_out", "layer": 0, "head": 0, "position": "last", "set": 0}, "takes no head"),
    ],
)
def test_an_inconsistent_write_is_refused(write, pattern):
    refused(lambda: sweep_of(axes={}, writes=[write]), pattern)


@pytest.mark.parametrize(
    ("measure", "pattern"),
    [
        ({"kind": "match"}, "kind match needs 'answer'"),
        ({"kind": "kl", "answer": "target"}, "kind kl takes no 'answer'"),
        ({"kind": "logit_diff", "answer": "target"}, "takes no 'answer'"),
        ({"kind": "recovery"}, "needs 'of'"),
        ({"kind": "prob"}, "kind prob needs 'answer' or 'answers'"),
        (
            {"kind": "prob", "answer": "target", "answers": ["target", "foil"]},
            "kind prob needs 'answer' or 'answers'",
        ),
        ({"kind": "logit_diff", "answers": ["target", "foil", "third"]}, "needs two answers"),
        ({"kind": "entropy", "answer": "target"}, "kind entropy takes no 'answer'"),
        ({"kind": "match", "answer": "verb"}, "answer 'verb' is not one of: target, foil"),
        ({"kind": "recovery", "of": "verb"}, "'verb' is no measure. Possible: good"),
        ({"kind": "recovery", "of": "m"}, "'m' is no number of one run alone"),
        ({"kind": "recovery", "of": "other"}, "'other' is no number of one run alone"),
        ({"kind": "recovery", "of": "good", "min_gap": 0}, "greater than 0"),
    ],
)
def test_an_inconsistent_measure_is_refused(measure, pattern):
    good = {"kind": "match", "answer": "target"}
    measures = {"m": measure, "other": {"kind": "kl"}, "good": good}
    refused(lambda: sweep_of(measures=measures), pattern)


def test_reading_the_donor_needs_a_donor():
    prompts = {key: value for key, value in document()["prompts"].items() if key != "donor"}
    refused(lambda: sweep_of(prompts=prompts), "prompts.donor: a write or measure reads the donor")
    assert not uses_donor(setting(0.0, prompts=prompts))
    assert not uses_donor(setting({"mean": "text"}))
    assert uses_donor(setting({"mean": "donor"}))
    assert uses_donor(setting("donor"))


def test_a_recovery_reads_the_donor():
    measures = {"m": {"kind": "match", "answer": "target"}, "r": {"kind": "recovery", "of": "m"}}
    assert uses_donor(setting(0.0, measures=measures))


def test_vocabularies_agree_between_rooms():
    assert set(MEASURES) == set(REGISTRY)
    assert set(SITES) == set(ORDER) == set(DEFINITIONS)


def test_the_document_survives_its_own_dump():
    sweep = heads_of(axes={"layer": {"range": [0, 4]}, "position": ["last"], "value": [0.5]})
    assert Sweep.model_validate(sweep.model_dump(mode="json")) == sweep


# --- the manual -------------------------------------------------------------------------------


def test_the_writes_and_measures_of_the_manual_are_allowed(repository):
    """Every example of the manual, each in a document that has what it refers to."""
    text = (repository / "config" / "README.md").read_text(encoding="utf-8")
    blocks = [yaml.safe_load(b) for b in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    mine = [block for block in blocks if {"writes", "measures"} & block.keys()]
    assert {"runs", "generate"} <= {key for block in mine for key in block}
    for block in mine:
        used = set(re.findall(r"\$([a-z]+)", json.dumps(block)))
        change = {"axes": {name: [1] for name in used}} | block
        measures = block.get("measures", {})
        change["measures"] = measures | {"logit_diff": document()["measures"]["logit_diff"]}
        if "generate" not in block and "writes" not in block:
            change |= {"writes": [HEAD | {"layer": 1, "head": 1, "position": "last", "set": 0.0}]}
        document_of = document(**change | {"model": {"id": "any", "attention": "eager"}})
        if not used and "writes" not in block:
            document_of["writes"] = [{"site": "embed", "position": "last", "set": 0.0}]
        assert parse(Sweep, document_of, "config/README.md")


def test_the_table_of_writes_of_the_manual_is_allowed(repository):
    text = (repository / "config" / "README.md").read_text(encoding="utf-8")
    table = text.split("### Writes")[1].split("**Attention.**")[0]
    written = [
        yaml.safe_load(code) for code in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    ]
    assert len(written) > 12
    for operation in written:
        used = set(re.findall(r"\$([a-z]+)", json.dumps(operation)))
        place = {"site": "resid_post", "layer": 1, "position": "last"}
        if "knockout" in operation:
            place |= {"site": "attn_scores", "head": 1, "keys": "subject"}
        change = {"axes": {name: [1] for name in used}, "writes": [place | operation]}
        change["model"] = {"id": "any", "attention": "eager"}
        assert parse(Sweep, document(**change), "config/README.md")


# --- lists and steps --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"layers": [2, 2]}, "2 is given twice"),
        ({"layers": []}, "at least 1 item"),
        ({"site": "mlp_post", "layer": 1, "units": [4, 4]}, "4 is given twice"),
        ({"site": "z", "layer": 1, "heads": [1, 0, 1]}, "1 is given twice"),
    ],
)
def test_a_list_names_everything_once(change, pattern):
    place = {"site": "resid_post", "position": "last", "set": 0.0}
    refused(lambda: sweep_of(axes={}, writes=[place | change]), pattern)


@pytest.mark.parametrize(
    ("generate", "pattern"),
    [
        ({"max_new_tokens": 4, "writes_at": [5]}, "step 5 never comes; the last one is 3"),
        ({"max_new_tokens": 0}, "greater than or equal to 1"),
        ({"max_new_tokens": 4, "writes_at": []}, "at least 1 item"),
    ],
)
def test_steps_that_never_come_are_refused(generate, pattern):
    place = {"site": "resid_post", "layer": 1, "position": "last", "set": 0.0}
    refused(lambda: sweep_of(axes={}, writes=[place], generate=generate), pattern)


@pytest.mark.parametrize(
    "write", [{"set": "donor"}, {"noise": {"std": 1.0}}, {"renormalize": "text"}]
)
def test_only_what_needs_no_other_prompt_is_repeated_at_new_tokens(write):
    place = {"site": "resid_post", "layer": 1, "position": "last"}
    how = {"max_new_tokens": 4}
    sweep_of(axes={}, writes=[place | write], generate=how)
    refused(
        lambda: sweep_of(axes={}, writes=[place | write], generate=how | {"writes_at": "all"}),
        "cannot be repeated at new tokens",
    )
