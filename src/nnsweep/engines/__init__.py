"""Engines: a chunk goes in, rows come out. `local`, `ndif` and `reference` share one interface."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Result:
    """What one chunk gave.

    Attributes:
        values: float32 (values, measures), rows in the order of `nnsweep.chunks.keys_of`.
        facts: Provenance: device, dtype, versions, threads, seconds by phase.
        sessions: One record a session (see `nnsweep.tables.SESSIONS`).
        errors: Row -> why a point that failed has no values.
    """

    values: Tensor
    facts: dict[str, Any]
    sessions: list[dict[str, Any]]
    errors: dict[int, str] = field(default_factory=dict)


class Engine(Protocol):
    """Runs chunks of one model; opening it loads what it needs once."""

    def run(self, chunk: Mapping[str, Any], report: Callable[[str], None]) -> Result:
        """Run one chunk and return its values."""
        ...
