"""How the cost of `nnsweep, recompute: fast` grows with layers, points, prompts and tokens.

`python bench/growth.py` runs the capitals sweep at a few sizes, one thing cut or stretched at a
time, and prints one table. Layers are those of the model (the first 8 or 15 of its 30), with two
points a layer; points are those of the whole model at fewer layers.
"""

import argparse
import json
import tempfile
from pathlib import Path

from run import measure, median, row
from task import Spec, export

SIZES = (
    ("the sweep as it is", {}),
    ("layers", {"depth": 8}),
    ("layers", {"depth": 15}),
    ("points", {"layers": 8}),
    ("points", {"layers": 15}),
    ("prompts", {"rows": 14}),
    ("prompts", {"rows": 28}),
    ("tokens", {"tokens": 25}),
    ("tokens", {"tokens": 50}),
)


def grown(cut, rounds):
    """Sizes, and what is compared: seconds, operations needed, layer-tokens planned."""
    with tempfile.TemporaryDirectory() as scratch:
        path = export(Spec("capitals_layers", **cut), Path(scratch))
        task, floor = json.loads(path.read_text()), measure("floor", path)
        runs = [measure("ways", "fast", path)["seconds"] for _ in range(rounds)]
    counts = [task["shape"]["layers"], len(task["points"]), len(task["base"])]
    return [*counts, len(task["base"][0])], (median(runs), floor["flop"], task["planned"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    rounds = parser.parse_args().rounds
    head = ["changed", "layers", "points", "prompts", "tokens", "seconds"]
    head += [f"{what}, ratio" for what in ("seconds", "operations needed", "layer-tokens planned")]
    print(row(head), row(["---"] * len(head)), sep="\n", flush=True)
    whole = None
    for changed, cut in SIZES:
        counts, found = grown(cut, rounds)
        whole = whole or found
        ratios = [f"{ours / theirs:.2f}" for ours, theirs in zip(found, whole, strict=True)]
        print(row([changed, *map(str, counts), f"{found[0]:.2f}", *ratios]), flush=True)


if __name__ == "__main__":
    main()
