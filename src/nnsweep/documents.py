"""Reading the two YAML documents: strict models, one-line errors with the next step."""

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from nnsweep.errors import UserError


class Strict(BaseModel):
    """A model that refuses unknown keys and cannot be changed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def read_yaml(path: Path) -> Any:
    """Read one YAML document; doubled keys and syntax errors name the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text. Save it as UTF-8.") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}. Give the path of an existing YAML file.")
    except ValueError as error:
        raise UserError(f"{path}: {error}. Give the path of an existing YAML file.")
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise UserError(f"{path}{where}: {problem}. Mend the YAML and run again.")


def parse[Document: BaseModel](model: type[Document], value: Any, where: str) -> Document:
    """Validate `value` as `model`.

    Args:
        model: The pydantic document.
        value: What YAML or the command line gave.
        where: The file's name, for the message.

    Raises:
        UserError: with the path of each bad key, what is allowed, and a suggestion.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected keys and values, got {_show(value)}.")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise UserError(f"{where}: " + "; ".join(_lines(model, value, error))) from None


def schema_of(model: type[BaseModel], title: str) -> dict[str, Any]:
    """JSON schema of a document with `$ref` inlined, as the Workflow Catalog reads it."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    inlined: dict[str, Any] = _inline(schema, definitions)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return head | {key: value for key, value in inlined.items() if key != "title"}


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        rest = {key: value for key, value in node.items() if key != "$ref"}
        return _inline(target | rest, definitions)
    return {key: _inline(value, definitions) for key, value in node.items()}


def _lines(model: type[BaseModel], value: Any, error: ValidationError) -> list[str]:
    """One short sentence per mistake; of a choice, only the option that came closest speaks."""
    found: dict[tuple[int | str, ...], list[Any]] = {}
    for item in error.errors(include_url=False):
        found.setdefault(_place(value, item), []).append(item)
    for place in [p for p in found if _known_elsewhere(model, p, found[p])]:
        del found[place]
    deep = [p for p in found if not any(o != p and o[: len(p)] == p for o in found)]
    lines = []
    for place in deep:
        path = ".".join(str(part) for part in place)
        sentence = _sentence(model, place, found[place])
        lines.append(f"{path}: {sentence}" if path else sentence)
    return lines


def _known_elsewhere(
    model: type[BaseModel], place: tuple[int | str, ...], items: list[Any]
) -> bool:
    """Whether a key is unknown to one option of a choice only, and known to another."""
    unknown = all(item["type"] == "extra_forbidden" for item in items)
    return unknown and str(place[-1]) in _keys_at(model, place[:-1])


def _place(value: Any, item: Any) -> tuple[int | str, ...]:
    """The path of keys in the document; pydantic's own names of options are left out."""
    place: list[int | str] = []
    for part in item["loc"]:
        if _holds(value, part):
            value = value[part]
        elif item["type"] != "missing" or part != item["loc"][-1]:
            continue
        place.append(part)
    return tuple(place)


def _holds(value: Any, part: int | str) -> bool:
    """Whether a part of pydantic's path is a key or a number of the document's own."""
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _sentence(model: type[BaseModel], place: tuple[int | str, ...], items: list[Any]) -> str:
    kinds = {item["type"] for item in items}
    if "extra_forbidden" in kinds:
        found = f"unknown key (value {_show(items[0]['input'])})"
        return found + _suggest(str(place[-1]), _keys_at(model, place[:-1]))
    if "missing" in kinds:
        return "this key is required"
    for item in items:
        if item["type"] == "value_error":
            return str(item["msg"]).removeprefix("Value error, ")
    expected = list(dict.fromkeys(_expected(item) for item in items))
    return f"got {_show(items[0]['input'])}, expected {' or '.join(expected)}"


def _expected(item: Any) -> str:
    """What one option would have taken, in plain words."""
    if item["type"] == "string_pattern_mismatch" and item["ctx"]["pattern"].startswith(r"^\$"):
        return "`$axis`"
    if item["type"].startswith("model_") or item["type"] == "dict_type":
        return "keys and values"
    message: str = item["msg"]
    return message.removeprefix("Input should be ").replace("String should", "text that should")


def _suggest(key: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(key, allowed, n=1, cutoff=0.5)
    meant = f", did you mean '{close[0]}'?" if close and close[0] != key else "."
    return f"{meant} Allowed: {', '.join(allowed)}" if allowed else meant


def _keys_at(model: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The keys allowed at a path, found by walking the inlined schema."""
    nodes: list[Any] = [schema_of(model, "")]
    for part in place:
        nodes = [inner for node in nodes for inner in _step(node, part)]
    return sorted({key for node in nodes for option in _options(node) for key in _named(option)})


def _options(node: Any) -> list[Any]:
    if not isinstance(node, dict):
        return []
    return [node, *(each for option in node.get("anyOf", []) for each in _options(option))]


def _named(option: dict[str, Any]) -> list[str]:
    return list(option.get("properties", {}))


def _step(node: Any, part: int | str) -> list[Any]:
    found = []
    for option in _options(node):
        if isinstance(part, int) and "items" in option:
            found.append(option["items"])
        elif part in option.get("properties", {}):
            found.append(option["properties"][part])
        elif isinstance(option.get("additionalProperties"), dict):
            found.append(option["additionalProperties"])
        found += list(option.get("patternProperties", {}).values())
    return found


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _UniqueKeys(yaml.SafeLoader):
    """YAML that refuses a key given twice, where plain YAML keeps the last silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        merges = [key for key, _ in node.value if key.tag == "tag:yaml.org,2002:merge"]
        if merges:
            raise yaml.constructor.ConstructorError(
                problem="merge keys (<<) hide what a file says; write the keys out",
                problem_mark=merges[0].start_mark,
            )
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    problem=f"key '{key}' is given twice", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep=deep)
