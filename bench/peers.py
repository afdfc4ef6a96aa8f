"""A task in another library, alone in a process: `.venv-bench/bin/python bench/peers.py WAY TASK`.

Reads the task's file and its own library only. Both peers capture the donor once (pyvene_sources:
at every point), run one full forward pass a point and take the vocabulary product of the last token
alone.
"""

import sys

import torch
from timing import WARM_POINTS, difference, read_task, report


def transformerlens_way(path):
    """TransformerBridge: float32, and eager attention, the only one that it allows."""
    from transformer_lens.model_bridge import TransformerBridge

    task = read_task(path)
    how = {"device": "cpu", "dtype": torch.float32}
    bridge = TransformerBridge.boot_transformers(task["weights"], **how)
    ending = "hook_resid_post" if task["points"][0][1] is None else "attn.hook_z"

    def run(points):
        names = [f"blocks.{layer}.{ending}" for layer, _, _ in points]
        wanted = list(dict.fromkeys(names))
        _, cache = bridge.run_with_cache(task["donor"], names_filter=wanted, logits_to_keep=1)
        found = zip(names, points, strict=True)
        return [transformerlens_point(bridge, cache, name, task, *p[1:]) for name, p in found]

    report(run, task["points"][:WARM_POINTS], task["points"])


def transformerlens_point(bridge, cache, name, task, head, token):
    place = (slice(None), token) if head is None else (slice(None), token, head)

    def write(value, hook):
        value[place] = cache[name][place]
        return value

    logits = bridge.run_with_hooks(task["base"], fwd_hooks=[(name, write)], logits_to_keep=1)
    return difference(logits[:, -1], task["answers"])


def pyvene_task(path):
    """A task and its model, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    task = read_task(path)
    how = {"dtype": torch.float32, "attn_implementation": task["attention"]}
    return task, AutoModelForCausalLM.from_pretrained(task["weights"], **how).eval()


def pyvene_way(path):
    """IntervenableModel: one a layer, the donor's activations handed in."""
    task, module = pyvene_task(path)

    def run(points):
        layers = sorted({point[0] for point in points})
        kept = pyvene_capture(module, task, layers)
        models = {layer: pyvene_model(module, task, layer) for layer in layers}
        return [pyvene_point(models[p[0]], kept[p[0]], task, *p[1:]) for p in points]

    report(run, task["points"][:WARM_POINTS], task["points"])


def pyvene_sources_way(path):
    """As pyvene's pages show it: the donor is a source that runs again at every point."""
    task, module = pyvene_task(path)

    def run(points):
        models = {layer: pyvene_model(module, task, layer) for layer, _, _ in points}
        return [pyvene_point(models[p[0]], None, task, *p[1:]) for p in points]

    report(run, task["points"][:WARM_POINTS], task["points"])


def pyvene_capture(module, task, layers):
    """Every layer's activations of the donor, by layer."""
    import pyvene

    component = "block_output" if task["points"][0][1] is None else "attention_value_output"
    width = task["donor"].shape[1]
    wanted = [
        {"layer": layer, "component": component, "max_number_of_units": width} for layer in layers
    ]
    config = pyvene.IntervenableConfig(wanted, intervention_types=pyvene.CollectIntervention)
    model = pyvene.IntervenableModel(config, model=module)
    prompt = {"input_ids": task["donor"], "logits_to_keep": 1}
    (_, found), _ = model(prompt, unit_locations={"base": list(range(width))})
    return dict(zip(layers, found, strict=True))


def pyvene_model(module, task, layer):
    import pyvene

    where = {"layer": layer, "component": "block_output"}
    if task["points"][0][1] is not None:
        where |= {"component": "head_attention_value_output", "unit": "h.pos"}
    config = pyvene.IntervenableConfig([where], intervention_types=pyvene.VanillaIntervention)
    return pyvene.IntervenableModel(config, model=module)


def pyvene_point(model, kept, task, head, token):
    rows, width = len(task["base"]), task["shape"]["head_dim"]
    place = token if head is None else ([[[[head]] * rows, [[token]] * rows]],) * 2
    given = {"sources": [{"input_ids": task["donor"], "logits_to_keep": 1}]}
    if kept is not None:
        source = kept[:, token : token + 1]
        if head is not None:
            source = source[:, None, :, head * width : (head + 1) * width]
        given = {"source_representations": {model.sorted_keys[0]: source}}
    prompt = {"input_ids": task["base"], "logits_to_keep": 1}
    _, output = model(prompt, unit_locations={"sources->base": place}, **given)
    return difference(output.logits[:, -1], task["answers"])


WAYS = {
    "transformerlens": transformerlens_way,
    "pyvene": pyvene_way,
    "pyvene_sources": pyvene_sources_way,
}


if __name__ == "__main__":
    WAYS[sys.argv[1]](sys.argv[2])
