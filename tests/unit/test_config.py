"""Settings as `--config KEY=VALUE` gives them: taken with the right type, or refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnsweep.config import Config, Mixed, read_config
from nnsweep.errors import UserError

TYPED = [
    ("layers", [0, 1]),
    ("layers", ["0", "1", "2"]),
    ("remote", "true"),
    ("engnie", "ndif"),
    ("seed", 7),
    ("revision", 100000.0),
    ("chunk_size", 0),
    ("alpha", "nan"),
    ("engine", "NDIF"),
    ("engine", None),
    ("engine", ""),
    ("sweep", {"layers": [7]}),
    ("sweep", "{layers: [7]}"),
    ("sweep", None),
    ("sweep", 7),
    ("sweep", "../other"),
    ("sweep", "two\nlines"),
    ("threads", "2"),
    ("threads", 2.0),
    ("threads", 2.5),
    ("threads", True),
    ("threads", 0),
    ("threads", None),
    ("batch_rows", "256"),
    ("batch_rows", -1),
    ("chunk_passes", 0),
    ("chunk_passes", 1e5),
    ("chunk_passes", float("inf")),
    ("recompute", False),
    ("recompute", "Fast"),
    ("device", "gpu"),
    ("bootstrap", None),
]


@pytest.mark.parametrize(("key", "value"), TYPED)
def test_a_mistyped_setting_is_refused_by_name(key, value):
    with pytest.raises(UserError, match=rf"^config: {key}: ") as caught:
        read_config({key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", -1),
        ("seed", "007"),
        ("seed", 7.0),
        ("resamples", 0),
        ("confidence", 0),
        ("confidence", 1),
        ("confidence", float("nan")),
        ("confidence", True),
        ("resample", 10),
    ],
)
def test_a_mistyped_setting_of_the_bootstrap_is_refused_by_path(key, value):
    with pytest.raises(UserError, match=rf"^config: bootstrap\.{key}: "):
        read_config({"bootstrap": {key: value}})


@pytest.mark.parametrize(
    ("key", "meant"), [("engnie", "engine"), ("thread", "threads"), ("batchrows", "batch_rows")]
)
def test_a_typo_brings_a_suggestion(key, meant):
    with pytest.raises(UserError, match=f"did you mean '{meant}'"):
        read_config({key: 1})


def test_a_wrong_engine_is_answered_with_the_engines_there_are():
    with pytest.raises(UserError, match=r"got 'NDIF'.*'local'.*'reference'"):
        read_config({"engine": "NDIF"})


def test_nothing_given_is_the_default():
    assert read_config({}) == Config()
    assert read_config({}).engine == "local"


def test_settings_cannot_be_changed_once_read():
    with pytest.raises(ValueError, match="frozen"):
        read_config({}).threads = 3


@given(st.floats(0, 1), st.integers(1, 500))
def test_ndif_gets_its_share_of_any_plan(share, chunks):
    mixed = Mixed(ndif_share=share)
    sides = [mixed.side(place) for place in range(chunks)]
    assert set(sides) <= {"local", "ndif"}
    assert abs(sides.count("ndif") - share * chunks) <= 1


def test_the_other_side_has_the_second_try_where_that_is_allowed():
    place = next(n for n in range(9) if Mixed().side(n) == "ndif")
    assert [Mixed().side(place, attempt) for attempt in (1, 2)] == ["ndif", "ndif"]
    allowed = Mixed(fallback=True)
    assert [allowed.side(place, attempt) for attempt in (1, 2, 3)] == ["ndif", "local", "ndif"]
    assert allowed.side(place - 1, 2) == "ndif"
