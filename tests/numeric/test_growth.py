"""A sweep that changes again and again has the values of one that was run at once."""

import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from harness import RECORDS, difference, record, sweep_of, write_records
from safetensors.torch import save_file

from nnsweep import jobs, prompts
from nnsweep.chunks import keys_of
from nnsweep.config import Config
from nnsweep.errors import UserError
from nnsweep.expansion import expand_sweep
from nnsweep.merge import merge_chunks
from nnsweep.tables import read_table, write_json, write_table

Plain = dict[str, Any]
STEPS = 8
GAP = {"kind": "logit_diff", "answers": ["target", "foil"]}
MEASURES: Plain = {
    "gap": GAP,
    "target": {"kind": "log_prob", "answer": "target"},
    "foil": {"kind": "log_prob", "answer": "foil"},
    "drift": {"kind": "kl"},
    "back": {"kind": "recovery", "of": "gap", "min_gap": 0.1},
    "turned": {"kind": "cosine", "read": {"site": "resid_post", "layer": 2}},
    "lens": {"kind": "prob", "answer": "target", "lens": {"layers": [1, 3]}},
    # Behind this one every pass goes on from all layers' keys and values.
    "whole": {"kind": "log_prob", "answer": "target", "tokens": "sum"},
    "slope": {"kind": "attribution", "of": "gap"},
}
POSITIONS: Plain = {
    "subject": {"text": "word", "donor_text": "source_word", "align": "last"},
    "second": {"span": [1, 2], "align": "first"},
}
WRITES = {
    "patch": {"set": "donor"},
    "mean": {"set": {"mean": "donor"}},
    "resample": {"set": {"resample": "text", "seed": 0}},
    "noise": {"noise": {"std": 0.5, "seed": 0}},
    "vector": {"add": {"vector": {"file": "v.safetensors"}, "scale": 2.0}},
}
MORE = [
    record("The mayor of {} is", "The mayor of {} is", "Rome", "Oslo", "Ed", "Bob"),
    record("I think the capital of {} is", "The capital of {} is", "Chile", "Peru", "Ed", "Lima"),
]


class State:
    """A sweep, its prompt rows and its vector."""

    def __init__(self, kind: str) -> None:
        self.records = deepcopy(RECORDS)
        write = {"site": "resid_post", "layer": "$layer", "position": "$position"}
        self.document: Plain = {
            "axes": {"layer": [0, 1, 2], "position": ["subject", "second", "last"]},
            "positions": deepcopy(POSITIONS),
            "writes": [write | deepcopy(WRITES[kind])],
            "measures": deepcopy(MEASURES),
        }
        self.vector = 1.0


def change(state: State, dice: random.Random) -> str:
    """One change that a person could make, and its name."""
    name = dice.choice(sorted(CHANGES))
    CHANGES[name](state, dice)
    return name


def rows(state: State, dice: random.Random) -> None:
    if len(state.records) > 4 and dice.random() < 0.5:
        state.records.pop(dice.randrange(len(state.records)))
    else:
        known = {one["row_id"] for one in state.records}
        left = [one for one in [*RECORDS, *MORE] if one["row_id"] not in known]
        state.records += deepcopy(left[:1])


def answer(state: State, dice: random.Random) -> None:
    one = dice.choice(state.records)
    one[dice.choice(["base_answer", "source_answer"])] = dice.choice(["Ed", "Bob", "Lima", "Kiev"])


def place(state: State, dice: random.Random) -> None:
    """Another word of the same prompt: the tokens stay."""
    one = dice.choice(state.records)
    side, column = dice.choice([("base", "word"), ("source", "source_word")])
    one[column] = dice.choice([one[side].split()[0], one[side].split()[-1]])


def names(state: State, dice: random.Random) -> None:
    """Two rows change their names."""
    one, other = dice.sample(state.records, 2)
    one["row_id"], other["row_id"] = other["row_id"], one["row_id"]


def order(state: State, dice: random.Random) -> None:
    dice.shuffle(state.records)
    for axis in state.document["axes"].values():
        dice.shuffle(axis)
    axes = state.document["axes"]
    state.document["axes"] = dict(sorted(axes.items(), reverse=dice.random() < 0.5))


def axes(state: State, dice: random.Random) -> None:
    state.document["axes"]["layer"] = dice.sample(range(4), dice.randint(1, 4))
    found = dice.sample(["subject", "second", "last"], dice.randint(1, 3))
    state.document["axes"]["position"] = found


def measures(state: State, dice: random.Random) -> None:
    count = dice.randint(2, len(MEASURES))
    kept = ["gap", *dice.sample(sorted({*MEASURES} - {"gap"}), count - 1)]
    state.document["measures"] = {name: deepcopy(MEASURES[name]) for name in kept}


def swapped(state: State, dice: random.Random) -> None:
    """Two measures change their names; a recovery follows its measure."""
    found = state.document["measures"]
    one, other = dice.sample([name for name in found if name not in ("back", "gap")] + ["gap"], 2)
    found[one], found[other] = found[other], found[one]
    renamed = {one: other, other: one}
    for spec in found.values():
        if "of" in spec:
            spec["of"] = renamed.get(spec["of"], spec["of"])


def guard(state: State, dice: random.Random) -> None:
    for spec in state.document["measures"].values():
        if "min_gap" in spec:
            spec["min_gap"] = dice.choice([0.01, 0.1, 3.0])


def positions(state: State, dice: random.Random) -> None:
    """Two positions change their names, or the way they meet the donor's."""
    found = state.document["positions"]
    if dice.random() < 0.5:
        found["subject"], found["second"] = found["second"], found["subject"]
    else:
        found[dice.choice(sorted(found))]["align"] = dice.choice(["first", "last", "mean"])


def write(state: State, dice: random.Random) -> None:
    """The seed, the scale or the prompts of a mean, or what is in the vector's file."""
    state.vector = dice.choice([1.0, 2.0, -1.0])
    for write in state.document["writes"]:
        if "noise" in write:
            write["noise"]["seed"] = dice.randint(0, 2)
        elif "add" in write:
            write["add"]["scale"] = dice.choice([0.5, 2.0])
        elif isinstance(write["set"], dict):
            for key in {"mean", "resample"} & write["set"].keys():
                write["set"][key] = dice.choice(["text", "donor"])


CHANGES = {
    one.__name__: one
    for one in (
        *(rows, answer, place, names, order, axes),
        *(measures, swapped, guard, positions, write),
    )
}


class Folder:
    """Results of one sweep, as the rules write them."""

    def __init__(self, results: Path, model: Plain, tokenizer: Any) -> None:
        self.results, self.model, self.tokenizer = results, model, tokenizer

    def run(self, state: State) -> tuple[int, pa.Table]:
        """Plan, run what has no part, merge; how many values were run, and the table."""
        results, width = self.results, self.model["shape"]["hidden"]
        save_file({"vector": torch.linspace(-1, 1, width) * state.vector}, "v.safetensors")
        sweep = sweep_of(**state.document)
        path = write_records(Path("prompts.csv"), state.records)
        table = prompts.to_table(prompts.prepare_rows(sweep, path, self.tokenizer, 0))
        write_table(results / "prompts.parquet", table, table.schema)
        write_json(results / "model.json", self.model)
        config = Config(batch_rows=8, chunk_passes=3, threads=1)
        files = [results / name for name in ("model.json", "prompts.parquet")]
        plan = expand_sweep(sweep, config, *files, results)
        ran = 0
        for chunk in [*plan.chunks, plan.controls]:
            part = results / "local/chunks" / f"{chunk['chunk_id']}.parquet"
            if not part.exists():
                source = results / "chunks" / f"{chunk['chunk_id']}.json"
                jobs.run_chunk(source, "local", config, part, part.with_suffix(".json"))
                ran += len(keys_of(chunk)) * (chunk is not plan.controls)
        merge_chunks(sweep, results, "local", results / "local")
        return ran, read_table(results / "local/values.parquet")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", WRITES)
def test_whatever_changes_no_value_is_stale(
    kind, seed, tiny_model, opened, tokenizer, tmp_path, monkeypatch
):
    model = tiny_model("llama", attention="eager")
    engine = opened("local", model)
    monkeypatch.setattr(jobs, "open_engine", lambda *_: engine)
    monkeypatch.chdir(tmp_path)
    dice, state = random.Random(f"{kind} {seed}"), State(kind)
    grown = Folder(tmp_path / "results/grown", model, tokenizer)
    story, saved, good = [kind], 0, deepcopy(state)
    for step in range(STEPS):
        try:
            alone = Folder(tmp_path / f"fresh{step}/results/alone", model, tokenizer)
            whole, expected = alone.run(state)
        except UserError:  # What the change asks for cannot be.
            state = deepcopy(good)
            story[-1] += " (refused)"
        else:
            ran, found = grown.run(state)
            saved += whole - ran
            compare(found, expected, story)
            good = deepcopy(state)
        story.append(change(state, dice))
    assert saved > 0, story


def compare(found: pa.Table, expected: pa.Table, story: list[str]) -> None:
    """Two tables with the same rows in the same order, numbers within the noise of batches."""
    assert found.schema == expected.schema, story
    for name in found.schema.names:
        one, other = found[name].to_pylist(), expected[name].to_pylist()
        if found.schema.field(name).type == pa.float32():
            numbers = ([float("nan") if x is None else x for x in side] for side in (one, other))
            largest = max(difference(*pair) for pair in zip(*numbers, strict=True))
            assert largest < 1e-4, (name, story)
        else:
            assert one == other, (name, story)
