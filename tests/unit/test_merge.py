"""The chain of files with an engine that makes its numbers up: every value once, in its place."""

import json
import random
import re
import zlib
from types import MappingProxyType

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from examples import (
    RECORDS,
    WordTokenizer,
    model_of,
    record,
    sweep_of,
    write_csv,
)

from nnsweep import jobs, prompts
from nnsweep.chunks import in_order, keys_of
from nnsweep.config import Bootstrap, Config
from nnsweep.engines import Result
from nnsweep.errors import CheckFailed, NnsweepError, UserError
from nnsweep.expansion import expand_sweep
from nnsweep.merge import (
    asked_values,
    merge_chunks,
    sample_values,
    take_all,
    texts,
    token_lists,
)
from nnsweep.mixed import _engines
from nnsweep.parity import classify
from nnsweep.parts import KEYS, read_part
from nnsweep.provenance import versions
from nnsweep.store import Store
from nnsweep.summary import summarize
from nnsweep.sweep import axis_kinds
from nnsweep.sweep_file import read_sweep, size_line
from nnsweep.tables import (
    part_schema,
    read_json,
    read_table,
    tokens_type,
    values_schema,
    write_json,
    write_table,
)
from nnsweep.vectors import load_vector

WRITE = {"site": "resid_post", "layer": "$layer", "position": "$position", "set": "donor"}
ALONE = [{"name": "logit_diff", "kind": "logit_diff"}]
AXES = {"layer": [0, 1, 2], "position": ["last", "subject"]}
BAD = [
    record(7, "The town of {} is", "The town of {} is", "Lagos", "Mali") | {"word": "Nowhere"},
    record(8, "The town of {} is", "The town of {} is", "Minsk", "Kyiv") | {"base_answer": "a b"},
]


TWO = {
    "gap": {"kind": "logit_diff", "answers": ["target", "foil"]},
    "extra": {"kind": "prob", "answer": "target"},
}


def number(point, row, kind="logit_diff"):
    """What the made-up engine says of a point on a row."""
    return zlib.crc32(f"{point} {row} {kind}".encode()) / 2**32


class MadeUp:
    """An engine without a model; controls give the same number on every run.

    The measure called `hole` has no number; `shift` moves all numbers; `failing` says of values,
    by their number in the chunk, why they failed.
    """

    hole, shift, failing = None, 0.0, MappingProxyType({})

    def one(self, point, row, spec):
        if point.startswith("control:"):
            return 0.5
        found = number(point, row, spec["kind"]) + self.shift
        return float("nan") if spec["name"] == self.hole else found

    def run(self, chunk, report):
        values = [
            [self.one(point, row, spec) for spec in chunk["measures"]]
            for point, row in keys_of(chunk)
        ]
        facts = {
            "device": "cpu",
            "device_name": "cpu",
            "dtype": "float32",
            "attention": "sdpa",
            "threads": 2,
            "versions": versions(),
            "seconds_run": 0.0,
        }
        values = torch.tensor(values)
        failing = {} if chunk["blocks"][0]["passes"][0]["points"][0][0] == "c" else self.failing
        values[list(failing)] = float("nan")
        return Result(values, facts, [], dict(failing))


class Chain:
    """One results folder and the rules that fill it."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.engine = folder, MadeUp()
        monkeypatch.setattr(jobs, "open_engine", lambda *_: self.engine)

    def sweep(self, records, **changes):
        path = write_csv(self.folder / "prompts.csv", records)
        plain = {"axes": AXES, "writes": [WRITE], "on_bad_row": "exclude"}
        where = {"file": str(path), "text": "base", "donor": "source"}
        answers = {"target": "source_answer", "foil": "base_answer"}
        return sweep_of(**plain | changes, prompts=where | {"answers": answers})

    def plan(self, sweep, results, **settings):
        rows = prompts.prepare_rows(sweep, self.folder / "prompts.csv", WordTokenizer(), 0)
        table = prompts.to_table(rows)
        write_table(results / "prompts.parquet", table, table.schema)
        write_json(results / "model.json", model_of())
        return expand_sweep(
            sweep,
            Config(**settings),
            results / "model.json",
            results / "prompts.parquet",
            results,
        )

    def run(self, sweep, name="results", **settings):
        results = self.folder / name
        plan = self.plan(sweep, results, **settings)
        for chunk in [*plan.chunks, *([plan.controls] if plan.controls else [])]:
            self.run_chunk(results, chunk["chunk_id"])
        return results, plan

    def run_chunk(self, results, name):
        folder = results / "local" / "chunks"
        chunk = results / "chunks" / f"{name}.json"
        part, facts = (folder / f"{name}.{ending}" for ending in ("parquet", "json"))
        jobs.run_chunk(chunk, "local", Config(), part, facts)

    def values(self, sweep, name="results", **settings):
        results, _ = self.run(sweep, name, **settings)
        merge_chunks(sweep, results, "local", results / "local")
        return results / "local" / "values.parquet"


@pytest.fixture
def chain(tmp_path, monkeypatch):
    return Chain(tmp_path, monkeypatch)


def read(path, sweep):
    return read_table(path, values_schema(axis_kinds(sweep), list(sweep.measures))).to_pylist()


# --- the merged table -------------------------------------------------------------------------


def test_every_value_stands_in_its_place(chain):
    sweep = chain.sweep(RECORDS)
    rows = read(chain.values(sweep), sweep)
    points = read_table(chain.folder / "results" / "points.parquet").to_pylist()
    lines = prompts.from_table(read_table(chain.folder / "results" / "prompts.parquet"))
    expected = [(point, line) for point in points for line in lines]
    assert len(rows) == len(expected) == 6 * len(RECORDS)
    for row, (point, line) in zip(rows, expected, strict=True):
        assert (row["point_id"], row["row_id"]) == (point["point_id"], line.row_id)
        assert (row["layer"], row["position"]) == (point["layer"], point["position"])
        assert row["status"] == "ok"
        made_up = number(point["point_key"], line.row_key)
        assert row["logit_diff"] == pytest.approx(made_up, abs=1e-6)


def test_excluded_rows_stay_with_their_reason(chain):
    sweep = chain.sweep([RECORDS[0], BAD[0], RECORDS[2], BAD[1]])
    rows = read(chain.values(sweep), sweep)
    found = {(row["position"], row["row_id"]): row for row in rows if row["layer"] == 0}
    assert found["last", "row-7"]["status"] == "ok"
    assert found["subject", "row-7"]["status"] == "excluded"
    assert "'Nowhere' is not in" in found["subject", "row-7"]["reason"]
    assert found["subject", "row-7"]["logit_diff"] is None
    for position in AXES["position"]:
        assert found[position, "row-8"]["status"] == "excluded"
        assert "has 2 tokens" in found[position, "row-8"]["reason"]
    assert [row["row_id"] for row in rows[:4]] == ["row-0", "row-7", "row-2", "row-8"]


def test_edges_that_a_row_does_not_have_are_a_reason_at_their_points_alone(chain):
    """The sixth token stands before one row's subject and behind the other's."""
    cut = {"site": "attn_scores", "layer": "$layer", "heads": "all", "position": "$position"}
    near = RECORDS[4] | {
        "row_id": "near",
        "base": "Delhi is now a very large town",
        "word": "Delhi",
    }
    sweep = chain.sweep(
        [RECORDS[2], near],
        model={"id": "any", "attention": "eager"},
        axes={"layer": [0, 1], "position": ["sixth", "last"]},
        positions={"subject": {"text": "word", "donor_text": "source_word"}, "sixth": 5},
        writes=[cut | {"keys": "subject", "knockout": True}],
    )
    rows = read(chain.values(sweep), sweep)
    found = {(row["position"], row["row_id"]): row for row in rows if row["layer"] == 0}
    assert found["sixth", "row-2"]["status"] == "excluded"
    assert "come after the query tokens [5]" in found["sixth", "row-2"]["reason"]
    others = [row for place, row in found.items() if place != ("sixth", "row-2")]
    assert [row["status"] for row in others] == ["ok", "ok", "ok"]


def test_bytes_depend_on_values_alone(chain):
    sweep = chain.sweep([*RECORDS, *BAD])
    cuts = [(2, 1), (2, 7), (64, 1000), (1, 3)]
    tables = {
        chain.values(sweep, f"r{i}", batch_rows=rows, chunk_passes=passes).read_bytes()
        for i, (rows, passes) in enumerate(cuts)
    }
    assert len(tables) == 1


def test_reordered_rows_bring_the_same_values_by_key(chain):
    sweep = chain.sweep(RECORDS)
    before = read(chain.values(sweep, "before"), sweep)
    after = read(chain.values(chain.sweep(RECORDS[::-1]), "after"), sweep)
    assert after != before

    def by_key(rows):
        return sorted(rows, key=lambda row: (row["point_id"], row["row_id"]))

    assert by_key(after) == by_key(before)


def test_a_row_that_repeats_another_counts_once(chain):
    sweep = chain.sweep([*RECORDS, RECORDS[0] | {"row_id": "twin"}])
    rows = read(chain.values(sweep), sweep)
    found = {row["row_id"]: row for row in rows if row["layer"] == 0 and row["position"] == "last"}
    assert found["row-0"]["status"] == "ok"
    assert found["twin"]["status"] == "excluded"
    assert "row-0" in found["twin"]["reason"]
    assert found["twin"]["logit_diff"] is None


def test_nothing_of_the_run_is_in_the_values(chain):
    sweep = chain.sweep(RECORDS)
    schema = read_table(chain.values(sweep)).schema
    assert schema.names == [
        "point_id",
        "layer",
        "position",
        "row_id",
        "status",
        "reason",
        "logit_diff",
    ]
    assert not schema.metadata


def test_the_run_record_counts(chain):
    sweep = chain.sweep([*RECORDS, *BAD])
    chain.values(sweep)
    run = read_json(chain.folder / "results" / "local" / "run.json")
    assert run["engine"] == "local"
    assert run["points"] == 6
    # Row 7 is excluded at one of two positions, row 8 at both.
    assert run["values"] == {"ok": 33, "excluded": 9, "error": 0}
    assert all(control["holds"] for control in run["controls"].values())


# --- lists of tokens --------------------------------------------------------------------------

FIELDS = ("id", "log_prob", "entropy")


def test_numbers_become_lists_of_tokens():
    """Two tokens a row at most: a whole list, one that ends early, and none."""
    lines = [[7, 8, -0.5, -1, 0.25, None], [9, None, -2, None, 0.5, None], [None] * 6]
    frame = pd.DataFrame(lines).astype("Float32")
    found = token_lists(frame, FIELDS, lambda ids: f"<{ids[0]}>")
    assert found.type == tokens_type(FIELDS)
    assert found.to_pylist() == [
        [
            {"id": 7, "token": "<7>", "log_prob": -0.5, "entropy": 0.25},
            {"id": 8, "token": "<8>", "log_prob": -1.0, "entropy": None},
        ],
        [{"id": 9, "token": "<9>", "log_prob": -2.0, "entropy": 0.5}],
        None,
    ]


def test_a_token_is_decoded_once_however_often_it_came():
    asked = []
    frame = pd.DataFrame([[3, 0.5], [3, 0.5], [4, 0.5]]).astype("Float32")
    token_lists(frame, FIELDS[:2], lambda ids: asked.extend(ids) or "")
    assert asked == [3, 4]


def test_a_generated_text_is_its_tokens_and_none_is_none():
    frame = pd.DataFrame([[3, 4, 0, 0], [5, None, 0, None], [None] * 4]).astype("Float32")
    found = token_lists(frame, FIELDS[:2], str)

    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return f"{ids} {skip_special_tokens}"

    assert texts(found, Tokenizer()) == ["[3, 4] True", "[5] True", None]


# --- names that our own columns could have ---------------------------------------------------

WORDS = [
    *("place", "order", "chunk", "failed", "also", "part", "measures", "engine", "index", "key"),
    *("values", "name", "variable", "value", "level_0", "left", "point", "row", "gap_a", "gap_b"),
]


@pytest.mark.parametrize("word", WORDS)
def test_an_axis_may_be_called_what_it_likes(chain, word):
    write = WRITE | {"position": f"${word}"}
    axes = {"layer": [0, 1], word: ["last", "subject"]}
    gap = {"gap": {"kind": "logit_diff", "answers": ["target", "foil"]}}
    through_all_tables(chain, chain.sweep(RECORDS, axes=axes, writes=[write], measures=gap), "gap")


@pytest.mark.parametrize("word", WORDS)
def test_a_measure_may_be_called_what_it_likes(chain, word):
    through_all_tables(chain, chain.sweep(RECORDS, measures={word: TWO["gap"]}), word)


def through_all_tables(chain, sweep, measure):
    """Values, a summary of them, who gave them, and a parity that sees one value move."""
    path = chain.values(sweep)
    local, results = path.parent, path.parents[1]
    summarize(sweep, path, local / "summary.parquet", Bootstrap(resamples=10))
    numbers = pd.read_parquet(path)[measure]
    means = pd.read_parquet(local / "summary.parquet")["mean"]
    assert means.to_numpy() == pytest.approx(
        numbers.to_numpy().reshape(len(means), -1).mean(1), abs=1e-6
    )
    asked, plan = asked_values(sweep, results), read_json(results / "plan.json")
    taken = take_all(local / "chunks", plan, asked[KEYS])
    facts = {name: {"engine": "local"} for name in chunk_names(results)}
    owners = _engines(asked, taken.owners, facts).to_pylist()
    assert [set(one) for one in owners] == [{"point_id", "row_id", "measures", "engine"}] * len(
        numbers
    )
    table = read_table(path)
    kinds = {measure: "logit_diff"}
    same = classify(table, table, kinds, "float32")
    assert set(same["class"].to_pylist()) == {"identical"}
    column = pa.array([numbers[0] + 1, *numbers[1:]], pa.float32())
    moved = table.set_column(table.schema.names.index(measure), measure, column)
    found = classify(table, moved, kinds, "float32")["class"].to_pylist()
    assert found.count("different") == 1


# --- what is refused --------------------------------------------------------------------------


def rewrite(path, change):
    table = read_table(path)
    write_table(path, change(table), table.schema)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda part: part.slice(1), "values, the plan takes"),
        (lambda part: pa.concat_tables([part, part.slice(0, 1)]), "stands twice; delete"),
        (lambda part: _renamed(part, "point_key", "stranger"), "values, the plan takes"),
        (lambda part: _renamed(part, "row_key", "stranger"), "values, the plan takes"),
    ],
)
def test_a_value_lost_doubled_or_strange_is_refused(chain, change, said):
    sweep = chain.sweep(RECORDS)
    results, plan = chain.run(sweep, chunk_passes=2)
    path = results / "local" / "chunks" / f"{plan.chunks[1]['chunk_id']}.parquet"
    rewrite(path, change)
    with pytest.raises(CheckFailed, match=said) as caught:
        merge_chunks(sweep, results, "local", results / "local")
    assert str(path) in str(caught.value)
    assert not (results / "local" / "values.parquet").exists()


def _renamed(part, column, name):
    """The part with another key in its first row."""
    keys = pa.array([name, *part[column].to_pylist()[1:]], pa.string())
    return part.set_column(part.schema.names.index(column), column, keys)


def test_a_part_that_holds_another_chunks_values_is_refused(chain):
    sweep = chain.sweep(RECORDS)
    results, plan = chain.run(sweep, chunk_passes=2)
    first, second = (
        results / "local" / "chunks" / f"{chunk['chunk_id']}.parquet" for chunk in plan.chunks[:2]
    )
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckFailed, match="values, the plan takes"):
        merge_chunks(sweep, results, "local", results / "local")


def test_a_plan_that_lost_a_chunk_names_the_first_missing_value(chain):
    sweep = chain.sweep(RECORDS)
    results, plan = chain.run(sweep, chunk_passes=2)
    planned = read_json(results / "plan.json")
    del planned["chunks"][plan.chunks[0]["chunk_id"]]
    write_json(results / "plan.json", planned)
    with pytest.raises(CheckFailed, match=r"\d+ of 30 values are missing, the first is point"):
        merge_chunks(sweep, results, "local", results / "local")


def test_a_part_of_another_sweep_is_refused(chain):
    sweep = chain.sweep(RECORDS)
    results, plan = chain.run(sweep)
    name = plan.chunks[0]["chunk_id"]
    other = part_schema(["kl"])
    write_table(results / "local" / "chunks" / f"{name}.parquet", other.empty_table(), other)
    with pytest.raises(NnsweepError, match="columns are not those asked for"):
        read_part(results / "local" / "chunks" / f"{name}.parquet", ALONE)


def test_a_broken_control_leaves_no_values(chain):
    sweep = chain.sweep(RECORDS)

    class Broken(MadeUp):
        def run(self, chunk, report):
            result = super().run(chunk, report)
            for i, (point, _) in enumerate(keys_of(chunk)):
                if point == "control:zero_steer":
                    result.values[i] += 1
            return result

    chain.engine = Broken()
    with pytest.raises(CheckFailed, match="null control zero_steer does not hold"):
        chain.values(sweep)
    assert not (chain.folder / "results" / "local" / "values.parquet").exists()


@pytest.mark.parametrize("lost", [1, -1])
def test_an_engine_that_returns_another_number_of_values_leaves_no_part(chain, lost):
    sweep = chain.sweep(RECORDS)

    class Careless(MadeUp):
        def run(self, chunk, report):
            result = super().run(chunk, report)
            values = result.values[:-1] if lost > 0 else result.values.repeat(2, 1)
            return Result(values, result.facts, [])

    chain.engine = Careless()
    with pytest.raises(NnsweepError, match=r"values were asked for, \d+ came back"):
        chain.run(sweep)
    assert not (chain.folder / "results" / "local").exists()


# --- growth on disk ---------------------------------------------------------------------------


def measured(path):
    """(layer, position, row) -> the values of a table."""
    lines = read_table(path).to_pylist()
    axes = ("layer", "position", "row_id")
    known = ("point_id", "status", "reason", *axes)
    return {
        tuple(line[name] for name in axes): {k: v for k, v in line.items() if k not in known}
        for line in lines
    }


class Growing:
    """A sweep that changes in one folder, with an engine that counts what it runs."""

    def __init__(self, chain):
        self.chain, self.results = chain, chain.folder / "results"
        self.ran = []

    def run(self, records=RECORDS, name="results", **changes):
        """Plan anew, run what has no part yet, merge; how many values were run."""
        settings = {"chunk_passes": 3, "batch_rows": 4} | changes.pop("settings", {})
        sweep = self.chain.sweep(records, **changes)
        results = self.chain.folder / name
        plan = self.chain.plan(sweep, results, **settings)
        ran = 0
        for chunk in [*plan.chunks, plan.controls]:
            if not (results / "local" / "chunks" / f"{chunk['chunk_id']}.parquet").exists():
                self.chain.run_chunk(results, chunk["chunk_id"])
                ran += 0 if chunk is plan.controls else len(keys_of(chunk))
        merge_chunks(sweep, results, "local", results / "local")
        return ran, plan, results / "local" / "values.parquet"


@pytest.fixture
def growing(chain):
    return Growing(chain)


def chunk_names(results):
    plan = read_json(results / "plan.json")
    return list(in_order(plan["chunks"]))


def fresh(growing, **changes):
    """The same sweep in a results folder of its own."""
    count = len(list(growing.chain.folder.glob("fresh*")))
    return growing.run(name=f"fresh{count}/alone", **changes)[2]


GROWTH = [
    ({"axes": AXES | {"layer": [0, 1]}}, {}, 10),
    ({}, {"axes": AXES | {"layer": [0, 2]}}, 0),
    ({}, {"axes": AXES | {"position": ["last"]}}, 0),
    ({"records": RECORDS[:-1]}, {}, 6),
    ({}, {"records": RECORDS[1:]}, 0),
    ({}, {"records": RECORDS[::-1]}, 0),
    ({"measures": TWO}, {"measures": {"gap": TWO["gap"]}}, 0),
    ({"measures": TWO}, {"measures": {"other": TWO["gap"]}}, 0),
    ({"measures": {"gap": TWO["gap"]}}, {"measures": TWO}, 30),
    ({}, {"records": [RECORDS[0] | {"base_answer": "Lima"}, *RECORDS[1:]]}, 6),
]


@pytest.mark.parametrize(("before", "after", "values"), GROWTH)
def test_a_sweep_that_changes_runs_what_is_new_and_nothing_else(growing, before, after, values):
    growing.run(**before)
    ran, _, table = growing.run(**after)
    assert ran == values
    assert table.read_bytes() == fresh(growing, **after).read_bytes()
    assert growing.run(**after)[0] == 0


def test_what_was_removed_and_comes_back_runs_nothing(growing):
    _, _, whole = growing.run()
    before = whole.read_bytes()
    assert growing.run(axes=AXES | {"layer": [1]})[0] == 0
    assert len(read_table(whole)) == 10
    ran, _, again = growing.run()
    assert ran == 0
    assert again.read_bytes() == before


def test_sweeps_of_one_folder_share_what_they_have_run(growing):
    _, first, _ = growing.run()
    ran, second, table = growing.run(name="copy")
    assert (ran, second.chunks) == (0, first.chunks)
    assert table.read_bytes() == fresh(growing).read_bytes()
    assert chunk_names(growing.results.parent / "copy") == chunk_names(growing.results)
    # Half of the points are those of the other sweep, in its chunks.
    ran, _, table = growing.run(name="half", axes=AXES | {"layer": [1, 2, 3]})
    assert ran == 10
    assert table.read_bytes() == fresh(growing, axes=AXES | {"layer": [1, 2, 3]}).read_bytes()


def test_of_two_chunks_that_hold_a_value_one_gives_it(growing):
    """Two folders that knew nothing of each other come together."""
    growing.run(axes=AXES | {"layer": [0, 1]})
    growing.run(name="far/away", axes=AXES | {"layer": [1, 2]}, settings={"batch_rows": 2})
    (growing.chain.folder / "far" / "away").rename(growing.chain.folder / "away")
    ran, plan, table = growing.run()
    assert ran == 2  # Of one chunk less than half was left to take.
    assert any(part.values < len(keys_of(part.chunk)) for part in plan.parts)
    assert table.read_bytes() == fresh(growing).read_bytes()


def test_the_plan_of_an_earlier_nnsweep_is_no_obstacle(growing, caplog):
    write_json(growing.results / "plan.json", {"chunks": {"a" * 16: []}, "controls": None})
    assert growing.run()[0] == 30
    assert "the plan of an earlier nnsweep is left aside" in caplog.text


def test_the_model_of_an_earlier_nnsweep_is_no_obstacle(tmp_path):
    """Before it is described anew, the line that says how large a sweep is knows less."""
    model = model_of()
    model["shape"] = {name: model["shape"][name] for name in ("layers", "heads")}
    write_json(tmp_path / "model.json", model)
    line = size_line(sweep_of(model={"id": model["id"]}), tmp_path / "model.json")
    assert "points are counted once the model is prepared" in line


@pytest.mark.parametrize(("place", "values"), [("chunks", 0), ("local/chunks", 30)])
def test_a_damaged_file_of_another_sweep_is_no_obstacle(growing, place, values, caplog):
    """Chunks planned anew have the same names, so that their parts serve all the same."""
    growing.run()
    for path in (growing.results / place).glob("*.json"):
        path.write_text(path.read_text()[:40])
    ran, _, table = growing.run(name="copy")
    assert ran == values
    assert table.read_bytes() == fresh(growing).read_bytes()
    assert ("what results has finished is left aside" in caplog.text) == (place == "chunks")


@pytest.mark.parametrize("change", [{"threads": 7}, {"versions": {"torch": "0"}}])
def test_what_was_made_otherwise_is_not_taken_from_another_sweep(growing, change):
    growing.run()
    for facts in (growing.results / "local" / "chunks").glob("*.json"):
        write_json(facts, read_json(facts) | change)
    assert growing.run(name="copy")[0] == 30


@pytest.mark.parametrize(
    ("made", "asked", "said"),
    [
        ({}, {"threads": 3}, "threads: 3 finished chunks in .* with threads=2, not 3. Set threads"),
        ({}, {"device": "cuda"}, "device: 3 finished chunks in .* with device=cpu, not cuda."),
        ({}, {"device": "cpu"}, None),
        ({}, {"device": "auto"}, None),
        ({"device": "cuda"}, {"threads": 3}, None),
        ({"device": "cuda"}, {"device": "cpu"}, "device=cuda, not cpu"),
        ({"engine": "ndif"}, {"threads": 3}, None),
    ],
)
def test_finished_chunks_that_were_made_otherwise_stop_a_run(growing, made, asked, said):
    """On a GPU threads move nothing; what NDIF computed is not of this machine."""
    growing.run(settings={"chunk_passes": 64})
    facts = list((growing.results / "local/chunks").glob("*.json"))
    for path in facts:
        write_json(path, read_json(path) | made)
    store = Store(growing.results, Config(**asked))
    if said is None:
        store.refuse_unlike("local")
    else:
        with pytest.raises(UserError, match=said.replace("3 finished", f"{len(facts)} finished")):
            store.refuse_unlike("local")
    store.refuse_unlike("reference")
    for path in facts:
        path.with_suffix(".parquet").unlink()
    store.refuse_unlike("local")


@pytest.mark.parametrize(
    ("made", "side", "target", "taken"),
    [
        ("mixed", "local", "local", True),
        ("mixed", "ndif", "ndif", False),
        ("mixed", "reference", "reference", False),
        ("local", "local", "mixed", True),
        ("local", "ndif", "mixed", False),
        ("local", "local", "local", False),
    ],
)
def test_a_mixed_run_and_its_sides_take_what_the_other_has_done(growing, made, side, target, taken):
    """Everything was computed here, alone or as one side of a mixed run."""
    _, plan, _ = growing.run()
    if made == "mixed":
        (growing.results / "local").rename(growing.results / "mixed")
    name = plan.chunks[0]["chunk_id"]
    part = growing.results / target / "chunks" / f"{name}.parquet"
    before = part.exists()
    assert jobs.taken_over(side, part, Config()) is taken
    assert part.exists() is (taken or before)
    assert not jobs.taken_over(side, part, Config(threads=7))


def test_chunks_of_two_machines_are_told(growing, caplog):
    """Two kinds of GPU, or a library that was brought up to date on the way."""
    growing.run()
    facts = sorted((growing.results / "local/chunks").glob("*.json"))[0]
    versions = read_json(facts)["versions"] | {"torch": "0.1"}
    write_json(facts, read_json(facts) | {"versions": versions, "device_name": "other"})
    merge_chunks(growing.chain.sweep(RECORDS), growing.results, "local", growing.results / "local")
    assert "chunks were not all made with the same device_name (" in caplog.text
    assert re.search(r"torch \(.*0\.1.*\)", caplog.text)
    assert "transformers (" not in caplog.text


def test_a_change_of_semantics_is_told_and_runs_everything(growing, caplog):
    growing.run()
    for path in (growing.results / "chunks").glob("*.json"):
        write_json(path, read_json(path) | {"semantics": 0})
    for part in (growing.results / "local" / "chunks").glob("*"):
        part.rename(part.with_name(f"0{part.name[1:]}"))
    ran, _, _ = growing.run()
    assert ran == 30
    assert "values of semantics 0 are left aside" in caplog.text


def test_errors_of_a_measure_that_is_gone_are_gone(growing):
    """One measure without a number makes the row an error; without that measure it is none."""
    growing.chain.engine.hole = "extra"
    growing.run(measures=TWO)
    lines = read_table(growing.results / "local" / "values.parquet").to_pylist()
    assert {line["reason"] for line in lines} == {"extra is not finite"}
    ran, _, table = growing.run(measures={"gap": TWO["gap"]})
    assert ran == 0
    assert {line["status"] for line in read_table(table).to_pylist()} == {"ok"}
    growing.chain.engine.hole = None
    assert table.read_bytes() == fresh(growing, measures={"gap": TWO["gap"]}).read_bytes()


def test_a_sample_is_taken_from_chunks_that_hold_more(growing):
    growing.run()
    axes = AXES | {"layer": [0, 2]}
    _, plan, table = growing.run(axes=axes, settings={"parity": {"points": 2}})
    assert len(plan.sample) == 1
    lines = sampled(growing, "sample", axes=axes)
    assert len({line["point_id"] for line in lines}) >= 2
    assert_in(table, lines)


BACK = {"kind": "recovery", "of": "gap", "min_gap": 0.1}


def measures_run(plan):
    """The measures of every chunk of a plan, in order."""
    return [{spec["name"] for spec in chunk["measures"]} for chunk in plan.chunks]


def test_a_new_measure_alone_is_computed(growing):
    """It reads an answer that nobody read before; what is there keeps its bytes."""
    growing.run(measures={"extra": TWO["extra"]})
    parts = growing.results / "local" / "chunks"
    before = {path: path.stat().st_mtime_ns for path in parts.iterdir()}
    ran, plan, table = growing.run(measures=TWO)
    assert ran == 30
    count = len(plan.chunks) // 2
    assert measures_run(plan) == [{"extra"}] * count + [{"gap"}] * count
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert table.read_bytes() == fresh(growing, measures=TWO).read_bytes()


def test_a_new_recovery_leaves_its_measure_as_it_is(growing):
    growing.run(measures={"gap": TWO["gap"]})
    growing.chain.engine.shift = 1.0
    _, plan, table = growing.run(measures={"gap": TWO["gap"], "back": BACK})
    assert {frozenset(found) for found in measures_run(plan)} == {
        frozenset({name}) for name in ("gap", "back")
    }
    lines = read_table(table).to_pylist()
    assert all(0 <= line["gap"] < 1 <= line["back"] for line in lines)
    again = growing.run(measures={"gap": TWO["gap"], "back": BACK})
    assert again[0] == 0
    assert read_table(again[2]).to_pylist() == lines


def test_a_row_that_comes_with_a_measure_gets_both_in_one_pass(growing):
    growing.run(records=RECORDS[:-1], measures={"gap": TWO["gap"]})
    ran, plan, table = growing.run(measures=TWO)
    assert ran == 30
    assert {"gap", "extra"} in measures_run(plan)
    assert table.read_bytes() == fresh(growing, measures=TWO).read_bytes()


def test_what_nobody_has_run_gets_all_measures_in_one_pass(growing):
    sweep = growing.chain.sweep(RECORDS, measures={"gap": TWO["gap"]})
    growing.chain.plan(sweep, growing.results, chunk_passes=3, batch_rows=4)
    _, plan, _ = growing.run(measures=TWO)
    assert all(found == {"gap", "extra"} for found in measures_run(plan))


def test_another_sweeps_chunks_that_lack_a_measure_are_left_aside(growing):
    growing.run(measures={"gap": TWO["gap"]})
    _, plan, _ = growing.run(name="copy", measures=TWO)
    assert all(found == {"gap", "extra"} for found in measures_run(plan))


def test_a_point_that_fails_for_one_measure_keeps_the_others(growing):
    growing.run(measures={"gap": TWO["gap"]})
    growing.chain.engine.failing = {0: "index 9"}
    _, _, table = growing.run(measures=TWO)
    lines = [line for line in read_table(table).to_pylist() if line["status"] == "error"]
    assert lines
    assert {line["reason"] for line in lines} == {"index 9"}
    assert all(line["gap"] is not None and line["extra"] is None for line in lines)


@pytest.mark.parametrize("hole", ["gap", "extra"])
def test_reasons_of_two_chunks_are_those_of_one(growing, hole):
    growing.chain.engine.hole = hole
    growing.run(measures={"extra": TWO["extra"]})
    table = growing.run(measures=TWO)[2]
    assert {line["reason"] for line in read_table(table).to_pylist()} == {f"{hole} is not finite"}
    assert table.read_bytes() == fresh(growing, measures=TWO).read_bytes()


def test_a_part_of_a_grown_sweep_that_loses_a_value_is_named(growing):
    growing.run(measures={"gap": TWO["gap"]})
    _, plan, _ = growing.run(measures=TWO)
    name = plan.chunks[-1]["chunk_id"]
    rewrite(growing.results / f"local/chunks/{name}.parquet", lambda part: part.slice(1))
    sweep = growing.chain.sweep(RECORDS, measures=TWO)
    with pytest.raises(CheckFailed, match=rf"{name}.parquet: \d+ values, the plan takes"):
        merge_chunks(sweep, growing.results, "local", growing.results / "local")


@pytest.mark.parametrize("name", ["sample", "calibration"])
def test_samples_of_a_grown_sweep_have_all_measures_once(growing, name):
    """A changed answer leaves stale values behind, a new measure has chunks of its own."""
    settings = {"parity": {"points": 3}, "mixed": {"calibration_points": 3}}
    records = [RECORDS[0] | {"base_answer": "Lima"}, *RECORDS[1:]]
    growing.run(measures={"gap": TWO["gap"]})
    growing.run(records=records, measures={"gap": TWO["gap"]})
    _, plan, table = growing.run(records=records, measures=TWO, settings=settings)
    assert len(getattr(plan, name)) > 1
    lines = sampled(growing, name, records, measures=TWO)
    assert len({line["point_id"] for line in lines}) >= 3
    assert_in(table, lines)


def test_a_sample_of_chunks_that_hold_the_same_value_has_it_once(growing):
    growing.run(axes=AXES | {"layer": [0, 1]})
    growing.run(name="far/away", axes=AXES | {"layer": [1, 2]})
    (growing.chain.folder / "far" / "away").rename(growing.chain.folder / "away")
    _, plan, table = growing.run(settings={"mixed": {"calibration_points": 6}})
    held = [key for part in plan.calibration for key in keys_of(part.chunk)]
    assert len(held) > len(set(held))
    lines = sampled(growing, "calibration")
    assert len(lines) == 30
    assert_in(table, lines)


CHOICES = {
    "gap": TWO["gap"],
    "extra": TWO["extra"],
    "other": {"kind": "log_prob", "answer": "foil"},
    "back": BACK,
}


@pytest.mark.parametrize("seed", range(12))
def test_every_story_of_changes_ends_as_a_fresh_run(growing, seed):
    """Measures, rows, answers and layers come and go; samples always stand in the table."""
    dice = random.Random(seed)
    for _ in range(6):
        picked = sorted(CHOICES, key=lambda _: dice.random())[: dice.randint(1, 4)]
        names = [*picked, *(["gap"] if "back" in picked and "gap" not in picked else [])]
        records = [dict(one) for one in RECORDS[: dice.randint(3, len(RECORDS))]]
        dice.choice(records)["base_answer"] = dice.choice(["Lima", "Oslo"])
        how = {
            "records": records,
            "axes": AXES | {"layer": dice.sample(range(4), dice.randint(1, 3))},
            "measures": {name: CHOICES[name] for name in names},
        }
        cut = {"batch_rows": dice.choice([2, 4]), "chunk_passes": dice.choice([1, 3])}
        points = {"parity": {"points": 2}, "mixed": {"calibration_points": 2}}
        _, plan, table = growing.run(settings=cut | points, **how)
        assert table.read_bytes() == fresh(growing, **how).read_bytes()
        for name in ("sample", "calibration"):
            if getattr(plan, name):
                assert_in(table, sampled(growing, name, **how))


def sampled(growing, name, records=RECORDS, **changes):
    """The values of a sample of the plan, run and read."""
    wanted = read_json(growing.results / "plan.json")[name]
    for chunk in wanted:
        growing.chain.run_chunk(growing.results, chunk)
    parts = [growing.results / "local" / "chunks" / f"{chunk}.parquet" for chunk in wanted]
    sweep = growing.chain.sweep(records, **changes)
    return sample_values(sweep, growing.results, parts, wanted).to_pylist()


def assert_in(table, lines):
    """The lines stand in the table, each once."""
    whole = {(line["point_id"], line["row_id"]): line for line in read_table(table).to_pylist()}
    found = {(line["point_id"], line["row_id"]): line for line in lines}
    assert len(found) == len(lines) > 0
    assert found.items() <= whole.items()


def test_planning_twice_writes_the_same_files(chain):
    sweep = chain.sweep([*RECORDS, *BAD])
    results = chain.folder / "results"
    chain.plan(sweep, results)
    before = {path: path.read_bytes() for path in results.rglob("*") if path.is_file()}
    chain.plan(sweep, results)
    after = {path: path.read_bytes() for path in results.rglob("*") if path.is_file()}
    assert after == before


# --- one chunk's rows -------------------------------------------------------------------------

SPECS = [
    {"name": "diff", "kind": "logit_diff"},
    {"name": "rec", "kind": "recovery", "of": {"name": "diff"}, "min_gap": 0.1},
]


def part_of(*values):
    keys = [(f"p{i}", "row") for i in range(len(values))]
    return jobs.part_table({"measures": SPECS}, keys, torch.tensor(values), {}).to_pylist()


def test_a_recovery_without_a_gap_is_null_with_a_reason():
    """Case C16."""
    (row,) = part_of([0.25, float("nan")])
    assert row["status"] == "ok"
    assert row["diff"] == 0.25
    assert row["rec"] is None
    assert "clean and donor differ in diff by less than 0.1" in row["reason"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_no_number_is_an_error_and_not_a_number(value):
    good, bad = part_of([1.0, 2.0], [value, 0.5])
    assert (good["status"], good["reason"], good["diff"], good["rec"]) == ("ok", None, 1.0, 2.0)
    assert (bad["status"], bad["diff"], bad["rec"]) == ("error", None, 0.5)
    assert bad["reason"] == "diff is not finite"


def test_a_point_that_failed_keeps_its_place_and_its_reason():
    values = torch.tensor([[1.0, 2.0], [float("nan"), float("nan")]])
    keys = [("p0", "row"), ("p1", "row")]
    good, bad = jobs.part_table({"measures": SPECS}, keys, values, {1: "index 9"}).to_pylist()
    assert (good["status"], good["reason"]) == ("ok", None)
    assert (bad["status"], bad["reason"], bad["diff"], bad["rec"]) == (
        "error",
        "index 9",
        None,
        None,
    )


def test_part_tables_have_the_declared_schema():
    values = torch.tensor([[float("nan"), float("nan")]])
    table = jobs.part_table({"measures": SPECS}, [("p", "r")], values, {})
    assert table.schema.equals(part_schema(["diff", "rec"]))
    assert table["diff"].null_count == 1


# --- vectors ----------------------------------------------------------------------------------


@pytest.fixture
def vector(tmp_path):
    """Write a tensor to a safetensors file and read it as a sweep does."""
    from safetensors.torch import save_file

    def load(tensor, layer=0, key="vector"):
        save_file({"vector": tensor}, tmp_path / "v.safetensors")
        return load_vector({"file": str(tmp_path / "v.safetensors"), "key": key}, layer)

    return load


def test_a_vector_is_read_by_layer_or_whole(vector):
    table = torch.arange(6, dtype=torch.float32).reshape(3, 2)
    assert vector(table[1]) == [2.0, 3.0]
    assert [vector(table, layer) for layer in range(3)] == table.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, torch.bfloat16])
def test_a_vector_of_any_dtype_is_read(vector, dtype):
    assert vector(torch.tensor([1.0, -2.0]).to(dtype)) == [1.0, -2.0]


def test_a_vector_that_is_no_vector_is_refused(vector):
    refused = [
        (torch.ones(2, 2, 2), 0, "vector"),
        (torch.ones(2, 2), 2, "vector"),
        (torch.ones(2, 2), None, "vector"),
        (torch.tensor([1.0, float("nan")]), 0, "vector"),
        (torch.tensor([float("inf")]), 0, "vector"),
        (torch.ones(2), 0, "direction"),
    ]
    for tensor, layer, key in refused:
        with pytest.raises(UserError, match=r"v\.safetensors"):
            vector(tensor, layer, key)


def test_a_missing_vector_file_is_refused(tmp_path):
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    for name in ("none.safetensors", "junk.safetensors"):
        with pytest.raises(UserError, match=name):
            load_vector({"file": str(tmp_path / name), "key": "vector"}, 0)


# --- documents on disk ------------------------------------------------------------------------


def test_a_sweep_is_named_as_its_file(tmp_path, repository):
    shipped = repository / "config" / "sweeps" / "capitals_layers.yaml"
    assert read_sweep(shipped).name == "capitals_layers"
    (tmp_path / "other.yaml").write_bytes(shipped.read_bytes())
    with pytest.raises(UserError, match="Name the sweep as its file: other"):
        read_sweep(tmp_path / "other.yaml")


def test_points_are_written_with_typed_axes(chain):
    sweep = chain.sweep(RECORDS)
    chain.plan(sweep, chain.folder / "results")
    table = read_table(chain.folder / "results" / "points.parquet")
    assert table.schema.field("layer").type == pa.int32()
    assert table.schema.field("position").type == pa.string()
    writes = [json.loads(text) for text in table["writes"].to_pylist()]
    place = {"site": "resid_post", "layer": 0, "position": "subject"}
    assert writes[1][0] == place | {"set": place | {"patch": "donor"}}
    assert len(np.unique(table["point_id"].to_numpy(zero_copy_only=False))) == 6
