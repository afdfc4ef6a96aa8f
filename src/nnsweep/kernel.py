"""What happens inside a session: capture, skip, write, measure.

This file travels to the server as it is, so it uses torch and builtins only, and reads a chunk
(see `nnsweep.plan`) as plain lists. Each traced `with` stands in a small function of its own with
explicit arguments: nnsight reads the block's variables from the frame, and a shared name can hand
it a value of an earlier turn of a loop. Every name a chunk needs comes in as an argument.
"""

import torch

LAST = 99
"""Behind every site of a layer (see `nnsweep.sites.ORDER`)."""

HEAD_BYTES = 16_000_000
"""Most bytes of logits that one call of the head returns."""


def run_chunk(model, chunk, functions, report):
    """Run all passes of a chunk.

    Args:
        model: An nnsight model; `model.trace` opens a forward pass.
        chunk: The plan of the chunk.
        functions: Kind of measure -> function (see `nnsweep.measures`).
        report: Called with one line of progress after each pass.

    Returns:
        float32 tensor (values, measures) on the CPU, rows in the plan's order.
    """
    shape = chunk["model"]["shape"]
    means = {
        number: reference_mean(model, shape, batches)
        for number, batches in chunk["references"].items()
    }
    total = sum(len(block["passes"]) for block in chunk["blocks"])
    parts = []
    for block in chunk["blocks"]:
        state = clean_state(model, shape, block, chunk["measures"])
        for item in block["passes"]:
            if item["inert"]:
                logits = state["clean"]["logits"].repeat(len(item["points"]), 1)
            else:
                logits = run_pass(model, shape, block, item, state, means)
            parts.append(measured(chunk["measures"], functions, logits, block, item, state))
            report(f"{len(parts)}/{total} passes")
    return torch.cat(parts)


# --- clean runs -------------------------------------------------------------------------------


def clean_state(model, shape, block, measures):
    """The runs without writes that a block's passes start from and compare with."""
    moving = [item for item in block["passes"] if not item["inert"]]
    edits = [edit for item in moving for edit in item["edits"]]
    starts = {}
    for item in moving:
        for resume in item["resumes"]:
            starts[resume] = min(starts.get(resume, item["start"]), item["start"])
    own = [wanted(edit, block, "base") for edit in edits if edit["operand"]["kind"] == "self"]
    caching = any(item["start"] for item in moving)
    ids, at, shared = block["ids"], block["measured"], block["shared"]
    clean = clean_run(model, shape, ids, at, own, starts, caching, shared)
    state = {"clean": clean, "donor": None, "starts": starts}
    theirs = [wanted(edit, block, "donor") for edit in edits if edit["operand"]["kind"] == "donor"]
    if theirs or any(spec["kind"] == "recovery" for spec in measures):
        ids, at, shared = block["donor_ids"], block["donor_measured"], block["donor_shared"]
        state["donor"] = clean_run(model, shape, ids, at, theirs, {}, False, shared)
    return state


def wanted(edit, block, side):
    """A capture: where, which (row, token) pairs, and the key to find it by."""
    tap = edit["tap"]
    rows, tokens = pairs(block["positions"][edit["position"]][side])
    return {"tap": tap, "rows": rows, "tokens": tokens, "key": capture_key(edit)}


def capture_key(edit):
    return (edit["tap"]["path"], edit["tap"]["side"], edit["position"])


def pairs(places):
    """[[tokens of row 0], ...] -> flat row and token indices."""
    rows = [row for row, tokens in enumerate(places) for _ in tokens]
    return torch.tensor(rows), torch.tensor([token for tokens in places for token in tokens])


def clean_run(model, shape, ids, at, captures, starts, caching, shared=0):
    """One forward pass without writes.

    The first `shared` tokens are the same in all rows and nobody reads them: they are computed
    once, and the rows start from their keys and values.

    Returns:
        logits (rows, vocab) at the tokens `at`; captures key -> (pairs, width); residual stream
        entering layer `resume` from token `starts[resume]` on; keys and values, if `caching`.
    """
    tokens = torch.tensor(ids)
    reads = {(read["tap"]["path"], read["tap"]["side"], read["key"][2]): read for read in captures}
    ordered = sorted(reads.values(), key=lambda read: read["tap"]["order"])
    steps = [(read["tap"]["order"], "capture", read) for read in ordered]
    steps += [([resume - 1, LAST], "resid", resume) for resume in starts if resume]
    steps.sort(key=lambda step: step[0])
    found = {"resid": {}}
    kept = at + [
        int(token) for one in captures if one["tap"]["side"] == "logits" for token in one["tokens"]
    ]
    inputs = forward_inputs(shape, tokens, shared, kept)
    if shared:
        start_inputs = forward_inputs(shape, tokens[:1, :shared], 0, [shared - 1])
        trace_start(model, tokens[:1, :shared], start_inputs, found)
        inputs["past_key_values"] = spread(found.pop("start"), lambda _: len(ids), shared)
    trace_clean(model, shape, tokens, inputs, steps, starts, found, caching, shared)
    found["logits"] = pick(found["logits"], at, tokens.shape[1]).float()
    return found


def trace_start(model, tokens, inputs, found):
    with model.trace(tokens, use_cache=True, **inputs):
        found["start"] = model.output.past_key_values


def trace_clean(model, shape, tokens, inputs, steps, starts, found, caching, shared):
    with model.trace(tokens[:, shared:], use_cache=caching or shared > 0, **inputs):
        for _, kind, step in steps:
            if kind == "capture":
                seen = read(model, step["tap"], len(tokens))
                shift = tokens.shape[1] - seen.shape[1]
                found[step["key"]] = seen[step["rows"], step["tokens"] - shift].clone()
            else:
                output = layer_at(model, shape, step - 1).output
                found["more"] = 0 if isinstance(output, torch.Tensor) else len(output) - 1
                found["resid"][step] = tensor_of(output)[:, starts[step] - shared :].clone()
        if caching:
            found["cache"] = model.output.past_key_values
        found["logits"] = model.output.logits.detach()


def reference_mean(model, shape, batches):
    """Mean of a place over the rows and tokens of a reference set: float32 (width,)."""
    total, count = 0, 0
    for batch in batches:
        rows, tokens = pairs(batch["at"])
        read_at = {"tap": batch["tap"], "rows": rows, "tokens": tokens, "key": ("", "", "mean")}
        last = [len(ids) - 1 for ids in batch["ids"]]
        run = clean_run(model, shape, batch["ids"], last, [read_at], {}, False)
        total = total + run[("", "", "mean")].float().sum(0)
        count += len(rows)
    tap = batches[0]["tap"]
    return (total / count)[tap["low"] : tap["high"]]


# --- passes under writes ----------------------------------------------------------------------


def run_pass(model, shape, block, item, state, means):
    """One forward pass that holds one or more points.

    Every point skips the layers before its own `resume`: it joins the pass there, with the clean
    residual stream, below the points that joined before it. Tokens before `start` come from the
    clean keys and values.

    Returns:
        logits (points * rows, vocab) at the measured tokens.
    """
    start, resumes = item["start"], item["resumes"]
    tokens = torch.tensor(block["ids"])
    at = block["measured"] * len(resumes)
    # Where layers are skipped, the ids only give mask and positions their shape: one row is enough
    # for a family whose layers take any number of rows.
    shown = tokens[:1] if shape["joins"] and resumes[0] else tokens.repeat(len(resumes), 1)
    inputs = forward_inputs(shape, shown, start, at + written_logits(block, item))
    if start:
        inputs["past_key_values"] = spread(
            state["clean"]["cache"],
            lambda layer: sum(resume <= layer for resume in resumes),
            start,
        )
    early, late = split_edits(shape, item)
    streams = {
        resume: stream_at(block, resumes, resume, early, state, means, start)
        for resume in sorted(set(resumes))
        if resume
    }
    steps = ordered_steps(shape, resumes[0], streams, late)
    found = {}
    suffix, width = shown[:, start:], tokens.shape[1]
    trace_pass(
        model, shape, suffix, inputs, item, streams, steps, block, state, means, at, width, found
    )
    return found["logits"]


def written_logits(block, item):
    """Tokens whose logits are written."""
    return [
        token
        for edit in item["edits"]
        if edit["tap"]["side"] == "logits"
        for tokens in block["positions"][edit["position"]]["base"]
        for token in tokens
    ]


def split_edits(shape, item):
    """Edits of the very stream that a point joins with, and the others in order of the pass."""
    edits = sorted(item["edits"], key=lambda edit: edit["tap"]["order"])
    streams = [is_stream(shape, edit, item["resumes"][edit["slot"]]) for edit in edits]
    early = [edit for edit, stream in zip(edits, streams, strict=True) if stream]
    return early, [edit for edit, stream in zip(edits, streams, strict=True) if not stream]


def is_stream(shape, edit, resume):
    """Whether an edit changes the very stream that enters layer `resume`."""
    tap = edit["tap"]
    return tap["side"] == "output" and tap["path"] == shape["layer_path"].format(layer=resume - 1)


def stream_at(block, resumes, resume, early, state, means, start):
    """The stream (rows of the points that join at `resume`, tokens, width), early edits applied."""
    first = state["starts"][resume]
    slots = [slot for slot, own in enumerate(resumes) if own == resume]
    stream = state["clean"]["resid"][resume][:, start - first :].repeat(len(slots), 1, 1)
    for edit in early:
        if edit["slot"] in slots:
            moved = dict(edit, slot=edit["slot"] - slots[0])
            apply(stream, moved, block, state, means, start)
    return stream


def ordered_steps(shape, first, streams, late):
    """What a pass does after its skipped layers, in order: points that join, edits by place."""
    steps = [([resume - 1, LAST], "join", resume) for resume in streams if resume > first]
    groups = {}
    for edit in late:
        groups.setdefault((edit["tap"]["path"], edit["tap"]["side"]), []).append(edit)
    steps += [(edits[0]["tap"]["order"], "edit", edits) for edits in groups.values()]
    return sorted(steps, key=lambda step: step[0])


def trace_pass(
    model, shape, tokens, inputs, item, streams, steps, block, state, means, at, width, found
):
    start, resumes, rows = item["start"], item["resumes"], len(block["ids"])
    writes_logits = any(kind == "edit" and on_logits(step) for _, kind, step in steps)
    # The clean keys and values are read all the same; they need not come back with the result.
    with model.trace(tokens, use_cache=False, **inputs):
        for layer in range(resumes[0]):
            # A family whose layers hand out tuples must get a tuple back from a skipped one.
            more = state["clean"]["more"]
            stream = streams[resumes[0]]
            layer_at(model, shape, layer).skip((stream, *[None] * more) if more else stream)
        for order, kind, step in steps:
            if kind == "join":
                lengthen(layer_at(model, shape, step - 1), streams[step])
            elif not on_logits(step):
                there = sum(resume <= max(order[0], 0) for resume in resumes)
                rewrite(model, step, block, state, means, start, there * rows)
        if shape["head"] and not writes_logits:
            head = module_at(model, shape["head"])
            hidden = pick(head.input, at, width)
            found["logits"] = unembed(head, hidden, shape["vocab"], rows)
            head.skip(hidden[:1, None, :1])
        else:
            logits = model.output.logits.detach()
            for _, kind, step in steps:
                if kind == "edit" and on_logits(step):
                    logits = logits.clone()
                    for edit in step:
                        apply(logits, edit, block, state, means, start, logits.shape[1])
            found["logits"] = pick(logits, at, width).float()


def on_logits(edits):
    return edits[0]["tap"]["side"] == "logits"


def unembed(head, hidden, vocab, rows):
    """float32 logits (points * rows, vocab) of the stream (points * rows, width) before the head.

    Whatever a server's sandbox reads crosses a socket, the model's output several times over and
    large tensors slower by the byte than small ones; the output of a module that is called crosses
    once. So the head is called, on as many whole points as make up at most HEAD_BYTES.
    """
    size = max(1, HEAD_BYTES // (4 * vocab))
    size = size // rows * rows or size
    return torch.cat([head(part).detach().float() for part in hidden.split(size)])


def lengthen(module, stream):
    """Let points join behind a layer, whose output is less to read than the next one's inputs."""
    old = module.output
    new = torch.cat([tensor_of(old), stream])
    module.output = new if isinstance(old, torch.Tensor) else (new, *old[1:])


def rewrite(model, edits, block, state, means, start, rows):
    """Read one place, apply all edits to a copy, put the copy in its place."""
    tap = edits[0]["tap"]
    module = module_at(model, tap["path"])
    old = module.input if tap["side"] == "input" else module.output
    stream = activation(old, rows).clone()
    for edit in edits:
        apply(stream, edit, block, state, means, start)
    new = stream.reshape(tensor_of(old).shape)
    if tap["side"] == "input":
        module.input = new
    else:
        module.output = new if isinstance(old, torch.Tensor) else (new, *old[1:])


def apply(stream, edit, block, state, means, start, kept=None):
    """Write one edit into `stream` (points * rows, tokens, width), in place.

    `start` is the token that stands first in `stream`; for logits, `kept` says how many of the
    last tokens it holds instead.
    """
    tap = edit["tap"]
    rows, tokens = pairs(block["positions"][edit["position"]]["base"])
    if kept is not None:
        start = len(block["ids"][0]) - kept
    place = (rows + edit["slot"] * len(block["ids"]), tokens - start)
    old = stream[place][:, tap["low"] : tap["high"]]
    new = operated(old, edit, block, state, means, rows)
    stream[place[0], place[1], tap["low"] : tap["high"]] = new.to(stream.dtype)


def operated(old, edit, block, state, means, rows):
    """The new value of `old` (pairs, width) under one edit; sums are taken in float32."""
    operand = edit["operand"]
    kind = operand["kind"]
    if kind == "clamp":
        return old.clamp(operand.get("low"), operand.get("high"))
    if kind == "noise":
        return old.float() + operand["std"] * noise(operand["seeds"], rows, old).to(old.device)
    new = source(old, edit, state, means)
    if edit["op"] == "add":
        return old.float() + operand["scale"] * new
    if edit["op"] == "mix":
        return (1 - operand["weight"]) * old.float() + operand["weight"] * new.float()
    return new


def source(old, edit, state, means):
    """What an edit sets, adds or mixes in, shaped as `old` (pairs, width) or (width,)."""
    tap, operand = edit["tap"], edit["operand"]
    kind = operand["kind"]
    if kind in ("donor", "self"):
        run = state["donor"] if kind == "donor" else state["clean"]
        return run[capture_key(edit)][:, tap["low"] : tap["high"]]
    if kind == "number":
        return torch.full_like(old, operand["value"])
    return direction(operand, means).to(old.device).expand_as(old)


def direction(operand, means):
    if operand["kind"] == "vector":
        return torch.tensor(operand["values"])
    vector = means[str(operand["plus"])]
    return vector - means[str(operand["minus"])] if "minus" in operand else vector


def noise(seeds, rows, old):
    """Standard normal numbers (pairs, width), each row's drawn from its own seed on the CPU."""
    parts = []
    for row, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        parts.append(torch.randn(int((rows == row).sum()), old.shape[-1], generator=generator))
    return torch.cat(parts)


# --- measuring --------------------------------------------------------------------------------


def measured(specs, functions, logits, block, item, state):
    """All measures of a pass: float32 (points * rows, measures) on the CPU."""
    rows = len(block["ids"])
    answers = {name: torch.tensor(ids) for name, ids in block["answers"].items()}
    parts = [logits[low : low + rows] for low in range(0, len(logits), rows)]
    found = [measured_point(specs, functions, part, answers, state) for part in parts]
    return torch.cat(found).detach().cpu()


def measured_point(specs, functions, logits, answers, state):
    """All measures of one point: float32 (rows, measures)."""
    clean = state["clean"]["logits"]
    kinds = {spec["name"]: spec for spec in specs}
    columns = []
    for spec in specs:
        if spec["kind"] == "recovery":
            donor, of = state["donor"]["logits"], kinds[spec["of"]]
            ours, theirs, base = (
                column(functions, of, run, clean, answers) for run in (logits, donor, clean)
            )
            columns.append(recovered(ours, base, theirs, spec["min_gap"]))
        else:
            columns.append(column(functions, spec, logits, clean, answers))
    return torch.stack(columns, -1).float()


def column(functions, spec, logits, clean, answers):
    names = spec.get("answers") or ([spec["answer"]] if "answer" in spec else [])
    return functions[spec["kind"]](logits, clean, [answers[name] for name in names])


def recovered(ours, base, theirs, min_gap):
    """(ours - base) / (theirs - base); not a number where the gap is too small to divide by."""
    gap = theirs - base
    return torch.where(gap.abs() < min_gap, torch.nan, (ours - base) / gap)


# --- places and inputs ------------------------------------------------------------------------


def module_at(model, path):
    for name in path.split("."):
        model = model[int(name)] if name.isdigit() else getattr(model, name)
    return model


def layer_at(model, shape, layer):
    return module_at(model, shape["layer_path"].format(layer=layer))


def tensor_of(value):
    """The activation itself, where some families hand out a tuple."""
    return value if isinstance(value, torch.Tensor) else value[0]


def read(model, tap, rows):
    if tap["side"] == "logits":
        return model.output.logits
    module = module_at(model, tap["path"])
    return activation(module.input if tap["side"] == "input" else module.output, rows)


def activation(value, rows):
    """The activation as (rows, tokens, width); some families fold rows and tokens into one."""
    found = tensor_of(value)
    return found if found.dim() == 3 else found.reshape(rows, -1, found.shape[-1])


def forward_inputs(shape, tokens, start, at):
    """Mask and position ids travel with the ids; the vocabulary product only where it is read."""
    rows, width = tokens.shape
    inputs = {"attention_mask": torch.ones(rows, width, dtype=torch.long)}
    if shape["position_ids"]:
        inputs["position_ids"] = torch.arange(start, width)[None].expand(rows, -1)
    if shape["logits_to_keep"]:
        inputs["logits_to_keep"] = width - min(at)
    return inputs


def spread(cache, copies, start):
    """A fresh cache of the keys and values before `start`, with `copies(layer)` of every row.

    Of a layer without copies, which will be skipped, nothing but the length is read.
    """
    past = cache.__class__()
    for number, layer in enumerate(cache.layers):
        count = copies(number)
        keys, values = (
            part[:, :, :start].repeat(count, 1, 1, 1) if count else part[:1, :, :start]
            for part in (layer.keys, layer.values)
        )
        past.update(keys, values, number)
    return past


def pick(values, at, width):
    """Values (rows, width) at each row's own token, of values that may be of the last tokens."""
    if values.shape[1] == 1:
        return values[:, 0]
    rows = torch.arange(len(at))
    return values[rows, torch.tensor(at) - (width - values.shape[1])]


# --- asking a server what it is ---------------------------------------------------------------


def probe(model, shape):
    """What runs a session: dtype and device of the activations, torch, threads, gradients."""
    found = {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
    trace_probe(model, shape, torch.tensor([[1, 2]]), found)
    return found


def trace_probe(model, shape, tokens, found):
    with model.trace(tokens, use_cache=False):
        stream = tensor_of(layer_at(model, shape, 0).output)
        found["dtype"] = str(stream.dtype).replace("torch.", "")
        found["device"] = str(stream.device.type)
        found["logits"] = int(model.output.logits.shape[-1])
