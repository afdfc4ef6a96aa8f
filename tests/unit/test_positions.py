"""Positions with keys and lists: which tokens, which pairs, and what is refused."""

import re

import pytest
import yaml
from examples import RECORDS, document, plan_of, rows_of, sweep_of
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from nnsweep.documents import parse
from nnsweep.errors import UserError
from nnsweep.explain import _row
from nnsweep.positions import trimmed
from nnsweep.prompts import from_table, to_table
from nnsweep.sweep import Sweep, position_spec
from nnsweep.sweep_positions import FORMS, Tokens

BASE, SOURCE = "The town of Aa Bb Cc is far", "The town of Xx is far"
NAMES = {"subject": {"text": "word", "donor_text": "source_word"}, "second": 1}
FIVE, SIX = "a b c d e", "u v w x y z"


def patched(positions, **changes):
    """A sweep that patches the position `here`."""
    write = {"site": "resid_post", "layer": 0, "position": "here", "set": "donor"}
    return sweep_of(
        **{"axes": {}, "writes": [write], "positions": positions, "on_bad_row": "exclude"} | changes
    )


@pytest.fixture
def place(tmp_path):
    """The place of the position `here` in one row."""

    def find(
        here, base=BASE, source=SOURCE, word="Aa Bb Cc", source_word="Xx", more=None, **changes
    ):
        mine = {"base": base, "source": source, "word": word, "source_word": source_word}
        sweep = patched(NAMES | (more or {}) | {"here": here}, **changes)
        row, *_ = rows_of(sweep, tmp_path, [RECORDS[0] | mine, RECORDS[1]])
        return row.positions["here"]

    return find


@pytest.fixture
def words(place):
    """Base and donor words of the position `here`, or the reason against it."""

    def find(here, base=BASE, source=SOURCE, **changes):
        found = place(here, base, source, **changes)
        sides = ((found.base, base), (found.donor, source))
        if found.reason:
            return found.reason
        return tuple(" ".join(text.split()[i] for i in side) for side, text in sides)

    return find


# --- forms ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "base", "donor"),
    [
        ({"last": 1}, "e", "z"),
        ({"last": 3}, "c d e", "x y z"),
        ({"span": [-3, None]}, "c d e", "x y z"),
        ({"span": [-3, -1]}, "c d", "x y"),
        ([-1, -4], "b e", "w z"),
    ],
)
def test_tokens_counted_from_the_end(words, here, base, donor):
    assert words(here, FIVE, SIX) == (base, donor)


@pytest.mark.parametrize(
    ("here", "found"),
    [
        ({"span": [0, 2]}, "a b"),
        ({"span": [1, None]}, "b c d e"),
        ({"span": [1, -1]}, "b c d"),
        ({"span": [-4, 3]}, "b c"),
        ([0, "second", "last"], "a b e"),
        (["all", 2], "a b c d e"),
    ],
)
def test_tokens_counted_from_the_start(words, here, found):
    assert words(here, FIVE, "v w x y z") == (
        found,
        found.translate(str.maketrans("abcde", "vwxyz")),
    )


@pytest.mark.parametrize("here", [{"last": 6}, {"span": [0, 6]}, {"span": [-6, None]}])
def test_a_span_is_never_shortened_to_what_there_is(words, here):
    reason = words(here, FIVE, FIVE)
    assert reason.startswith("position here: tokens [")
    assert "not all among the 5 tokens ['a', ' b', ' c', ' d', ' e']" in reason


def test_a_span_of_no_token_is_refused(words):
    assert "are none" in words({"span": [3, -2]}, FIVE, FIVE)


bounds = st.integers(-7, 7)


@given(st.integers(1, 6), bounds, bounds | st.none())
def test_a_span_is_pythons_slice_or_a_reason(tmp_path, size, low, high):
    assume(high is None or (low < 0) != (high < 0) or low < high)
    text = " ".join("abcdef"[:size])
    record = RECORDS[0] | {"base": text, "source": text}
    sweep = patched({"here": {"span": [low, high]}})
    found = rows_of(sweep, tmp_path, [record, RECORDS[1]])[0].positions["here"]
    inside = -size <= low <= size and (high is None or -size <= high <= size)
    expected = list(range(size))[low:high] if inside else []
    assert found.base == found.donor == expected
    assert (found.reason is None) == bool(expected)


@given(st.lists(st.integers(-5, 4), min_size=1, max_size=6))
def test_a_list_is_in_token_order_without_doubles(tmp_path, indices):
    record = RECORDS[0] | {"base": FIVE, "source": FIVE}
    found = rows_of(patched({"here": indices}), tmp_path, [record, RECORDS[1]])[0].positions["here"]
    assert found.base == found.donor == sorted({i % 5 for i in indices})


def test_a_list_may_hold_lists_by_name(words):
    more = {"ends": [0, -1], "inner": ["ends", 2]}
    assert words(["inner", 1], FIVE, FIVE, more=more) == ("a b c e", "a b c e")


def test_a_reason_names_the_member(words):
    reason = words([0, "subject"], FIVE, FIVE, word="q", source_word="q")
    assert reason == "position here (subject): 'q' is not in 'a b c d e'"
    reason = words([0, "subject"], FIVE, FIVE, word="a", source_word="q")
    assert reason == "position here (subject) in the donor: 'q' is not in 'a b c d e'"


# --- unequal lengths --------------------------------------------------------------------------


@pytest.mark.parametrize("here", [NAMES["subject"], ["subject", -1]])
def test_unequal_spans_are_refused_with_the_way_out(words, here):
    reason = words(here)
    assert "spans of unequal length [' Aa', ' Bb', ' Cc'] / [' Xx']" in reason
    assert "align: first, last or mean" in reason


@pytest.mark.parametrize(
    ("here", "way"),
    [
        (0, "{span: [0, 1], align: first}"),
        ("all", "{span: [0, null], align: first}"),
        ({"span": [1, -1]}, "{span: [1, -1], align: first}"),
        ({"span": [-5, 2]}, "{span: [-5, 2], align: first}"),
        ([-1, 2], "{span: [2, 3], align: first}"),
    ],
)
def test_counting_from_the_start_of_unequal_prompts_needs_align(words, here, way):
    reason = words(here, FIVE, SIX)
    assert "prompt and donor have 5 and 6 tokens: ['a'" in reason
    assert way in reason


@pytest.mark.parametrize(
    ("align", "expected"),
    [("first", ("Aa", "Xx")), ("last", ("Cc", "Xx")), ("mean", ("Aa Bb Cc", "Xx"))],
)
def test_align_of_a_text(words, align, expected):
    assert words(NAMES["subject"] | {"align": align}) == expected
    more = {"whole": NAMES["subject"] | {"align": align}}
    tail = {"first": ("Aa far", "Xx far"), "last": ("Cc far", "Xx far")}
    if align != "mean":
        assert words(["whole", -1], more=more) == tail[align]


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ({"span": [0, None], "align": "first"}, ("a b c d e", "u v w x y")),
        ({"span": [0, None], "align": "last"}, ("a b c d e", "v w x y z")),
        ({"span": [0, None], "align": "mean"}, ("a b c d e", "u v w x y z")),
        ({"span": [1, -1], "align": "last"}, ("b c d", "w x y")),
        ({"last": 2, "align": "mean"}, ("d e", "y z")),
        ({"union": [0, -1], "align": "first"}, ("a e", "u z")),
        ({"union": ["all"], "align": "first"}, ("a b c d e", "u v w x y")),
        ({"union": [0, -1], "align": "mean"}, ("a e", "u z")),
    ],
)
def test_align_of_other_forms(words, here, expected):
    assert words(here, FIVE, SIX) == expected


@pytest.mark.parametrize("align", ["first", "last"])
def test_a_short_member_of_a_list_shifts_no_other(words, align):
    """Trimming the whole list would write the donor's `far` to a word of the subject."""
    kept = {"first": "Aa", "last": "Cc"}[align]
    here = {"union": ["subject", -2, -1], "align": align}
    assert words(here) == (f"{kept} is far", "Xx is far")


def test_a_member_keeps_its_own_alignment(words):
    more = {"own": NAMES["subject"] | {"align": "last"}}
    assert words({"union": ["own", -1], "align": "first"}, more=more) == ("Cc far", "Xx far")


def test_a_token_with_two_partners_is_refused_with_both_shown(words):
    reason = words({"union": [0, -5], "align": "first"}, FIVE, SIX)
    assert "token [0] 'a' would meet the donor's tokens [0, 1]" in reason
    reason = words({"union": [0, -1], "align": "first"}, "a b", "a")
    assert "token [0] 'a' would meet the prompt's tokens [0, 1]" in reason


def test_a_mean_of_a_list_takes_all_tokens_of_both(words):
    here = {"union": ["subject", -1, -1], "align": "mean"}
    assert words(here) == ("Aa Bb Cc far", "Xx far")


def test_a_sweep_that_reads_no_donor_trims_nothing(place):
    write = {"site": "resid_post", "layer": 0, "position": "here", "set": 0.0}
    found = place(NAMES["subject"] | {"align": "last"}, writes=[write])
    assert (found.base, found.donor, found.reason) == ([3, 4, 5], [], None)


alignments = st.sampled_from(["first", "last"])


@given(st.lists(st.integers(), unique=True), st.lists(st.integers(), unique=True), alignments)
def test_trimming_keeps_pairs_aligned(ours, theirs, align):
    """The k-th token meets the k-th, from the first or from the last, and none is left alone."""
    base, donor = trimmed(ours, theirs, align)
    step = 1 if align == "first" else -1
    pairs = list(zip(ours[::step], theirs[::step], strict=False))
    assert list(zip(base, donor, strict=True))[::step] == pairs
    assert trimmed(ours, theirs, "mean") == (ours, theirs)


counts = st.tuples(st.integers(1, 3), st.integers(1, 3))


@given(st.lists(counts, min_size=1, max_size=3), alignments, st.integers(0, 2))
def test_a_list_is_the_union_of_its_members_pairs(tmp_path, sizes, align, extra):
    record = dict(RECORDS[0])
    texts = {"base": [], "source": ["so"] * extra}
    positions = {}
    for number, pair in enumerate(sizes):
        for side, size in zip(("base", "source"), pair, strict=True):
            record[f"{side}{number}"] = " ".join(f"{side}{number}x{i}" for i in range(size))
            texts[side] += ["and", record[f"{side}{number}"]]
        spec = {"text": f"base{number}", "donor_text": f"source{number}", "align": align}
        positions[f"p{number}"] = spec
    record |= {side: " ".join(text) for side, text in texts.items()}
    sweep = patched(positions | {"here": [*reversed(positions)]}, measure_at="here")
    together = rows_of(sweep, tmp_path, [record, _filled(record)])[0].positions["here"]
    alone = set()
    for name in positions:
        one = patched(positions | {"here": [name]})
        found = rows_of(one, tmp_path, [record, _filled(record)])[0].positions["here"]
        alone |= set(zip(found.base, found.donor, strict=True))
    assert list(zip(together.base, together.donor, strict=True)) == sorted(alone)


def _filled(record):
    """A usable row with the columns of another."""
    return dict.fromkeys(record, "same") | RECORDS[1]


forms = st.one_of(
    st.integers(-6, 5),
    st.just("all"),
    st.builds(lambda n: {"last": n}, st.integers(1, 6)),
    st.builds(lambda n: {"span": [n, None]}, st.integers(-6, 5)),
    st.builds(lambda a: {"span": [0, -1], "align": a}, st.sampled_from(["first", "last", "mean"])),
    st.sampled_from([NAMES["subject"], NAMES["subject"] | {"align": "mean"}]),
    st.lists(st.integers(-6, 5) | st.just("subject"), min_size=1, max_size=3),
    st.builds(lambda i: {"union": [i, "subject"], "align": "mean"}, st.integers(-6, 5)),
)


@given(forms, st.permutations(range(5)))
def test_a_position_does_not_depend_on_other_rows(tmp_path, here, order):
    sweep = patched(NAMES | {"here": here})
    records = [RECORDS[i] for i in order]
    try:
        found = rows_of(sweep, tmp_path, records)
        alone = [rows_of(sweep, tmp_path, [record])[0] for record in records]
    except UserError:
        assume(False)
    assert [row.positions for row in found] == [row.positions for row in alone]


# --- specs ------------------------------------------------------------------------------------

columns = st.sampled_from(["word", "source_word"])
aligns = st.sampled_from([None, "first", "last", "mean"])
keyed = st.one_of(
    st.fixed_dictionaries({"last": st.integers(1, 3), "align": aligns}),
    st.fixed_dictionaries(
        {"span": st.sampled_from([[0, 2], [0, None], [-2, None]]), "align": aligns}
    ),
    st.fixed_dictionaries(
        {
            "text": columns,
            "donor_text": columns | st.none(),
            "occurrence": st.sampled_from([None, 1, -1]),
            "token": st.sampled_from(["all", "first", "last"]),
            "align": aligns,
        }
    ),
)
plain = st.integers(-3, 3) | st.just("all") | keyed


@given(plain, plain)
def test_different_positions_have_different_specs(one, other):
    sweep = sweep_of(positions={"one": one, "other": other})
    same = sweep.position("one") == sweep.position("other")
    assert (position_spec(sweep, "one") == position_spec(sweep, "other")) == same


@given(plain, st.integers(-3, 3), aligns)
def test_a_list_is_known_by_what_its_names_mean(inner, index, align):
    own = inner.get("align") if isinstance(inner, dict) else None
    assume(own != "mean" or align == "mean")

    def spec(name, member=inner, index=index):
        here = {"union": [name, index], "align": align} if align else [name, index]
        return position_spec(sweep_of(positions={name: member, "here": here}), "here")

    assert spec("one") == spec("another")
    assert spec("one", index=index + 1) != spec("one")
    assert spec("one", member=7) != spec("one")
    assert spec("one")["align"] == align


def test_renaming_a_position_in_a_list_changes_no_point(tmp_path):
    """Case: a point is known by what is written, not by what it is called."""

    def points(name, spec):
        sweep = patched({name: spec, "here": [name, -1]})
        return [point.point_id for point in plan_of(sweep, rows_of(sweep, tmp_path)).points]

    subject = NAMES["subject"] | {"align": "last"}
    assert points("subject", subject) == points("town", subject)
    assert points("subject", subject) != points("subject", subject | {"token": "last"})


def test_every_kind_of_position_says_how_it_is_aligned():
    kinds = [0, "all", {"last": 1}, {"span": [0, 1]}, {"text": "word"}, [0, 1]]
    sweep = sweep_of(positions={f"p{i}": kind for i, kind in enumerate(kinds)})
    for name in [*sweep.positions, "last", "all"]:
        assert position_spec(sweep, name)["align"] is None
    kinds = [{"last": 1}, {"span": [0, 1]}, {"text": "word"}, {"union": [0, 1]}]
    for kind in kinds:
        sweep = sweep_of(positions={"here": kind | {"align": "mean"}})
        assert position_spec(sweep, "here")["align"] == "mean"


# --- what is refused --------------------------------------------------------------------------

MEAN = {"text": "word", "align": "mean"}


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ({"a": {}}, "a: give exactly one of last, span, text, segment, union (given: none)"),
        ({"a": {"text": "word", "last": 2}}, "given: ['last', 'text']"),
        ({"a": {"last": 0}}, "a.last: got 0, expected 1 or more"),
        ({"a": {"last": True}}, "a.last: got True"),
        ({"a": {"last": 2, "occurrence": 1}}, "a: last takes no 'occurrence'"),
        ({"a": {"span": [0, 2], "token": "first"}}, "a: span takes no 'token'"),
        ({"a": {"union": [0], "align": "last", "donor_text": "x"}}, "union takes no 'donor_text'"),
        ({"a": {"span": [3]}}, "a.span: got [3], expected [a, b]"),
        ({"a": {"span": [None, 3]}}, "a.span: got [None, 3], expected [a, b]"),
        ({"a": {"span": [1, 2, 3]}}, "a.span: got [1, 2, 3], expected [a, b]"),
        ({"a": {"span": [3, 3]}}, "a.span: [3, 3] holds no token"),
        ({"a": {"span": [-1, -2]}}, "a.span: [-1, -2] runs backwards; write [-2, -1]"),
        ({"a": {"txt": "word"}}, "a.txt: unknown key (value 'word'), did you mean 'text'?"),
        ({"a": {"text": "word", "align": "mid"}}, "a.align: got 'mid', expected 'first', 'last'"),
        ({"a": []}, "a: got []"),
        ({"a": [[1]]}, "a.0: got [1]"),
        ({"a": [True]}, "a.0: got True"),
        ({"a": [1.5]}, "a.0: got 1.5"),
        ({"a": {"union": [0, 1]}}, "a: without align, write the list alone: [0, 1]"),
        ({"a": ["b"]}, "a: position 'b' is not declared. Positions: a, last, all"),
        ({"a": ["a"]}, "a: the list holds itself (a -> a)"),
        ({"a": [0, "b"], "b": ["c"], "c": ["a"]}, "a: the list holds itself (a -> b -> c -> a)"),
        ({"last": ["last"]}, "last: built in, as -1; call it otherwise"),
        ({"all": {"span": [0, 2]}}, "all: built in, as 'all'; call it otherwise"),
        ({"a": MEAN, "b": ["a", 0]}, "b: 'a' is aligned by its mean"),
        ({"a": MEAN, "b": {"union": ["a"], "align": "last"}}, "b: 'a' is aligned by its mean"),
        ({"a": {"segment": "user"}}, "a: segments are of chat prompts. Set prompts.chat: true"),
        ({"a": {"segment": "generation", "occurrence": 1}}, "generation takes no 'occurrence'"),
    ],
)
def test_a_bad_position_is_one_line(positions, message):
    with pytest.raises(UserError) as caught:
        parse(Sweep, document(positions=positions), "file.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("file.yaml: positions.")
    assert "\n" not in str(caught.value)


def test_a_name_may_be_used_twice_without_a_cycle():
    sweep_of(positions={"a": ["b", "c"], "b": ["c"], "c": [0]})
    sweep_of(positions={"a": MEAN, "b": {"union": ["a", 0], "align": "mean"}})
    with pytest.raises(ValidationError):
        sweep_of(positions={"z": ["a"], "a": ["b"], "b": ["a"]})


def test_the_document_survives_its_own_dump():
    positions = {"a": {"span": [0, None], "align": "mean"}, "b": {"last": 2}, "c": ["b", 0]}
    sweep = sweep_of(positions=positions)
    assert Sweep.model_validate(sweep.model_dump(mode="json")) == sweep


# --- tables and explanations ------------------------------------------------------------------


def test_a_table_holds_the_alignment(tmp_path):
    positions = {"here": {"last": 2, "align": "mean"}}
    rows = rows_of(patched(positions), tmp_path)
    assert from_table(to_table(rows)) == rows
    assert to_table(rows)["align.here"].to_pylist() == ["mean"] * len(rows)
    assert to_table(rows)["align.last"].to_pylist() == [None] * len(rows)


@pytest.mark.parametrize(
    ("align", "shown"),
    [
        ("first", "position here: [3] | Aa|  <-  donor by first [3] | Xx|"),
        ("mean", "position here: [3, 4, 5] | Aa| Bb| Cc|  <-  mean of donor [3] | Xx|"),
    ],
)
def test_an_explanation_shows_pairs_as_tokens(tmp_path, align, shown):
    mine = {"base": BASE, "source": SOURCE, "word": "Aa Bb Cc", "source_word": "Xx"}
    answerless = {key: value for key, value in document()["prompts"].items() if key != "answers"}
    kl = {"kl": {"kind": "kl"}}
    subject = NAMES["subject"] | {"align": align}
    sweep = patched({"here": subject}, prompts=answerless, measures=kl)
    row, *_ = rows_of(sweep, tmp_path, [RECORDS[0] | mine, RECORDS[1]])
    assert f"  {shown}" in list(_row(row, "last", None))


# --- the manual -------------------------------------------------------------------------------


def test_the_positions_of_the_manual_are_allowed(repository):
    text = (repository / "config" / "README.md").read_text(encoding="utf-8")
    blocks = [yaml.safe_load(b) for b in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    found = {name: spec for b in blocks for name, spec in b.get("positions", {}).items()}
    prompts = document()["prompts"] | {"chat": True}
    sweep = parse(Sweep, document(positions=found, prompts=prompts), "config/README.md")
    forms = {spec.form for spec in sweep.positions.values() if isinstance(spec, Tokens)}
    assert forms == set(FORMS)
    assert {list, int, str} <= {type(spec) for spec in sweep.positions.values()}


# --- which positions need a partner -----------------------------------------------------------


def test_only_positions_read_in_the_donor_need_a_partner_there(tmp_path):
    """Tokens that are patched from the prompt's own run may have no counterpart in the donor."""
    longer = RECORDS[0] | {"source": "Well then " + RECORDS[0]["source"]}
    own = {"site": "mlp_out", "layer": 1, "position": "all", "set": {"patch": "text"}}
    theirs = {"site": "mlp_out", "layer": 2, "position": "last", "set": "donor"}
    sweep = sweep_of(axes={}, writes=[own, theirs], on_bad_row="exclude")
    (row,) = rows_of(sweep, tmp_path, [longer])
    assert row.positions["all"].reason is None
    assert row.positions["all"].base == list(range(len(row.ids)))
    assert len(row.donor_ids) != len(row.ids)
    both = sweep_of(axes={}, writes=[own | {"set": "donor"}, theirs], on_bad_row="exclude")
    (row,) = rows_of(both, tmp_path, [longer])
    assert "prompt and donor have" in row.positions["all"].reason
