"""The page that says where a table's numbers come from."""

import html
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nnsweep.parity import sentence
from nnsweep.registry import REGISTRY
from nnsweep.summary import extremes
from nnsweep.sweep import Sweep, axis_kinds
from nnsweep.tables import read_json, read_table, summary_schema, write_text

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0 1.5em}td,th{padding:.25em .8em;text-align:left;
border-bottom:1px solid #ddd;vertical-align:top}th{font-weight:600}.holds{color:#06713a}
.fails{color:#b00020}code{font-size:13px}
"""


def write_overview(sweep: Sweep, run: Path, summary: Path, output: Path) -> None:
    """Rule write_overview: provenance, null controls, cost and extremes as one HTML page."""
    record = read_json(run)
    sections = [
        ("Result", _result(record)),
        ("Extremes", _extremes(sweep, summary)),
        ("Null controls", _controls(record["controls"])),
        ("Where the numbers come from", _provenance(record)),
    ]
    body = "".join(f"<h2>{title}</h2>{content}" for title, content in sections)
    page = (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{sweep.name}</title>"
        f"<style>{STYLE}</style></head><body><h1>{sweep.name}, engine {record['engine']}</h1>"
        f"{body}</body></html>\n"
    )
    write_text(output, page)


def _table(rows: Iterable[Iterable[Any]], head: Iterable[str] = ()) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = [f"<tr>{cells}</tr>"] if cells else []
    for row in rows:
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


def _result(record: Mapping[str, Any]) -> str:
    values, run, naive = record["values"], record["forward_passes"], record["forward_passes_naive"]
    return _table(
        [
            ("points", record["points"]),
            ("value rows", _counts(values)),
            *_shares(record),
            ("forward passes", f"{run} (a loop without reuse: {naive})"),
            *_remote(record["remote"]),
            ("seconds in sessions", f"{record['seconds']['run']:.1f}"),
            ("peak memory", f"{record['peak_memory_bytes'] / 1e9:.2f} GB"),
        ]
    )


def _shares(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Who computed what in a mixed run, and what both sides computed before."""
    if "engines" not in record:
        return []
    shares = [
        (
            f"on {side}",
            f"{one['values']} value rows in {one['chunks']} chunks, {one['passes']} passes",
        )
        for side, one in record["engines"].items()
    ]
    return [*shares, ("calibration", html.escape(sentence(record["calibration"])))]


def _counts(values: Mapping[str, int]) -> str:
    """How many value rows are ok, and how many are not, if any."""
    counts = [(name, values[name]) for name in ("ok", "excluded", "error")]
    return ", ".join(f"{n} {name}" for name, n in counts if n or name == "ok")


def _remote(cost: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if cost is None:
        return []
    requests = (
        f"{cost['requests']} and a trial session (one trace a point: {cost['requests_naive']})"
    )
    home, naive = cost["result_bytes"] / 1e3, cost["result_bytes_naive"] / 1e6
    brought = f"{home:.1f} kB (a loop that brings logits home: {naive:.0f} MB)"
    sent = f"{cost['payload_bytes'] / 1e3:.1f} kB"
    return [("requests", requests), ("sent", sent), ("came home", brought)]


def _extremes(sweep: Sweep, summary: Path) -> str:
    axes = axis_kinds(sweep)
    frame = read_table(summary, summary_schema(axes)).to_pandas()
    rows = []
    for measure, spec in sweep.measures.items():
        name = f"{measure}<br><small>{html.escape(REGISTRY[spec.kind].definition)}</small>"
        for found in extremes(frame, list(axes), measure):
            interval = f"{found.mean:.4g} [{found.low:.4g}, {found.high:.4g}]"
            ties = f" and {found.ties} other points" if found.ties else ""
            rows.append((name, found.word, interval, found.where + ties, found.rows))
            name = ""
    return _table(rows, ("measure", "", "mean [interval]", "where", "rows"))


def _controls(controls: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, control in controls.items():
        if control["holds"] is None:
            verdict = html.escape(f"not run: {control['reason']}")
        else:
            word, kind = ("holds", "holds") if control["holds"] else ("does not hold", "fails")
            verdict = f"<span class='{kind}'>{word}</span>"
        largest = "" if control["largest"] is None else f"{control['largest']:.2g}"
        what = html.escape(f"{control['what']}; must equal the {control['equals']} run")
        rows.append((f"<code>{name}</code>", what, verdict, largest, f"{control['tolerance']:g}"))
    return _table(rows, ("control", "what", "verdict", "largest difference", "allowed"))


def _provenance(record: Mapping[str, Any]) -> str:
    names = ("model", "device_name", "dtype", "attention", "threads", "versions", "settings")
    rows = [(name, _plain(record[name])) for name in (*names, "digests", "semantics")]
    return _table(rows)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "<br>".join(f"{html.escape(str(k))}: {_plain(v)}" for k, v in value.items())
    return html.escape(str(value))
