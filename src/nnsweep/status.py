"""How far a run is: chunks, rate, time left, bytes, and what the running chunks say."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nnsweep.config import ENGINES
from nnsweep.errors import UserError
from nnsweep.tables import read_json

LINE = re.compile(r"^\d\d:\d\d:\d\d (?P<level>[A-Z]+) (?P<said>.*)$")
SHARE = re.compile(r"^(\d+)/(\d+) ")
QUIET_S = 600
"""A running chunk that has said nothing for so many seconds is told as such."""
Plain = dict[str, Any]


@dataclass(frozen=True)
class Chunk:
    """One chunk of a run: `done`, `started` (its log is there), `failed` or `waiting`."""

    name: str
    passes: int
    state: str
    said: str = ""
    silent: float = 0.0
    """Seconds since the last line of its log."""


@dataclass(frozen=True)
class Status:
    """A run at one moment."""

    folder: Path
    chunks: list[Chunk]
    facts: list[Plain]
    finished: bool

    def of(self, state: str) -> list[Chunk]:
        """The chunks in a state."""
        return [chunk for chunk in self.chunks if chunk.state == state]

    @property
    def passes(self) -> int:
        """Passes of all chunks."""
        return sum(chunk.passes for chunk in self.chunks)

    @property
    def passes_done(self) -> float:
        """Passes of finished chunks, and the share of the started ones."""
        done = sum(chunk.passes for chunk in self.of("done"))
        return done + sum(chunk.passes * share(chunk.said) for chunk in self.of("started"))

    @property
    def rate(self) -> float | None:
        """Passes a second of one job, its start included; None before a chunk is done."""
        seconds = sum(fact["seconds_open"] + fact["seconds_run"] for fact in self.facts)
        done = sum(chunk.passes for chunk in self.of("done"))
        return done / seconds if done and seconds else None

    @property
    def left(self) -> float | None:
        """Seconds left with as many jobs as run now (one, when none does); None if unknown."""
        if self.rate is None:
            return None
        return (self.passes - self.passes_done) / self.rate / max(1, len(self.of("started")))

    @property
    def requests(self) -> list[Plain]:
        """Sessions of finished chunks that were sent to a server; local ones sent nothing."""
        return [one for fact in self.facts for one in fact["sessions"] if one["payload_bytes"]]


def share(said: str) -> float:
    """The part of a chunk that its last line says is done, 0 to 1."""
    match = SHARE.match(said)
    return int(match[1]) / int(match[2]) if match and int(match[2]) else 0.0


def newest(root: Path) -> Path:
    """The folder `results/SWEEP/ENGINE` below `root` that was written to last.

    Raises:
        UserError: there is none.
    """
    plans = [path.parent for path in root.glob("results/*/plan.json")]
    runs = [plan / engine for plan in plans for engine in ENGINES if (plan / engine).is_dir()]
    if not runs:
        raise UserError(f"{root}: no results/SWEEP/ENGINE here. Run snakemake first.")
    return max(runs, key=_last_write)


def _last_write(folder: Path) -> float:
    places = [folder, folder / "chunks", *_log_folder(folder).glob("*.log")]
    return max(place.stat().st_mtime for place in places if place.exists())


def read_status(folder: Path) -> Status:
    """Look at `results/SWEEP/ENGINE`, finished or not.

    Raises:
        UserError: the folder is no such folder, or the sweep has no plan yet.
    """
    if folder.name not in ENGINES:
        raise UserError(f"{folder}: expected results/SWEEP/ENGINE, ENGINE being one of {ENGINES}.")
    if not (folder.parent / "plan.json").exists():
        raise UserError(f"{folder.parent}: no plan.json here yet. Run snakemake first.")
    plan = read_json(folder.parent / "plan.json")
    passes = {name: one["passes"] for name, one in plan["chunks"].items()}
    if plan["controls"] and folder.name != "mixed":
        passes[plan["controls"]] = _passes(folder.parent / f"chunks/{plan['controls']}.json")
    chunks = [_chunk(folder, name, number) for name, number in passes.items()]
    done = [chunk.name for chunk in chunks if chunk.state == "done"]
    facts = [read_json(folder / f"chunks/{name}.json") for name in done]
    finished = len(done) == len(chunks) and (folder / "values.parquet").exists()
    return Status(folder, chunks, facts, finished)


def _passes(chunk: Path) -> int:
    return sum(len(block["passes"]) for block in read_json(chunk)["blocks"])


def _chunk(folder: Path, name: str, passes: int) -> Chunk:
    """The facts are written before the part: with the part, both are there."""
    if (folder / f"chunks/{name}.parquet").exists() and (folder / f"chunks/{name}.json").exists():
        return Chunk(name, passes, "done")
    log = _log_folder(folder) / f"{name}.log"
    if not log.exists():
        return Chunk(name, passes, "waiting")
    level, said = _last_line(log)
    state = "failed" if level == "ERROR" else "started"
    return Chunk(name, passes, state, said, time.time() - log.stat().st_mtime)


def _log_folder(folder: Path) -> Path:
    """logs/SWEEP/run_chunk/ENGINE beside the folder `results`."""
    root = folder.absolute().parents[2]
    return root / "logs" / folder.absolute().parent.name / "run_chunk" / folder.name


def _last_line(log: Path) -> tuple[str, str]:
    """Level and text of the last line that a job wrote itself (a traceback has no level)."""
    found = [
        match
        for line in log.read_text(errors="replace").splitlines()
        if (match := LINE.match(line))
    ]
    return (found[-1]["level"], found[-1]["said"]) if found else ("INFO", "opening the model")


def lines(status: Status) -> Iterator[str]:
    """A status as plain lines."""
    done, failed = status.of("done"), status.of("failed")
    yield (
        f"{status.folder}: {len(done)} of {len(status.chunks)} chunks done, "
        f"{len(status.of('started'))} started, {len(status.of('waiting'))} waiting, "
        f"{len(failed)} failed"
    )
    yield f"  passes     {status.passes_done:.0f} of {status.passes}{_pace(status)}"
    if status.requests:
        yield f"  sessions   {_remote(status)}"
    for chunk in [*failed, *status.of("started")]:
        yield f"  {chunk.name}  {_told(chunk)}"


def _pace(status: Status) -> str:
    if status.finished:
        return ", finished"
    if status.rate is None or status.left is None:
        return ", time left unknown until a chunk is done"
    if not status.left:
        return ", tables to be written"
    return f", {status.rate:.2g}/s a job, about {_span(status.left)} left"


def _remote(status: Status) -> str:
    names = ("attempts", "payload_bytes", "result_bytes")
    tries, sent, home = (sum(one[name] for one in status.requests) for name in names)
    count = len(status.requests)
    return f"{count}, {tries - count} retries, {sent / 1e3:.1f} kB sent, {home / 1e3:.1f} kB home"


def _told(chunk: Chunk) -> str:
    if chunk.state == "failed":
        return f"failed: {chunk.said}"
    silent = f" (silent for {_span(chunk.silent)})" if chunk.silent > QUIET_S else ""
    return f"{chunk.said}{silent}"


def _span(seconds: float) -> str:
    """Seconds as 40 s, 3 min or 2.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def render(status: Status) -> RenderableType:
    """A status for a terminal: the plain lines under a bar."""
    head, *rest = lines(status)
    bar = Table.grid(padding=(0, 1))
    percent = Text(f"{status.passes_done / max(1, status.passes):.0%}")
    bar.add_row(ProgressBar(status.passes, status.passes_done, width=50), percent)
    return Group(Text(head, style="bold"), bar, *(_styled(line) for line in rest))


def show_status(status: Status, console: Console) -> None:
    """Print a status: a bar on a terminal, plain lines elsewhere."""
    if console.is_terminal:
        console.print(render(status))
    else:
        console.file.write("\n".join(lines(status)) + "\n")
        console.file.flush()


def watch_status(folder: Path, console: Console, every: float) -> None:
    """Show a run again every few seconds until it is finished; elsewhere only what is new."""
    status = read_status(folder)
    if not console.is_terminal:
        _follow(status, console, every)
        return
    with Live(render(status), console=console, auto_refresh=False) as live:
        while not status.finished:
            time.sleep(every)
            status = read_status(folder)
            live.update(render(status), refresh=True)


def _follow(status: Status, console: Console, every: float) -> None:
    """Plain lines whenever they are other than before."""
    show_status(status, console)
    while not status.finished:
        time.sleep(every)
        before, status = status, read_status(status.folder)
        if list(lines(status)) != list(lines(before)):
            show_status(status, console)


def _styled(line: str) -> Text:
    return Text(line, style="red" if " failed: " in line else "", overflow="ellipsis", no_wrap=True)
