"""Small sweeps, rows and models for tests that run no model."""

import csv
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nnsweep.plan import make_plan
from nnsweep.planned import Plan, Settings
from nnsweep.prompts import PromptRow, prepare_rows
from nnsweep.reuse import Earlier
from nnsweep.sites import site_table
from nnsweep.sweep import Sweep

ANSWERS = {"target": "source_answer", "foil": "base_answer"}
SUBJECT = {"text": "word", "donor_text": "source_word"}
PATCH = {"site": "resid_post", "layer": "$layer", "position": "last", "set": "donor"}
DOCUMENT: dict[str, Any] = {
    "name": "example",
    "model": {"id": "any"},
    "prompts": {"file": "prompts.csv", "text": "base", "donor": "source", "answers": ANSWERS},
    "positions": {"subject": SUBJECT, "second": 1},
    "axes": {"layer": [0, 1, 2]},
    "writes": [PATCH],
    "measures": {"logit_diff": {"kind": "logit_diff", "answers": ["target", "foil"]}},
}


def document(**changes: Any) -> dict[str, Any]:
    """The example document with some keys changed."""
    return DOCUMENT | changes


def sweep_of(**changes: Any) -> Sweep:
    """The example sweep with some keys changed."""
    return Sweep.model_validate(document(**changes))


def alone_of(**changes: Any) -> Sweep:
    """The example sweep without donor prompts."""
    prompts = {key: value for key, value in DOCUMENT["prompts"].items() if key != "donor"}
    positions = {"subject": {"text": "word"}, "second": 1}
    return sweep_of(**{"prompts": prompts, "positions": positions} | changes)


def setting(value: Any, **changes: Any) -> Sweep:
    """A sweep of one write, at layer 0 and the last token, that sets `value`."""
    write = {"site": "resid_post", "layer": 0, "position": "last", "set": value}
    return sweep_of(writes=[write], axes=changes.pop("axes", {}), **changes)


def record(number: int, base: str, source: str, word: str, source_word: str) -> dict[str, str]:
    """One line of a prompt file; its answers are words of their own."""
    return {
        "row_id": f"row-{number}",
        "base": base.format(word),
        "source": source.format(source_word),
        "word": word,
        "source_word": source_word,
        "base_answer": f"yes{number}",
        "source_answer": f"no{number}",
    }


SHORT, LONG = "The town of {} is", "We all know that the town of {} is"
RECORDS = [
    record(0, SHORT, SHORT, "Oslo", "Paris"),
    record(1, SHORT, SHORT, "Rome", "Berlin"),
    record(2, LONG, LONG, "Cairo", "Lima"),
    record(3, SHORT, SHORT, "Quito", "Accra"),
    record(4, LONG, SHORT, "Delhi", "Tunis"),
]


class WordTokenizer:
    """One token a word, the space before it included; ids are the same in every process."""

    bos_token_id = None

    def __init__(self) -> None:
        self.words: dict[int, str] = {}

    def __call__(self, text: str, return_offsets_mapping: bool = True) -> dict[str, Any]:
        ends = [i for i in range(1, len(text)) if text[i] == " "] + [len(text)]
        offsets, start = [], 0
        for end in ends:
            if end > start:
                offsets.append((start, end))
            start = end
        ids = [self._id(text[low:high]) for low, high in offsets]
        return {"input_ids": ids, "offset_mapping": offsets}

    def _id(self, word: str) -> int:
        number = zlib.crc32(word.encode()) % 1_000_003
        assert self.words.setdefault(number, word) == word
        return number

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[i] for i in ids)


def write_csv(path: Path, records: Sequence[Mapping[str, str]]) -> Path:
    """Write records as CSV."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
    return path


def write_jsonl(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Write records as JSON lines."""
    lines = [json.dumps(item, ensure_ascii=False) for item in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def rows_of(sweep: Sweep, folder: Path, records: Any = None) -> list[PromptRow]:
    """Prompt rows of some records, by words."""
    path = write_csv(folder / "prompts.csv", records or RECORDS)
    return prepare_rows(sweep, path, WordTokenizer(), 0)


def model_of(layers: int = 4, heads: int = 4, **changes: Any) -> dict[str, Any]:
    """A prepared model as `nnsweep.models.prepare` describes one, of the Llama kind."""
    paths = {
        "embed": "model.embed_tokens",
        "layer": "model.layers.{layer}",
        "attn": "model.layers.{layer}.self_attn",
        "mlp": "model.layers.{layer}.mlp",
        "projection": "model.layers.{layer}.self_attn.o_proj",
        **{site: f"model.layers.{{layer}}.self_attn.{site}_proj" for site in ("q", "k", "v")},
        "softmax": "model.layers.{layer}.self_attn.source.softmax",
        "ln1": "model.layers.{layer}.input_layernorm",
        **dict.fromkeys(("ln2", "mid"), "model.layers.{layer}.post_attention_layernorm"),
        "up": "model.layers.{layer}.mlp.gate_proj",
        "down": "model.layers.{layer}.mlp.down_proj",
        "ln_final": "model.norm",
    }
    sizes = {"heads": heads, "kv_heads": heads, "head_dim": 8, "hidden": 8 * heads, "vocab": 100}
    sizes |= {"neurons": 64}
    sites, refused = site_table("llama", paths, sizes)
    shape = sizes | {
        "family": "llama",
        "layers": layers,
        "context": 0,
        "parameters": 1000,
        "logits_to_keep": True,
        "position_ids": True,
        "window": None,
        "joins": True,
        "head": "lm_head",
        "eos": [0],
        "lens": {"norm": "model.norm", "head": "lm_head", "softcap": None},
        "layer_path": paths["layer"],
        "sites": sites,
        "refused": refused,
    }
    model = {"id": "any", "kind": "hub", "revision": "abc", "asked": None}
    return model | {"dtype": "float32", "attention": "sdpa", "shape": shape} | changes


def no_vector(spec: Mapping[str, Any], layer: int | None) -> list[float]:
    """The loader of vectors for sweeps that read none."""
    raise AssertionError(f"{spec} was read at layer {layer}")


def plan_of(
    sweep: Sweep,
    rows: Sequence[PromptRow],
    model: Mapping[str, Any] | None = None,
    earlier: Sequence[Earlier] = (),
    load_vector: Any = no_vector,
    **settings: Any,
) -> Plan:
    """Plan a sweep."""
    chosen = dict(model or model_of())
    return make_plan(sweep, chosen, rows, Settings(**settings), load_vector, earlier)


def lying(plan: Plan, *, finished: bool = True, own: bool = True) -> list[Earlier]:
    """The chunks of a plan as a later plan finds them."""
    return [
        *(Earlier(chunk, own, finished) for chunk in plan.chunks),
        *([Earlier(plan.controls, own, finished, "controls")] if plan.controls else []),
    ]
