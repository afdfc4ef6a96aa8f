"""run.json: what a table's numbers came from."""

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

import nnsweep
from nnsweep import SEMANTICS, __version__
from nnsweep.sweep import Sweep
from nnsweep.tables import digest, file_digest, read_json

Plain = dict[str, Any]
SAME = ("device", "device_name", "dtype", "attention", "threads", "versions")
PACKAGES = ("torch", "transformers", "nnsight", "nnterp")


def versions() -> dict[str, str]:
    """Versions of all that can change a value."""
    named = {name: version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "nnsweep": __version__} | named


def run_record(
    sweep: Sweep,
    results: Path,
    engine: str,
    plan: Plain,
    facts: Mapping[str, Plain],
    values: pa.Table,
    controls: Mapping[str, Plain],
) -> Plain:
    """Everything needed to run the table again, and what running it took.

    Args:
        sweep: The sweep.
        results: `results/<sweep>`.
        engine: The engine's name.
        plan: plan.json.
        facts: chunk id -> what its engine recorded.
        values: The merged table.
        controls: The verdicts of the null controls.
    """
    status = values["status"].to_pylist()
    return {
        "sweep": sweep.name,
        "engine": engine,
        "semantics": SEMANTICS,
        "kinds": {spec["name"]: spec["kind"] for spec in plan["measures"]},
        "model": read_json(results / "sweep.json")["resolved_model"] | {"id": sweep.model.id},
        **{name: _distinct(facts, name) for name in SAME},
        "settings": plan["settings"],
        "digests": digests(sweep, results),
        "points": plan["points"],
        "inert_rows": plan["inert_rows"],
        "values": {name: status.count(name) for name in ("ok", "excluded", "error")},
        "controls": dict(controls),
        "forward_passes": sum(fact["passes"] for fact in facts.values()),
        "forward_passes_naive": plan["forward_passes_naive"],
        "remote": None,
        "peak_memory_bytes": max(fact["peak_memory_bytes"] for fact in facts.values()),
        "seconds": {
            name: round(sum(fact[f"seconds_{name}"] for fact in facts.values()), 3)
            for name in ("open", "run")
        },
    }


def remote_cost(results: Path, plan: Plain, sessions: Sequence[Plain], values: pa.Table) -> Plain:
    """Requests and bytes of what went to NDIF, null controls included, and of a naive run of all.

    The naive loop sends one trace a point and brings the float32 next-token logits of its rows
    home; what it sends is not counted. The trial session before a run is not in `requests`.
    """
    sessions = [record for record in sessions if record["engine"] == "ndif"]
    vocab = read_json(results / "model.json")["shape"]["vocab"]
    rows = sum(status != "excluded" for status in values["status"].to_pylist())
    return {
        "requests": sum(record["attempts"] for record in sessions),
        "sessions": len(sessions),
        "payload_bytes": sum(record["payload_bytes"] for record in sessions),
        "result_bytes": sum(record["result_bytes"] for record in sessions),
        "requests_naive": plan["points"],
        "result_bytes_naive": 4 * vocab * rows,
    }


def mixture(record: Mapping[str, Any]) -> list[str]:
    """What chunks of one engine were made with that differs between them: NAME (ONE, OTHER)."""
    found = {name: record[name] for name in SAME if isinstance(record[name], list)}
    packages = found.pop("versions", [])
    for name in packages[0] if packages else ():
        values = list(dict.fromkeys(one[name] for one in packages))
        found |= {name: values} if len(values) > 1 else {}
    return [f"{name} ({', '.join(map(str, values))})" for name, values in found.items()]


def _distinct(facts: Mapping[str, Plain], name: str) -> Any:
    """The one value all chunks agree on, or the list of values where they do not."""
    found: list[Any] = []
    for fact in facts.values():
        if fact[name] not in found:
            found.append(fact[name])
    return found[0] if len(found) == 1 else found


def digests(sweep: Sweep, results: Path) -> dict[str, str]:
    """Digests of the sweep, the prompts, the points and the package's code."""
    return {
        "sweep": digest(sweep.model_dump(mode="json")),
        "prompts": file_digest(results / "prompts.parquet"),
        "points": file_digest(results / "points.parquet"),
        "code": code_digest(),
    }


def code_digest() -> str:
    """Digest of every module of the installed package."""
    root = Path(nnsweep.__file__).parent
    files = sorted(root.rglob("*.py"))
    return digest({str(path.relative_to(root)): file_digest(path) for path in files})
