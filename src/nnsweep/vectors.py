"""Vector files of a sweep, looked at without reading their values (no torch)."""

from pathlib import Path

from nnsweep.errors import UserError
from nnsweep.sweep import Sweep, placed_writes
from nnsweep.sweep_writes import VectorFile


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
