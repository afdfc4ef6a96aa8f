"""`make bench`: the same sweep in four ways, each in its own process, in turn, three times over.

`python bench/run.py [SWEEP …]` prints a table of medians and ratios. Compare ratios of one run:
seconds depend on the machine and on its neighbours.
"""

import json
import statistics
import subprocess
import sys

ROUNDS = 3
WAYS = ("hooks", "nnsight", "exact", "fast")


def measure(way, sweep):
    done = subprocess.run(
        [sys.executable, "bench/ways.py", way, sweep], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def compare(sweep):
    runs = {way: [] for way in WAYS}
    for turn in range(ROUNDS):
        for way in WAYS:
            runs[way].append(measure(way, sweep))
            print(
                f"{sweep} round {turn + 1} {way}: {runs[way][-1]['seconds'][0]:.1f} s", flush=True
            )
    table(sweep, runs)


def table(sweep, runs):
    hooks = runs["hooks"]
    print(f"\n{sweep} ({len(hooks[0]['means'])} points), medians of {ROUNDS} rounds in turn\n")
    print("| way | seconds | of hooks | of nnsight | peak memory | largest difference of a mean |")
    print("|---|---|---|---|---|---|")
    names = {"hooks": "hand-written hooks", "nnsight": "nnsight, one trace a point"}
    for way in WAYS:
        pairs = zip(runs[way][0]["means"], hooks[0]["means"], strict=True)
        cells = (
            names.get(way, f"nnsweep, recompute: {way}"),
            f"{median(runs[way]):.2f}",
            f"{ratio(runs, way, 'hooks'):.2f}",
            f"{ratio(runs, way, 'nnsight'):.2f}",
            f"{runs[way][0]['peak'] / 1e9:.1f} GB",
            f"{max(abs(a - b) for a, b in pairs):.1e}",
        )
        print("| " + " | ".join(cells) + " |")
    print(flush=True)


def median(runs):
    return statistics.median(run["seconds"][0] for run in runs)


def ratio(runs, way, other):
    """Median of the ratios round by round, so that a slow minute hits both."""
    pairs = zip(runs[way], runs[other], strict=True)
    return statistics.median(a["seconds"][0] / b["seconds"][0] for a, b in pairs)


if __name__ == "__main__":
    for name in sys.argv[1:] or ("capitals_layers", "ioi_heads"):
        compare(name)
