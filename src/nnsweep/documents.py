"""Reading the two YAML documents: strict models, one-line errors with the next step."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from nnsweep.errors import UserError
from nnsweep.mistakes import lines, show


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
        raise UserError(f"{where}: expected keys and values, got {show(value)}.")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise UserError(
            f"{where}: " + "; ".join(lines(schema_of(model, ""), value, error))
        ) from None


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
