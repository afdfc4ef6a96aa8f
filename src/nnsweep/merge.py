"""Chunks become the published tables: every asked value exactly once, or an error that names it."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from nnsweep import prompts as prompt_rows
from nnsweep.chunks import columns, in_order
from nnsweep.controls import compared, judge
from nnsweep.errors import CheckFailed, NnsweepError
from nnsweep.grid import position_names
from nnsweep.measure_plan import controlled
from nnsweep.parts import (
    CHUNK,
    KEYS,
    Taken,
    nullable,
    read_part,
    refuse_count,
    take_parts,
    with_state,
)
from nnsweep.provenance import mixture, remote_cost, run_record
from nnsweep.sweep import GENERATED, Sweep, axis_kinds, watched_positions
from nnsweep.tables import (
    SESSIONS,
    part_schema,
    read_json,
    read_table,
    tokens_type,
    values_schema,
    write_json,
    write_table,
)

logger = logging.getLogger(__name__)
Plain = dict[str, Any]
LISTS = {"top_k": ("id", "log_prob"), "generate": ("id", "log_prob", "entropy")}
"""Kinds whose numbers become a list of tokens, and what there is of each."""


def merge_chunks(sweep: Sweep, results: Path, engine: str, output: Path) -> None:
    """Rule merge_chunks: values.parquet, sessions.parquet and run.json of one engine.

    Args:
        sweep: The sweep.
        results: `results/<sweep>`, with plan.json, points.parquet and prompts.parquet.
        engine: Whose parts are merged.
        output: `results/<sweep>/<engine>`.

    Raises:
        CheckFailed: a value is missing or doubled, or a null control does not hold.
    """
    plan = read_json(results / "plan.json")
    specs = plan["measures"]
    frame = asked_values(sweep, results)
    asked = frame.loc[frame["excluded"].isna(), KEYS]
    taken = take_all(output / "chunks", plan, asked)
    values = assemble(sweep, results, specs, frame, taken.values)
    everything = [*in_order(plan["chunks"]), *filter(None, [plan["controls"]])]
    facts = {name: read_json(output / "chunks" / f"{name}.json") for name in everything}
    verdict = judge_controls(plan, output, sweep.model.dtype)
    sessions = sessions_table([{"chunk_id": name, **fact} for name, fact in facts.items()])
    write_table(output / "sessions.parquet", sessions, SESSIONS)
    own = {name: facts[name] for name in in_order(plan["chunks"])}
    record = run_record(sweep, results, engine, plan, own, values, verdict)
    if mixed := mixture(record):
        logger.warning("the chunks were not all made with the same %s", ", ".join(mixed))
    if engine == "ndif":
        record["remote"] = remote_cost(results, plan, sessions.to_pylist(), values)
    write_json(output / "run.json", record)
    refuse_broken(verdict, output)
    write_table(output / "values.parquet", values, values.schema)


def take_all(folder: Path, plan: Plain, asked: pd.DataFrame) -> Taken:
    """All values of a plan (see `nnsweep.parts.take_parts`).

    Raises:
        CheckFailed: a part gives fewer or more values than the plan takes of it.
    """
    records = in_order(plan["chunks"])
    taken = take_parts(folder, records, plan["measures"], asked)
    counts = taken.owners.drop_duplicates([*KEYS, CHUNK])[CHUNK].value_counts()
    for name, record in records.items():
        refuse_count(folder / f"{name}.parquet", int(counts.get(name, 0)), record["values"])
    return taken


def refuse_broken(verdict: Mapping[str, Plain], output: Path) -> None:
    """Log the null controls; raise CheckFailed where one does not hold."""
    for name, control in verdict.items():
        logger.info("control %s: %s", name, control)
    failed = [name for name, control in verdict.items() if control["holds"] is False]
    if failed:
        raise CheckFailed(
            f"null control {failed[0]} does not hold: {verdict[failed[0]]}. No values were "
            f"written; see {output / 'run.json'} and docs/checks.md."
        )


def judge_controls(plan: Plain, output: Path, dtype: str) -> dict[str, Plain]:
    """The verdicts of the null controls of one engine (`results/SWEEP/ENGINE`)."""
    name, specs = plan["controls"], plan["measures"]
    if name is None:
        return {}
    wanted, part = controlled(specs), output / "chunks" / f"{name}.parquet"
    frame = with_state(read_part(part, wanted, plan["control_measures"]), wanted)
    table = pa.Table.from_pandas(frame, part_schema(columns(wanted)), preserve_index=False)
    return judge(table, compared(specs), dtype)


def asked_values(sweep: Sweep, results: Path) -> pd.DataFrame:
    """Every point on every row in the sweep's order; `excluded` says why one is left out."""
    points = read_table(results / "points.parquet").to_pandas(types_mapper=nullable)
    rows = prompt_rows.from_table(read_table(results / "prompts.parquet"))
    lines = pd.DataFrame({"row_id": [row.row_id for row in rows]})
    frame = points.drop(columns=["writes", "inert_rows"]).merge(lines, how="cross")
    frame["row_key"] = [row.row_key for row in rows] * len(points)
    frame["excluded"] = _exclusions(sweep, points, rows)
    # A row that repeats another has its key, but none of its values.
    frame.loc[frame["excluded"].notna(), "row_key"] = None
    return frame


def assemble(
    sweep: Sweep, results: Path, specs: Sequence[Plain], frame: pd.DataFrame, parts: pd.DataFrame
) -> pa.Table:
    """Values join the points and rows that asked for them, excluded rows included."""
    whole = frame.merge(parts, on=KEYS, how="left", sort=False)
    _refuse_gaps(whole, parts)
    out = whole["excluded"].notna()
    whole.loc[out, "status"] = "excluded"
    whole.loc[out, "reason"] = whole.loc[out, "excluded"]
    return _published(sweep, results, specs, whole)


def _published(
    sweep: Sweep, results: Path, specs: Sequence[Plain], whole: pd.DataFrame
) -> pa.Table:
    """The columns of values.parquet; tokens get their texts, and texts their measures."""
    lists = {spec["name"]: LISTS[spec["kind"]] for spec in specs if spec["kind"] in LISTS}
    found: dict[str, pa.Array] = {}
    if lists:
        from nnsweep.models import load_tokenizer

        tokenizer = load_tokenizer(read_json(results / "model.json"))
        for spec in specs:
            if spec["kind"] in LISTS:
                fields, numbers = LISTS[spec["kind"]], whole[columns([spec])]
                found[spec["name"]] = token_lists(numbers, fields, tokenizer.decode)
    if sweep.generate is not None:
        whole["text"] = texts(found[GENERATED[0]], tokenizer)
        answers = _answer_texts(sweep, results)
        for spec in (spec for spec in specs if spec["kind"] == "contains"):
            whole[spec["name"]] = contained(whole, answers[spec["answer"]])
    names = [spec["name"] for spec in specs]
    schema = values_schema(axis_kinds(sweep), names, lists, sweep.generate is not None)
    plain = pa.schema([field for field in schema if field.name not in found])
    table = pa.Table.from_pandas(whole[plain.names], schema=plain, preserve_index=False)
    return pa.table(
        [found[name] if name in found else table[name] for name in schema.names], schema=schema
    )


def _answer_texts(sweep: Sweep, results: Path) -> dict[str, dict[str, str]]:
    """Answer -> row_id -> its text."""
    rows = prompt_rows.from_table(read_table(results / "prompts.parquet"))
    return {
        name: {row.row_id: row.answer_texts[name] for row in rows} for name in sweep.prompts.answers
    }


def token_lists(
    frame: pd.DataFrame, fields: Sequence[str], decode: Callable[[list[int]], str]
) -> pa.ListArray:
    """Columns of numbers, all ids first, as one list of tokens a row; null where there are none."""
    numbers = frame.to_numpy(dtype=np.float32, na_value=np.nan).reshape(len(frame), len(fields), -1)
    kept = ~np.isnan(numbers[:, 0])
    offsets = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int32)
    flat = {name: numbers[:, place][kept] for place, name in enumerate(fields)}
    ids, places = np.unique(flat["id"].astype(np.int32), return_inverse=True)
    words = pa.array([decode([int(one)]) for one in ids], pa.string())
    kind = tokens_type(fields)
    found = {"id": pa.array(ids[places], pa.int32()), "token": words.take(pa.array(places))}
    found |= {
        name: pa.array(flat[name], pa.float32(), mask=np.isnan(flat[name])) for name in fields[1:]
    }
    members = list(kind.value_type)
    tokens = pa.StructArray.from_arrays([found[one.name] for one in members], fields=members)
    return pa.ListArray.from_arrays(offsets, tokens, kind, mask=pa.array(~kept.any(axis=1)))


def texts(tokens: pa.ListArray, tokenizer: Any) -> list[str | None]:
    """What was generated, without end tokens."""
    ids, ends = tokens.values.field("id").to_numpy(), tokens.offsets.to_numpy()
    return [
        tokenizer.decode(ids[low:high].tolist(), skip_special_tokens=True) if high > low else None
        for low, high in pairwise(ends)
    ]


def contained(whole: pd.DataFrame, answers: Mapping[str, str]) -> list[float | None]:
    """1 where the generated text contains the row's answer, else 0."""
    pairs = zip(whole["text"], whole["row_id"], strict=True)
    return [None if text is None else float(answers[row].strip() in text) for text, row in pairs]


def sample_values(
    sweep: Sweep, results: Path, parts: Sequence[Path], records: Mapping[str, Plain]
) -> pa.Table:
    """The sweep's values that a sample's parts hold, in the form of values.parquet.

    Args:
        sweep: The sweep.
        results: `results/SWEEP`.
        parts: The parts.
        records: `sample` or `calibration` of plan.json.

    Raises:
        CheckFailed: a part holds another number of values than its chunk.
    """
    specs = read_json(results / "plan.json")["measures"]
    frame = asked_values(sweep, results)
    asked = frame[frame["excluded"].isna()]
    found = take_parts(parts[0].parent, in_order(records), specs, asked[KEYS])
    whole = asked.merge(found.values, on=KEYS, sort=False)
    return _published(sweep, results, specs, whole)


def _exclusions(
    sweep: Sweep, points: pd.DataFrame, rows: Sequence[prompt_rows.PromptRow]
) -> list[str | None]:
    """Why each (point, row) is left out, or None, in the order of the cross product."""
    watched = set(watched_positions(sweep))
    cache: dict[str, list[str | None]] = {}
    found: list[str | None] = []
    for writes in points["writes"]:
        resolved = json.loads(writes)
        names = {name for write in resolved for name in position_names(write)} | watched
        key = " ".join(sorted(names))
        if key not in cache:
            cache[key] = [_excluded(row, sorted(names)) for row in rows]
        found += cache[key]
    return found


def _excluded(row: prompt_rows.PromptRow, names: Sequence[str]) -> str | None:
    reasons = [row.reason, *(row.positions[name].reason for name in names)]
    return next((reason for reason in reasons if reason), None)


def _refuse_gaps(whole: pd.DataFrame, parts: pd.DataFrame) -> None:
    asked = whole[whole["excluded"].isna()]
    missing = asked[asked["status"].isna()]
    if len(missing):
        first = missing.iloc[0]
        raise CheckFailed(
            f"{len(missing)} of {len(asked)} values are missing, the first is point "
            f"{first['point_id']} on row {first['row_id']}. Run the workflow again."
        )
    if len(asked) != len(parts):
        raise CheckFailed(f"{len(parts)} values came back, {len(asked)} were asked for.")


def sessions_table(facts: Iterable[Plain]) -> pa.Table:
    """sessions.parquet: one line a session, in the order of the chunks."""
    records = [
        {"chunk_id": fact["chunk_id"], "engine": fact["engine"], **record}
        for fact in facts
        for record in fact["sessions"]
    ]
    return pa.Table.from_pylist(records, schema=SESSIONS)


def status_counts(values: pa.Table) -> dict[str, int]:
    """How many values are ok, excluded and in error."""
    counts = Counter(values["status"].to_pylist())
    if set(counts) - {"ok", "excluded", "error"}:
        raise NnsweepError(f"unknown status in {dict(counts)}")
    return {name: counts.get(name, 0) for name in ("ok", "excluded", "error")}
