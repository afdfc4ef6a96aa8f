"""The sweeps of the benchmark, whole or cut to size, and each as plain data for its peers.

A task is a JSON file: prompt and donor ids, answers, (layer, head or None, token) of every point,
the folder of the weights, and the sizes that the floor is computed from. Whoever reads it needs
neither nnsweep nor a tokenizer.
"""

import csv
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from timing import THREADS

from nnsweep.cost import full_work, work_of
from nnsweep.documents import parse, read_yaml
from nnsweep.log import quiet_libraries
from nnsweep.models import load_tokenizer, locate, prepare
from nnsweep.plan import make_plan
from nnsweep.planned import Settings
from nnsweep.prompts import prepare_rows
from nnsweep.sweep import Sweep

NEUTRAL = (
    "This is a plain note about places, written on a quiet afternoon by somebody who likes to "
    "read maps, collects old letters and keeps a list of simple facts beside the window, where "
    "the light is good and nobody asks for anything in particular. One of the facts reads like so:"
)


@dataclass(frozen=True)
class Spec:
    """A sweep of config/sweeps, and to what it is cut (None: as it is)."""

    sweep: str
    layers: int | None = None
    rows: int | None = None
    tokens: int | None = None
    depth: int | None = None


def spec_of(name, **cut):
    """`capitals_long` is `capitals_layers` with prompts of 50 tokens."""
    if name == "capitals_long":
        return Spec("capitals_layers", tokens=50, **cut)
    return Spec(name, **cut)


def load(spec, scratch):
    """The sweep, its model and its rows, as the workflow prepares them."""
    quiet_libraries()
    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)
    path = Path(f"config/sweeps/{spec.sweep}.yaml")
    sweep = parse(Sweep, read_yaml(path), str(path))
    model = prepare(sweep.model.model_dump())
    if spec.depth:
        folder = shallow(locate(model), spec.depth, scratch)
        model = prepare(sweep.model.model_dump() | {"id": str(folder)})
    tokenizer, table = load_tokenizer(model), Path(sweep.prompts.file)
    if spec.tokens:
        table = lengthen(sweep, table, tokenizer, spec.tokens, scratch)
    rows = prepare_rows(sweep, table, tokenizer, 0)[: spec.rows]
    return cut(sweep, model, spec.layers), model, rows


def cut(sweep, model, layers):
    """The sweep at `layers` layers, spread over the model."""
    if not layers:
        return sweep
    depth = model["shape"]["layers"]
    axes = sweep.axes | {"layer": [i * depth // layers for i in range(layers)]}
    return sweep.model_copy(update={"axes": axes})


def alike(sweep):
    """The sweep with the one measure that every way computes."""
    measures = {"logit_diff": sweep.measures["logit_diff"]}
    return sweep.model_copy(update={"measures": measures})


def shallow(folder, depth, scratch):
    """The same weights without the layers from `depth` on."""
    made = scratch / f"depth_{depth}"
    made.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name != "config.json" and not (made / path.name).exists():
            (made / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": depth}
    (made / "config.json").write_text(json.dumps(config))
    return made


def lengthen(sweep, table, tokenizer, tokens, scratch):
    """The prompt table with a neutral text before every prompt and donor."""
    columns = (sweep.prompts.text, sweep.prompts.donor)
    with table.open(newline="") as stream:
        records = list(csv.DictReader(stream))
    wanted = tokens - len(tokenizer(records[0][columns[0]])["input_ids"])
    prefix = tokenizer.decode(tokenizer(NEUTRAL)["input_ids"][:wanted])
    for record in records:
        record |= {name: f"{prefix} {record[name]}" for name in columns}
    made = scratch / f"{table.stem}_{tokens}.csv"
    with made.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
    return made


def points_of(sweep, model, rows):
    """(layer, head or None, token) of every point; all rows share their positions."""
    places = {name: place.base[0] for name, place in rows[0].positions.items()}
    axis = sweep.axes["layer"]
    layers = range(model["shape"]["layers"]) if axis == "all" else axis
    if "head" in sweep.axes:
        heads = range(model["shape"]["heads"])
        return [(layer, head, places["last"]) for layer in layers for head in heads]
    names = sweep.axes["position"]
    return [(layer, None, places[name]) for layer in layers for name in names]


def tensors(sweep, rows):
    """Ids of prompts and donors, and the answers of the logit difference."""
    base = torch.tensor([row.ids for row in rows])
    donor = torch.tensor([row.donor_ids for row in rows])
    spec = sweep.measures["logit_diff"]
    answers = [torch.tensor([row.answers[name][0] for row in rows]) for name in spec.answers]
    return base, donor, answers


def export(spec, scratch):
    """Write the task's file and return its path."""
    sweep, model, rows = load(spec, scratch)
    base, donor, answers = tensors(sweep, rows)
    plan = make_plan(alike(sweep), model, rows, Settings(), lambda *_: [])
    task = {
        "spec": asdict(spec),
        "weights": str(locate(model).absolute()),
        "attention": model["attention"],
        "shape": {key: value for key, value in model["shape"].items() if isinstance(value, int)},
        "base": base.tolist(),
        "donor": donor.tolist(),
        "answers": [ids.tolist() for ids in answers],
        "points": points_of(sweep, model, rows),
        "planned": work_of(plan.chunks),
        "full": full_work(plan.chunks),
    }
    path = scratch / "task.json"
    path.write_text(json.dumps(task))
    return path


def read_spec(path):
    return Spec(**json.loads(path.read_text())["spec"])
