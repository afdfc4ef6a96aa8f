"""Ray actors that serve a model from the CPU, as NDIF's own serve it from GPUs.

This file runs inside the server's environment, where nnsweep is not installed: a copy of it lies
on the workers' path, so it imports nothing of ours. NDIF's actors are kept whole but for the three
places that talk to a GPU and one that hangs.
"""

import gc
import os
import time
from typing import Any

import ray
import torch
from ndif.services.ray.deployments.modeling.base import BaseModelDeployment
from ndif.services.ray.sandbox.model import SandboxModelDeployment
from nnsight.modeling.huggingface import HuggingFaceModel

_POOL_PATIENCE_S = 60.0


class CpuModelDeployment(BaseModelDeployment):
    """Holds the model in main memory and runs a request's code beside it (a trusted key)."""

    # "Parking" a model means moving it from the GPU to main memory, where it is already.
    CACHEABLE = False

    def __init__(
        self, *args: Any, gpu_mem_bytes_by_id: dict[int, int] | None = None, **kwargs: Any
    ) -> None:
        # The GPUs on offer are pretended, and a real one must not be touched.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        super().__init__(*args, gpu_mem_bytes_by_id={}, **kwargs)

    def load_from_disk(self) -> HuggingFaceModel:
        """Load the weights in the served dtype, without gradients on parameters."""
        model = HuggingFaceModel.from_model_key(
            self.model_key,
            dispatch=True,
            dtype=self.dtype_name,
            device_map="cpu",
            **self.kwargs,
        )
        model._module.requires_grad_(False)
        return model

    def cleanup(self) -> None:
        """Forget a finished request; NDIF's own version also synchronizes the GPUs."""
        self.kill_switch.clear()
        self.kill_reason = None
        self.execution_ident = None
        self.model.interleaver.cancel()
        gc.collect()


class SandboxDeployment(SandboxModelDeployment):
    """Runs a request's code in a fresh process of its own (an ordinary key)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A request's clock runs while it waits for its process, so be ready with one.
        deadline = time.monotonic() + _POOL_PATIENCE_S
        while self.pool.ready.empty() and time.monotonic() < deadline:
            time.sleep(0.1)

    def interrupt(self) -> None:
        """End a request that ran too long by ending its process, and leave the thread alone.

        NDIF 0.1.2 also throws SystemExit into the thread that waits for the process. The thread
        is back in its pool by then and dies there, and every later request hangs (ndif issue 284).
        """
        if self.execution_sandbox is None:
            super().interrupt()
        else:
            self.execution_sandbox.stop()


class CpuSandboxDeployment(SandboxDeployment, CpuModelDeployment):
    """An ordinary key's requests, served from the CPU."""


@ray.remote(num_cpus=0, max_restarts=-1)
class CpuTrustedActor(CpuModelDeployment):
    """Runs every request as a trusted key's."""


@ray.remote(num_cpus=0, max_restarts=-1)
class CpuSandboxActor(CpuSandboxDeployment):
    """Runs every request as an ordinary key's."""


@ray.remote(num_cpus=1, max_restarts=-1)
class GpuSandboxActor(SandboxDeployment):
    """Runs every request as an ordinary key's, on NDIF's own GPU path."""
