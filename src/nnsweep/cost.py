"""What chunks need, from their plan alone: layers times tokens, bytes, operations, minutes.

No torch: the workflow asks while it plans, and a login node has no use for it.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from nnsweep.chunks import backward_runs, every, forward_passes, naive_passes
from nnsweep.config import Ndif
from nnsweep.errors import UserError

Plain = dict[str, Any]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
RESIDENT = 8e8
"""Bytes that a chunk job holds besides the model: Python, torch, nnsight and pyarrow (measured)."""
BACKWARD = 20
"""Numbers a layer keeps of a token for a backward pass, in widths of the stream (an estimate)."""
MOST_ROWS = 4096
WAITING_MB, START_MINUTES = 2000, 10
"""What a job that only waits for a server needs, and what any job may need before it computes."""
LOAD_RATE, READ_RATE, CPU_RATE, CUDA_RATE = 1e8, 5e9, 5e9, 1e12
"""Slow machines: bytes/s from a shared disk, bytes/s of memory, operations/s of a CPU thread (a
tenth of what was measured) and of a GPU."""


def work_of(chunks: Iterable[Plain]) -> int:
    """Layers times tokens that a plan computes: clean and donor runs, references and passes.

    New tokens count with all of their steps, of which a model's end token may spare some.
    """
    return sum(_chunk_work(chunk, full=False) for chunk in chunks)


def full_work(chunks: Iterable[Plain]) -> int:
    """The same of a loop: a full pass for every point, and for every run that it patches from.

    Clean runs, donors, references and gradients are run once, as in the plan, and whole.
    """
    return sum(_chunk_work(chunk, full=True) for chunk in chunks)


def _chunk_work(chunk: Plain, full: bool) -> int:
    layers = chunk["model"]["shape"]["layers"]
    tokens = _reference_tokens(chunk)
    passes = 0
    for block in chunk["blocks"]:
        tokens += _clean_tokens(chunk, block, full) + _tokens_behind(chunk, block)
        rows, width, donors = _sizes(block)
        for item in block["passes"]:
            own = (_whole_work if full else _pass_work)(item, layers, width)
            passes += rows * (own + layers * _chain_tokens(item, width, donors, full))
    return layers * tokens + passes


def _clean_tokens(chunk: Plain, block: Plain, full: bool) -> int:
    """Tokens of a block's runs without writes; a beginning that its rows share is run once."""
    rows, width, donors = _sizes(block)
    found = rows * width - (0 if full else (rows - 1) * block["shared"])
    if _reads_donor(chunk, block):
        found += rows * donors - (0 if full else (rows - 1) * block["donor_shared"])
    # A backward pass takes about twice its forward pass.
    return found + 3 * backward_runs(chunk["measures"]) * rows * width


def _reads_donor(chunk: Plain, block: Plain) -> bool:
    """Whether the donors of a block are run without writes."""
    edits = [edit for item in block["passes"] if not item["inert"] for edit in item["edits"]]
    operands = [one["operand"] for edit in edits for one in _with_chains(edit)]
    patched = any(o["kind"] == "donor" and "chain" not in o for o in operands)
    measured = any(
        spec["kind"] == "recovery" or ("read" in spec and spec["against"] == "donor")
        for spec in chunk["measures"]
    )
    return bool(block["donor_ids"]) and (patched or measured)


def _with_chains(edit: Plain) -> list[Plain]:
    return [edit, *edit["operand"].get("under", [])]


def _pass_work(item: Plain, layers: int, width: int) -> int:
    """Layers times tokens of one prompt row in a pass; none where nothing is run."""
    if item["inert"] or item["estimated"]:
        return 0
    return sum(layers - resume for resume in item["resumes"]) * (width - item["start"])


def _whole_work(item: Plain, layers: int, width: int) -> int:
    """The same of a loop; a point that neither writes nor goes on is the clean run itself."""
    clean = item["inert"] and not item["edits"]
    return 0 if clean else len(item["points"]) * layers * width


def _chain_tokens(item: Plain, width: int, donors: int, full: bool) -> int:
    """Tokens, for one prompt row, of the runs under writes that a pass patches from.

    A pass runs equal chains once, a loop once for every point.
    """
    if item["inert"] and not full:
        return 0
    sizes = {"self": width, "donor": donors}
    operands = [(edit["slot"] if full else 0, edit["operand"]) for edit in item["edits"]]
    chains = {(slot, o["kind"], o["chain"]) for slot, o in operands if "chain" in o}
    return sum(sizes[kind] for _, kind, _ in chains)


def _tokens_behind(chunk: Plain, block: Plain) -> int:
    """Tokens that are run behind the prompts of a block: new ones, and those of whole answers."""
    specs = chunk["measures"]
    whole = {spec["answer"] for spec in every(specs) if spec.get("tokens") == "sum"}
    sizes = {name: max(map(len, block["answer_ids"][name])) - 1 for name in whole}
    steps = sum(spec["k"] - 1 for spec in specs if spec["kind"] == "generate")
    points = sum(len(item["points"]) for item in block["passes"])
    # A recovery reads whole answers behind the clean prompt and behind the donor, too.
    recovered = 2 * any(spec["of"].get("tokens") == "sum" for spec in specs if "of" in spec)
    return len(block["ids"]) * (points * steps + (points + recovered) * sum(sizes.values()))


def _reference_tokens(chunk: Plain) -> int:
    """Tokens of the prompts that means and the like are taken over."""
    wanted = chunk["references"].values()
    return sum(
        len(batch["ids"]) * len(batch["ids"][0]) for each in wanted for batch in each["batches"]
    )


def _sizes(block: Plain) -> tuple[int, int, int]:
    """Rows, tokens of a prompt, tokens of a donor (0 without donors)."""
    donors = len(block["donor_ids"][0]) if block["donor_ids"] else 0
    return len(block["ids"]), len(block["ids"][0]), donors


def operations(model: Plain, work: int) -> float:
    """Two operations a weight and token."""
    return work * 2 * model["shape"]["parameters"] / max(1, model["shape"]["layers"])


def weights_of(model: Plain) -> float:
    """Bytes of a model's weights."""
    return model["shape"]["parameters"] * BYTES[model["dtype"]]


def passes_of(chunks: Iterable[Plain]) -> Iterator[tuple[Plain, Plain]]:
    """Every pass with its block."""
    for chunk in chunks:
        for block in chunk["blocks"]:
            for item in block["passes"]:
                yield block, item


def memory_of(model: Plain, chunks: Iterable[Plain]) -> float:
    """Bytes: weights, a block's clean runs, one pass's activations, keys and logits, the rest."""
    shape = model["shape"]
    keys = 2 * shape["kv_heads"] * shape["head_dim"]
    most = 0.0
    for chunk in chunks:
        layer = shape["hidden"] * (1 + BACKWARD * backward_runs(chunk["measures"])) + keys
        for block, item in passes_of([chunk]):
            rows, width, _ = _sizes(block)
            stacked = rows * len(item["points"])
            live = stacked * ((width - item["start"]) * shape["hidden"] * 8 + shape["vocab"])
            live += stacked * item["start"] * shape["layers"] * keys + 4 * rows * shape["vocab"]
            most = max(most, rows * width * shape["layers"] * layer + live)
    return weights_of(model) + BYTES[model["dtype"]] * most + RESIDENT


def rows_that_fit(model: Plain, width: int, backward: bool, memory: float) -> int:
    """The largest power of two, up to 4096, of prompt rows that a pass can hold.

    Args:
        model: The prepared model.
        width: Tokens of the longest prompt.
        backward: Whether a block also runs backwards.
        memory: Bytes of one job.

    Raises:
        UserError: the model with a single row does not fit.
    """
    shape = model["shape"]
    keys = 2 * shape["kv_heads"] * shape["head_dim"]
    layer = shape["hidden"] * (1 + BACKWARD * backward) + 2 * keys
    row = width * (shape["layers"] * layer + 8 * shape["hidden"]) + 5 * shape["vocab"]
    fixed = weights_of(model) + RESIDENT
    count = (memory - fixed) / (BYTES[model["dtype"]] * row)
    if count < 1:
        raise UserError(
            f"config: batch_rows: auto: {model['id']} needs more than {fixed / 1e9:.1f} GB, a job "
            f"has {memory / 1e9:.1f} GB. Give memory_gb, or run it where there is more."
        )
    return int(min(MOST_ROWS, 2 ** math.floor(math.log2(count))))


def chunk_mb(chunk: Plain) -> int:
    """Megabytes to ask a cluster for: half as much again as the estimate, and 2 GB."""
    return round((memory_of(chunk["model"], [chunk]) * 1.5 + 2e9) / 1e6)


def chunk_minutes(chunk: Plain, engine: str, device: str, threads: int) -> int:
    """Minutes to ask a cluster for: opening, reading the weights once a pass, and the operations.

    Args:
        chunk: The chunk's plan.
        engine: `reference` computes full passes, `local` only what a write can change.
        device: `cuda` where a GPU was asked for; anything else counts as a CPU.
        threads: CPU threads of the job.
    """
    full = engine == "reference"
    model, rate = chunk["model"], CUDA_RATE if device == "cuda" else CPU_RATE * threads
    passes = naive_passes([chunk]) if full else forward_passes([chunk])
    work = full_work([chunk]) if full else work_of([chunk])
    seconds = weights_of(model) * (1 / LOAD_RATE + passes / READ_RATE)
    return START_MINUTES + round((seconds + operations(model, work) / rate) / 60)


def waiting_minutes(deadlines: Ndif) -> int:
    """Minutes until a request's own deadlines have passed, one after the other."""
    phases = ("connect_s", "queue_s", "run_s", "download_s")
    return START_MINUTES + round(sum(getattr(deadlines, phase) for phase in phases) / 60)
