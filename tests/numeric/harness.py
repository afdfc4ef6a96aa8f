"""Run sweeps on engines and compare what comes back, value by value and by key."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nnsweep import plan as planning
from nnsweep.jobs import load_vector
from nnsweep.prompts import PromptRow, prepare_rows
from nnsweep.sweep import Sweep

Values = dict[tuple[str, str], dict[str, float]]
"""(point_key, row_key) -> measure -> value; a value that is not a number is NaN."""

MEASURES: dict[str, Any] = {
    "match": {"kind": "match", "answer": "target"},
    "logit": {"kind": "logit", "answer": "target"},
    "log_prob": {"kind": "log_prob", "answer": "target"},
    "prob": {"kind": "prob", "answer": "foil"},
    "rank": {"kind": "rank", "answer": "foil"},
    "logit_diff": {"kind": "logit_diff", "answers": ["target", "foil"]},
    "kl": {"kind": "kl"},
    "recovery": {"kind": "recovery", "of": "logit_diff", "min_gap": 1.0},
}
ANSWERS = {"target": "source_answer", "foil": "base_answer"}
SUBJECT = {"text": "word", "donor_text": "source_word"}


def sweep_of(**changes: Any) -> Sweep:
    """A sweep over the columns of `records`, with every measure unless told otherwise."""
    plain = {
        "name": "tiny",
        "model": {"id": "unused"},
        "prompts": {"file": "unused", "text": "base", "donor": "source", "answers": ANSWERS},
        "positions": {"subject": SUBJECT, "second": 1},
        "measures": MEASURES,
        "on_bad_row": "exclude",
    }
    return Sweep.model_validate(plain | changes)


def write_records(path: Path, records: Sequence[Mapping[str, str]]) -> Path:
    """Write records as CSV."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
    return path


def record(base: str, source: str, word: str, source_word: str, *answers: str) -> dict[str, str]:
    """One prompt row; its name is made of its words."""
    return {
        "row_id": f"{word}-{source_word}-{len(base)}",
        "base": base.format(word),
        "source": source.format(source_word),
        "word": word,
        "source_word": source_word,
        "base_answer": answers[0],
        "source_answer": answers[1],
    }


CAPITAL, MAYOR, THINK = "The capital of {} is", "The mayor of {} is", "I think the capital of {} is"

RECORDS = [
    record(CAPITAL, CAPITAL, "Austria", "France", "Vienna", "Paris"),
    record(CAPITAL, CAPITAL, "Norway", "Germany", "Oslo", "Berlin"),
    record(MAYOR, MAYOR, "New York", "Los Angeles", "Ed", "Bill"),
    record(MAYOR, MAYOR, "Santa Monica", "New York", "Bob", "Ed"),
    record(THINK, THINK, "France", "Austria", "Paris", "Vienna"),
    record(THINK, THINK, "Greece", "Norway", "Athens", "Oslo"),
    record(CAPITAL, THINK, "Poland", "Egypt", "Warsaw", "Cairo"),
    record(CAPITAL, THINK, "Italy", "Spain", "Rome", "Madrid"),
]
"""Prompts of 5, 6 and 7 tokens, spans of one and two tokens, and two donors longer than their
prompt: four pairs of lengths with two rows each, so that two rows fill a pass of `PAIR`."""

PAIR = 2


def rows_of(sweep: Sweep, tokenizer: Any, folder: Path, records: Any = None) -> list[PromptRow]:
    """Prompt rows of some records."""
    path = write_records(folder / "prompts.csv", records or RECORDS)
    return prepare_rows(sweep, path, tokenizer, 0)


def run(engine: Any, sweep: Sweep, model: Any, rows: Sequence[PromptRow], **settings: Any) -> Values:
    """Plan a sweep, run every chunk, and return the values by key."""
    plan = planning.make_plan(sweep, model, rows, planning.Settings(**settings), load_vector)
    return run_chunks(engine, plan.chunks)


def run_chunks(engine: Any, chunks: Iterable[Any]) -> Values:
    """Run chunks and return their values by key; a key that comes back twice is refused."""
    values: Values = {}
    for chunk in chunks:
        names = [spec["name"] for spec in chunk["measures"]]
        keys = planning.keys_of(chunk)
        found = engine.run(chunk, lambda line: None).values.tolist()
        assert len(found) == len(keys)
        for key, numbers in zip(keys, found, strict=True):
            assert key not in values
            values[key] = dict(zip(names, numbers, strict=True))
    return values


def largest_difference(one: Values, other: Values, without: Sequence[str] = ()) -> float:
    """The largest difference of a value; both must have the same keys and the same gaps."""
    assert one.keys() == other.keys()
    assert one
    largest = 0.0
    for key, measures in one.items():
        for name, value in measures.items():
            if name not in without:
                largest = max(largest, difference(value, other[key][name]))
    return largest


def difference(one: float, other: float) -> float:
    """Distance of two numbers; NaN is as far from a number as can be, and next to NaN."""
    if math.isnan(one) or math.isnan(other):
        return 0.0 if math.isnan(one) and math.isnan(other) else math.inf
    return abs(one - other)
