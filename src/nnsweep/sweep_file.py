"""A sweep's file: read, checked, and said in one line how large it is."""

import difflib
from pathlib import Path
from typing import Any

from nnsweep.documents import parse, read_yaml
from nnsweep.errors import UserError
from nnsweep.grid import expand
from nnsweep.sites import limits_of
from nnsweep.sweep import Sweep, vector_files
from nnsweep.tables import read_json

Plain = dict[str, Any]


def read_sweep(path: Path) -> Sweep:
    """Read and check a sweep file; its name must be the file's."""
    if not path.exists():
        raise UserError(f"{path}: there is no such file.{_others(path)}")
    sweep = parse(Sweep, read_yaml(path), str(path))
    if sweep.name != path.stem:
        raise UserError(f"{path}: name is '{sweep.name}'. Name the sweep as its file: {path.stem}.")
    for file in (sweep.prompts.file, *vector_files(sweep)):
        if "{" in file or "}" in file:
            raise UserError(
                f"{path}: file '{file}' has braces in its name, which Snakemake reads as a "
                "wildcard. Rename the file."
            )
    return sweep


def _others(path: Path) -> str:
    """The sweeps that there are beside it, the likeliest first."""
    names = sorted(found.stem for found in path.parent.glob("*.yaml"))
    close = difflib.get_close_matches(path.stem, names, n=1)
    meant = f" Did you mean {close[0]}?" if close else ""
    return f"{meant} Sweeps in {path.parent}: {', '.join(names) or 'none'}."


def size_line(sweep: Sweep, model: Path) -> str:
    """One line before anything runs: how many points, as far as that can be known."""
    described: Plain = read_json(model) if model.exists() else {"id": None}
    if described["id"] == sweep.model.id:
        try:
            limits = limits_of(described["shape"])
        except KeyError:
            pass  # An earlier nnsweep described the model with less; its rule does so anew.
        else:
            return f"{sweep.name}: {len(expand(sweep, limits))} points"
    axes = " x ".join(f"{name} ({_count(axis)})" for name, axis in sweep.axes.items()) or "no axes"
    return f"{sweep.name}: {axes}; points are counted once the model is prepared"


def _count(axis: Any) -> str:
    if axis == "all":
        return "all"
    return str(len(axis if isinstance(axis, list) else axis.values()))
