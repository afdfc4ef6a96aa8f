"""A sweep on NDIF against a loop of one remote trace a point, on the server of NDIF_HOST.

`NDIF_HOST=… python bench/ndif.py [SWEEP]` prints requests, bytes and seconds of both, as ratios.
The loop is what one writes first: every trace captures its donor and brings the next-token logits
home.
"""

import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch
from task import Spec, load, points_of, tensors
from timing import difference

from nnsweep.config import Config
from nnsweep.engines.ndif import NdifEngine
from nnsweep.jobs import budget_of
from nnsweep.models import model_key, open_model
from nnsweep.ndif.preflight import check
from nnsweep.plan import make_plan
from nnsweep.planned import Settings


def session_way(sweep, model, rows):
    """The product: one session a chunk."""
    config = Config()
    served = check(model, config)
    plan = make_plan(sweep, model, rows, Settings(), lambda *_: [])
    began = time.perf_counter()
    records = []
    with tempfile.TemporaryDirectory() as folder:
        engine = NdifEngine(model, served, Path(folder) / "jobs", budget_of(config))
        for chunk in plan.chunks:
            records += engine.run(chunk, lambda line: None).sessions
    seconds = time.perf_counter() - began
    sent = sum(record["payload_bytes"] for record in records)
    home = sum(record["result_bytes"] for record in records)
    return {"requests": len(records), "sent": sent, "home": home, "seconds": seconds}


def loop_way(sweep, model, rows):
    """One remote trace a point through nnsight's own client."""
    from nnsight import CONFIG

    CONFIG.APP.REMOTE_LOGGING = False
    shell = open_model(model, None)
    model_key(shell)
    base, donor, answers = tensors(sweep, rows)
    width = model["shape"]["head_dim"]
    found = {"requests": 0, "sent": 0, "home": 0}
    post = httpx.Client.post

    def counted(client, url, **given):
        found["requests"] += 1
        found["sent"] += len(given["files"]["blob"][1])
        return post(client, url, **given)

    httpx.Client.post = counted
    began = time.perf_counter()
    means = []
    for layer, head, token in points_of(sweep, model, rows):
        logits = remote_point(shell, base, donor, layer, head, token, width)
        found["home"] += logits.numel() * logits.element_size()
        means.append(difference(logits, answers))
    seconds = time.perf_counter() - began
    httpx.Client.post = post
    return found | {"seconds": seconds}


def remote_point(shell, base, donor, layer, head, token, width):
    low, high = (0, None) if head is None else (head * width, (head + 1) * width)
    with shell.session(remote=True):
        with shell.trace(donor, logits_to_keep=1):
            block = shell.model.layers[layer]
            source = block.output if head is None else block.self_attn.o_proj.input
            kept = source[:, token, low:high].clone()
        with shell.trace(base, logits_to_keep=1):
            block = shell.model.layers[layer]
            if head is None:
                block.output[:, token] = kept
            else:
                block.self_attn.o_proj.input[:, token, low:high] = kept
            logits = shell.output.logits[:, -1].detach().cpu().save()
    return torch.as_tensor(logits)


def main():
    name = sys.argv[1] if len(sys.argv) > 1 else "capitals_layers"
    given = load(Spec(name), None)
    ours, loop = session_way(*given), loop_way(*given)
    print(f"\n{name} on a local NDIF server\n")
    print("| | one trace a point | nnsweep | ratio |")
    print("|---|---|---|---|")
    for what in ("requests", "sent", "home", "seconds"):
        print(f"| {what} | {loop[what]:.6g} | {ours[what]:.6g} | {ours[what] / loop[what]:.2g} |")


if __name__ == "__main__":
    main()
