"""What a sweep will do, before it does it: points, passes, bytes, time, and decoded tokens."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nnsweep.chunks import columns, forward_passes, keys_of, naive_passes, pass_ids
from nnsweep.config import Config
from nnsweep.cost import full_work, memory_of, operations, passes_of, work_of
from nnsweep.expansion import settings_of
from nnsweep.plan import make_plan
from nnsweep.planned import Plan, Settings
from nnsweep.prompts import PromptRow, prepare_rows
from nnsweep.sites import ORDER, limits_of
from nnsweep.sweep import Sweep
from nnsweep.sweep_words import BETWEEN, HEADED, LAYERLESS
from nnsweep.vectors import load_vector

Plain = dict[str, Any]


def describe_model(model: Plain) -> str:
    """A model's sizes, and for every site where it lives, how wide it is, or why it is missing."""
    shape = model["shape"]
    lines = [
        f"{model['id']} ({shape['family']}, revision {model['revision']}): "
        f"{shape['layers']} layers, {shape['heads']} query heads and {shape['kv_heads']} key-value "
        f"heads of width {shape['head_dim']}, hidden {shape['hidden']}, vocabulary "
        f"{shape['vocab']}, {shape['parameters'] / 1e6:.0f}M parameters",
        f"  {'site':<11} {'layers':<8} {'heads':<6} {'width':<6} place",
    ]
    lines += [_site(shape, site) for site in ORDER if site in shape["sites"]]
    lines += [f"  {site:<11} none: {reason}" for site, reason in shape["refused"].items()]
    return "\n".join(lines)


def _site(shape: Plain, site: str) -> str:
    place, limits = shape["sites"][site], limits_of(shape)
    layers = "-" if site in LAYERLESS else f"0..{shape['layers'] - 1}"
    heads = f"0..{limits[HEADED[site]] - 1}" if site in HEADED else "-"
    path = place["path"] or "the model"
    return f"  {site:<11} {layers:<8} {heads:<6} {place['width']:<6} {place['side']} of {path}"


def explain(sweep: Sweep, model: Plain, tokenizer: Any, config: Config, rows: int) -> str:
    """Describe a sweep in a few lines.

    Args:
        sweep: The sweep.
        model: The prepared model (no weights are read).
        tokenizer: The model's tokenizer.
        config: How the plan is cut; engine `ndif` adds what will be sent and what will come home.
        rows: How many prompt rows to show with their tokens.
    """
    found = prepare_rows(sweep, Path(sweep.prompts.file), tokenizer, model["shape"]["context"])
    settings = settings_of(config, sweep, model, found)
    began = time.perf_counter()
    plan = make_plan(sweep, model, found, settings, load_vector)
    seconds = time.perf_counter() - began
    lines = [*_size(sweep, model, plan, found, settings, seconds)]
    if config.engine == "ndif":
        lines += _remote(model, plan)
    lines.append("")
    for row in found[:rows]:
        lines += [*_row(row, sweep.measure_at, tokenizer), ""]
    return "\n".join(lines).rstrip()


def _size(
    sweep: Sweep,
    model: Plain,
    plan: Plan,
    rows: list[PromptRow],
    settings: Settings,
    planned: float,
) -> Iterator[str]:
    shape = model["shape"]
    usable = sum(row.reason is None for row in rows)
    passes, naive = forward_passes(plan.chunks), naive_passes(plan.chunks)
    work, full = work_of(plan.chunks), full_work(plan.chunks)
    yield (
        f"{sweep.name} on {model['id']} ({shape['family']}, {shape['layers']} layers, "
        f"{shape['heads']} heads, {shape['parameters'] / 1e6:.0f}M parameters, {model['dtype']})"
    )
    yield f"  points          {len(plan.points)} over axes {list(sweep.axes) or 'none'}"
    yield f"  prompt rows     {usable} usable of {len(rows)}"
    yield f"  values          {sum(len(p.rows) for p in plan.points) * len(columns(plan.measures))}"
    yield f"  chunks          {_chunks(plan)}"
    yield f"  forward passes  {passes} with the clean runs (a loop without reuse: {naive})"
    yield f"  layer x token   {work:,} computed, {full:,} in whole passes ({work / full:.0%})"
    yield from _reuse(model, plan, settings)
    yield f"  memory          about {memory_of(model, plan.chunks) / 1e9:.1f} GB"
    yield f"  time            about {_seconds(model, work):.0f} s of passes on this CPU"
    yield f"  planned in      {planned:.1f} s"


def _chunks(plan: Plan) -> str:
    """Jobs of the plan and their passes under writes."""
    count = len(plan.chunks)
    told = f"{count} {'chunk' if count == 1 else 'chunks'} of "
    told += f"{sum(len(pass_ids(chunk)) for chunk in plan.chunks)} passes"
    own = f", and one of {len(pass_ids(plan.controls))} null controls" if plan.controls else ""
    return told + own


def _remote(model: Plain, plan: Plan) -> Iterator[str]:
    """Requests and bytes; the payloads are packed just as they will be sent."""
    from nnsweep.engines.ndif import pack
    from nnsweep.models import open_model

    shell = open_model(model, None)
    chunks = [*plan.chunks, *([plan.controls] if plan.controls else [])]
    sent = sum(len(pack(shell, chunk)) for chunk in chunks)
    values = sum(len(keys_of(chunk)) * len(columns(chunk["measures"])) for chunk in chunks)
    naive = len(plan.points)
    yield f"  requests        {len(chunks)} and one trial session (one trace a point: {naive})"
    yield f"  bytes           {sent:,} sent, about {4 * values + 2000 * len(chunks):,} home"


def _reuse(model: Plain, plan: Plan, settings: Settings) -> Iterator[str]:
    """What is taken from the clean run, and what is not and why."""
    idle = sum(plan.inert.values())
    if idle and any(point.edits for point in plan.points):
        yield f"  cannot differ   {idle} value rows, taken from the clean run"
    if settings.recompute == "exact":
        yield "  not reused      tokens before a write (recompute: exact)"
        return
    shape, items = model["shape"], list(passes_of(plan.chunks))
    late = [item for _, item in items if any(item["resumes"])]
    if late and not shape["joins"]:
        yield f"  not shared      passes between first layers ({shape['family']})"
    long = sum(_is_long(shape, block) for block, item in items if item["edits"])
    if long:
        yield (
            f"  not reused      tokens before a write in {long} passes: prompts of "
            f"{shape['window']} tokens or more, the sliding window"
        )


def _is_long(shape: Plain, block: Plain) -> bool:
    return shape["window"] is not None and len(block["ids"][0]) >= shape["window"]


def _seconds(model: Plain, work: int) -> float:
    """Two operations a weight and token, at the speed of a matrix product measured now."""
    import torch

    a, b = torch.rand(256, 1024), torch.rand(1024, 1024)
    a @ b
    began = time.perf_counter()
    for _ in range(5):
        a @ b
    rate = 5 * 2 * 256 * 1024 * 1024 / (time.perf_counter() - began)
    # A real pass reaches about half of what one large product does.
    return operations(model, work) / (rate / 2)


def _row(row: PromptRow, measure_at: str, tokenizer: Any) -> Iterator[str]:
    state = f"excluded: {row.reason}" if row.reason else "ok"
    yield f"row {row.row_id} ({state})"
    yield f"  text   {_tokens(row.tokens)}"
    if row.donor_text is not None:
        yield f"  donor  {_tokens(row.donor_tokens)}"
    for name, place in row.positions.items():
        if BETWEEN in name and not place.reason:
            continue  # Edges, of which both positions are shown.
        if place.reason:
            yield f"  position {name}: {place.reason}"
            continue
        theirs = ""
        if place.donor:
            how = {None: "donor", "mean": "mean of donor"}.get(
                place.align, f"donor by {place.align}"
            )
            tokens = _tokens([row.donor_tokens[i] for i in place.donor])
            theirs = f"  <-  {how} {place.donor} {tokens}"
        ours = _tokens([row.tokens[i] for i in place.base])
        yield f"  position {name}: {place.base} {ours}{theirs}"
    measured = row.positions[measure_at]
    if measured.base:
        token = measured.base[-1]
        yield f"  measured after [{token}] {_tokens([row.tokens[token]])}"
    for name, ids in row.answers.items():
        decoded = [tokenizer.decode([i]) for i in ids]
        yield f"  answer {name}: {row.answer_texts[name]!r} -> {ids} {_tokens(decoded)}"


def _tokens(tokens: list[str]) -> str:
    return "|" + "|".join(token.replace("\n", "\\n") for token in tokens) + "|"
