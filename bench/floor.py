"""The least that a task costs: `python bench/floor.py TASK` prints it as one JSON line.

Every layer-token that a write can reach is computed once; of prompts and donors, every beginning
that several of them share runs once; the vocabulary product is taken of the last token of every
point that a write reaches. Attention scores and everything that is no matrix product are left out.
Seconds are at the rate of one product of 256x1024x1024, measured now.
"""

import json
import statistics
import sys
import time
from itertools import pairwise

import torch
from timing import THREADS

SECONDS = 2


def floor_of(task, rate):
    shape, rows = task["shape"], len(task["base"])
    layer_tokens, live = needed(task)
    table = shape["vocab"] * shape["hidden"]
    layer = (shape["parameters"] - table) // shape["layers"]
    products = 2 * rows * live * table
    flop = 2 * layer * layer_tokens + products
    return {
        "layer_tokens": round(layer_tokens),
        "vocabulary": products / flop,
        "flop": flop,
        "bytes": 4 * shape["parameters"],
        "rate": rate,
        "seconds": flop / rate,
    }


def needed(task):
    """Layer-tokens to compute, and how many points a write reaches the last token of."""
    layers, rows, width = task["shape"]["layers"], len(task["base"]), len(task["base"][0])
    texts = task["base"] + task["donor"]
    beginnings = {tuple(ids[: end + 1]) for ids in texts for end in range(len(ids))}
    total, live = layers * len(beginnings), 0
    for layer, head, token in task["points"]:
        reach = layers - 1 - layer
        if reach or token == width - 1:
            live += 1
            total += rows * (reach * (width - token) + after_heads(task["shape"], head))
    return total, live


def after_heads(shape, head):
    """The part of a layer that lies after its heads, which a write to a head runs again."""
    if head is None:
        return 0
    layer = (shape["parameters"] - shape["vocab"] * shape["hidden"]) / shape["layers"]
    inputs = shape["hidden"] * shape["head_dim"] * (shape["heads"] + 2 * shape["kv_heads"])
    return 1 - inputs / layer


def product_rate():
    """Operations a second of one product, the median of many."""
    torch.set_num_threads(THREADS)
    a, b = torch.rand(256, 1024), torch.rand(1024, 1024)
    marks = [time.perf_counter()]
    while marks[-1] - marks[0] < SECONDS:
        a @ b
        marks.append(time.perf_counter())
    seconds = statistics.median(after - before for before, after in pairwise(marks))
    return 2 * 256 * 1024 * 1024 / seconds


if __name__ == "__main__":
    with open(sys.argv[1]) as stream:
        print(json.dumps(floor_of(json.load(stream), product_rate())))
