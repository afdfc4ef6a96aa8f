"""What is wrong with a document, in plain words: a sentence a mistake, with its key's path."""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

Place = tuple[int | str, ...]
"""The path of keys of a value in the document."""


def lines(schema: Any, value: Any, error: ValidationError) -> list[str]:
    """One short sentence per mistake; of a choice, only the option that came closest speaks.

    Args:
        schema: JSON schema of the document, without `$ref`.
        value: What was to be a document.
        error: What pydantic says about it.
    """
    items = _closest(value, list(error.errors(include_url=False)))
    found: dict[Place, list[Any]] = {}
    for item in items:
        found.setdefault(_place(value, item), []).append(item)
    told = dict(_choices_of_keys(schema, value, found))
    deep = [p for p in found if not any(o != p and o[: len(p)] == p for o in found)]
    for place in deep:
        aside = _known_elsewhere(schema, place, found[place])
        if place[:-1] not in told and not (aside or _beside_unknown(schema, value, place, found)):
            told[place] = _sentence(schema, place, found[place])
    return [
        f"{'.'.join(str(part) for part in place)}: {sentence}" if place else sentence
        for place, sentence in told.items()
    ]


def show(value: Any) -> str:
    """A value as a message shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- where --------------------------------------------------------------------------------------


def _steps(value: Any, item: Any) -> Iterator[tuple[bool, int | str]]:
    """The path of a mistake: whether a part is a key, or the name of an option; and the part."""
    for part in item["loc"]:
        if _holds(value, part):
            value = value[part]
            yield True, part
        else:
            yield item["type"] == "missing" and part == item["loc"][-1], part


def _place(value: Any, item: Any) -> Place:
    return tuple(part for is_key, part in _steps(value, item) if is_key)


def _options(value: Any, item: Any) -> Iterator[tuple[Place, int | str]]:
    """The options of choices below which a mistake stands: (place of the choice, option)."""
    place: Place = ()
    for is_key, part in _steps(value, item):
        if is_key:
            place = (*place, part)
        else:
            yield place, part


def _holds(value: Any, part: int | str) -> bool:
    """Whether a part of pydantic's path is a key or a number of the document's own."""
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _closest(value: Any, items: list[Any]) -> list[Any]:
    """The mistakes of those options of a choice between keys that have the fewest keys wrong."""
    wrong: dict[Place, dict[int | str, set[Place]]] = {}
    for item in items:
        where = _place(value, item)
        for place, option in _options(value, item):
            if len(where) > len(place) and item["input"] != {}:
                wrong.setdefault(place, {}).setdefault(option, set()).add(where)
    least = {place: min(map(len, options.values())) for place, options in wrong.items()}
    return [
        item
        for item in items
        if all(
            len(wrong.get(place, {}).get(option, ())) <= least.get(place, 0)
            for place, option in _options(value, item)
        )
    ]


# --- choices between keys -----------------------------------------------------------------------


def _choices_of_keys(
    schema: Any, value: Any, found: dict[Place, list[Any]]
) -> Iterator[tuple[Place, str]]:
    """Where the keys of several options stand together, or none of any: (place, sentence)."""
    for parent in dict.fromkeys(place[:-1] for place in found if place):
        kinds = {p[-1]: {i["type"] for i in found[p]} for p in found if p and p[:-1] == parent}
        options = {
            o for p in found if p[:-1] == parent for i in found[p] for o in _options(value, i)
        }
        chosen = len({option for place, option in options if place == parent})
        if chosen > 1 and all(kind == {"missing"} for kind in kinds.values()):
            yield parent, f"give one of {', '.join(str(key) for key in kinds)}"
        odd = [key for key, kind in kinds.items() if kind == {"extra_forbidden"}]
        if odd and all(str(key) in _keys_at(schema, parent) for key in odd):
            here: Any = value
            for part in parent:
                here = here[part]
            rest = [str(key) for key in here if key not in odd[:1]]
            yield parent, f"{odd[0]} and {', '.join(rest)} exclude each other; give one of them"


def _known_elsewhere(schema: Any, place: Place, items: list[Any]) -> bool:
    """Whether a key is unknown to one option of a choice only, and known to another."""
    unknown = all(item["type"] == "extra_forbidden" for item in items)
    return unknown and str(place[-1]) in _keys_at(schema, place[:-1])


def _beside_unknown(schema: Any, value: Any, place: Place, found: dict[Place, list[Any]]) -> bool:
    """Whether an option misses a key where one stands that none knows: that one is the mistake."""
    missing = all(i["type"] == "missing" and any(_options(value, i)) for i in found[place])
    return missing and any(
        other[:-1] == place[:-1]
        and any(item["type"] == "extra_forbidden" for item in found[other])
        and not _known_elsewhere(schema, other, found[other])
        for other in found
    )


# --- sentences ----------------------------------------------------------------------------------

PLAIN = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "keys and values"),
    "list_type": "a list",
    "string_type": "text",
}
"""Kind of mistake -> what was expected, in plain words."""

DECISIVE = {
    "finite_number": "a finite number",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "{ge} or more",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "{le} or less",
    "too_short": "{min_length} or more entries",
    "too_long": "{max_length} or fewer entries",
}
"""The same of a value of the right kind; what other options expected says nothing then."""


def _sentence(schema: Any, place: Place, items: list[Any]) -> str:
    kinds = {item["type"] for item in items}
    if "extra_forbidden" in kinds:
        found = f"unknown key (value {show(items[0]['input'])})"
        return found + _suggest(str(place[-1]), _keys_at(schema, place[:-1]))
    if "missing" in kinds:
        return "this key is required"
    for item in items:
        if item["type"] == "value_error":
            return str(item["msg"]).removeprefix("Value error, ")
    given = items[0]["input"]
    items = [item for item in items if item["type"] in DECISIVE] or items
    expected = list(dict.fromkeys(name for item in items for name in _expected(item)))
    if "a number" in expected and "a whole number" in expected:
        expected.remove("a whole number")
    return f"got {show(given)}, expected {_either(expected)}{_meant(given, items)}"


def _either(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _expected(item: Any) -> list[str]:
    """What one option would have taken, in plain words."""
    kind, facts = item["type"], item.get("ctx", {})
    if kind == "string_pattern_mismatch":
        axis = facts["pattern"].startswith(r"^\$")
        return ["`$axis`" if axis else "a name of lower-case letters, digits and _ (at most 64)"]
    if kind == "literal_error":
        return _choices(item)
    if kind in PLAIN or kind in DECISIVE:
        return [(PLAIN | DECISIVE)[kind].format(**facts)]
    message: str = item["msg"]
    return [message.removeprefix("Input should be ")]


def _choices(item: Any) -> list[str]:
    """The values of a choice, as they are written in YAML."""
    found = item["ctx"]["expected"].replace(" or ", ", ").split(", ")
    return [{"True": "true"}.get(name, name) for name in found]


def _meant(given: Any, items: list[Any]) -> str:
    """The choice that a misspelt word comes close to, if there is one."""
    known = [each for item in items if item["type"] == "literal_error" for each in _choices(item)]
    choices = [each.strip("'") for each in known]
    close = difflib.get_close_matches(given, choices, n=1) if isinstance(given, str) else []
    return f"; did you mean '{close[0]}'?" if close else ""


def _suggest(key: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(key, allowed, n=1, cutoff=0.5)
    meant = f", did you mean '{close[0]}'?" if close and close[0] != key else "."
    return f"{meant} Allowed: {', '.join(allowed)}" if allowed else meant


# --- the schema ---------------------------------------------------------------------------------


def _keys_at(schema: Any, place: Place) -> list[str]:
    """The keys allowed at a path, found by walking the schema."""
    nodes: list[Any] = [schema]
    for part in place:
        nodes = [inner for node in nodes for inner in _step(node, part)]
    named = [option.get("properties", {}) for node in nodes for option in _alternatives(node)]
    return sorted({key for properties in named for key in properties})


def _alternatives(node: Any) -> list[Any]:
    if not isinstance(node, dict):
        return []
    return [node, *(each for option in node.get("anyOf", []) for each in _alternatives(option))]


def _step(node: Any, part: int | str) -> list[Any]:
    found = []
    for option in _alternatives(node):
        if isinstance(part, int) and "items" in option:
            found.append(option["items"])
        elif part in option.get("properties", {}):
            found.append(option["properties"][part])
        elif isinstance(option.get("additionalProperties"), dict):
            found.append(option["additionalProperties"])
        found += list(option.get("patternProperties", {}).values())
    return found
