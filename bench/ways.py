"""One way of running a task, alone in a process: `python bench/ways.py WAY TASK`.

Prints one JSON line: seconds, peak memory, and the mean logit difference at every point, by which
the ways are compared.
"""

import sys
from pathlib import Path

import torch
from task import alike, load, read_spec
from timing import THREADS, WARM_POINTS, difference, read_task, report

from nnsweep.chunks import keys_of
from nnsweep.engines.local import LocalEngine
from nnsweep.plan import make_plan
from nnsweep.planned import Settings


def nnsweep_way(path, recompute):
    """The product's kernel; the untimed part is one layer of the sweep."""
    sweep, model, rows = load(read_spec(path), path.parent)
    engine = LocalEngine(model, "cpu", THREADS)
    middle = sweep.axes | {"layer": [model["shape"]["layers"] // 2]}

    def plan(part):
        return make_plan(alike(part), model, rows, Settings(recompute=recompute), lambda *_: [])

    def run(part):
        found = {point.point_key: [] for point in part.points}
        for chunk in part.chunks:
            values = engine.run(chunk, lambda line: None).values[:, 0]
            for (key, _), value in zip(keys_of(chunk), values, strict=True):
                found[key].append(float(value))
        return [sum(values) / len(values) for values in found.values()]

    report(run, plan(sweep.model_copy(update={"axes": middle})), plan(sweep))


def hooks_way(path):
    """What one would write by hand: donor captured once, one full forward a point under a hook."""
    from transformers import AutoModelForCausalLM

    task = read_task(path)
    module = AutoModelForCausalLM.from_pretrained(
        task["weights"], dtype=torch.float32, attn_implementation=task["attention"]
    ).eval()
    layers, width = module.model.layers, task["shape"]["head_dim"]

    def one(store, layer, head, token):
        handle = patch(layers[layer], store[layer], head, token, width)
        logits = module(task["base"], logits_to_keep=1).logits[:, -1]
        handle.remove()
        return difference(logits, task["answers"])

    def run(points):
        store = capture(module, layers, task["donor"])
        return [one(store, *point) for point in points]

    report(run, task["points"][:WARM_POINTS], task["points"])


def capture(module, layers, donor):
    """The donor's residual stream and heads at every layer."""
    store, handles = [{} for _ in layers], []
    for layer, kept in zip(layers, store, strict=True):

        def stream(_, args, output, kept=kept):
            kept["stream"] = output.clone()

        def heads(_, args, kept=kept):
            kept["heads"] = args[0].clone()

        handles.append(layer.register_forward_hook(stream))
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(heads))
    module(donor, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    return store


def patch(layer, kept, head, token, width):
    """Register the hook that writes the donor's stream, or one of its heads, at one token."""

    def stream(_, args, output):
        output[:, token] = kept["stream"][:, token]
        return output

    def heads(_, args):
        value, part = args[0].clone(), slice(head * width, (head + 1) * width)
        value[:, token, part] = kept["heads"][:, token, part]
        return (value,)

    if head is None:
        return layer.register_forward_hook(stream)
    return layer.self_attn.o_proj.register_forward_pre_hook(heads)


def nnsight_way(path):
    """A session with one plain trace a point, the donor captured once."""
    from nnsight import TransformersModel

    task = read_task(path)
    how = {"dispatch": True, "device_map": "cpu", "dtype": "float32"}
    opened = TransformersModel(
        task["weights"], task="text-generation", attn_implementation=task["attention"], **how
    )
    opened._module.eval()

    def run(points):
        with opened.session():
            found = nnsight_sweep(opened, task, points).save()
        return found

    report(run, task["points"][:WARM_POINTS], task["points"])


def nnsight_sweep(opened, task, points):
    store = {"stream": [], "z": []}
    nnsight_capture(opened, task["donor"], store)
    found = []
    for layer, head, token in points:
        nnsight_point(opened, task, store, layer, head, token, found)
    return found


def nnsight_capture(opened, donor, store):
    with opened.trace(donor, logits_to_keep=1):
        for block in opened.model.layers:
            store["z"].append(block.self_attn.o_proj.input.clone())
            store["stream"].append(block.output.clone())


def nnsight_point(opened, task, store, layer, head, token, found):
    width = task["shape"]["head_dim"]
    with opened.trace(task["base"], logits_to_keep=1):
        block = opened.model.layers[layer]
        if head is None:
            block.output[:, token] = store["stream"][layer][:, token]
        else:
            part = slice(head * width, (head + 1) * width)
            block.self_attn.o_proj.input[:, token, part] = store["z"][layer][:, token, part]
        found.append(difference(opened.output.logits[:, -1], task["answers"]))


WAYS = {
    "hooks": hooks_way,
    "nnsight": nnsight_way,
    "exact": lambda path: nnsweep_way(path, "exact"),
    "fast": lambda path: nnsweep_way(path, "fast"),
}


if __name__ == "__main__":
    WAYS[sys.argv[1]](Path(sys.argv[2]))
