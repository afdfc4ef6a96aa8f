"""Documents: what is refused, where, and in which words."""

import copy

import pytest
import yaml
from examples import document
from hypothesis import given
from hypothesis import strategies as st

from nnsweep.config import Config
from nnsweep.documents import parse, read_yaml, schema_of
from nnsweep.errors import UserError
from nnsweep.sweep import Sweep

WRITE = {"site": "resid_post", "layer": 0, "position": "last"}
VECTOR = {"mean": "donor", "minus": "text"}


def refusal(value, model=Sweep):
    with pytest.raises(UserError) as caught:
        parse(model, value, "file.yaml")
    return str(caught.value)


def changed(path, value):
    """The example document with one key set, which may be new; lists are indexed by numbers."""
    whole = copy.deepcopy(document(axes={}, writes=[dict(WRITE, set=0.0)]))
    node = whole
    *parents, last = path.split(".")
    for part in parents:
        node = node[int(part)] if part.isdigit() else node[part]
    node[last] = value
    return whole


UNKNOWN = [
    ("wites", [], "writes"),
    ("measure_att", "last", "measure_at"),
    ("model.dtpe", "float32", "dtype"),
    ("prompts.donr", "source", "donor"),
    ("writes.0.layr", 1, "layer"),
    ("writes.0.nois", {"std": 1.0}, "noise"),
    ("measures.logit_diff.answrs", ["target"], "answers"),
    ("positions.subject.occurence", 1, "occurrence"),
    ("positions.subject.donor_txt", "word", "donor_text"),
]


@pytest.mark.parametrize(("path", "value", "meant"), UNKNOWN)
def test_an_unknown_key_is_named_with_its_path_and_a_suggestion(path, value, meant):
    message = refusal(changed(path, value))
    assert message.startswith("file.yaml: ")
    assert f"{path}: unknown key" in message
    assert f"did you mean '{meant}'?" in message


@pytest.mark.parametrize(
    ("key", "value", "typo", "meant"),
    [
        ("axes", {"layer": {"rnge": [0, 4]}}, "axes.layer.rnge", "range"),
        ("positions", {"end": {"txt": "word"}}, "positions.end.txt", "text"),
        ("measures", {"float": {"kind": "kl", "answr": "a"}}, "measures.float.answr", "answer"),
        (
            "writes",
            [{**WRITE, "add": {"vector": {"mean": "donor", "minu": "text"}}}],
            "writes.0.add.vector.minu",
            "minus",
        ),
        ("writes", [{**WRITE, "add": {"vector": VECTOR, "scal": 1}}], "writes.0.add.scal", "scale"),
        ("writes", [{**WRITE, "set": {"men": "text"}}], "writes.0.set.men", "mean"),
        ("writes", [{**WRITE, "noise": {"sdt": 1}}], "writes.0.noise.sdt", "std"),
    ],
)
def test_an_unknown_key_below_a_choice_is_named_too(key, value, typo, meant):
    message = refusal(document(axes={}, writes=[]) | {key: value})
    assert f"{typo}: unknown key" in message
    assert f"did you mean '{meant}'?" in message


def test_a_key_is_never_suggested_for_itself():
    vector = {"mean": "donor", "minu": "text"}
    message = refusal(document(axes={}, writes=[{**WRITE, "add": {"vector": vector}}]))
    assert "mean: unknown key" not in message


@pytest.mark.parametrize(
    ("path", "value", "shown"),
    [
        ("name", 7, "7"),
        ("name", "Capital Layers", "'Capital Layers'"),
        ("model", "gpt2", "'gpt2'"),
        ("model.dtype", "float64", "float32"),
        ("model.revision", 100000.0, "quotes"),
        ("writes", {"site": "z"}, "list"),
        ("writes.0.site", "resid_out", "resid_post"),
        ("writes.0.layer", -1, "-1"),
        ("writes.0.layer", "3", "'3'"),
        ("writes.0.layer", 1.5, "1.5"),
        ("writes.0.set", float("nan"), "nan"),
        ("writes.0.set", float("inf"), "inf"),
        ("positions.subject", "text", "'text'"),
        ("measures", {}, "1 or more"),
        ("measures.logit_diff.answers", ["target"], "2 or more"),
        ("on_bad_row", "drop", "'drop'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_its_path(path, value, shown):
    message = refusal(changed(path, value))
    assert message.startswith(f"file.yaml: {path}: ")
    assert shown in message


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("path", ["writes.0.set", "writes.0.layer", "positions.second"])
def test_a_truth_value_is_no_number(path, value):
    """YAML reads `yes` and `on` as true; as a number that would be 1."""
    assert path in refusal(changed(path, value))


def test_a_truth_value_is_no_axis_value():
    writes = [dict(WRITE, layer="$layer", set=0.0)]
    assert "axes.layer" in refusal(document(axes={"layer": [True]}, writes=writes))


def test_a_missing_key_is_named():
    plain = document()
    del plain["model"]
    assert refusal(plain) == "file.yaml: model: this key is required"


def test_several_mistakes_are_told_at_once():
    message = refusal(document(wites=[], on_bad_row="drop"))
    assert "wites: unknown key" in message
    assert "on_bad_row: got 'drop'" in message


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_a_document_that_is_no_mapping_is_refused(value):
    assert refusal(value).startswith("file.yaml: expected keys and values")


@pytest.mark.parametrize("path", ["writes.0.set", "writes.0.layer", "writes.0.add", "axes"])
def test_no_message_speaks_of_the_library_that_checks(path):
    message = refusal(changed(path, "wrong"))
    for word in ("constrained-str", "instance of", "pydantic", "validation", "Literal"):
        assert word not in message


def test_a_message_is_one_line_even_when_a_key_is_not():
    assert "\n" not in refusal(document() | {"two\nlines": 1})


words = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=8)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


def outcome(model, value, where):
    """The message against a value, or None."""
    try:
        parse(model, value, where)
    except UserError as error:
        return str(error)
    return None


@given(st.sampled_from(sorted(document())), plain_values)
def test_any_value_is_accepted_or_refused_in_one_line(key, value):
    message = outcome(Sweep, document() | {key: value}, "file.yaml")
    assert message is None or (message.startswith("file.yaml: ") and message[11:].strip())
    assert "\n" not in (message or "")


@given(st.sampled_from(sorted(Config.model_fields)), plain_values)
def test_any_setting_is_accepted_or_refused_in_one_line(key, value):
    message = outcome(Config, {key: value}, "config")
    assert message is None or message.startswith(f"config: {key}")
    assert "\n" not in (message or "")


SOURCES = st.dictionaries(
    st.sampled_from(["patch", "mean", "resample", "seed", "per_token", "site", "head", "sead"]),
    st.sampled_from(["text", "donor", 1, True, None, [], {}]),
    max_size=4,
)


@given(SOURCES, st.sampled_from(["set", "mix"]))
def test_a_source_is_accepted_or_refused_in_plain_words(source, key):
    """Whatever keys of several kinds of sources stand together, something is said, and in words."""
    write = WRITE | ({"set": source} if key == "set" else {"mix": {"source": source, "weight": 1}})
    message = outcome(Sweep, document(axes={}, writes=[write]), "file.yaml")
    if message is not None:
        assert message.startswith("file.yaml: writes.0.")
        for word in ("should", "valid ", "Input", "dictionary", "validation"):
            assert word not in message


# --- YAML -------------------------------------------------------------------------------------


def written(folder, text):
    path = folder / "file.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def yaml_refusal(path):
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("a: 1\nb: 2\na: 3\n", 1, "a"),
        ("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n", 3, "c"),
        ("a:\n- {b: 1, b: 2}\n", 2, "b"),
        ("1: a\n1: b\n", 1, "1"),
    ],
)
def test_a_key_given_twice_is_refused_with_its_line(tmp_path, text, line, key):
    message = yaml_refusal(written(tmp_path, text))
    assert f"line {line}: key '{key}' is given twice" in message


def test_a_merge_key_is_refused_with_its_line(tmp_path):
    text = "x: &x {b: 1}\na:\n  <<: *x\n"
    assert "line 3: merge keys (<<)" in yaml_refusal(written(tmp_path, text))


@pytest.mark.parametrize("text", ["a: [1\nb: 2\n", "a:\n\t- b\n", "a: 1\n---\nb: 2\n", "a: \x00\n"])
def test_what_is_not_one_yaml_document_is_refused(tmp_path, text):
    assert "Mend the YAML" in yaml_refusal(written(tmp_path, text))


def test_a_file_that_is_not_utf_8_is_refused(tmp_path):
    yaml_refusal(written(tmp_path, "name: caf\xe9\n".encode("latin-1")))


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    yaml_refusal(tmp_path / "none.yaml")
    yaml_refusal(tmp_path)


def test_no_object_is_made_from_a_tag(tmp_path):
    yaml_refusal(written(tmp_path, "a: !!python/object/apply:os.getcwd []\n"))


keys = st.text(st.characters(codec="ascii", categories=["Ll"]), min_size=1, max_size=4)


@given(st.dictionaries(keys, st.lists(st.integers() | keys, max_size=3), max_size=4))
def test_a_document_reads_as_it_was_written(tmp_path, value):
    assert read_yaml(written(tmp_path, yaml.safe_dump(value))) == value


# --- schemas ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Sweep, Config])
def test_schemas_have_no_reference_and_refuse_unknown_keys(model):
    schema = schema_of(model, "title")
    assert "$ref" not in str(schema)
    assert "$defs" not in schema
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(model.model_fields)
