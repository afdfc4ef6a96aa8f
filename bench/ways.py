"""One way of running a sweep, alone in a process: `python bench/ways.py WAY SWEEP [REPEATS]`.

Prints one JSON line: seconds of every repeat (after one untimed run), peak memory, and the mean of
the first measure at every point, by which the ways are compared.
"""

import json
import resource
import sys
import time
from pathlib import Path

import torch

from nnsweep.documents import parse, read_yaml
from nnsweep.engines.local import LocalEngine
from nnsweep.log import quiet_libraries
from nnsweep.models import load_tokenizer, open_model, prepare
from nnsweep.plan import Settings, keys_of, make_plan
from nnsweep.prompts import prepare_rows
from nnsweep.sweep import Sweep

THREADS = 2


def load(name):
    """The sweep, its model and its rows, as the workflow prepares them."""
    quiet_libraries()
    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)
    path = Path(f"config/sweeps/{name}.yaml")
    sweep = parse(Sweep, read_yaml(path), str(path))
    model = prepare(sweep.model.model_dump())
    rows = prepare_rows(sweep, Path(sweep.prompts.file), load_tokenizer(model), 0)
    return sweep, model, rows


def nnsweep_way(sweep, model, rows, recompute):
    """The product's kernel."""
    engine = LocalEngine(model, "cpu", THREADS)
    plan = make_plan(sweep, model, rows, Settings(recompute=recompute), lambda *_: [])
    column = list(sweep.measures).index("logit_diff")

    def run():
        found = {}
        for chunk in plan.chunks:
            result = engine.run(chunk, lambda line: None)
            for key, value in zip(keys_of(chunk), result.values[:, column], strict=True):
                found.setdefault(key[0], []).append(float(value))
        return [sum(found[p.point_key]) / len(found[p.point_key]) for p in plan.points]

    return run


def tensors(sweep, rows):
    """Ids of prompts and donors, and the answers of the logit difference."""
    base = torch.tensor([row.ids for row in rows])
    donor = torch.tensor([row.donor_ids for row in rows])
    spec = sweep.measures["logit_diff"]
    answers = [torch.tensor([row.answers[name][0] for row in rows]) for name in spec.answers]
    return base, donor, answers


def points_of(sweep, model, rows):
    """(layer, head or None, token) of every point; all rows share their positions."""
    shape = model["shape"]
    positions = {name: place.base[0] for name, place in rows[0].positions.items()}
    if "head" in sweep.axes:
        heads = [
            (layer, head) for layer in range(shape["layers"]) for head in range(shape["heads"])
        ]
        return [(layer, head, positions["last"]) for layer, head in heads]
    return [
        (layer, None, positions[name])
        for layer in range(shape["layers"])
        for name in sweep.axes["position"]
    ]


def difference(logits, answers):
    row = torch.arange(len(logits))
    return (logits[row, answers[0]] - logits[row, answers[1]]).mean().item()


def hooks_way(sweep, model, rows):
    """What one would write by hand: donor captured once, one full forward a point under a hook."""
    module = open_model(model, "cpu")._module
    layers = module.model.layers
    base, donor, answers = tensors(sweep, rows)
    width = model["shape"]["head_dim"]

    def capture(store):
        def hook(_, args, output=None):
            value = args[0] if output is None else output
            store.append((value if torch.is_tensor(value) else value[0]).clone())

        return hook

    streams_of, heads_of = [], []

    def one(layer, head, token):
        def patch_stream(_, args, output):
            value = output if torch.is_tensor(output) else output[0]
            value[:, token] = streams_of[layer][:, token]
            return output

        def patch_head(_, args):
            value = args[0].clone()
            low = head * width
            value[:, token, low : low + width] = heads_of[layer][:, token, low : low + width]
            return (value,)

        if head is None:
            handle = layers[layer].register_forward_hook(patch_stream)
        else:
            handle = layers[layer].self_attn.o_proj.register_forward_pre_hook(patch_head)
        logits = module(base, logits_to_keep=1).logits[:, -1]
        handle.remove()
        return difference(logits, answers)

    def run():
        streams_of.clear()
        heads_of.clear()
        handles = []
        for layer in layers:
            handles.append(layer.register_forward_hook(capture(streams_of)))
            handles.append(layer.self_attn.o_proj.register_forward_pre_hook(capture(heads_of)))
        module(donor, logits_to_keep=1)
        for handle in handles:
            handle.remove()
        return [one(*point) for point in points_of(sweep, model, rows)]

    return run


def nnsight_way(sweep, model, rows):
    """A session with one plain trace a point, the donor captured once."""
    opened = open_model(model, "cpu")
    base, donor, answers = tensors(sweep, rows)
    points = points_of(sweep, model, rows)
    width = model["shape"]["head_dim"]

    def run():
        with opened.session():
            found = nnsight_sweep(opened, base, donor, answers, points, width).save()
        return found

    return run


def nnsight_sweep(opened, base, donor, answers, points, width):
    store = {"stream": [], "z": []}
    nnsight_capture(opened, donor, store)
    found = []
    for layer, head, token in points:
        nnsight_point(opened, base, store, answers, layer, head, token, width, found)
    return found


def nnsight_capture(opened, donor, store):
    with opened.trace(donor, logits_to_keep=1):
        for block in opened.model.layers:
            store["z"].append(block.self_attn.o_proj.input.clone())
            store["stream"].append(block.output.clone())


def nnsight_point(opened, base, store, answers, layer, head, token, width, found):
    with opened.trace(base, logits_to_keep=1):
        block = opened.model.layers[layer]
        if head is None:
            block.output[:, token] = store["stream"][layer][:, token]
        else:
            part = slice(head * width, (head + 1) * width)
            block.self_attn.o_proj.input[:, token, part] = store["z"][layer][:, token, part]
        found.append(difference(opened.output.logits[:, -1], answers))


WAYS = {
    "fast": lambda *given: nnsweep_way(*given, "fast"),
    "exact": lambda *given: nnsweep_way(*given, "exact"),
    "hooks": hooks_way,
    "nnsight": nnsight_way,
}


def main():
    way, name = sys.argv[1:3]
    repeats = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    run = WAYS[way](*load(name))
    means = run()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        means = run()
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak": peak, "means": means}))


if __name__ == "__main__":
    main()
