"""What a results folder holds: the chunks of every sweep and their parts.

The results folder is the store. A chunk's name is a digest of what it computes, so a part that one
sweep has paid for serves every other that asks the same.
"""

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nnsweep import SEMANTICS
from nnsweep.chunks import in_order
from nnsweep.config import ENGINES, Config
from nnsweep.errors import NnsweepError, UserError
from nnsweep.planned import PLAN_FORMAT
from nnsweep.provenance import versions
from nnsweep.reuse import Earlier
from nnsweep.tables import read_json, write_atomically

logger = logging.getLogger(__name__)
Plain = dict[str, Any]


class Store:
    """The results folder as one sweep sees it."""

    def __init__(self, results: Path, config: Config) -> None:
        """Look from one sweep.

        Args:
            results: `results/SWEEP`.
            config: Device and threads; a part that was made with others is not taken over.
        """
        self.results, self.config = results, config
        self.versions = versions()

    def earlier(self) -> list[Earlier]:
        """Chunks of this sweep, those of its plan first; then what other sweeps have finished."""
        found = list(self._chunks(self.results))
        strange = {one.chunk.get("semantics") for one in found} - {SEMANTICS}
        if strange:
            logger.warning(
                "values of semantics %s are left aside: this nnsweep has semantics %s, which "
                "computes them anew (see CHANGELOG.md)",
                ", ".join(sorted(map(str, strange))),
                SEMANTICS,
            )
        for other in self._others():
            try:
                found += [one for one in self._chunks(other) if one.finished]
            except NnsweepError as error:
                logger.warning("what %s has finished is left aside: %s", other.name, error)
        return found

    def _others(self) -> list[Path]:
        siblings = sorted(self.results.parent.glob("*/plan.json"))
        return [plan.parent for plan in siblings if plan.parent != self.results]

    def _chunks(self, folder: Path) -> Iterator[Earlier]:
        """Chunks of a sweep: its plan's in their order, then others that are finished."""
        if not (folder / "plan.json").exists():
            return
        plan, own = read_json(folder / "plan.json"), folder == self.results
        if plan.get("format") != PLAN_FORMAT:
            logger.warning("%s: the plan of an earlier nnsweep is left aside", folder.name)
            return
        lying = sorted(path.stem for path in (folder / "chunks").glob("*.json"))
        planned = [*in_order(plan["chunks"]), *filter(None, [plan["controls"]])]
        for name in [*planned, *(name for name in lying if name not in planned)]:
            finished = any(self._usable(folder, engine, name, own) for engine in ENGINES)
            path = folder / "chunks" / f"{name}.json"
            if path.exists() and (finished or name in planned):
                chunk = read_json(path)
                yield Earlier(chunk, own, finished, _role(chunk))

    def _usable(self, folder: Path, engine: str, name: str, own: bool) -> bool:
        """Whether an engine's part is there; of another sweep, made as it would be made here."""
        part, facts = _files(folder, engine, name)
        if not (part.exists() and facts.exists()):
            return False
        return own or self._made_alike(facts)

    def refuse_unlike(self, engine: str) -> None:
        """Refuse to begin where finished chunks of an engine were made otherwise than asked.

        To run them anew would remove them first; to leave them would mix two machines in a table.

        Raises:
            UserError: other threads, or another device than the one that is named.
        """
        folder = self.results / engine / "chunks"
        finished = [path for path in folder.glob("*.json") if path.with_suffix(".parquet").exists()]
        facts = [fact for fact in map(_readable, sorted(finished)) if fact]
        facts = [fact for fact in facts if fact["engine"] != "ndif"]
        cpu = [fact["threads"] for fact in facts if fact["device"] == "cpu"]
        made = {"device": [fact["device"] for fact in facts], "threads": cpu}
        for name, found in made.items():
            ours = getattr(self.config, name)
            if unlike := [theirs for theirs in found if theirs != ours != "auto"]:
                raise UserError(
                    f"{name}: {len(unlike)} finished chunks in {folder} were made with "
                    f"{name}={unlike[0]}, not {ours}. Set {name}={unlike[0]}, or delete that "
                    "folder to run all of them anew."
                )

    def _made_alike(self, path: Path) -> bool:
        """Versions are the same; on this machine also threads and, if one was named, device."""
        facts = _readable(path)
        if facts is None or facts["versions"] != self.versions:
            return False
        device = self.config.device in ("auto", facts["device"])
        return facts["engine"] == "ndif" or (facts["threads"] == self.config.threads and device)

    def adopt(self, names: Sequence[str]) -> int:
        """Bring the finished parts of some chunks here from other sweeps; how many there were."""
        count = 0
        for other in self._others():
            for engine in ENGINES:
                for name in names:
                    if not _files(self.results, engine, name)[0].exists() and self._usable(
                        other, engine, name, own=False
                    ):
                        _bring(_files(other, engine, name), _files(self.results, engine, name))
                        count += 1
        return count

    def take_over(self, side: str, name: str, target: str) -> bool:
        """Let what one side has finished serve as a part of `target`; whether there was any.

        A mixed run takes the parts of either engine; an engine takes what it did in a mixed run.
        """
        source = side if target == "mixed" else "mixed"
        _, facts = _files(self.results, source, name)
        if source == target or not self._usable(self.results, source, name, own=False):
            return False
        if read_json(facts)["engine"] != side:
            return False
        _bring(_files(self.results, source, name), _files(self.results, target, name))
        return True

    def forget(self, names: Sequence[str]) -> None:
        """Remove chunks that no plan and no part needs; `names` are those of the plan."""
        for path in (self.results / "chunks").glob("*.json"):
            parts = (_files(self.results, engine, path.stem)[0] for engine in ENGINES)
            if path.stem not in names and not any(part.exists() for part in parts):
                path.unlink()


def _readable(path: Path) -> Plain | None:
    """The facts of a part, or None where they are damaged: the merge that needs them says so."""
    try:
        facts: Plain = read_json(path)
    except NnsweepError:
        return None
    return facts


def _role(chunk: Plain) -> str:
    first = chunk["blocks"][0]["passes"][0]["points"][0] if chunk.get("blocks") else ""
    return "controls" if first.startswith("control:") else "values"


def _files(folder: Path, engine: str, name: str) -> tuple[Path, Path]:
    """Part and facts of a chunk."""
    chunks = folder / engine / "chunks"
    return chunks / f"{name}.parquet", chunks / f"{name}.json"


def _bring(theirs: tuple[Path, Path], ours: tuple[Path, Path]) -> None:
    """One file with two names, or a copy; the facts come before the values."""
    for source, target in reversed(list(zip(theirs, ours, strict=True))):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError:
            write_atomically(target, lambda part, source=source: shutil.copyfile(source, part))  # type: ignore[misc]
