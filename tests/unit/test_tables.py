"""Files: the same bytes for the same values, the declared columns, all or nothing."""

import json
import os
import stat

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsweep.errors import NnsweepError
from nnsweep.tables import (
    digest,
    file_digest,
    part_schema,
    points_schema,
    read_json,
    read_table,
    summary_schema,
    values_schema,
    write_atomically,
    write_json,
    write_table,
)

AXES = {"layer": "index", "position": "string", "scale": "number"}
SCHEMA = values_schema(AXES, ["logit_diff"])

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
row = st.fixed_dictionaries(
    {
        "point_id": text,
        "layer": st.none() | st.integers(0, 2**31 - 1),
        "position": text,
        "scale": st.floats(allow_nan=False),
        "row_id": text,
        "status": st.sampled_from(["ok", "excluded", "error"]),
        "reason": st.none() | text,
        "logit_diff": st.none() | st.floats(width=32, allow_nan=False),
    }
)


def table_of(rows, schema=SCHEMA):
    return pa.Table.from_pylist(rows, schema=schema)


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


# --- bytes ------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.lists(row, max_size=6))
def test_a_table_reads_as_it_was_written(tmp_path, rows):
    path = tmp_path / "values.parquet"
    write_table(path, table_of(rows), SCHEMA)
    assert read_table(path, SCHEMA).to_pylist() == rows


@settings(max_examples=20)
@given(st.lists(row, max_size=6), st.integers(1, 6))
def test_the_same_values_are_the_same_bytes(tmp_path, rows, cut):
    """However the table was put together, and whatever a library noted on it."""
    one, two = tmp_path / "one.parquet", tmp_path / "two.parquet"
    write_table(one, table_of(rows), SCHEMA)
    pieces = [table_of(rows[:cut]), table_of(rows[cut:])]
    noted = pa.concat_tables(pieces).replace_schema_metadata({"pandas": "{}", "host": "here"})
    write_table(two, noted, SCHEMA)
    assert one.read_bytes() == two.read_bytes()
    first = one.read_bytes()
    write_table(one, table_of(rows), SCHEMA)
    assert one.read_bytes() == first


def test_an_empty_and_an_all_null_column_keep_their_types(tmp_path):
    path = tmp_path / "values.parquet"
    write_table(path, table_of([]), SCHEMA)
    assert pq.read_schema(path).equals(SCHEMA)
    wide = table_of([dict.fromkeys(SCHEMA.names)])
    write_table(path, wide, SCHEMA)
    assert pq.read_schema(path).equals(SCHEMA)


def test_null_and_not_a_number_stay_apart(tmp_path):
    schema = pa.schema([("x", pa.float32())])
    write_table(tmp_path / "t.parquet", pa.table({"x": [None, float("nan")]}, schema), schema)
    first, second = read_table(tmp_path / "t.parquet")["x"].to_pylist()
    assert first is None
    assert second != second


# --- columns ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (part_schema(["a", "b"]), ["point_key", "row_key", "status", "reason", "a", "b"]),
        (
            points_schema(AXES),
            ["point_id", "point_key", "layer", "position", "scale", "writes", "inert_rows"],
        ),
        (
            values_schema(AXES, ["a"]),
            ["point_id", "layer", "position", "scale", "row_id", "status", "reason", "a"],
        ),
        (
            summary_schema(AXES),
            ["point_id", *AXES, "measure", "n", "mean", "std", "ci_low", "ci_high"],
        ),
    ],
)
def test_published_columns(schema, expected):
    assert schema.names == expected


def test_published_types():
    types = {field.name: str(field.type) for field in SCHEMA}
    assert types == {
        "point_id": "string",
        "layer": "int32",
        "position": "string",
        "scale": "double",
        "row_id": "string",
        "status": "string",
        "reason": "string",
        "logit_diff": "float",
    }


@pytest.mark.parametrize(
    "columns",
    [{"a": [1]}, {"b": [1], "a": [1]}, {"a": [1], "b": [1], "c": [1]}, {"a": [1], "B": [1]}],
)
def test_other_columns_are_not_written(tmp_path, columns):
    schema = pa.schema([("a", pa.int32()), ("b", pa.int32())])
    with pytest.raises(NnsweepError, match=r"t\.parquet: columns"):
        write_table(tmp_path / "t.parquet", pa.table(columns), schema)
    assert left_in(tmp_path) == []


def test_a_value_that_does_not_fit_is_not_written(tmp_path):
    schema = pa.schema([("a", pa.int32())])
    with pytest.raises(pa.ArrowInvalid):
        write_table(tmp_path / "t.parquet", pa.table({"a": [2**40]}), schema)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    "other",
    [
        pa.schema([("a", pa.int64())]),
        pa.schema([("b", pa.int32())]),
        pa.schema([("a", pa.int32()), ("b", pa.int32())]),
    ],
)
def test_a_file_with_other_columns_is_refused(tmp_path, other):
    path = tmp_path / "t.parquet"
    schema = pa.schema([("a", pa.int32())])
    write_table(path, pa.table({"a": [1]}), schema)
    with pytest.raises(NnsweepError, match=r"t\.parquet.*Delete it and run again"):
        read_table(path, other)


@pytest.mark.parametrize("content", [None, b"", b"PAR1", b"not a table at all, by any means"])
def test_an_unreadable_table_is_named_with_what_to_do(tmp_path, content):
    path = tmp_path / "t.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        NnsweepError, match=r"t\.parquet: not a readable table.*run again"
    ) as caught:
        read_table(path)
    assert "\n" not in str(caught.value)


def test_a_truncated_table_is_unreadable(tmp_path):
    path = tmp_path / "t.parquet"
    write_table(path, table_of([]), SCHEMA)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(NnsweepError, match="not a readable table"):
        read_table(path)


# --- all or nothing ---------------------------------------------------------------------------


def broken(part):
    part.write_text("half")
    raise RuntimeError("the writer broke")


def test_a_broken_writer_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="broke"):
        write_atomically(tmp_path / "new" / "file", broken)
    assert left_in(tmp_path / "new") == []


def test_a_broken_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda part: part.write_text("old"))
    with pytest.raises(RuntimeError, match="broke"):
        write_atomically(path, broken)
    assert path.read_text() == "old"
    assert left_in(tmp_path) == ["file"]


def test_the_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "file"

    def write(part):
        assert not path.exists()
        assert part.parent == path.parent
        part.write_text("whole")
        assert not path.exists()

    write_atomically(path, write)
    assert path.read_text() == "whole"
    assert left_in(tmp_path) == ["file"]


def test_files_have_the_usual_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        write_json(tmp_path / "file", 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


# --- plain data -------------------------------------------------------------------------------

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(plain)
def test_json_reads_as_it_was_written(tmp_path, value):
    write_json(tmp_path / "file.json", value)
    assert read_json(tmp_path / "file.json") == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [float("-inf")]}])
def test_no_number_but_a_finite_one_becomes_json(tmp_path, value):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "file.json", value)
    with pytest.raises(ValueError, match="JSON"):
        digest(value)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff"])
def test_unreadable_json_is_named_with_what_to_do(tmp_path, content):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(NnsweepError, match=r"file\.json: not readable.*run again"):
        read_json(path)


@given(st.dictionaries(text, plain, min_size=2, max_size=4))
def test_a_digest_does_not_depend_on_the_order_of_keys(value):
    assert digest(value) == digest(dict(reversed(value.items())))


@given(plain, plain)
def test_different_values_have_different_digests(one, two):
    equal = json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)
    assert (digest(one) == digest(two)) == equal
    assert len(digest(one)) == 16


def test_known_digests(tmp_path):
    """Ids in published tables must not change with a release."""
    assert digest({"b": [1, 2.5], "a": None}) == "e57f5d37865437a8"
    (tmp_path / "file").write_bytes(b"abc")
    assert file_digest(tmp_path / "file").startswith("ba7816bf8f01cfea")
