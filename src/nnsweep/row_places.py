"""Where a position lies in a prompt row, and in its donor."""

from typing import Any

from nnsweep.prompts import PromptRow

Plain = dict[str, Any]


def tokens_of(row: PromptRow, name: str, donor: bool) -> list[int]:
    """Tokens of a position; `@all` is every token."""
    if name == "@all":
        return list(range(len(row.donor_ids if donor else row.ids)))
    return place_of(row, name, donor)


def place_of(row: PromptRow, name: str, donor: bool) -> list[int]:
    """Tokens of a named position in the prompt or in the donor."""
    place = row.positions[name]
    return place.donor if donor else place.base


def last_of(row: PromptRow, name: str, donor: bool) -> int:
    """The token whose next-token logits are measured: the last one of the position."""
    return place_of(row, name, donor)[-1]


def seen_keys(row: PromptRow, where: Plain, donor: bool) -> list[list[int]]:
    """Which of the keys each query token of a position can see, by their place in the list."""
    keys = tokens_of(row, where["keys"], donor)
    tokens = tokens_of(row, where["position"], donor)
    return [[place for place, key in enumerate(keys) if key <= token] for token in tokens]


def equal_lengths(row: PromptRow) -> bool:
    """Whether prompt and donor have as many tokens."""
    return len(row.ids) == len(row.donor_ids)
