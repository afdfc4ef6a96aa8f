"""Run sweeps on engines and compare what comes back, value by value and by key."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nnsweep.chunks import columns, keys_of
from nnsweep.plan import make_plan
from nnsweep.planned import Plan, Settings
from nnsweep.prompts import PromptRow, prepare_rows
from nnsweep.sweep import Sweep
from nnsweep.vectors import load_vector

Values = dict[tuple[tuple[Any, ...], str], dict[str, float]]
"""(axis values, row_id) -> measure -> value; a value that is not a number is NaN."""

MEASURES: dict[str, Any] = {
    "match": {"kind": "match", "answer": "target"},
    "logit": {"kind": "logit", "answer": "target"},
    "log_prob": {"kind": "log_prob", "answer": "target"},
    "prob": {"kind": "prob", "answer": "foil"},
    "rank": {"kind": "rank", "answer": "foil"},
    "logit_diff": {"kind": "logit_diff", "answers": ["target", "foil"]},
    "cross_entropy": {"kind": "cross_entropy", "answer": "target"},
    "either": {"kind": "prob", "answers": ["target", "foil"]},
    "either_log": {"kind": "log_prob", "answers": ["target", "foil"]},
    "entropy": {"kind": "entropy"},
    "js": {"kind": "js"},
    "kl": {"kind": "kl"},
    "recovery": {"kind": "recovery", "of": "logit_diff", "min_gap": 1.0},
}
ANSWERS = {"target": "source_answer", "foil": "base_answer"}
SUBJECT = {"text": "word", "donor_text": "source_word"}


def sweep_of(**changes: Any) -> Sweep:
    """A sweep over the columns of `records`, with every measure unless told otherwise."""
    plain = {
        "name": "tiny",
        "model": {"id": "unused", "attention": "eager"},  # what attention's own sites ask for
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


CAPITAL, PEOPLE = "The capital of {} is", "In {}, people live"
MAYOR = "The mayor of {} is"
THINK, KNOW = "I think the capital of {} is", "I know {} is known as nice"

RECORDS = [
    record(CAPITAL, CAPITAL, "Austria", "France", "Vienna", "Paris"),
    record(PEOPLE, PEOPLE, "Norway", "Germany", "Oslo", "Berlin"),
    record(MAYOR, MAYOR, "New York", "Los Angeles", "Ed", "Bill"),
    record(MAYOR, MAYOR, "Santa Monica", "New York", "Bob", "Ed"),
    record(THINK, CAPITAL, "Poland", "Egypt", "Warsaw", "Cairo"),
    record(KNOW, CAPITAL, "Italy", "Spain", "Rome", "Madrid"),
]
"""Prompts of 5, 6 and 7 tokens, spans of one and two tokens, and two donors shorter than their
prompt: three pairs of lengths with two rows each, so that `PAIR` rows fill a pass. Rows of one
pass have their subjects at different tokens."""

PAIR = 2


def rows_of(sweep: Sweep, tokenizer: Any, folder: Path, records: Any = None) -> list[PromptRow]:
    """Prompt rows of some records."""
    path = write_records(folder / "prompts.csv", records or RECORDS)
    return prepare_rows(sweep, path, tokenizer, 0)


def plan_of(sweep: Sweep, model: Any, rows: Sequence[PromptRow], **settings: Any) -> Plan:
    """Plan a sweep."""
    return make_plan(sweep, model, rows, Settings(**settings), load_vector)


def run(engine: Any, sweep: Sweep, model: Any, rows: Sequence[PromptRow], **how: Any) -> Values:
    """Plan a sweep, run every chunk, and return the values by cell and row name."""
    plan = plan_of(sweep, model, rows, **how)
    cells = {point.point_key: tuple(point.cell.values()) for point in plan.points}
    names = {row.row_key: row.row_id for row in rows}
    found = run_chunks(engine, plan.chunks)
    return {(cells[point], names[row]): values for (point, row), values in found.items()}


def run_chunks(engine: Any, chunks: Iterable[Any]) -> dict[tuple[str, str], dict[str, float]]:
    """Run chunks and return their values by key; a key that comes back twice is refused."""
    values: dict[tuple[str, str], dict[str, float]] = {}
    for chunk in chunks:
        names = columns(chunk["measures"])
        keys = keys_of(chunk)
        found = engine.run(chunk, lambda line: None).values.tolist()
        assert len(found) == len(keys)
        for key, numbers in zip(keys, found, strict=True):
            assert key not in values
            values[key] = dict(zip(names, numbers, strict=True))
    return values


def whole_logits(model: dict[str, Any]) -> dict[str, Any]:
    """The model with a vocabulary product of every token, as in a plain forward pass."""
    return model | {"shape": model["shape"] | {"logits_to_keep": False, "head": None}}


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


def effect(values: Values) -> float:
    """The largest divergence from the clean run, so that a comparison is known to see writes."""
    return max(found["kl"] for found in values.values())


def difference(one: float, other: float) -> float:
    """Distance of two numbers; NaN is as far from a number as can be, and next to NaN."""
    if math.isnan(one) or math.isnan(other):
        return 0.0 if math.isnan(one) and math.isnan(other) else math.inf
    return abs(one - other)
