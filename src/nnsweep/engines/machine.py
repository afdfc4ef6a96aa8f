"""What the engines say of the machine they run on."""

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from nnsweep.chunks import keys_of, pass_ids
from nnsweep.errors import UserError

logger = logging.getLogger(__name__)
POLL_S = 2.0


def pick_device(wanted: str) -> str:
    """`auto` is a GPU if there is one; `cuda` without one is refused."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("device: cuda was asked for, torch sees no GPU here. Use auto or cpu.")
    return wanted


def gpus() -> list[dict[str, Any]]:
    """Name and bytes of every GPU that torch sees."""
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": one.name, "memory_bytes": one.total_memory} for one in found]


def claim_gpu() -> IO[str]:
    """Make a GPU that no other nnsweep job of this user holds the current one.

    Jobs on one node each take another; `snakemake --resources gpu=N` lets no more begin than there
    are, and one that begins all the same waits. The system frees a GPU with its process, whatever
    ends it.

    Returns:
        The lock; it must be kept as long as the GPU is used.
    """
    told = False
    while True:
        for index in range(torch.cuda.device_count()):
            lock = _try_lock(str(torch.cuda.get_device_properties(index).uuid))
            if lock is not None:
                torch.cuda.set_device(index)
                return lock
        if not told:
            logger.info("waiting: other jobs hold every GPU here (see --resources gpu=N)")
            told = True
        time.sleep(POLL_S)


def _try_lock(uuid: str) -> IO[str] | None:
    """The lock of one GPU, known by its hardware's name since SLURM numbers them anew, or None."""
    path = Path(tempfile.gettempdir()) / f"nnsweep-{os.getuid()}-{uuid}.lock"
    lock = path.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def session_record(part: Mapping[str, Any], number: int, seconds: float) -> dict[str, Any]:
    """The line of a session on this machine (see `nnsweep.tables.SESSIONS`)."""
    keys = keys_of(dict(part))
    sizes = {"points": len({point for point, _ in keys}), "rows": len(keys)}
    nothing = dict.fromkeys(("payload_bytes", "result_bytes"), 0)
    waits = dict.fromkeys(("seconds_queued", "seconds_downloading"), 0.0)
    return {
        "session": number,
        **sizes,
        "passes": len(pass_ids(dict(part))),
        "attempts": 1,
        **nothing,
        **waits,
        "seconds_running": seconds,
    }


def served(module: torch.nn.Module) -> dict[str, Any]:
    """The dtype and attention implementation that a loaded model really has."""
    parameter = next(module.parameters())
    config: Any = module.config
    name = torch.cuda.get_device_name() if parameter.is_cuda else "cpu"
    return {
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "attention": config._attn_implementation,
        "device_name": name,
    }
