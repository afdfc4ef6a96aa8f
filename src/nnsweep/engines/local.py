"""Engine `local`: one nnsight session on this machine."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nnsweep import kernel
from nnsweep.chunks import halves_of, keys_of, pass_ids
from nnsweep.engines import Result
from nnsweep.engines.machine import claim_gpu, pick_device, served, session_record
from nnsweep.errors import NnsweepError
from nnsweep.measures import functions
from nnsweep.models import open_model
from nnsweep.provenance import versions

logger = logging.getLogger(__name__)


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
        self.claim = claim_gpu() if self.device == "cuda" else None
        self.model = open_model(model, self.device)
        self.seconds_load = time.perf_counter() - began

    def run(self, chunk: Mapping[str, Any], report: Callable[[str], None]) -> Result:
        """Run one chunk as one session."""
        began = time.perf_counter()
        records: list[dict[str, Any]] = []
        with torch.no_grad():
            values = self._values(chunk, report, records)
        seconds = time.perf_counter() - began
        facts = served(self.model._module) | {
            "device": self.device,
            "threads": self.threads,
            "versions": versions(),
            "seconds_load": self.seconds_load,
            "seconds_run": seconds,
        }
        return Result(values, facts, [one | {"dtype": facts["dtype"]} for one in records])

    def _values(
        self,
        chunk: Mapping[str, Any],
        report: Callable[[str], None],
        records: list[dict[str, Any]],
    ) -> torch.Tensor:
        """All values of a chunk; what does not fit into memory runs as two halves.

        Args:
            chunk: The chunk.
            report: Told of progress.
            records: Gets a line for every session.

        Raises:
            NnsweepError: one point alone does not fit.
        """
        found: dict[tuple[str, str], torch.Tensor] = {}
        waiting = [dict(chunk)]
        while waiting:
            part, began = waiting.pop(0), time.perf_counter()
            values = self._fitting(part, report)
            if values is None:
                halves = halves_of(part)
                if not halves:
                    raise NnsweepError(
                        f"one point on {len(part['blocks'][0]['ids'])} rows does not fit into the "
                        f"memory of {self.device}. Set a smaller batch_rows."
                    )
                logger.warning("out of memory: %d passes run as two halves", len(pass_ids(part)))
                waiting = halves + waiting
            else:
                found |= dict(zip(keys_of(part), values, strict=True))
                seconds = time.perf_counter() - began
                records.append(session_record(part, len(records), seconds))
        return torch.stack([found[key] for key in keys_of(dict(chunk))])

    def _fitting(
        self, part: Mapping[str, Any], report: Callable[[str], None]
    ) -> torch.Tensor | None:
        """The values of one session, or None where memory is too small for it."""
        try:
            return _session(self.model, part, functions(), report)
        except torch.OutOfMemoryError:
            if self.device == "cuda":
                torch.cuda.empty_cache()
            return None


def _session(
    model: Any, chunk: Mapping[str, Any], measures: Any, report: Callable[[str], None]
) -> torch.Tensor:
    values = None
    with model.session():
        values = kernel.run_chunk(model, chunk, measures, report).save()  # type: ignore[no-untyped-call]
    if values is None:
        raise RuntimeError("the session ended without values")
    return values
