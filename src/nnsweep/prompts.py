"""Prompt rows: text becomes token ids, positions and answers, once, before any model runs.

Positions are unpadded token coordinates. A row that cannot be used keeps its place with a reason;
nothing is mapped to a neighbouring token or to the first piece of an answer.
"""

import csv
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from nnsweep.chat import Template, answer_join, chat_of, template_of
from nnsweep.errors import UserError
from nnsweep.grid import edges_of
from nnsweep.positions import Encoded, Place, Sides, edges_place, place_of
from nnsweep.sweep import Sweep, donor_positions, named_positions, placed_measures, uses_donor
from nnsweep.sweep_measures import needs_one_token
from nnsweep.sweep_positions import Tokens
from nnsweep.sweep_words import BETWEEN, edges_name
from nnsweep.tables import digest


@dataclass
class PromptRow:
    """One usable or unusable line of the prompt table."""

    row_id: str
    text: str
    donor_text: str | None
    ids: list[int]
    donor_ids: list[int]
    tokens: list[str]
    donor_tokens: list[str]
    answers: dict[str, list[int]]
    answer_texts: dict[str, str]
    positions: dict[str, Place]
    reason: str | None
    row_key: str = ""

    def key(self) -> str:
        """Digest of the tokens that a model sees of this row."""
        return digest([self.ids, self.donor_ids])

    def details(self) -> Any:
        """What tells two rows of the same tokens apart."""
        places = {name: [place.base, place.donor] for name, place in self.positions.items()}
        return [self.answers, places]


def read_records(path: Path, columns: list[str]) -> list[dict[str, str]]:
    """Read the prompt file's columns as text.

    Raises:
        UserError: an unknown kind of file, a missing column, no rows, or an empty cell.
    """
    table = _read_any(path)
    doubled = [name for name in columns if table.column_names.count(name) > 1]
    if doubled:
        raise UserError(f"{path}: column '{doubled[0]}' stands twice. Name every column once.")
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        have = ", ".join(table.column_names)
        raise UserError(f"{path}: no column '{missing[0]}'. Columns: {have}.")
    if table.num_rows == 0:
        raise UserError(f"{path}: no rows. Add prompts.")
    rows = table.select(columns).to_pylist()
    return [{key: _cell(cell) for key, cell in row.items()} for row in rows]


def _cell(value: Any) -> str:
    """A cell as text; the lists and structs of a parquet file as JSON."""
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def _read_any(path: Path) -> pa.Table:
    if not os.path.isfile(path):  # Path.is_file raises where a name is too long.
        raise UserError(f"prompts.file: {path} does not exist. Give a csv, jsonl or parquet file.")
    try:
        if path.suffix == ".parquet":
            return pq.ParquetFile(path).read()
        if path.suffix == ".jsonl":
            return _read_jsonl(path)
        if path.suffix == ".csv":
            return _read_csv(path)
    except (pa.ArrowInvalid, ValueError) as error:
        raise UserError(f"{path}: not a readable {path.suffix[1:]} file ({error}).") from None
    raise UserError(f"prompts.file: {path} is none of .csv, .jsonl, .parquet.")


def _read_jsonl(path: Path) -> pa.Table:
    """Read one object a line; a key that only some lines have is an empty cell in the others."""
    lines = path.read_text(encoding="utf-8").split("\n")
    records = [json.loads(line) for line in lines if line.strip()]
    if not all(isinstance(record, dict) for record in records):
        raise ValueError("a line is no object")
    names = list(dict.fromkeys(name for record in records for name in record))
    cells = {name: [_text(record.get(name)) for record in records] for name in names}
    return pa.table({name: pa.array(column, pa.string()) for name, column in cells.items()})


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _read_csv(path: Path) -> pa.Table:
    """Read every cell as text, so that 007 stays 007 and NA stays NA."""
    with path.open(encoding="utf-8-sig", newline="") as stream:
        names = next(csv.reader(stream), [])
    options = pyarrow.csv.ConvertOptions(
        column_types={name: pa.string() for name in names}, strings_can_be_null=False
    )
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    return pyarrow.csv.read_csv(path, convert_options=options, parse_options=parse)


def columns_of(sweep: Sweep, available: set[str] | None = None) -> list[str]:
    """The columns of the prompt file that the sweep reads."""
    prompts = sweep.prompts
    names = [prompts.text, prompts.donor, *prompts.answers.values()]
    for position in sweep.positions.values():
        if isinstance(position, Tokens):
            names += [position.text, position.donor_text]
    # Without a column for them rows have numbers, unless one was asked for by name.
    asked = prompts.row_id != type(prompts).model_fields["row_id"].default
    if available is None or asked or prompts.row_id in available:
        names.insert(0, prompts.row_id)
    return list(dict.fromkeys(name for name in names if name))


def prepare_rows(sweep: Sweep, path: Path, tokenizer: Any, context: int) -> list[PromptRow]:
    """Tokenize and check every row of the sweep's prompt file.

    Args:
        sweep: The sweep.
        path: The prompt file.
        tokenizer: A fast Hugging Face tokenizer.
        context: The longest prompt the model takes (0: unknown).

    Raises:
        UserError: a row cannot be used and `on_bad_row` is `refuse`, or no row can be used; or
            the prompts are chats and the tokenizer has no chat template (see `template_of`).
    """
    chat = sweep.prompts.chat
    template = template_of(tokenizer, chat) if chat else None
    records, edges = records_of(sweep, path), edges_of(sweep)
    rows = [
        _row(sweep, record, i, tokenizer, template, context, edges)
        for i, record in enumerate(records)
    ]
    for row in rows:
        row.row_key = row.key()
    _tell_apart(rows)
    _apply_policy(sweep, rows, path)
    return rows


def records_of(sweep: Sweep, path: Path) -> list[dict[str, str]]:
    """The records of the sweep's prompt file, each with a name of its own.

    Raises:
        UserError: as `read_records`, or two rows of one name.
    """
    available = set(_read_any(path).column_names)
    records = read_records(path, columns_of(sweep, available))
    seen: set[str] = set()
    for number, record in enumerate(records):
        name = _name_of(sweep, record, number)
        if name in seen:
            raise UserError(f"{path}: row_id '{name}' stands twice. Name every row once.")
        seen.add(name)
    return records


def _name_of(sweep: Sweep, record: Mapping[str, str], number: int) -> str:
    return record.get(sweep.prompts.row_id) or f"row{number:05d}"


def _tell_apart(rows: list[PromptRow]) -> None:
    """Give rows of the same tokens keys of their own; a row that repeats another is left out.

    The same row twice would count twice in every mean.
    """
    first: dict[str, str] = {}
    for row in (row for row in rows if row.reason is None):
        twin = first.setdefault(digest([row.row_key, row.details()]), row.row_id)
        if twin != row.row_id:
            row.reason = f"the same prompt, answers and positions as row {twin}"
    usable = [row for row in rows if row.reason is None]
    shared = Counter(row.row_key for row in usable)
    for row in usable:
        if shared[row.row_key] > 1:
            row.row_key = digest([row.row_key, row.details()])


def _apply_policy(sweep: Sweep, rows: list[PromptRow], path: Path) -> None:
    for name in [name for name in rows[0].positions if BETWEEN in name]:
        reasons = [row.reason or row.positions[name].reason for row in rows]
        if all(reasons) and not all(row.reason for row in rows):
            raise UserError(
                f"{path}: no row can be used with edges {name} ({rows[0].row_id}: {reasons[0]}). "
                "Choose keys at or before position, or exclude such points."
            )
    bad = [(row.row_id, reason) for row in rows if (reason := _any_reason(sweep, row))]
    if bad and sweep.on_bad_row == "refuse":
        shown = "; ".join(f"{name}: {reason}" for name, reason in bad[:3])
        raise UserError(
            f"{path}: {len(bad)} of {len(rows)} rows cannot be used. {shown}. "
            "Mend them, or set on_bad_row: exclude."
        )
    if all(row.reason for row in rows):
        raise UserError(f"{path}: no row can be used ({rows[0].row_id}: {rows[0].reason}).")


def _any_reason(sweep: Sweep, row: PromptRow) -> str | None:
    reasons = [row.reason, *(place.reason for place in row.positions.values())]
    return next((reason for reason in reasons if reason), None)


def used_positions(sweep: Sweep) -> list[str]:
    """Names of the positions that the writes and the measures refer to, in stable order."""
    names = [sweep.measure_at]
    for name in named_positions(sweep):
        if name.startswith("$"):
            axis = sweep.axes[name[1:]]
            names += [str(value) for value in axis] if isinstance(axis, list) else []
        else:
            names.append(name)
    return list(dict.fromkeys(names))


def _row(
    sweep: Sweep,
    record: Mapping[str, str],
    number: int,
    tokenizer: Any,
    template: Template | None,
    context: int,
    edges: Sequence[tuple[str, str, bool]],
) -> PromptRow:
    prompts = sweep.prompts
    base = _prompt(record[prompts.text], tokenizer, template)
    donor = _prompt(record[prompts.donor], tokenizer, template) if prompts.donor else None
    answers, reason = _answers(sweep, record, base, tokenizer)
    reason = _bad_text(base, tokenizer, context) or reason
    if donor is not None and uses_donor(sweep):
        reason = reason or _prefixed("donor", _bad_text(donor, tokenizer, context))
    paired = donor_positions(sweep)
    places = {
        name: place_of(Sides(sweep, record, base, donor if name in paired else None), name)
        for name in used_positions(sweep)
    }
    places |= _edges(edges, places)
    return PromptRow(
        row_id=_name_of(sweep, record, number),
        text=base.text,
        donor_text=donor.text if donor else None,
        ids=base.ids,
        donor_ids=donor.ids if donor else [],
        tokens=base.tokens,
        donor_tokens=donor.tokens if donor else [],
        answers=answers,
        answer_texts={name: record[column] for name, column in prompts.answers.items()},
        positions=places,
        reason=reason,
    )


def _edges(edges: Sequence[tuple[str, str, bool]], places: Mapping[str, Place]) -> dict[str, Place]:
    """The edges of attention that writes touch, as positions of their own."""
    found: dict[str, Place] = {}
    for position, keys, donor in edges:
        name = edges_name(position, keys)
        place = edges_place(name, places[position], places[keys], donor)
        if name not in found or found[name].reason is None:
            found[name] = place
    return found


def _prompt(cell: str, tokenizer: Any, template: Template | None) -> Encoded:
    """One cell as tokens; of a chat, the text that the model's template makes of it."""
    if template is None or not cell.strip():
        return _encode(tokenizer, cell)
    chat = chat_of(template, cell)
    if isinstance(chat, str):
        return Encoded([], [], [], cell, problem=chat)
    return replace(_encode(tokenizer, chat.text, special=False), chat=chat)


def _encode(tokenizer: Any, text: str, special: bool = True) -> Encoded:
    """Tokenize; a template writes its special tokens itself, and none is added to its text."""
    how = {} if special else {"add_special_tokens": False}
    out = tokenizer(text, return_offsets_mapping=True, **how)
    ids = list(out["input_ids"])
    tokens = [tokenizer.decode([i]) for i in ids]
    return Encoded(ids, tokens, [tuple(pair) for pair in out["offset_mapping"]], text)


def _prefixed(what: str, reason: str | None) -> str | None:
    return reason and f"{what}: {reason}"


def _bad_text(encoded: Encoded, tokenizer: Any, context: int) -> str | None:
    ids, bos = encoded.ids, tokenizer.bos_token_id
    if encoded.problem:
        return encoded.problem
    if not encoded.text.strip() or not ids:
        return "the prompt is empty"
    if encoded.chat is None and encoded.text != encoded.text.rstrip():
        return f"the prompt ends in white space: {encoded.tokens}; put the space into the answer"
    if bos is not None and ids[:2] == [bos, bos]:
        return f"the prompt begins with two BOS tokens: {encoded.tokens[:3]}; remove one"
    if context and len(ids) > context:
        return f"the prompt has {len(ids)} tokens, the model takes {context}"
    return None


def _answers(
    sweep: Sweep, record: Mapping[str, str], base: Encoded, tokenizer: Any
) -> tuple[dict[str, list[int]], str | None]:
    """Ids of each answer as they follow the prompt, and why the row cannot be used, if so."""
    answers, reason = {}, None
    one = [measure for _, measure in placed_measures(sweep) if needs_one_token(measure)]
    single = {name for m in one for name in [m.answer, *(m.answers or [])]}
    prefix = _prefix(sweep, base) if sweep.prompts.answers else ""
    for name, column in sweep.prompts.answers.items():
        ids, problem = _answer_ids(base, record[column], prefix, tokenizer, name in single)
        answers[name] = ids
        reason = reason or _prefixed(f"answer {name} '{record[column]}'", problem)
    firsts = {name: ids[0] for name, ids in answers.items() if ids}
    for _, measure in placed_measures(sweep):
        ids = [firsts[name] for name in measure.answers or [] if name in firsts]
        twice = next((token for token in ids if ids.count(token) > 1), None)
        if twice is not None:
            reason = reason or f"answers {measure.answers} begin with the same token {twice}"
    return answers, reason


def _prefix(sweep: Sweep, base: Encoded) -> str:
    """What joins a prompt and its answer, unless the answer brings its own white space."""
    if sweep.prompts.answer_prefix is not None:
        return sweep.prompts.answer_prefix
    return answer_join(base.chat) if base.chat else " "


def _answer_ids(
    base: Encoded, answer: str, prefix: str, tokenizer: Any, single: bool
) -> tuple[list[int], str | None]:
    """Encode prompt and answer together, since a tokenizer may merge over their border."""
    if not answer.strip():
        return [], "is empty"
    if base.problem:
        return [], base.problem
    joined = "" if answer[0].isspace() else prefix
    both = _encode(tokenizer, base.text + joined + answer, special=base.chat is None)
    if both.ids[: len(base.ids)] != base.ids:
        return [], f"changes the tokens of the prompt: {base.tokens} became {both.tokens}"
    ids, tokens = both.ids[len(base.ids) :], both.tokens[len(base.ids) :]
    if single and len(ids) != 1:
        return ids, (
            f"has {len(ids)} tokens {tokens}; only one-token answers are measured, or "
            "the log_prob of whole answers (tokens: sum)"
        )
    return ids, None


def to_table(rows: list[PromptRow]) -> pa.Table:
    """prompts.parquet: one line a row, lists for ids and positions, reasons beside them."""
    ids = pa.list_(pa.int32())
    columns: dict[str, pa.Array] = {
        "row_id": pa.array([row.row_id for row in rows], pa.string()),
        "row_key": pa.array([row.row_key for row in rows], pa.string()),
        "status": pa.array(["excluded" if row.reason else "ok" for row in rows], pa.string()),
        "reason": pa.array([row.reason for row in rows], pa.string()),
        "text": pa.array([row.text for row in rows], pa.string()),
        "donor_text": pa.array([row.donor_text for row in rows], pa.string()),
        "ids": pa.array([row.ids for row in rows], ids),
        "donor_ids": pa.array([row.donor_ids for row in rows], ids),
        "tokens": pa.array([row.tokens for row in rows], pa.list_(pa.string())),
        "donor_tokens": pa.array([row.donor_tokens for row in rows], pa.list_(pa.string())),
    }
    for name in rows[0].positions:
        places = [row.positions[name] for row in rows]
        columns[f"position.{name}"] = pa.array([place.base for place in places], ids)
        columns[f"donor_position.{name}"] = pa.array([place.donor for place in places], ids)
        columns[f"align.{name}"] = pa.array([place.align for place in places], pa.string())
        columns[f"reason.{name}"] = pa.array([place.reason for place in places], pa.string())
    for name in rows[0].answers:
        texts = [row.answer_texts[name] for row in rows]
        columns[f"answer.{name}"] = pa.array(texts, pa.string())
        columns[f"answer_ids.{name}"] = pa.array([row.answers[name] for row in rows], ids)
    return pa.table(columns)


def from_table(table: pa.Table) -> list[PromptRow]:
    """The inverse of `to_table`."""
    names = table.column_names
    positions = [name.removeprefix("position.") for name in names if name.startswith("position.")]
    answers = [name.removeprefix("answer.") for name in names if name.startswith("answer.")]
    return [_from_record(record, positions, answers) for record in table.to_pylist()]


def _from_record(record: dict[str, Any], positions: list[str], answers: list[str]) -> PromptRow:
    plain = ("row_id", "row_key", "reason", "text", "donor_text", "ids", "donor_ids")
    return PromptRow(
        **{name: record[name] for name in (*plain, "tokens", "donor_tokens")},
        answers={name: record[f"answer_ids.{name}"] for name in answers},
        answer_texts={name: record[f"answer.{name}"] for name in answers},
        positions={
            name: Place(
                record[f"position.{name}"],
                record[f"donor_position.{name}"],
                record[f"reason.{name}"],
                record[f"align.{name}"],
            )
            for name in positions
        },
    )
