"""What happens inside a session: capture, skip, write, measure.

This file travels to the server as it is, so it uses torch and builtins only, and reads a chunk
(see `nnsweep.plan`) as plain lists. Each traced `with` stands in a small function of its own with
explicit arguments: nnsight reads the block's variables from the frame, and a shared name can hand
it a value of an earlier turn of a loop. Every name a chunk needs comes in as an argument.
"""

import torch


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
            logits = run_pass(model, shape, block, item, state, means)
            parts.append(measured(chunk["measures"], functions, logits, block, item, state))
            report(f"{len(parts)}/{total} passes")
    return torch.cat(parts)


# --- clean runs -------------------------------------------------------------------------------


def clean_state(model, shape, block, measures):
    """The runs without writes that a block's passes start from and compare with."""
    edits = [edit for item in block["passes"] for edit in item["edits"]]
    starts = {}
    for item in block["passes"]:
        if item["resume"] or item["start"]:
            known = starts.get(item["resume"], item["start"])
            starts[item["resume"]] = min(known, item["start"])
    own = [wanted(edit, block, "base") for edit in edits if edit["operand"]["kind"] == "self"]
    caching = any(item["start"] for item in block["passes"])
    clean = clean_run(model, shape, block["ids"], block["measured"], own, starts, caching)
    state = {"clean": clean, "donor": None, "starts": starts}
    theirs = [wanted(edit, block, "donor") for edit in edits if edit["operand"]["kind"] == "donor"]
    if theirs or any(spec["kind"] == "recovery" for spec in measures):
        ids, at = block["donor_ids"], block["donor_measured"]
        state["donor"] = clean_run(model, shape, ids, at, theirs, {}, False)
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


def clean_run(model, shape, ids, at, captures, starts, caching):
    """One forward pass without writes.

    Returns:
        logits (rows, vocab) at the tokens `at`; captures key -> (pairs, width); residual stream
        entering layer `resume` from token `starts[resume]` on; keys and values, if `caching`.
    """
    tokens = torch.tensor(ids)
    reads = {(read["tap"]["path"], read["tap"]["side"], read["key"][2]): read for read in captures}
    ordered = sorted(reads.values(), key=lambda read: read["tap"]["order"])
    steps = [(read["tap"]["order"], "capture", read) for read in ordered]
    steps += [([resume - 1, 5], "resid", resume) for resume in starts if resume]
    steps.sort(key=lambda step: step[0])
    found = {"resid": {}}
    kept = at + [
        int(token) for one in captures if one["tap"]["side"] == "logits" for token in one["tokens"]
    ]
    inputs = forward_inputs(shape, tokens, 0, kept)
    trace_clean(model, shape, tokens, inputs, steps, starts, found, caching)
    found["logits"] = pick(found["logits"], at, tokens.shape[1])
    return found


def trace_clean(model, shape, tokens, inputs, steps, starts, found, caching):
    with model.trace(tokens, use_cache=caching, **inputs):
        for _, kind, step in steps:
            if kind == "capture":
                seen = read(model, step["tap"], len(tokens))
                shift = tokens.shape[1] - seen.shape[1]
                found[step["key"]] = seen[step["rows"], step["tokens"] - shift].clone()
            else:
                output = layer_at(model, shape, step - 1).output
                found["more"] = 0 if isinstance(output, torch.Tensor) else len(output) - 1
                found["resid"][step] = tensor_of(output)[:, starts[step] :].clone()
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

    Layers before `resume` are skipped with the clean residual stream; tokens before `start` come
    from the clean keys and values.

    Returns:
        logits (points * rows, vocab) at the measured tokens.
    """
    points, start, resume = len(item["points"]), item["start"], item["resume"]
    tokens = torch.tensor(block["ids"]).repeat(points, 1)
    at = block["measured"] * points
    written = [
        token
        for edit in item["edits"]
        if edit["tap"]["side"] == "logits"
        for tokens_of_row in block["positions"][edit["position"]]["base"]
        for token in tokens_of_row
    ]
    inputs = forward_inputs(shape, tokens, start, at + written)
    if start:
        inputs["past_key_values"] = prefix(state["clean"]["cache"], points, start)
    edits = sorted(item["edits"], key=lambda edit: edit["tap"]["order"])
    early = [edit for edit in edits if edit["resume"] == resume and is_stream(shape, edit, resume)]
    hidden = None
    if resume:
        first = state["starts"][resume]
        hidden = state["clean"]["resid"][resume][:, start - first :].repeat(points, 1, 1)
        for edit in early:
            apply(hidden, edit, block, state, means, start)
        # A family whose layers hand out tuples must get a tuple back from a skipped one.
        more = state["clean"]["more"]
        hidden = (hidden, *[None] * more) if more else hidden
    late = grouped([edit for edit in edits if edit not in early])
    found, suffix = {}, tokens[:, start:]
    trace_pass(
        model, shape, suffix, inputs, resume, hidden, late, block, state, means, start, found
    )
    return pick(found["logits"], at, tokens.shape[1])


def is_stream(shape, edit, resume):
    """Whether an edit changes the very stream that enters layer `resume`."""
    tap = edit["tap"]
    return tap["side"] == "output" and tap["path"] == shape["layer_path"].format(layer=resume - 1)


def grouped(edits):
    """Edits by place, in the order of the forward pass."""
    groups = {}
    for edit in edits:
        groups.setdefault((edit["tap"]["path"], edit["tap"]["side"]), []).append(edit)
    return list(groups.values())


def trace_pass(
    model, shape, tokens, inputs, resume, skipped, late, block, state, means, start, found
):
    with model.trace(tokens, use_cache=start > 0, **inputs):
        for layer in range(resume):
            layer_at(model, shape, layer).skip(skipped)
        for edits in late:
            if edits[0]["tap"]["side"] != "logits":
                rewrite(model, edits, block, state, means, start, len(tokens))
        logits = model.output.logits.detach()
        for edits in late:
            if edits[0]["tap"]["side"] == "logits":
                logits = logits.clone()
                for edit in edits:
                    apply(logits, edit, block, state, means, start, logits.shape[1])
        found["logits"] = logits


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
    tap, operand = edit["tap"], edit["operand"]
    kind = operand["kind"]
    if kind in ("donor", "self"):
        run = state["donor"] if kind == "donor" else state["clean"]
        return run[capture_key(edit)][:, tap["low"] : tap["high"]]
    if kind == "number":
        return torch.full_like(old, operand["value"])
    if kind == "noise":
        return old.float() + operand["std"] * noise(operand["seeds"], rows, old).to(old.device)
    vector = direction(operand, means).to(old.device)
    if edit["op"] == "set":
        return vector.expand_as(old)
    return old.float() + operand["scale"] * vector


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
    points = len(item["points"])
    clean = state["clean"]["logits"].repeat(points, 1)
    answers = {name: torch.tensor(ids * points) for name, ids in block["answers"].items()}
    kinds = {spec["name"]: spec for spec in specs}
    columns = []
    for spec in specs:
        if spec["kind"] == "recovery":
            donor = state["donor"]["logits"].repeat(points, 1)
            of = kinds[spec["of"]]
            ours, theirs, base = (
                column(functions, of, run, clean, answers) for run in (logits, donor, clean)
            )
            columns.append(recovered(ours, base, theirs, spec["min_gap"]))
        else:
            columns.append(column(functions, spec, logits, clean, answers))
    return torch.stack(columns, -1).float().detach().cpu()


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


def prefix(cache, points, start):
    """A fresh cache that holds the clean keys and values of the tokens before `start`."""
    past = cache.__class__()
    for number, layer in enumerate(cache.layers):
        keys, values = (
            part[:, :, :start].repeat(points, 1, 1, 1) for part in (layer.keys, layer.values)
        )
        past.update(keys, values, number)
    return past


def pick(logits, at, width):
    """float32 logits (rows, vocab) at each row's own token, of logits that may be the last few."""
    rows = torch.arange(len(at))
    return logits[rows, torch.tensor(at) - (width - logits.shape[1])].float()


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
