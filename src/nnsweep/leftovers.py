"""What lies under `results` that no sweep refers to any more, and how to be rid of it."""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnsweep.config import ENGINES, read_config
from nnsweep.documents import read_yaml
from nnsweep.errors import UserError
from nnsweep.tables import read_json

OURS = ("model.json", "sweep.json", "plan.json")
"""A folder that holds none of these is not the folder of a sweep, and is left alone."""


@dataclass(frozen=True)
class Leftover:
    """A file or folder that nothing refers to."""

    path: Path
    why: str
    size: int


def find_leftovers(results: Path, sweeps: Path | None = None) -> list[Leftover]:
    """Everything below `results` that no sweep file and no plan refers to, in order of path.

    Args:
        results: The folder of all results.
        sweeps: Folder of the sweep files; None is what config/config.yaml beside `results` says.

    Raises:
        UserError: there are no results, or no sweep files beside them.
    """
    if not results.is_dir():
        raise UserError(f"{results}: no such folder. Give the folder that snakemake writes to.")
    known = _names(sweeps or _configured(results.absolute().parent))
    found: dict[Path, str] = {}
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        if not any((folder / name).exists() for name in OURS):
            continue
        if folder.name not in known:
            found[folder] = "no sweep file has this name"
            continue
        found |= dict.fromkeys(folder.rglob(".*.part"), "half-written by a job that was killed")
        if (folder / "plan.json").exists():
            found |= dict(_unplanned(folder, _planned(read_json(folder / "plan.json"))))
    whole = {path: why for path, why in sorted(found.items()) if not found.keys() & {*path.parents}}
    return [Leftover(path, why, _size(path)) for path, why in whole.items()]


def _configured(root: Path) -> Path:
    """The folder of a project's sweep files."""
    written = root / "config/config.yaml"
    return root / read_config(read_yaml(written) if written.exists() else {}).sweeps


def _names(sweeps: Path) -> set[str]:
    names = {path.stem for path in sweeps.glob("*.yaml")}
    if not names:
        raise UserError(
            f"{sweeps}: no sweep files, which would make all results leftovers. Give --sweeps."
        )
    return names


def _planned(plan: dict[str, Any]) -> set[str]:
    named = [name for kind in ("chunks", "sample", "calibration") for name in plan[kind]]
    return {*named, *filter(None, [plan["controls"]])}


def _unplanned(folder: Path, planned: set[str]) -> Iterator[tuple[Path, str]]:
    """Chunks, parts and journals of a sweep that its plan has no use for."""
    places = [folder / "chunks", *(folder / engine / "chunks" for engine in ENGINES)]
    for path in (path for place in places for path in place.glob("*")):
        if path.suffix in (".json", ".parquet") and path.stem not in planned:
            yield path, "its chunk is not in the plan"
    for engine in ENGINES:
        for path in (folder / engine / "jobs").glob("*"):
            part = folder / engine / "chunks" / path.name
            if path.name not in planned:
                yield path, "its chunk is not in the plan"
            elif all(part.with_suffix(end).exists() for end in (".json", ".parquet")):
                yield path, "its chunk is finished"


def _size(path: Path) -> int:
    if path.is_dir() and not path.is_symlink():
        return sum(_size(member) for member in path.iterdir())
    return path.lstat().st_size


def delete(results: Path, leftovers: Iterable[Leftover]) -> None:
    """Delete leftovers.

    Raises:
        UserError: Snakemake is at work in the folder, or was killed there.
    """
    locks = results.absolute().parent / ".snakemake/locks"
    if locks.is_dir() and any(locks.iterdir()):
        raise UserError(
            f"{locks}: Snakemake is at work here. Wait for it; if it was killed: "
            "`snakemake --unlock`. Nothing was deleted."
        )
    for leftover in leftovers:
        if leftover.path.is_dir() and not leftover.path.is_symlink():
            shutil.rmtree(leftover.path)
        else:
            leftover.path.unlink()


def lines(leftovers: list[Leftover]) -> Iterator[str]:
    """One line a leftover, and their sum."""
    for one in leftovers:
        yield f"{_told(one.size):>9}  {one.path}  ({one.why})"
    total = sum(one.size for one in leftovers)
    yield f"{_told(total):>9}  in {len(leftovers)} leftovers"


def _told(size: int) -> str:
    """Bytes as 12 B, 3.4 kB, 5.6 MB or 7.8 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"
