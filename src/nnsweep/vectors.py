"""Vector files of a sweep: looked at without torch, then read."""

from pathlib import Path
from typing import Any

from nnsweep.errors import UserError
from nnsweep.sweep import Sweep, placed_writes
from nnsweep.sweep_writes import VectorFile

Plain = dict[str, Any]


def check_vectors(sweep: Sweep) -> None:
    """Refuse a vector file that is missing, unreadable or of no shape that a vector has.

    Raises:
        UserError: with the path of the write in the sweep file.
    """
    for where, write in placed_writes(sweep):
        if write.add and isinstance(write.add.vector, VectorFile):
            _check(f"{where}.add.vector", write.add.vector)


def _check(where: str, vector: VectorFile) -> None:
    from safetensors import SafetensorError, safe_open

    path = Path(vector.file)
    try:
        with safe_open(path, framework="np") as tensors:
            names = list(tensors.keys())
            shape = tensors.get_slice(vector.key).get_shape() if vector.key in names else None
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{where}.file: {path} is not a readable safetensors file ({error})."
        ) from None
    if shape is None:
        raise UserError(f"{where}.key: {path} has no '{vector.key}'. Tensors: {', '.join(names)}.")
    if len(shape) not in (1, 2):
        raise UserError(
            f"{where}.key: '{vector.key}' has shape {shape}, expected [width] or [layers, width]."
        )


def load_vector(spec: Plain, layer: int | None) -> list[float]:
    """Read a vector of shape [width] or [layers, width] from a safetensors file."""
    from safetensors import SafetensorError, safe_open

    path = Path(spec["file"])
    try:
        with safe_open(path, framework="pt") as tensors:
            names = list(tensors.keys())
            if spec["key"] not in names:
                have = ", ".join(names)
                raise UserError(f"{path}: no tensor '{spec['key']}'. Tensors: {have}.")
            values = tensors.get_tensor(spec["key"]).float()
    except (OSError, SafetensorError) as error:
        raise UserError(f"writes: {path} is not a readable safetensors file ({error}).") from None
    if values.ndim == 2 and layer is not None and layer < len(values):
        values = values[layer]
    if values.ndim != 1:
        shape = list(values.shape)
        raise UserError(f"{path}: shape {shape} is neither [width] nor [layers, width].")
    if not values.isfinite().all():
        raise UserError(f"{path}: '{spec['key']}' holds a value that is not finite.")
    return [float(value) for value in values]
