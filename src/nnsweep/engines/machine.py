"""What the engines say of the machine they run on."""

from collections.abc import Mapping
from typing import Any

import torch

from nnsweep.chunks import keys_of, pass_ids
from nnsweep.errors import UserError


def pick_device(wanted: str) -> str:
    """`auto` is a GPU if there is one; `cuda` without one is refused."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("device: cuda was asked for, torch sees no GPU here. Use auto or cpu.")
    return wanted


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
