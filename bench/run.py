"""`make bench`: the same sweeps in several ways, each in its own process, in turn, round by round.

Prints tables of medians and ratios, and how far `nnsweep, recompute: fast` is from the computed
floor. Compare ratios of one run: seconds depend on the machine and on its neighbours.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from task import export, spec_of

SWEEPS = ("capitals_layers", "capitals_long", "ioi_heads")
TOLERANCE = 1e-3
PEERS = {
    "transformerlens": "TransformerLens",
    "pyvene": "pyvene, donor captured once",
    "pyvene_sources": "pyvene, donor at every point",
}
NAMES = {
    "hooks": "hand-written hooks",
    "nnsight": "nnsight, one trace a point",
    **PEERS,
    "exact": "nnsweep, recompute: exact",
    "fast": "nnsweep, recompute: fast",
}
SHORT = {"hooks": "hooks", "nnsight": "nnsight", **PEERS}


def measure(script, *given, python=sys.executable):
    """Run one script of bench/ in its own process and return what it prints last."""
    settings = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"} | os.environ
    command = [python, f"bench/{script}.py", *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(name, given):
    """One sweep in all ways; returns the lines of its report, and who computed something else."""
    runs, floors = {way: [] for way in given.ways}, []
    with tempfile.TemporaryDirectory() as scratch:
        task = export(spec_of(name, layers=given.layers), Path(scratch))
        for turn in range(given.rounds):
            for way in given.ways:
                runs[way].append(run_way(way, task, given.peers))
                seconds = runs[way][-1]["seconds"]
                print(f"{name}, round {turn + 1}, {way}: {seconds:.1f} s", flush=True)
            floors.append(measure("floor", task))
        sizes = json.loads(task.read_text())
    lines = [*table(name, sizes, runs), *floor_lines(sizes, floors, runs.get("fast"))]
    return lines, [f"{way} in {name}" for way in runs if apart(runs, way) > TOLERANCE]


def run_way(way, task, peers):
    if way in PEERS:
        return measure("peers", way, task, python=peers)
    return measure("ways", way, task)


def table(name, sizes, runs):
    points, rows, width = len(sizes["points"]), len(sizes["base"]), len(sizes["base"][0])
    others = [way for way in SHORT if way in runs]
    rounds = len(next(iter(runs.values())))
    head = ["way", "seconds", *(f"of {SHORT[way]}" for way in others)]
    head += ["peak memory", "largest difference of a mean"]
    size = f"{points} points, {rows} prompts of {width} tokens"
    yield f"\n{name}: {size}, medians of {rounds} rounds in turn\n"
    yield row(head)
    yield row(["---"] * len(head))
    for way, found in runs.items():
        cells = [NAMES[way], f"{median(run['seconds'] for run in found):.2f}"]
        cells += [f"{ratio(found, runs[other]):.2f}" for other in others]
        peak = median(run["peak"] for run in found)
        yield row([*cells, f"{peak / 1e9:.1f} GB", f"{apart(runs, way):.1e}"])


def floor_lines(sizes, floors, fast):
    """What the sweep costs at least, and what `fast` takes of it."""
    floor, rate = floors[0], median(found["rate"] for found in floors)
    computed = f"{sizes['planned']:,} layer-tokens planned, {sizes['full']:,} in full passes"
    yield f"\nFloor: {floor['layer_tokens']:,} layer-tokens needed ({computed})."
    yield (
        f"{floor['flop'] / 1e9:,.0f} GFLOP ({floor['vocabulary']:.0%} of it vocabulary products), "
        f"{floor['bytes'] / 1e9:.2f} GB of weights; a product of 256x1024x1024 runs at "
        f"{rate / 1e9:.0f} GFLOP/s here: {floor['flop'] / rate:.1f} s."
    )
    if fast:
        yield f"nnsweep, recompute: fast takes {ratio(fast, floors):.2f} times the floor."


def row(cells):
    return f"| {' | '.join(cells)} |"


def median(values):
    return statistics.median(values)


def ratio(runs, others):
    """Median of the ratios round by round, so that a slow minute hits both."""
    return median(a["seconds"] / b["seconds"] for a, b in zip(runs, others, strict=True))


def apart(runs, way):
    """Largest difference of any mean of any round from the first way's (hooks, if they ran)."""
    base = runs.get("hooks") or next(iter(runs.values()))
    pairs = ((run["means"], base[0]["means"]) for run in runs[way])
    return max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=f"default: {' '.join(SWEEPS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(NAMES), help="comma between: %(default)s")
    parser.add_argument("--layers", type=int, help="sweep only so many layers (a quick look)")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    parser.add_argument("--peers", default=".venv-bench/bin/python", help="Python of the peers")
    given = parser.parse_args()
    given.ways = given.ways.split(",")
    if unknown := set(given.ways) - set(NAMES):
        parser.error(f"--ways: no {sorted(unknown)}. Ways: {', '.join(NAMES)}.")
    if set(given.ways) & set(PEERS) and not Path(given.peers).exists():
        parser.error(f"{given.peers} does not exist. Run `make .venv-bench/deps`.")
    return given


def main():
    given, written, wrong = arguments(), [], []
    for name in given.sweeps or SWEEPS:
        lines, others = compare(name, given)
        print("\n".join(lines), "\n", flush=True)
        written, wrong = written + lines, wrong + others
        if given.out:
            given.out.write_text("\n".join(written).lstrip() + "\n")
    if wrong:
        sys.exit(f"A mean is more than {TOLERANCE} from the first way's: {', '.join(wrong)}.")


if __name__ == "__main__":
    main()
