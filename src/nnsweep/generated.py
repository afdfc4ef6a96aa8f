"""Files made from the models: the JSON schemas, the key tables of the manual, docs/measures.md."""

import json
from pathlib import Path
from typing import Any

import yaml

from nnsweep.config import Config
from nnsweep.documents import schema_of
from nnsweep.registry import REGISTRY
from nnsweep.sites import DEFINITIONS
from nnsweep.sweep import Sweep
from nnsweep.sweep_measures import MEASURES

BEGIN, END = "<!-- generated: {} -->", "<!-- end -->"


def generated(root: Path) -> dict[Path, str]:
    """Path -> content of every generated file below the project's root."""
    found = {
        root / "workflow/schemas/config.schema.yaml": _schema(Config, "nnsweep config"),
        root / "workflow/schemas/sweep.schema.yaml": _schema(Sweep, "nnsweep sweep"),
        root / "docs/measures.md": _measures(),
    }
    manual = root / "config/README.md"
    text = manual.read_text(encoding="utf-8")
    for name, model in (("config keys", Config), ("sweep keys", Sweep)):
        text = _replaced(text, name, _keys(schema_of(model, "")))
    text = _replaced(text, "sites", _sites())
    return found | {manual: text}


def _schema(model: Any, title: str) -> str:
    return yaml.safe_dump(schema_of(model, title), sort_keys=False, width=100, allow_unicode=True)


def _replaced(text: str, name: str, content: str) -> str:
    begin = BEGIN.format(name)
    before, rest = text.split(begin, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{begin}\n\n{content}\n{END}{after}"


def _keys(schema: dict[str, Any]) -> str:
    lines = ["| key | values | default | what |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in _rows(schema, "", {})]
    return "\n".join(lines) + "\n"


def _rows(
    schema: dict[str, Any], prefix: str, seen: dict[str, str]
) -> list[tuple[str, str, str, str]]:
    """One line a key; what stands in several places is written out in the first one (`seen`)."""
    rows = []
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        default = "required" if name in required else f"`{_plain(field.get('default'))}`"
        what = " ".join(str(field.get("description", "")).split())
        nested = [(inner, mark, json.dumps(inner["properties"])) for inner, mark in _nested(field)]
        known = dict.fromkeys(seen[text] for *_, text in nested if text in seen)
        as_there = f" (keys as of {' and '.join(known)})" if known else ""
        rows.append((f"`{prefix}{name}`", _kind(field), default, what + as_there))
        for inner, mark, text in nested:
            if text not in seen:
                seen[text] = f"`{prefix}{name}`"
                rows += _rows(inner, f"{prefix}{name}{mark}.", seen)
    return rows


def _nested(field: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    found = []
    for option in (field, *field.get("anyOf", [])):
        if "properties" in option:
            found.append((option, ""))
        named = [option.get("additionalProperties"), *option.get("patternProperties", {}).values()]
        for inner, mark in [*((each, ".NAME") for each in named), (option.get("items"), "[]")]:
            if isinstance(inner, dict):
                options = (inner, *inner.get("anyOf", []))
                found += [(each, mark) for each in options if "properties" in each]
    return found


def _kind(field: dict[str, Any]) -> str:
    if field.get("enum") == list(DEFINITIONS):
        return "a site (below)"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if "anyOf" in field:
        kinds = [_kind(option) for option in field["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    kind = str(field.get("type", ""))
    if field.get("pattern", "").startswith(r"^\$"):
        return "`$axis`"
    if kind == "object" and "properties" not in field:
        return "names and values"
    return {"array": "list", "object": "keys", "string": "text"}.get(kind, kind)


def _plain(value: Any) -> str:
    if isinstance(value, dict) and value:
        return "see below"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def _sites() -> str:
    rows = [f"| `{site}` | {what} |" for site, what in DEFINITIONS.items()]
    return "\n".join(["| site | what |", "|---|---|", *rows]) + "\n"


def _measures() -> str:
    head = (
        "# Measures\n\nOne number per point and prompt row, from the float32 next-token logits at "
        "`measure_at`. Made by `make schemas` from the registry `nnsweep.registry`.\n\n"
        "| kind | asks for | unit | range | definition | source |\n|---|---|---|---|---|---|\n"
    )
    rows = []
    for kind, entry in REGISTRY.items():
        asks = " or ".join(f"`{field}`" for field in MEASURES[kind]) or "nothing"
        low = "-inf" if entry.low is None else f"{entry.low:g}"
        high = "inf" if entry.high is None else f"{entry.high:g}"
        cells = (f"`{kind}`", asks, entry.unit, f"{low} to {high}", entry.definition, entry.source)
        rows.append("| " + " | ".join(cell.replace("||", "\\|\\|") for cell in cells) + " |")
    return head + "\n".join(rows) + "\n"
