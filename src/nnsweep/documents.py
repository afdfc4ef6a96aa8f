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
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}. Give the path of an existing YAML file.")
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
        raise UserError(f"{where}: " + "; ".join(_lines(model, error))) from None


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


def _lines(model: type[BaseModel], error: ValidationError) -> list[str]:
    """One short sentence per mistake; unions report only their most specific branch."""
    seen: dict[str, str] = {}
    for item in error.errors(include_url=False):
        path = _path(item["loc"])
        seen.setdefault(path, f"{path}: {_sentence(model, item)}")
    return list(seen.values())


def _path(loc: tuple[int | str, ...]) -> str:
    named = [part for part in loc if not (isinstance(part, str) and _is_branch(part))]
    return ".".join(str(part) for part in named) or "the document"


def _is_branch(part: str) -> bool:
    """Whether pydantic put the name of a union's branch, not a key, into the path."""
    return part[:1].isupper() or part in {"str", "int", "float", "bool"} or "[" in part


def _sentence(model: type[BaseModel], item: Any) -> str:
    if item["type"] == "extra_forbidden":
        return "unknown key" + _suggest(str(item["loc"][-1]), _keys_at(model, item["loc"][:-1]))
    if item["type"] == "missing":
        return "this key is required"
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if item["type"] == "value_error":
        return str(message)
    return f"got {_show(item['input'])}, expected {message}"


def _suggest(key: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(key, allowed, n=1, cutoff=0.5)
    meant = f", did you mean '{close[0]}'?" if close else "."
    return f"{meant} Allowed: {', '.join(allowed)}" if allowed else meant


def _keys_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """The keys allowed at a path, found by walking the inlined schema."""
    node: Any = schema_of(model, "")
    for part in loc:
        node = _step(node, part)
    return sorted(_properties(node))


def _step(node: Any, part: int | str) -> Any:
    options = [node, *node.get("anyOf", [])] if isinstance(node, dict) else []
    for option in options:
        if isinstance(part, int) and "items" in option:
            return option["items"]
        if part in option.get("properties", {}):
            return option["properties"][part]
    for option in options:
        named = isinstance(part, str) and not _is_branch(part)
        if named and isinstance(option.get("additionalProperties"), dict):
            return option["additionalProperties"]
    return node


def _properties(node: Any) -> set[str]:
    if not isinstance(node, dict):
        return set()
    found = set(node.get("properties", {}))
    for option in node.get("anyOf", []):
        found |= _properties(option)
    return found


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _UniqueKeys(yaml.SafeLoader):
    """YAML that refuses a key given twice, where plain YAML keeps the last silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    problem=f"key '{key}' is given twice", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep=deep)
