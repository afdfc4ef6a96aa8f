"""Prompt rows, mostly with the tokenizer of the real model: ids, positions, answers, refusals."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples import (
    ANSWERS,
    RECORDS,
    SUBJECT,
    WordTokenizer,
    document,
    plan_of,
    record,
    rows_of,
    sweep_of,
    write_csv,
    write_jsonl,
)
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from nnsweep.errors import UserError
from nnsweep.prompts import columns_of, from_table, prepare_rows, read_records, to_table

CAPITAL = {
    "row_id": "austria",
    "base": "The capital of Austria is",
    "source": "The capital of France is",
    "word": "Austria",
    "source_word": "France",
    "base_answer": "Vienna",
    "source_answer": "Paris",
}
OTHER = CAPITAL | {"row_id": "norway", "base": "The capital of Norway is", "word": "Norway"}


@pytest.fixture
def prepare(tokenizer, tmp_path):
    """Rows of some records under the example sweep, changed."""

    def run(*records, context=0, using=None, **changes):
        sweep = _used(**{"on_bad_row": "exclude"} | changes)
        path = write_csv(tmp_path / "prompts.csv", records)
        return prepare_rows(sweep, path, using or tokenizer, context)

    return run


def _used(position="subject", **changes):
    """A sweep that patches one position."""
    write = {"site": "resid_post", "layer": 0, "position": position, "set": "donor"}
    return sweep_of(**{"axes": {}, "writes": [write]} | changes)


@pytest.fixture
def place(prepare):
    """Base and donor tokens of one declared position in one row, or the reason against it."""

    def find(spec, **changes):
        row, _ = prepare(CAPITAL | changes, OTHER, positions={"subject": spec})
        found = row.positions["subject"]
        if found.reason:
            return found.reason
        return [row.tokens[i] for i in found.base], [row.donor_tokens[i] for i in found.donor]

    return find


def refusal(call):
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- ids --------------------------------------------------------------------------------------


def test_ids_are_the_tokenizers_own(prepare, tokenizer):
    row, _ = prepare(CAPITAL, OTHER)
    assert row.ids == tokenizer(CAPITAL["base"])["input_ids"]
    assert row.donor_ids == tokenizer(CAPITAL["source"])["input_ids"]
    assert row.tokens == ["The", " capital", " of", " Austria", " is"]
    assert "".join(row.donor_tokens) == CAPITAL["source"]


def test_a_row_does_not_depend_on_its_neighbours(prepare):
    longer = OTHER | {
        "base": "We all know that the capital of Norway is",
        "source": "a",
        "word": "",
    }
    alone, _ = prepare(CAPITAL, OTHER)
    beside, _ = prepare(CAPITAL, longer)
    assert alone == beside


# --- positions --------------------------------------------------------------------------------


def test_a_span_is_found_in_each_prompt(place):
    assert place(SUBJECT) == ([" Austria"], [" France"])


def test_a_span_of_several_tokens_is_whole_or_its_first_or_last(place):
    rows = {
        "base": "The mayor of New York is",
        "word": "New York",
        "source": "The mayor of Los Angeles is",
        "source_word": "Los Angeles",
    }
    assert place(SUBJECT, **rows) == ([" New", " York"], [" Los", " Angeles"])
    assert place(SUBJECT | {"token": "first"}, **rows) == ([" New"], [" Los"])
    assert place(SUBJECT | {"token": "last"}, **rows) == ([" York"], [" Angeles"])


def test_spans_of_unequal_length_do_not_correspond(place):
    rows = {"base": "The mayor of New York is", "word": "New York"}
    reason = place(SUBJECT, **rows)
    assert "[' New', ' York'] / [' France']" in reason
    assert place(SUBJECT | {"token": "last"}, **rows) == ([" York"], [" France"])


def test_donor_text_defaults_to_the_text(place):
    both = {"base": "The capital of Austria is", "source": "The river of Austria was"}
    assert place({"text": "word"}, **both) == ([" Austria"], [" Austria"])


def test_a_text_found_twice_needs_an_occurrence(place):
    twice = {"base": "Austria is near Austria they say"}
    reason = place(SUBJECT, **twice)
    assert "'Austria' is 2 times in 'Austria is near Austria they say'" in reason
    assert place(SUBJECT | {"occurrence": 3}, **twice).endswith(f"in '{twice['base']}'")
    assert place(SUBJECT | {"occurrence": -3}, **twice).endswith(f"in '{twice['base']}'")


@pytest.mark.parametrize(("occurrence", "expected"), [(1, 1), (2, 3), (-1, 3), (-2, 1)])
def test_occurrences_count_from_both_ends(prepare, occurrence, expected):
    spec = {"text": "word", "donor_text": "source_word", "occurrence": occurrence}
    text = {"base": "So Austria and Austria again", "source": "So France and France again"}
    row, _ = prepare(CAPITAL | text, OTHER, positions={"subject": spec})
    assert row.positions["subject"].base == [expected]
    assert row.positions["subject"].donor == [expected]


def test_occurrence_zero_is_refused():
    with pytest.raises(ValueError, match="count from 1"):
        sweep_of(positions={"subject": SUBJECT | {"occurrence": 0}})


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("Aust", "'Aust' is only a part of the token ' Austria'"),
        ("stria", "'stria' is only a part of the token ' Austria'"),
        ("capital of Aus", "'capital of Aus' is only a part of the token ' Austria'"),
        ("Nowhere", "'Nowhere' is not in 'The capital of Austria is'"),
        ("austria", "'austria' is not in 'The capital of Austria is'"),
        ("", "the text to find is empty"),
    ],
)
def test_a_text_that_is_no_whole_tokens_is_not_mapped_to_any(place, word, reason):
    assert place(SUBJECT, word=word) == f"position subject: {reason}"


@pytest.mark.parametrize("word", [" Austria", "capital of Austria", "The", "is"])
def test_white_space_before_a_word_belongs_to_its_token(prepare, word):
    spec = {"text": "word", "donor_text": "word"}
    text = {"word": word, "source": CAPITAL["base"]}
    row, _ = prepare(CAPITAL | text, OTHER, positions={"subject": spec})
    found = "".join(row.tokens[i] for i in row.positions["subject"].base)
    assert found.strip() == word.strip()


def test_a_character_of_several_tokens_is_covered_whole(prepare):
    text = {"base": "In 東京 it is", "source": "In 東京 it is", "word": "京", "source_word": "京"}
    row, _ = prepare(CAPITAL | text, OTHER)
    found = row.positions["subject"].base
    assert len(found) > 1
    assert found == list(range(found[0], found[-1] + 1))


@pytest.mark.parametrize(("index", "expected"), [(0, 0), (2, 2), (-1, 4), (-5, 0)])
def test_an_index_counts_unpadded_tokens(prepare, index, expected):
    longer = OTHER | {"base": "We all know that the capital of Norway is"}
    row, _ = prepare(CAPITAL, longer, positions={"subject": index})
    assert (row.positions["subject"].base, row.positions["subject"].donor) == (
        [expected],
        [expected],
    )


@pytest.mark.parametrize("index", [5, -6])
def test_an_index_outside_the_prompt_shows_the_tokens(place, index):
    reason = place(index)
    assert f"index {index} is outside the 5 tokens ['The', ' capital'" in reason


def test_a_missing_name_is_rejected_and_not_mapped_to_the_end(prepare):
    """Case C4: the second prompt has no "Tower"."""
    tower = CAPITAL | {"row_id": "a", "base": "The Eiffel Tower is in the city of"}
    colosseum = CAPITAL | {"row_id": "b", "base": "The Colosseum is in the city of"}
    records = [row | {"source": row["base"], "word": "Tower"} for row in (tower, colosseum)]
    positions = {"subject": {"text": "word"}, "start": 0}
    first, second = prepare(*records, positions=positions)
    assert first.tokens[first.positions["subject"].base[0]] == " Tower"
    assert second.positions["subject"].base == []
    assert "'Tower' is not in 'The Colosseum" in second.positions["subject"].reason
    message = refusal(lambda: prepare(*records, positions=positions, on_bad_row="refuse"))
    assert "1 of 2 rows" in message
    assert "b: position subject: 'Tower' is not in 'The Colosseum is in the city of'" in message


ZEBEDIAH = CAPITAL | {"base": "When Alice and Bob went", "source": "When Zebediah and Bob went"}


@pytest.mark.parametrize("spec", [0, 1, "all"])
def test_positions_from_the_start_need_equal_lengths(place, spec):
    """Case C7: 5 and 8 tokens."""
    reason = place(spec, base=ZEBEDIAH["base"], source=ZEBEDIAH["source"])
    assert "prompt and donor have 5 and 8 tokens" in reason
    assert "['When', ' Alice', ' and', ' Bob', ' went']" in reason
    assert "['When', ' Z', 'eb', 'edia', 'h', ' and', ' Bob', ' went']" in reason


def test_positions_from_the_end_and_by_text_take_unequal_lengths(prepare, place):
    row, _ = prepare(ZEBEDIAH, OTHER, positions={"subject": -1})
    assert (row.positions["subject"].base, row.positions["subject"].donor) == ([4], [7])
    shared = {"base": ZEBEDIAH["base"], "source": ZEBEDIAH["source"], "word": "Bob"}
    assert place({"text": "word"}, **shared) == ([" Bob"], [" Bob"])


def test_equal_lengths_are_the_control(prepare):
    tower = CAPITAL | {
        "base": "The Eiffel Tower is in the city of",
        "source": "The Colosseum is in the city of",
    }
    row, _ = prepare(tower, OTHER, positions={"subject": "all"})
    assert row.positions["subject"].base == row.positions["subject"].donor == list(range(9))


@given(
    st.lists(st.sampled_from(["ab", "cd", "ef", "longer"]), min_size=1, max_size=8),
    st.integers(-10, 9),
)
def test_an_index_is_pythons(tmp_path, words, index):
    text = " ".join(words)
    record = RECORDS[0] | {"base": text, "source": text}
    sweep = _used(positions={"subject": index}, on_bad_row="exclude")
    place = rows_of(sweep, tmp_path, [record, RECORDS[1]])[0].positions["subject"]
    if -len(words) <= index < len(words):
        assert place.base == place.donor == [range(len(words))[index]]
        assert place.reason is None
    else:
        assert place.base == []
        assert "outside" in place.reason


@given(st.data())
def test_a_span_covers_exactly_its_words(tmp_path, data):
    words = data.draw(st.permutations(["one", "two", "three", "four", "five"]))
    low = data.draw(st.integers(0, 4))
    high = data.draw(st.integers(low + 1, 5))
    text = " ".join(words)
    record = RECORDS[0] | {"base": text, "source": text, "word": " ".join(words[low:high])}
    sweep = _used(positions={"subject": {"text": "word"}}, on_bad_row="exclude")
    place = rows_of(sweep, tmp_path, [record, RECORDS[1]])[0].positions["subject"]
    assert place.base == place.donor == list(range(low, high))


# --- answers ----------------------------------------------------------------------------------


def test_an_answer_is_encoded_after_its_prompt(prepare, tokenizer):
    """Case C6, the good half: "The capital is" and " Paris"."""
    row, _ = prepare(CAPITAL, OTHER)
    joint = tokenizer(CAPITAL["base"] + " Paris")["input_ids"]
    assert row.answers["target"] == joint[len(row.ids) :] == tokenizer(" Paris")["input_ids"]
    assert row.answer_texts == {"target": "Paris", "foil": "Vienna"}


def test_an_answer_may_bring_its_own_space(prepare):
    plain, _ = prepare(CAPITAL, OTHER)
    spaced, _ = prepare(CAPITAL | {"source_answer": " Paris"}, OTHER)
    assert spaced.answers == plain.answers


def test_the_prefix_is_declared(prepare, tokenizer):
    prompts = document()["prompts"] | {"answer_prefix": ""}
    row, _ = prepare(
        CAPITAL | {"source_answer": "ly", "base_answer": "ness"}, OTHER, prompts=prompts
    )
    assert row.answers["target"] == tokenizer("ly")["input_ids"]


def test_a_trailing_space_is_refused(prepare):
    """Case C6, the bad half: the space belongs to the answer's token."""
    row, _ = prepare(CAPITAL | {"base": "The capital of Austria is "}, OTHER)
    assert "ends in white space" in row.reason
    assert "' is', ' ']" in row.reason


def test_an_answer_that_changes_the_prompts_tokens_is_refused(prepare):
    text = {"base": "The capital of Aus", "word": "capital", "source_answer": "tria"}
    prompts = document()["prompts"] | {"answer_prefix": ""}
    spec, good = {"text": "word"}, OTHER | {"source_answer": "ly", "base_answer": "ness"}
    row, _ = prepare(CAPITAL | text, good, prompts=prompts, positions={"subject": spec})
    assert "answer target 'tria': changes the tokens of the prompt" in row.reason
    assert "' Austria'" in row.reason


@pytest.mark.parametrize(
    ("answer", "tokens"), [("Ankara", "[' Ank', 'ara']"), ("Bangkok", "[' Bang', 'kok']")]
)
def test_an_answer_of_several_tokens_is_never_cut(prepare, answer, tokens):
    row, _ = prepare(CAPITAL | {"source_answer": answer}, OTHER)
    assert f"answer target '{answer}': has 2 tokens {tokens}" in row.reason


def test_answers_that_share_their_first_token_are_refused(prepare):
    row, _ = prepare(CAPITAL | {"source_answer": "Vienna"}, OTHER)
    assert "answers ['target', 'foil'] begin with the same token" in row.reason


def test_equal_answers_matter_only_to_a_measure_that_compares_them(prepare):
    measures = {"match": {"kind": "match", "answer": "target"}}
    row, _ = prepare(CAPITAL | {"source_answer": "Vienna"}, OTHER, measures=measures)
    assert row.reason is None


@pytest.mark.parametrize("answer", ["", "  "])
def test_an_empty_answer_is_refused(prepare, answer):
    row, _ = prepare(CAPITAL | {"source_answer": answer}, OTHER)
    assert f"answer target '{answer}': is empty" in row.reason


# --- unusable prompts -------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " ", "\t"])
def test_an_empty_prompt_is_refused(prepare, text):
    assert prepare(CAPITAL | {"base": text}, OTHER)[0].reason == "the prompt is empty"
    assert prepare(CAPITAL | {"source": text}, OTHER)[0].reason == "donor: the prompt is empty"


def test_an_unused_donor_may_be_empty(prepare):
    write = {"site": "resid_post", "layer": 0, "position": "last", "set": 0.0}
    assert prepare(CAPITAL | {"source": ""}, OTHER, writes=[write])[0].reason is None


def test_a_prompt_longer_than_the_context_is_refused(prepare):
    short = OTHER | {"base": "In Norway", "source": "In France"}
    long, fits = prepare(CAPITAL, short, context=4)
    assert long.reason == "the prompt has 5 tokens, the model takes 4"
    assert fits.reason is None
    assert prepare(CAPITAL, short, context=5)[0].reason is None


@pytest.fixture(scope="module")
def with_bos(tokenizer, tmp_path_factory):
    """The real tokenizer, made to put a BOS token first."""
    folder = tmp_path_factory.mktemp("bos")
    tokenizer.save_pretrained(folder)
    made = PreTrainedTokenizerFast.from_pretrained(folder)
    bos = [(made.bos_token, made.bos_token_id)]
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{made.bos_token} $A", special_tokens=bos
    )
    return made


def test_a_bos_token_shifts_positions_and_not_answers(prepare, with_bos):
    plain, _ = prepare(CAPITAL, OTHER)
    row, _ = prepare(CAPITAL, OTHER, using=with_bos)
    assert row.reason is None
    assert row.ids == [with_bos.bos_token_id, *plain.ids]
    assert row.answers == plain.answers
    assert row.positions["subject"].base == [plain.positions["subject"].base[0] + 1]


def test_a_doubled_bos_is_refused(prepare, with_bos):
    text = with_bos.bos_token + CAPITAL["base"]
    row, _ = prepare(CAPITAL | {"base": text}, OTHER, using=with_bos)
    assert "begins with two BOS tokens" in row.reason


# --- policies ---------------------------------------------------------------------------------


def test_refuse_names_the_rows_and_says_what_to_do(prepare):
    bad = [CAPITAL | {"row_id": f"bad{i}", "source_answer": "Ankara"} for i in range(5)]
    message = refusal(lambda: prepare(*bad, OTHER, on_bad_row="refuse"))
    assert "5 of 6 rows cannot be used" in message
    assert "bad0: answer target 'Ankara'" in message
    assert "on_bad_row: exclude" in message


def test_exclude_keeps_every_row_in_its_place(prepare):
    third = CAPITAL | {"row_id": "third", "base_answer": "Rome"}
    rows = prepare(CAPITAL, OTHER | {"source_answer": "Ankara"}, third)
    assert [row.row_id for row in rows] == ["austria", "norway", "third"]
    assert [row.reason is None for row in rows] == [True, False, True]


def test_no_usable_row_is_refused_under_every_policy(prepare):
    for policy in ("refuse", "exclude"):
        refusal(lambda policy=policy: prepare(CAPITAL | {"base": ""}, on_bad_row=policy))


def test_a_row_name_given_twice_is_refused(prepare):
    message = refusal(lambda: prepare(CAPITAL, CAPITAL | {"base": OTHER["base"]}))
    assert "row_id 'austria' stands twice" in message


def test_a_row_that_repeats_another_is_left_out(prepare):
    first, second = prepare(CAPITAL, CAPITAL | {"row_id": "again"})
    assert first.reason is None
    assert "austria" in second.reason


def test_messages_stay_on_one_line_when_prompts_do_not(prepare):
    text = {"base": "First line.\nThe capital of Austria is", "word": "Nowhere"}
    message = refusal(lambda: prepare(CAPITAL | text, OTHER, on_bad_row="refuse"))
    assert "Nowhere" in message


# --- row keys ---------------------------------------------------------------------------------


def key_of(prepare, **changes):
    return prepare(CAPITAL | changes, OTHER)[0].row_key


def test_a_row_is_known_by_its_contents_not_by_its_name_or_place(prepare):
    key = key_of(prepare)
    assert key_of(prepare, row_id="other") == key
    assert prepare(OTHER, CAPITAL)[1].row_key == key


def test_rows_of_the_same_tokens_are_told_apart_in_any_order(prepare):
    """One prompt with two foils: each row keeps its key when the file is reordered."""
    other = CAPITAL | {"row_id": "other", "base_answer": "Rome"}
    orders = [(CAPITAL, other, OTHER), (OTHER, other, CAPITAL)]
    first, second = ({row.row_id: row.row_key for row in prepare(*order)} for order in orders)
    assert len(set(first.values())) == 3
    assert first == second


def test_a_repeated_row_changes_no_key(prepare):
    """The repetition is left out; what is left is what was there without it."""
    plain = prepare(CAPITAL, OTHER)
    first, repeated, last = prepare(CAPITAL, CAPITAL | {"row_id": "again"}, OTHER)
    assert repeated.reason
    assert [first.row_key, last.row_key] == [row.row_key for row in plain]


@pytest.mark.parametrize(
    "change",
    [
        {"base": "The capital of Austria was"},
        {"source": "The capital of France was"},
    ],
)
def test_whatever_decides_a_value_changes_the_key(prepare, change):
    assert key_of(prepare, **change) != key_of(prepare)


# --- files ------------------------------------------------------------------------------------

ODD = [
    CAPITAL | {"row_id": "007", "base_answer": "NA"},
    OTHER | {"row_id": "1e5", "base_answer": "true"},
    CAPITAL | {"row_id": "null", "base": 'The "capital", of Austria is', "base_answer": "nan"},
]


def write_parquet(path, records):
    pq.write_table(pa.Table.from_pylist(list(records)), path)
    return path


WRITERS = {"csv": write_csv, "jsonl": write_jsonl, "parquet": write_parquet}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_file_keeps_text_as_it_is(tmp_path, kind):
    path = WRITERS[kind](tmp_path / f"rows.{kind}", ODD)
    assert read_records(path, list(CAPITAL)) == ODD


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    sweep = _used(on_bad_row="exclude")
    results = [
        prepare_rows(sweep, WRITERS[kind](tmp_path / f"rows.{kind}", ODD), WordTokenizer(), 0)
        for kind in WRITERS
    ]
    assert results[0] == results[1] == results[2]


cell = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)


@given(st.lists(st.fixed_dictionaries({"row_id": cell, "base": cell}), min_size=1, max_size=4))
def test_any_text_survives_every_kind_of_file(tmp_path, records):
    for kind, write in WRITERS.items():
        path = write(tmp_path / f"rows.{kind}", records)
        assert read_records(path, ["row_id", "base"]) == records


def test_a_csv_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = write_csv(tmp_path / "rows.csv", ODD)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_records(path, list(CAPITAL)) == ODD


def test_a_line_break_in_a_csv_cell_is_kept(tmp_path):
    records = [CAPITAL | {"base": "First line.\nSecond line"}]
    path = write_csv(tmp_path / "rows.csv", records)
    assert read_records(path, list(CAPITAL)) == records


@pytest.mark.parametrize("mark", ["\u2028", "\u0085", "\x0c"])
def test_only_a_line_feed_ends_a_json_line(tmp_path, mark):
    records = [CAPITAL | {"base": f"First{mark}second"}]
    lines = [json.dumps(item, ensure_ascii=mark < " ") for item in records]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    assert read_records(path, list(CAPITAL)) == records


def test_a_key_that_only_later_json_lines_have_is_not_lost(tmp_path):
    nameless = {key: value for key, value in CAPITAL.items() if key != "row_id"}
    path = write_jsonl(tmp_path / "rows.jsonl", [nameless, OTHER])
    rows = prepare_rows(_used(on_bad_row="exclude"), path, WordTokenizer(), 0)
    assert rows[1].row_id == OTHER["row_id"]


def test_rows_without_names_are_counted(prepare):
    nameless = [{k: v for k, v in r.items() if k != "row_id"} for r in (CAPITAL, OTHER)]
    assert [row.row_id for row in prepare(*nameless)] == ["row00000", "row00001"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", b""),
        ("rows.csv", b"row_id,base\n"),
        ("rows.csv", b"row_id,base\nx\n"),
        ("rows.csv", b"row_id,base\nx,\xff\n"),
        ("rows.csv", b"row_id,base,base\nx,y,z\n"),
        ("rows.csv", b"row_id,text\nx,y\n"),
        ("rows.jsonl", b""),
        ("rows.jsonl", b"{"),
        ("rows.jsonl", b"[1, 2]\n"),
        ("rows.jsonl", b"3\n"),
        ("rows.parquet", b"PAR1"),
        ("rows.txt", b"base\nx\n"),
        ("rows", b"base\nx\n"),
    ],
)
def test_an_unreadable_file_is_one_line(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    bare = {"file": "rows", "text": "base"}
    measures = {"kl": {"kind": "kl"}}
    sweep = sweep_of(axes={}, writes=[], prompts=bare, positions={}, measures=measures)
    assert name in refusal(lambda: prepare_rows(sweep, path, WordTokenizer(), 0))


def test_a_missing_file_is_one_line(tmp_path):
    assert "does not exist" in refusal(lambda: read_records(tmp_path / "none.csv", ["base"]))


def test_a_missing_column_is_named_with_the_columns_there_are(tmp_path):
    path = write_csv(tmp_path / "rows.csv", [{"base": "x", "sorce": "y"}])
    message = refusal(lambda: read_records(path, ["base", "source"]))
    assert "no column 'source'. Columns: base, sorce." in message


def test_columns_are_those_the_sweep_names():
    assert columns_of(sweep_of()) == [
        "row_id",
        "base",
        "source",
        *ANSWERS.values(),
        "word",
        "source_word",
    ]


def test_a_table_holds_everything_of_the_rows(prepare):
    rows = prepare(
        CAPITAL, OTHER | {"source_answer": "Ankara"}, OTHER | {"row_id": "x", "word": "z"}
    )
    assert from_table(to_table(rows)) == rows


# --- edges ------------------------------------------------------------------------------------

CUT = {"site": "attn_scores", "layer": 0, "heads": "all", "knockout": True}
EAGER = {"model": {"id": "any", "attention": "eager"}, "axes": {}}


def cutting(position, keys, **changes):
    write = CUT | {"position": position, "keys": keys}
    return sweep_of(**EAGER | {"writes": [write]} | changes)


def test_edges_that_no_query_sees_exclude_a_row_with_a_reason(tmp_path):
    """The subject is token 3 of the short prompts and token 7 of the long ones."""
    positions = {"subject": SUBJECT, "sixth": 5}
    records = [RECORDS[2], RECORDS[4] | {"base": "Delhi is a large and old town", "word": "Delhi"}]
    sweep = cutting("sixth", "subject", positions=positions, on_bad_row="exclude")
    far, near = rows_of(sweep, tmp_path, records)
    reason = far.positions["sixth<-subject"].reason
    assert "the key tokens [7] come after the query tokens [5]" in reason
    assert near.positions["sixth<-subject"].reason is None
    assert [point.rows for point in plan_of(sweep, [far, near]).points] == [(1,)]
    with pytest.raises(UserError, match=r"1 of 2 rows cannot be used.*key tokens \[7\]"):
        rows_of(cutting("sixth", "subject", positions=positions), tmp_path, records)


@pytest.mark.parametrize("policy", ["refuse", "exclude"])
def test_edges_that_no_row_has_are_refused_at_once(tmp_path, policy):
    sweep = cutting("second", "last", on_bad_row=policy)
    with pytest.raises(UserError, match="no row can be used with edges second<-last"):
        rows_of(sweep, tmp_path)


def test_of_several_keys_those_that_are_seen_are_enough(tmp_path):
    positions = {"second": 1, "ends": [0, -1]}
    rows = rows_of(cutting("second", "ends", positions=positions), tmp_path)
    assert all(row.positions["second<-ends"].reason is None for row in rows)


@pytest.mark.parametrize(
    ("more", "works"),
    [
        ({}, False),
        ({"exclude": [{"query": "second", "key": "last"}]}, True),
        ({"zip": [["query", "key"]]}, True),
    ],
)
def test_only_edges_that_some_point_has_are_looked_at(tmp_path, more, works):
    axes = {"query": ["second", "last"], "key": ["second", "last"]}
    sweep = cutting("$query", "$key", axes=axes, **more)
    if works:
        assert all(
            not any(p.reason for p in r.positions.values()) for r in rows_of(sweep, tmp_path)
        )
    else:
        with pytest.raises(UserError, match="second<-last"):
            rows_of(sweep, tmp_path)


def test_edges_of_the_donor_are_looked_at_in_the_donor(tmp_path):
    """The subject stands before the third token of the prompt, and behind it in the donor."""
    records = [record(0, "Oslo is a town which is", "We all know that {} is", "Oslo", "Rome")]
    positions = {"subject": SUBJECT, "third": {"span": [2, 3], "align": "first"}}
    cut = CUT | {"position": "third", "keys": "subject"}
    runs = {"cut": {"prompt": "donor", "writes": [cut]}}
    patch = {"site": "resid_post", "layer": 2, "position": "last", "set": {"patch": "cut"}}
    for writes, chains in (([cut], {}), ([patch], runs)):
        sweep = sweep_of(
            **EAGER, positions=positions, writes=writes, runs=chains, on_bad_row="exclude"
        )
        if chains:
            with pytest.raises(UserError, match=r"in the donor: the key tokens \[4\]"):
                rows_of(sweep, tmp_path, records)
        else:
            assert rows_of(sweep, tmp_path, records)[0].positions["third<-subject"].reason is None
