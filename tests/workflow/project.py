"""A copy of the workflow in a folder of its own, with a tiny model and a tiny sweep."""

import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PARTS = ("Snakefile", "workflow", "scripts", "config", "profiles", "envs")
BIN = Path(sys.executable).parent

COLUMNS = ("row_id", "base", "source", "word", "source_word", "target", "foil")
ROWS = [
    ("france", "The capital of {} is", "France", "Germany", "Berlin", "Paris"),
    ("italy", "The capital of {} is", "Italy", "Spain", "Madrid", "Rome"),
    ("japan", "The capital of {} is", "Japan", "China", "Beijing", "Tokyo"),
    ("iceland", "The capital of {} is", "Iceland", "Peru", "Lima", "Reykjavik"),
    ("dog", "It was late when the {} sat on the", "dog", "cat", "table", "chair"),
    ("king", "It was late when the {} sat on the", "king", "queen", "bed", "floor"),
]
"""Two groups of prompts of equal length, hence two chunks of six passes (and the null controls).
The answer of row iceland has several tokens."""

SWEEP: dict[str, Any] = {
    "name": "tiny",
    "model": {"id": "model"},
    "prompts": {
        "file": "config/prompts/tiny.csv",
        "text": "base",
        "donor": "source",
        "answers": {"target": "target", "foil": "foil"},
    },
    "positions": {"subject": {"text": "word", "donor_text": "source_word"}},
    "axes": {"position": ["subject", "last"], "layer": [0, 1, 2]},
    "writes": [{"site": "resid_post", "layer": "$layer", "position": "$position", "set": "donor"}],
    "measures": {
        "top": {"kind": "match", "answer": "target"},
        "gap": {"kind": "logit_diff", "answers": ["target", "foil"]},
        "drift": {"kind": "kl"},
    },
    "on_bad_row": "exclude",
}
"""Neither the axes nor the measures stand in alphabetical order."""


CUT = {"batch_rows": 3, "chunk_passes": 6}
"""One point a pass."""


@dataclass
class Done:
    """A finished command."""

    code: int
    out: str

    def jobs(self, rule: str) -> int:
        """How many jobs of a rule Snakemake planned (0 when there was nothing to do)."""
        for line in self.out.splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == rule and words[1].isdigit():
                return int(words[1])
        return 0

    @property
    def idle(self) -> bool:
        """Whether Snakemake found everything done."""
        return self.code == 0 and "Nothing to be done" in self.out


@dataclass
class Project:
    """A folder that holds the workflow."""

    root: Path

    def __truediv__(self, path: str) -> Path:
        return self.root / path

    @property
    def results(self) -> Path:
        return self.root / "results" / "tiny"

    @property
    def values(self) -> Path:
        return self.results / "local" / "values.parquet"

    def copy(self, folder: Path) -> "Project":
        """Copy everything, finished work and its times included, to a new folder."""
        shutil.copytree(self.root, folder, symlinks=True)
        return Project(folder)

    def plan(self) -> dict[str, Any]:
        """plan.json of the tiny sweep."""
        return json.loads((self.results / "plan.json").read_text())

    def unplan(self) -> None:
        """Take the plan and all that ran away; the model and the prompts stay prepared."""
        (self.results / "plan.json").unlink()
        for name in ("chunks", "local"):
            shutil.rmtree(self.results / name)

    def parts(self, engine: str = "local") -> dict[str, Path]:
        """The parts of the plan's chunks, null controls left out, by chunk id."""
        folder = self.results / engine / "chunks"
        return {name: folder / f"{name}.parquet" for name in self.plan()["chunks"]}

    def write_sweep(self, **changes: Any) -> None:
        """Write the tiny sweep with some keys replaced."""
        sweep = deepcopy(SWEEP) | changes
        path = self.root / "config" / "sweeps" / f"{sweep['name']}.yaml"
        path.write_text(yaml.safe_dump(sweep, sort_keys=False))

    def write_prompts(self, rows: list[tuple[str, ...]]) -> None:
        """Write the prompt table from (row id, template, word, donor's word, target, foil)."""
        with (self.root / "config" / "prompts" / "tiny.csv").open("w", newline="") as stream:
            table = csv.writer(stream)
            table.writerow(COLUMNS)
            for name, text, word, other, target, foil in rows:
                table.writerow(
                    [name, text.format(word), text.format(other), word, other, target, foil]
                )

    def start(
        self, *arguments: str, cores: int = 2, env: Mapping[str, str] | None = None, **config: Any
    ) -> subprocess.Popen[str]:
        """Start Snakemake in the folder."""
        chosen = {"sweep": "tiny", "threads": 1} | CUT | config
        pairs = [f"{key}={value}" for key, value in chosen.items()]
        command = [sys.executable, "-m", "snakemake", "--cores", str(cores), "--nocolor"]
        return subprocess.Popen(
            [*command, *arguments, "--config", *pairs],
            cwd=self.root,
            env=environment(env),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(
        self, *arguments: str, cores: int = 2, env: Mapping[str, str] | None = None, **config: Any
    ) -> Done:
        """Run Snakemake in the folder and wait for it."""
        return finish(self.start(*arguments, cores=cores, env=env, **config))


def finish(process: subprocess.Popen[str], seconds: float = 900) -> Done:
    """Wait for a command; whatever it said comes back."""
    try:
        out, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return Done(process.returncode, out)


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a job: this interpreter first, idle threads asleep."""
    given = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"} | dict(changes or {})
    return given | {"PATH": f"{BIN}{os.pathsep}{given['PATH']}"}


def command(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> Done:
    """Run any command and wait for it."""
    process = subprocess.Popen(
        arguments,
        cwd=cwd,
        env=environment(env),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return finish(process)


def copy_workflow(folder: Path, model: Path | None = None) -> Project:
    """Copy the workflow into a new folder; with a model, add the tiny sweep."""
    folder.mkdir(parents=True)
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copy2(source, folder / name)
    project = Project(folder)
    if model is not None:
        (folder / "model").symlink_to(model)
        project.write_sweep()
        project.write_prompts(ROWS)
    return project


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def times(paths: Mapping[str, Path]) -> dict[str, int]:
    """Modification time of each file, in nanoseconds."""
    return {name: path.stat().st_mtime_ns for name, path in paths.items()}
