"""Engine `local`: one nnsight session on this machine."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nnsweep import kernel
from nnsweep.engines import Result
from nnsweep.engines.machine import pick_device, served, versions
from nnsweep.measures import functions
from nnsweep.models import open_model


class LocalEngine:
    """nnsight on this machine's CPU or GPU."""

    def __init__(self, model: Mapping[str, Any], device: str, threads: int) -> None:
        """Load the model.

        Args:
            model: The prepared model.
            device: `auto`, `cpu` or `cuda`.
            threads: Threads of a CPU forward pass.

        Raises:
            UserError: `cuda` without a GPU, or a model that is not prepared here.
        """
        began = time.perf_counter()
        torch.set_num_threads(threads)
        self.threads = threads
        self.device = pick_device(device)
        self.model = open_model(model, self.device)
        self.seconds_load = time.perf_counter() - began

    def run(self, chunk: Mapping[str, Any], report: Callable[[str], None]) -> Result:
        """Run one chunk as one session."""
        began = time.perf_counter()
        with torch.no_grad():
            values = _session(self.model, chunk, functions(), report)
        seconds = time.perf_counter() - began
        facts = served(self.model._module) | {
            "device": self.device,
            "threads": self.threads,
            "versions": versions(),
            "seconds_load": self.seconds_load,
            "seconds_run": seconds,
        }
        return Result(values, facts, [])


def _session(
    model: Any, chunk: Mapping[str, Any], measures: Any, report: Callable[[str], None]
) -> torch.Tensor:
    values = None
    with model.session():
        values = kernel.run_chunk(model, chunk, measures, report).save()  # type: ignore[no-untyped-call]
    if values is None:
        raise RuntimeError("the session ended without values")
    return values
