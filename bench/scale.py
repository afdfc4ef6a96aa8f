"""What many points cost around the kernel: time and peak memory of every step, and of Snakemake.

`python bench/scale.py` plans sweeps of 1,000 and 10,000 points on 50 prompt rows with two measures,
lets an engine without a model write their parts, and runs each step in a process of its own. Then
Snakemake runs one job a pass of the smaller plan with the same engine: what its wall time has
beyond the time of the jobs is what Snakemake adds. Nothing is computed by a model; the default
model's tokenizer is all that is read of it.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]
PARTS = ("Snakefile", "workflow", "scripts", "config", "envs")
NAME = "scale"
ROWS = 50
LAYERS, HEADS = 25, 8
MORE = " with a new measure"
STEPS = (
    *("plan", "dry run", "merge", "plan again", "summarize", "plot", "parity"),
    *(f"plan{MORE}", f"merge{MORE}"),
)
MINUTE = 60.0
JOB = """
import sys

sys.path.insert(0, {bench!r})
from scale import MadeUp

from nnsweep import jobs

jobs.open_engine = lambda *_: MadeUp()
"""


class Numbers(list):
    """Lines of numbers, as far as a tensor is asked for: no job here waits for torch."""

    def numpy(self):
        import numpy as np

        return np.array(self, np.float32)


class MadeUp:
    """An engine without a model: a number between 0 and 1 for every point, row and measure."""

    def __init__(self, moved=0.0):
        self.moved = moved

    def run(self, chunk, report):
        from nnsweep.chunks import columns, keys_of

        names = columns(chunk["measures"])
        values = [self.line(point, row, names) for point, row in keys_of(chunk)]
        facts = dict.fromkeys(("device", "device_name"), "cpu")
        facts |= {"dtype": "float32", "attention": "sdpa", "threads": 1, "versions": {}}
        facts |= {"seconds_run": 0.0}
        return SimpleNamespace(values=Numbers(values), facts=facts, sessions=[], errors={})

    def line(self, point, row, names):
        if point.startswith("control:"):
            return [0.5] * len(names)
        return [self.number(f"{point} {row} {name}", "." in name) for name in names]

    def number(self, key, listed):
        """Numbers of a list may be ids of tokens: whole, and the same from every engine."""
        made = zlib.crc32(key.encode())
        return float(made % 1000) if listed else made / 2**32 + self.moved


# --- a project ------------------------------------------------------------------------------------


def project_of(folder, points, top_k=0):
    """A copy of the workflow with a sweep of so many points."""
    folder.mkdir()
    for name in PARTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    values = points // (LAYERS * HEADS)
    document = {
        "name": NAME,
        "model": {"id": "smollm2-135m"},
        "prompts": {
            "file": "config/prompts/scale.csv",
            "text": "base",
            "answers": {"target": "source_capital", "foil": "capital"},
        },
        "axes": {
            "layer": list(range(LAYERS)),
            "head": list(range(HEADS)),
            "value": [step / 8 for step in range(values)],
        },
        "writes": [
            {"site": "z", "layer": "$layer", "head": "$head", "position": "last", "set": "$value"}
        ],
        "measures": {
            "gap": {"kind": "logit_diff", "answers": ["target", "foil"]},
            "chance": {"kind": "prob", "answer": "target"},
        },
    }
    if top_k:
        document["measures"]["top"] = {"kind": "top_k", "k": top_k}
    (folder / f"config/sweeps/{NAME}.yaml").write_text(json.dumps(document))
    write_prompts(folder / "config/prompts/scale.csv")
    return folder


def add_measure(folder):
    """The sweep asks for a third measure now."""
    path = folder / f"config/sweeps/{NAME}.yaml"
    document = json.loads(path.read_text())
    document["measures"]["other"] = {"kind": "prob", "answer": "foil"}
    path.write_text(json.dumps(document))


def write_prompts(path):
    """The shipped capitals, and some of them once more in a longer sentence."""
    with (ROOT / "config/prompts/capitals.csv").open() as stream:
        lines = list(csv.DictReader(stream))
    more = [
        line | {"row_id": f"long-{line['row_id']}", "base": f"We all know that {line['base']}"}
        for line in lines[: ROWS - len(lines)]
    ]
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(lines[0]))
        writer.writeheader()
        writer.writerows([*lines, *more])


def snakemake(folder, *given, **config):
    """The command that runs the workflow in a project."""
    pairs = [f"{key}={value}" for key, value in ({"sweep": NAME, "threads": 1} | config).items()]
    return [sys.executable, "-m", "snakemake", "--nocolor", *given, "--config", *pairs]


# --- one step in this process ---------------------------------------------------------------------


def run_step(step):
    """One step of the project in the working directory; it imports what its rule's job imports."""
    from nnsweep.sweep_file import read_sweep

    sweep = read_sweep(Path(f"config/sweeps/{NAME}.yaml"))
    STEPS_HERE[step](sweep, Path(f"results/{NAME}"))


def plan(sweep, results):
    from nnsweep.config import Config
    from nnsweep.expansion import expand_sweep

    prepared = [results / name for name in ("model.json", "prompts.parquet")]
    expand_sweep(sweep, Config(), *prepared, results)


def parts(sweep, results):
    """Every chunk through two made-up engines that differ a little; the second one's table."""
    from nnsweep import jobs
    from nnsweep.config import Config
    from nnsweep.merge import merge_chunks

    planned = json.loads((results / "plan.json").read_text())
    for engine, moved in (("local", 0.0), ("reference", 1e-6)):
        jobs.open_engine = lambda *_, moved=moved: MadeUp(moved)
        for name in [*planned["chunks"], planned["controls"]]:
            files = [results / engine / f"chunks/{name}.{end}" for end in ("parquet", "json")]
            if not files[0].exists():
                jobs.run_chunk(results / f"chunks/{name}.json", engine, Config(), *files)
    merge_chunks(sweep, results, "reference", results / "reference")


def merge(sweep, results):
    from nnsweep.merge import merge_chunks

    merge_chunks(sweep, results, "local", results / "local")


def summarize(sweep, results):
    from nnsweep.config import Bootstrap
    from nnsweep.summary import summarize

    local = results / "local"
    summarize(sweep, local / "values.parquet", local / "summary.parquet", Bootstrap())


def plot(sweep, results):
    from nnsweep.figures import plot_measure

    local = results / "local"
    tables = local / "summary.parquet", local / "values.parquet"
    plot_measure(sweep, "gap", *tables, local / "figures/gap.svg")


def parity(sweep, results):
    from nnsweep.parity import check_parity

    sides = results / "local", results / "reference"
    check_parity(*sides, results / "parity/local-vs-reference.json")


STEPS_HERE = {step.__name__: step for step in (plan, parts, merge, summarize, plot, parity)}


# --- each step in its own process -----------------------------------------------------------------


def measured(command, folder):
    """Seconds and peak memory (bytes) of a command, its children included; it must succeed."""
    with tempfile.TemporaryFile("w+") as said:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        said.seek(0)
        if process.returncode:
            sys.exit(f"{' '.join(map(str, command))} failed:\n{said.read()[-3000:]}")
    return seconds, usage.ru_maxrss * 1024


def measure_steps(scratch, points, top_k, steps):
    """step -> (seconds, bytes) at one size, and how many jobs the plan has."""
    folder = project_of(scratch / str(points), points, top_k)
    prepared = f"results/{NAME}/plan.json"
    measured(snakemake(folder, prepared, "--cores", "2"), folder)
    plan = json.loads((folder / prepared).read_text())
    jobs = len(plan["chunks"]) + bool(plan["controls"])
    found = {}
    for step in steps:
        if step == f"plan{MORE}":
            add_measure(folder)
        if step.startswith("merge"):
            measured([sys.executable, str(Path(__file__).resolve()), "--step", "parts"], folder)
        # Planned again, every part is there and is taken.
        here = step.removesuffix(" again").removesuffix(MORE)
        command = [sys.executable, str(Path(__file__).resolve()), "--step", here]
        if step == "dry run":
            command = snakemake(folder, "-n", "--quiet", "all")
        found[step] = measured(command, folder)
    return found, jobs


def measure_snakemake(scratch, points):
    """Jobs, wall seconds, and seconds of the jobs' own processes, of a run of trivial chunks."""
    folder = project_of(scratch / "jobs", points)
    script = folder / "scripts/run_chunk.py"
    script.write_text(JOB.format(bench=str(ROOT / "bench")) + script.read_text())
    cut = {"chunk_passes": 1}
    measured(snakemake(folder, f"results/{NAME}/plan.json", "--cores", "2", **cut), folder)
    target = f"results/{NAME}/local/values.parquet"
    wall, _ = measured(snakemake(folder, target, "--cores", "2", **cut), folder)
    records = (folder / f"benchmarks/{NAME}/run_chunk/local").glob("*.tsv")
    own = [float(path.read_text().splitlines()[1].split("\t")[0]) for path in records]
    return len(own), wall, sum(own)


# --- tables ---------------------------------------------------------------------------------------


def row(cells):
    return f"| {' | '.join(cells)} |"


def step_lines(sizes):
    """A table of steps by size."""
    heads = [f"{points:,} points, {jobs} jobs" for points, (_, jobs) in sizes.items()]
    yield row(["step", *(f"{head}: {what}" for head in heads for what in ("seconds", "peak"))])
    yield row(["---"] * (1 + 2 * len(heads)))
    for step in next(iter(sizes.values()))[0]:
        cells = [found[step] for found, _ in sizes.values()]
        told = [text for s, peak in cells for text in (f"{s:.1f}", f"{peak / 1e6:.0f} MB")]
        yield row([step, *told])


def job_lines(jobs, wall, own, cores=2):
    """What Snakemake adds to a job: the cores' time that no job had."""
    added = (wall * cores - own) / jobs
    yield f"{jobs} jobs on {cores} cores: {wall:.0f} s, of which the jobs' own {own / cores:.0f} s."
    yield (
        f"Snakemake adds {added:.2f} s of a core to a job (its own start and the merge included): "
        f"{added / (added + MINUTE):.1%} of a run whose chunks take a minute."
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, nargs="*", default=[1000, 10000])
    parser.add_argument(
        "--jobs-of", type=int, default=1000, help="points of Snakemake's run; 0: no"
    )
    parser.add_argument("--steps", nargs="*", default=STEPS, help="these alone, in this order")
    parser.add_argument("--top-k", type=int, default=0, help="a list of tokens as a third measure")
    parser.add_argument("--keep", type=Path, help="an empty folder for the projects")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        run_step(given.step)
        return
    with tempfile.TemporaryDirectory() as passing:
        scratch = given.keep or passing
        sizes = {
            points: measure_steps(Path(scratch), points, given.top_k, given.steps)
            for points in given.points
        }
        if sizes:
            print("\n".join(step_lines(sizes)), flush=True)
        if given.jobs_of:
            found = measure_snakemake(Path(scratch), given.jobs_of)
            print("\n".join(["", *job_lines(*found)]), flush=True)


if __name__ == "__main__":
    main()
