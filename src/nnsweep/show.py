"""A result in a few lines: where the files lie, the extremes, the controls, the cost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nnsweep.errors import UserError
from nnsweep.provenance import mixture
from nnsweep.summary import extremes
from nnsweep.tables import measure_of, read_json, read_table


def show(folder: Path) -> str:
    """Describe `results/SWEEP/ENGINE`.

    Raises:
        UserError: the folder holds no finished run.
    """
    if not (folder / "run.json").exists() or not (folder / "summary.parquet").exists():
        raise UserError(f"{folder}: no finished run here. Run snakemake first.")
    record = read_json(folder / "run.json")
    stale = _changed(folder, record)
    return "\n".join(
        [*stale, *_head(record), *_extremes(folder), *_controls(record), *_files(folder)]
    )


def _changed(folder: Path, record: dict[str, Any]) -> Iterator[str]:
    """A warning where the sweep has been planned anew since this run."""
    planned = folder.parent / "sweep.json"
    if planned.exists() and read_json(planned)["digest"] != record["digests"]["sweep"]:
        yield "The sweep has changed since this run. Run snakemake to bring it up to date."


def _head(record: dict[str, Any]) -> Iterator[str]:
    values, passes = record["values"], record["forward_passes"]
    yield (
        f"{record['sweep']} on {record['model']['id']}, engine {record['engine']}: "
        f"{record['points']} points, {values['ok']} value rows, {values['excluded']} excluded, "
        f"{values['error']} in error"
    )
    yield (
        f"  {passes} forward passes in {record['seconds']['run']:.1f} s "
        f"(a loop without reuse: {record['forward_passes_naive']}), "
        f"{record['peak_memory_bytes'] / 1e9:.1f} GB"
    )
    if "engines" not in record and (mixed := mixture(record)):
        yield f"  chunks were not all made with the same {', '.join(mixed)}"
    for side, one in record.get("engines", {}).items():
        yield f"  {side}: {one['values']} value rows in {one['chunks']} chunks"
    if record["remote"]:
        cost = record["remote"]
        yield (
            f"  {cost['requests']} requests and a trial session (one trace a point: "
            f"{cost['requests_naive']}), "
            f"{cost['payload_bytes'] / 1e3:.1f} kB sent, {cost['result_bytes'] / 1e3:.1f} kB home"
        )


def _extremes(folder: Path) -> Iterator[str]:
    frame = read_table(folder / "summary.parquet").to_pandas()
    axes = list(frame.columns[1 : frame.columns.get_loc("measure")])
    for measure in dict.fromkeys(frame["measure"].map(measure_of)):
        found = extremes(frame, axes, measure)
        if not found:
            yield f"  {measure}: no values"
        for one in found:
            ties = f" and {one.ties} other points" if one.ties else ""
            yield (
                f"  {measure}: {one.word} {one.mean:.3g} [{one.low:.3g}, {one.high:.3g}] "
                f"at {one.where}{ties} ({one.rows} rows)"
            )


def _controls(record: dict[str, Any]) -> Iterator[str]:
    held = [name for name, control in record["controls"].items() if control["holds"]]
    absent = [name for name, control in record["controls"].items() if control["holds"] is None]
    yield f"  null controls: {len(held)} hold" + (
        f", not run: {', '.join(absent)}" if absent else ""
    )


def _files(folder: Path) -> Iterator[str]:
    figures = sorted((folder / "figures").glob("*.svg"))
    report = folder.parent / "report.html"
    yield f"  table    {folder / 'values.parquet'}"
    yield from (f"  figure   {figure}" for figure in figures)
    if report.exists():
        yield f"  report   {report}"
