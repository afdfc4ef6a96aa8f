"""Engine `ndif`: the same plan and the same kernel, beside weights that never come here.

The client holds a shell of the model on the meta device. A session is serialized with the kernel
and the measures by value, so the server needs nothing but torch and nnsight.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nnsweep import kernel, measures
from nnsweep.chunks import columns, keys_of
from nnsweep.engines import Result
from nnsweep.models import model_key, open_model
from nnsweep.ndif.sessions import Budget, Sessions
from nnsweep.provenance import versions

logger = logging.getLogger(__name__)


class NdifEngine:
    """Sessions on an NDIF server; host and key are nnsight's own."""

    def __init__(
        self, model: Mapping[str, Any], served: Mapping[str, Any], folder: Path, budget: Budget
    ) -> None:
        """Build the shell.

        Args:
            model: The prepared model.
            served: What the preflight found (see `nnsweep.ndif.preflight`).
            folder: Where job ids and finished sessions of this chunk lie.
            budget: Deadlines and tries.
        """
        began = time.perf_counter()
        self.served, self.folder, self.budget = served, folder, budget
        self.model = open_model(model, None)
        self.key = model_key(self.model)
        self.seconds_load = time.perf_counter() - began

    def run(self, chunk: Mapping[str, Any], report: Callable[[str], None]) -> Result:
        """Run one chunk as one session, or as more where the server cannot take it whole.

        Every state of a job goes to the log, not to `report`, which may leave lines out.
        """
        began = time.perf_counter()
        sessions = Sessions(self.key, self._pack, self.folder, self.budget, logger.info)
        found = sessions.run(dict(chunk))
        keys, width = keys_of(dict(chunk)), len(columns(chunk["measures"]))
        values = np.full((len(keys), width), np.nan, np.float32)
        errors = {}
        for place, key in enumerate(keys):
            value = found[key]
            if isinstance(value, str):
                errors[place] = value
            else:
                values[place] = value
        facts = {
            "dtype": self.served["dtype"],
            "attention": self.served["attention"],
            "device": "ndif",
            "device_name": self.served["device_name"],
            "threads": self.served["threads"],
            "versions": versions(),
            "server_versions": self.served["versions"],
            "seconds_load": self.seconds_load,
            "seconds_run": time.perf_counter() - began,
        }
        extra = {"dtype": facts["dtype"], "server_versions": _line(self.served["versions"])}
        records = [record | extra for record in sessions.records]
        return Result(torch.from_numpy(values), facts, records, errors)

    def _pack(self, chunk: Mapping[str, Any]) -> bytes:
        return pack(self.model, chunk)


def _line(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(found.items()))


class _Packer:
    """A backend that only serializes the session it is given."""

    blob: bytes = b""

    def __call__(self, tracer: Any) -> None:
        from nnsight.schema.request import RequestModel

        self.blob = RequestModel.serialize(tracer, compress=True)


def pack(model: Any, chunk: Mapping[str, Any]) -> bytes:
    """Serialize one session: kernel and measures by value, the chunk as plain data.

    Nothing else of this machine travels: nnsight's own client would ship every importable module
    that lies about, this one names the two that are needed.
    """
    import nnsight

    nnsight.register(kernel)
    nnsight.register(measures)
    plan = {name: chunk[name] for name in ("measures", "reads", "references", "blocks")}
    plan["model"] = {"shape": chunk["model"]["shape"]}
    packer = _Packer()
    _session(model, plan, measures.functions(), packer)
    return packer.blob


def pack_probe(model: Any, shape: Mapping[str, Any], gradients: bool = False) -> bytes:
    """Serialize the session that asks a server what it is (see `nnsweep.kernel.probe`)."""
    import nnsight

    nnsight.register(kernel)
    packer = _Packer()
    _probe_session(model, dict(shape), gradients, packer)
    return packer.blob


def _probe_session(model: Any, shape: Any, gradients: bool, backend: Any) -> None:
    probe = kernel.probe
    with model.session(backend=backend):
        found = probe(model, shape, gradients).save()  # type: ignore[no-untyped-call]  # noqa: F841


def _session(model: Any, chunk: Any, functions: Any, backend: Any) -> None:
    run_chunk = kernel.run_chunk
    with model.session(backend=backend):
        values = run_chunk(model, chunk, functions, print).save()  # type: ignore[no-untyped-call]  # noqa: F841
