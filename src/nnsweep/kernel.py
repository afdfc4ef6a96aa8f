"""What happens inside a session: capture, skip, write, measure.

This file travels to the server as it is, so it uses torch and builtins only, and reads a chunk
(see `nnsweep.plan`) as plain lists. The traced `with` stands in a small function of its own with
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
        float32 tensor (values, columns) on the CPU, rows in the plan's order.
    """
    tools = {"shape": chunk["model"]["shape"], "measures": chunk["measures"]}
    tools["functions"] = functions
    tools["generate"] = next((s for s in tools["measures"] if s["kind"] == "generate"), None)
    tools["every"] = every(chunk["measures"])
    summed = [s["answer"] for s in tools["every"] if s.get("tokens") == "sum"]
    tools["summed"] = list(dict.fromkeys(summed))
    tools["references"] = {
        number: reference_values(model, tools, wanted)
        for number, wanted in chunk["references"].items()
    }
    total = sum(len(block["passes"]) for block in chunk["blocks"])
    parts = []
    for block in chunk["blocks"]:
        tools["reads"] = [read_of(block, read, "base") for read in chunk["reads"]]
        tools["donor_reads"] = [read_of(block, read, "donor") for read in chunk["reads"]]
        state = clean_state(model, tools, block)
        for item in block["passes"]:
            if item["inert"] or item["estimated"]:
                run = repeated(state["clean"], len(item["points"]))
                # Nothing is done to a pass that cannot differ, so nothing is captured for it.
                moving = [] if item["inert"] else item["edits"]
                chained = chain_runs(model, tools, block, moving, state)
            else:
                run, chained = run_pass(model, tools, block, item, state)
                if tools["summed"]:
                    count = len(item["points"])
                    run["scores"] = scores(model, tools, block, block["ids"], count, run)
            if tools["generate"]:
                generate(model, tools, block, item, run, state)
            run["estimates"] = estimates(tools, block, item, state | {"chained": chained})
            parts.append(measured(tools, run, block, state))
            report(f"{len(parts)}/{total} passes")
    return torch.cat(parts)


def every(measures):
    """The measures and those that they are taken of."""
    found = {spec["name"]: spec for spec in measures}
    return list((found | {s["of"]["name"]: s["of"] for s in measures if "of" in s}).values())


def repeated(run, count):
    """The clean run, as if that many points had run."""
    return {
        "logits": run["logits"].repeat(count, 1),
        "reads": [value.repeat(count, 1) for value in run["reads"]],
        "lens": {name: value.repeat(count) for name, value in run["lens"].items()},
    }


# --- runs without writes ----------------------------------------------------------------------


def clean_state(model, tools, block):
    """The runs without writes that a block's passes start from and compare with."""
    moving = [item for item in block["passes"] if not item["inert"]]
    edits = [deep for item in moving for edit in item["edits"] for deep in with_chains(edit)]
    running = [item for item in moving if not item["estimated"]]
    starts = {}
    for item in running:
        for resume in item["resumes"]:
            starts[resume] = min(starts.get(resume, item["start"]), item["start"])
    how = {"captures": captures(edits, block, "self"), "starts": starts, "shared": block["shared"]}
    specs = tools["measures"]
    recovered = [spec["of"] for spec in specs if spec["kind"] == "recovery"]
    whole = any(spec.get("tokens") == "sum" for spec in recovered)
    how |= {"caching": whole or any(item["start"] for item in running), "reads": tools["reads"]}
    how |= {"answers": block["answers"]}
    clean = clean_run(model, tools, block["ids"], block["measured"], how)
    if whole:
        clean["scores"] = scores(model, tools, block, block["ids"], 1, clean)
    state = {"clean": clean, "donor": None, "starts": starts, "references": tools["references"]}
    theirs = captures(edits, block, "donor")
    lens = [spec["name"] for spec in recovered if "lens" in spec]
    read = lens or any("read" in spec and spec["against"] == "donor" for spec in specs)
    if theirs or read or recovered:
        how = {"captures": theirs, "shared": block["donor_shared"], "caching": whole}
        how |= {"reads": tools["donor_reads"] if read else []}
        how |= {"answers": block["answers"], "lens": lens}
        donor = clean_run(model, tools, block["donor_ids"], block["donor_measured"], how)
        if whole:
            donor["scores"] = scores(model, tools, block, block["donor_ids"], 1, donor)
        state["donor"] = donor
    written = [edit for item in moving for edit in item["edits"]]
    if written and any(spec["kind"] == "attribution" for spec in specs):
        state["gradients"] = gradients(model, tools, block, written)
    return state


def with_chains(edit):
    """An edit and the edits under which its operand is captured."""
    return [edit, *edit["operand"].get("under", [])]


def captures(edits, block, kind):
    """What edits read in a run without writes: key -> (tap, indices)."""
    side = "donor" if kind == "donor" else "base"
    operands = [edit["operand"] for edit in edits]
    return {
        capture_key(operand): (operand["tap"], indices(operand, block, side))
        for operand in operands
        if operand["kind"] == kind and "chain" not in operand
    }


def capture_key(operand):
    tap = operand["tap"]
    return (tap["path"], tap["side"], operand["position"], operand.get("keys"))


def read_of(block, read, side):
    """A place that measures read: its tap, and of each row the position's last token."""
    places = block["positions"][read["position"]][side]
    return {"tap": read["tap"], "at": [tokens[-1] for tokens in places if tokens]}


def clean_run(model, tools, ids, at, how):
    """One forward pass without writes.

    The first `shared` tokens are the same in all rows and nobody reads them: they are computed
    once, and the rows start from their keys and values.

    Args:
        model: An nnsight model.
        tools: Shape, measures and functions.
        ids: Prompts of one length.
        at: The token of each row whose logits are measured.
        how: captures; starts (layer -> first token to keep); shared; caching; reads; answers; lens,
            the names of the lens measures to take (without it, all, where there are answers).

    Returns:
        logits (rows, vocab) at the tokens `at`; captures, key -> (pairs, width); resid, the stream
        entering a layer from token `starts[layer]` on; reads, a list of (rows, width); lens, name
        of a measure -> (rows,); cache, keys and values, if `caching`.
    """
    shape, tokens, shared = tools["shape"], torch.tensor(ids), how["shared"]
    wanted, starts, reads = how["captures"], how.get("starts", {}), how["reads"]
    steps = [(tap["order"], "capture", (key, tap, found)) for key, (tap, found) in wanted.items()]
    steps += [([layer - 1, LAST], "keep", (layer, starts[layer])) for layer in starts if layer]
    steps += [(read["tap"]["order"], "read", number) for number, read in enumerate(reads)]
    kept = [int(t) for tap, found in wanted.values() if tap["side"] == "logits" for t in found[1]]
    inputs = forward_inputs(shape, tokens, shared, at + kept)
    found = new_found(len(reads))
    if shared:
        start_inputs = forward_inputs(shape, tokens[:1, :shared], 0, [shared - 1])
        trace_start(model, tokens[:1, :shared], start_inputs, found)
        inputs["past_key_values"] = spread(found.pop("start"), lambda _: len(ids), shared)
    caching = how.get("caching", False)
    job = {"tokens": tokens[:, shared:], "width": tokens.shape[1], "start": shared, "at": at}
    job |= {"inputs": inputs | {"use_cache": caching or shared > 0}, "caching": caching}
    job |= {"rows": len(ids), "resumes": [0], "streams": {}, "reads": reads, "edits": []}
    job |= {"steps": sorted(steps, key=lambda step: step[0]), "answers": how.get("answers")}
    job |= {"lens": how.get("lens")}
    trace_run(model, tools, job, {}, {}, found)
    return found


def new_found(reads):
    return {"captures": {}, "resid": {}, "reads": [None] * reads, "lens": {}, "carry": {}}


def trace_start(model, tokens, inputs, found):
    with model.trace(tokens, use_cache=True, **inputs):
        found["start"] = model.output.past_key_values


def reference_values(model, tools, wanted):
    """What is taken of a place over a reference set.

    Returns:
        float32; `mean`: (width,) over all rows and tokens; `tokens`: (tokens, width) over the rows;
        `rows`: key of a row -> (tokens, width).
    """
    tap, parts, keys = wanted["tap"], [], []
    for batch in wanted["batches"]:
        at = pairs(batch["at"])
        last = [len(ids) - 1 for ids in batch["ids"]]
        how = {"captures": {"values": (tap, at)}, "shared": 0, "reads": []}
        run = clean_run(model, tools, batch["ids"], last, how)
        values = run["captures"]["values"].float()[:, part_of(tap)]
        parts += values.split([len(tokens) for tokens in batch["at"]])
        keys += batch["row_keys"]
    if wanted["how"] == "mean":
        return sum(part.sum(0) for part in parts) / sum(len(part) for part in parts)
    return (
        torch.stack(parts).mean(0)
        if wanted["how"] == "tokens"
        else dict(zip(keys, parts, strict=True))
    )


# --- passes under writes ----------------------------------------------------------------------


def run_pass(model, tools, block, item, state):
    """One forward pass that holds one or more points.

    Every point skips the layers before its own `resume`: it joins the pass there, with the clean
    residual stream, below the points that joined before it. Tokens before `start` come from the
    clean keys and values.

    Returns:
        logits (points * rows, vocab) at the measured tokens, reads and lens as `clean_run`; and
        what the chains of the pass captured.
    """
    shape, start, resumes = tools["shape"], item["start"], item["resumes"]
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
    chained = chain_runs(model, tools, block, item["edits"], state)
    state = state | {"chained": chained}
    if tools["generate"] and 0 not in tools["generate"]["steps"]:
        item = item | {"edits": []}
    early, late = split_edits(shape, item)
    streams = {
        resume: stream_at(block, resumes, resume, early, state, start)
        for resume in sorted(set(resumes))
        if resume
    }
    steps = edit_steps(late) + [
        ([resume - 1, LAST], "join", resume) for resume in streams if resume > resumes[0]
    ]
    steps += [(behind(read["tap"]), "read", number) for number, read in enumerate(tools["reads"])]
    # The clean keys and values are read all the same; they need not come back with the result.
    job = {"tokens": shown[:, start:], "width": tokens.shape[1], "start": start, "at": at}
    caching = tools["generate"] is not None or bool(tools["summed"])
    job |= {"inputs": inputs | {"use_cache": caching}, "caching": caching, "reads": tools["reads"]}
    job |= {"rows": len(block["ids"]), "resumes": resumes, "streams": streams}
    job |= {"steps": sorted(steps, key=lambda step: step[0]), "answers": block["answers"]}
    job |= {"edits": item["edits"]}
    found = new_found(len(tools["reads"]))
    trace_run(model, tools, job, block, state, found)
    return found, chained


def chain_runs(model, tools, block, edits, state):
    """Runs under the writes of chains: (chain, capture key) -> (pairs, width).

    All chains of one prompt run in one full pass, each on rows of its own.
    """
    found = {}
    for kind, side in (("self", "base"), ("donor", "donor")):
        operands = [edit["operand"] for edit in edits if "chain" in edit["operand"]]
        operands = [operand for operand in operands if operand["kind"] == kind]
        chains = {operand["chain"]: operand["under"] for operand in operands}
        if chains:
            ids = block["ids"] if kind == "self" else block["donor_ids"]
            found |= chain_run(model, tools, block, state, ids, side, chains, operands)
    return found


def chain_run(model, tools, block, state, ids, side, chains, operands):
    """One full pass under the writes of each chain, which captures what the operands read."""
    slots = {chain: slot for slot, chain in enumerate(chains)}
    tokens = torch.tensor(ids).repeat(len(chains), 1)
    edits = [
        edit | {"slot": slots[chain], "written": side}
        for chain, under in chains.items()
        for edit in under
    ]
    wanted = {}
    for operand in operands:
        rows, *more = indices(operand, block, side)
        at = (rows + slots[operand["chain"]] * len(ids), *more)
        wanted[operand["chain"], capture_key(operand)] = (operand["tap"], at)
    steps = edit_steps(sorted(edits, key=lambda edit: edit["tap"]["order"]))
    steps += [(behind(tap), "capture", (key, tap, at)) for key, (tap, at) in wanted.items()]
    last = [len(one) - 1 for one in ids] * len(chains)
    inputs = forward_inputs(tools["shape"], tokens, 0, [0])
    job = {"tokens": tokens, "width": tokens.shape[1], "start": 0, "at": last, "reads": []}
    job |= {"inputs": inputs | {"use_cache": False}, "caching": False, "rows": len(ids)}
    job |= {"resumes": [0] * len(chains), "streams": {}, "edits": edits, "answers": None}
    job |= {"steps": sorted(steps, key=lambda step: step[0])}
    found = new_found(0)
    trace_run(model, tools, job, block, state, found)
    return found["captures"]


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
    streams = [is_stream(shape, edit["tap"], item["resumes"][edit["slot"]]) for edit in edits]
    early = [edit for edit, stream in zip(edits, streams, strict=True) if stream]
    return early, [edit for edit, stream in zip(edits, streams, strict=True) if not stream]


def is_stream(shape, tap, resume):
    """Whether a place is the very stream that enters layer `resume`."""
    return tap["side"] == "output" and tap["path"] == shape["layer_path"].format(layer=resume - 1)


def stream_at(block, resumes, resume, early, state, start):
    """The stream (rows of the points that join at `resume`, tokens, width), early edits applied."""
    first = state["starts"][resume]
    slots = [slot for slot, own in enumerate(resumes) if own == resume]
    stream = state["clean"]["resid"][resume][:, start - first :].repeat(len(slots), 1, 1)
    for edit in early:
        if edit["slot"] in slots:
            apply(stream, edit | {"slot": edit["slot"] - slots[0]}, block, state, start)
    return stream


def edit_steps(edits):
    """Edits in groups of one place, in order.

    What is written to the stream between attention and MLP moves what goes past the MLP too.
    """
    carried = {e["tap"]["path"]: e["tap"]["carry"] for e in edits if "carry" in e["tap"]}
    more = [{"tap": tap, "op": "carry", "from": path} for path, tap in carried.items()]
    groups = {}
    for edit in sorted(edits + more, key=lambda edit: edit["tap"]["order"]):
        groups.setdefault((edit["tap"]["path"], edit["tap"]["side"]), []).append(edit)
    return [(group[0]["tap"]["order"], "edit", group) for group in groups.values()]


def behind(tap):
    """Just behind the writes of a place, and behind the points that join with it."""
    layer, rank = tap["order"]
    return [layer, rank + 0.25]


# --- one forward pass -------------------------------------------------------------------------


def trace_run(model, tools, job, block, state, found):
    """One forward pass: layers skipped, steps in order, then the logits."""
    shape = tools["shape"]
    with model.trace(job["tokens"], **job["inputs"]):
        for layer in range(job["resumes"][0]):
            # A family whose layers hand out tuples must get a tuple back from a skipped one.
            more, stream = state["clean"]["more"], job["streams"][job["resumes"][0]]
            layer_at(model, shape, layer).skip((stream, *[None] * more) if more else stream)
        for order, kind, step in job["steps"]:
            act(model, shape, job, order, kind, step, block, state, found)
        if job["reads"]:
            assemble_reads(shape, job, state, found)
            lens_columns(model, tools, job, state, found)
        if job["caching"]:
            found["cache"] = model.output.past_key_values
        if shape["head"] and block and not needs_logits(job):
            head = module_at(model, shape["head"])
            hidden = pick(head.input, job["at"], job["width"])
            found["logits"] = unembed(head, hidden, shape["vocab"], job["rows"])
            head.skip(hidden[:1, None, :1])
        else:
            logits = model.output.logits.detach()
            for _, kind, step in job["steps"]:
                if on_logits([] if kind != "edit" else step):
                    logits = logits.clone()
                    first = job["width"] - logits.shape[1]
                    for edit in step:
                        apply(logits, edit, block, state, first)
                elif kind == "capture" and step[1]["side"] == "logits":
                    first = job["width"] - logits.shape[1]
                    found["captures"][step[0]] = gather(logits, step[2], first)
            found["logits"] = pick(logits, job["at"], job["width"]).float()


def needs_logits(job):
    """Whether the model's own output is read, not only the rows that are measured."""
    captured = any(
        kind == "capture" and step[1]["side"] == "logits" for _, kind, step in job["steps"]
    )
    return job["caching"] or captured or on_logits(job["edits"])


def on_logits(edits):
    return any(edit["tap"]["side"] == "logits" for edit in edits)


def act(model, shape, job, order, kind, step, block, state, found):
    """One step inside a forward pass."""
    rows = job["rows"] * sum(resume <= max(order[0], 0) for resume in job["resumes"])
    if kind == "join":
        lengthen(layer_at(model, shape, step - 1), job["streams"][step])
    elif kind == "keep":
        layer, first = step
        output = layer_at(model, shape, layer - 1).output
        found["more"] = 0 if isinstance(output, torch.Tensor) else len(output) - 1
        found["resid"][layer] = tensor_of(output)[:, first - job["start"] :].clone()
    elif kind == "capture" and step[1]["side"] != "logits":
        key, tap, at = step
        found["captures"][key] = gather(read(model, tap, rows), at, job["start"])
    elif kind == "read" and rows:
        wanted = job["reads"][step]
        tokens = torch.tensor(wanted["at"]).repeat(rows // job["rows"]) - job["start"]
        seen = read(model, wanted["tap"], rows)
        # Tokens before the first one computed are clean; they are put in afterwards.
        read_there = seen[torch.arange(rows), tokens.clamp_min(0)]
        found["reads"][step] = read_there[:, part_of(wanted["tap"])].clone()
    elif kind == "edit" and not on_logits(step):
        rewrite(model, step, block, state, job["start"], rows, found)


def rewrite(model, edits, block, state, start, rows, found):
    """Read one place, apply all edits to a copy, put the copy in its place."""
    tap = edits[0]["tap"]
    module = module_at(model, tap["path"])
    old = module.input if tap["side"] == "input" else module.output
    before = activation(old, rows)
    stream = before.clone()
    for edit in edits:
        if edit["op"] == "carry":
            stream = stream + found["carry"].pop(edit["from"])
        else:
            apply(stream, edit, block, state, start)
    if "carry" in tap:
        found["carry"][tap["path"]] = stream - before
    new = stream.reshape(tensor_of(old).shape)
    if tap["side"] == "input":
        module.input = new
    else:
        module.output = new if isinstance(old, torch.Tensor) else (new, *old[1:])


def lengthen(module, stream):
    """Let points join behind a layer, whose output is less to read than the next one's inputs."""
    old = module.output
    new = torch.cat([tensor_of(old), stream])
    module.output = new if isinstance(old, torch.Tensor) else (new, *old[1:])


def unembed(head, hidden, vocab, rows):
    """float32 logits (points * rows, vocab) of the stream (points * rows, width) before the head.

    Whatever a server's sandbox reads crosses a socket, the model's output several times over and
    large tensors slower by the byte than small ones; the output of a module that is called crosses
    once. So the head is called, on as many whole points as make up at most HEAD_BYTES.
    """
    size = max(1, HEAD_BYTES // (4 * vocab))
    size = size // rows * rows or size
    return torch.cat([head(part).detach().float() for part in hidden.split(size)])


def assemble_reads(shape, job, state, found):
    """Complete what was read: (points * rows, width), of every point, joined or not.

    A point that has not joined yet is clean there; one that joins with this very stream brings it.
    """
    rows, resumes = job["rows"], job["resumes"]
    for number, wanted in enumerate(job["reads"]):
        seen, tap = found["reads"][number], wanted["tap"]
        if not state:
            continue
        clean, parts = state["clean"]["reads"][number], []
        late = torch.tensor(wanted["at"]) >= job["start"]
        for slot, resume in enumerate(resumes):
            part = clean
            if resume and is_stream(shape, tap, resume):
                tokens = (torch.tensor(wanted["at"]) - job["start"]).clamp_min(0)
                first = (slot - resumes.index(resume)) * rows
                part = job["streams"][resume][first + torch.arange(rows), tokens]
            elif resume <= max(tap["order"][0], 0):
                part = seen[slot * rows : (slot + 1) * rows]
            parts.append(torch.where(late.to(part.device)[:, None], part, clean))
        found["reads"][number] = torch.cat(parts)


def lens_columns(model, tools, job, state, found):
    """The measures of the logit lens: name -> (points * rows,)."""
    shape, rows = tools["shape"], job["rows"]
    specs = [spec for spec in tools["every"] if "lens" in spec and job["answers"] is not None]
    wanted = job.get("lens")
    specs = specs if wanted is None else [spec for spec in specs if spec["name"] in wanted]
    answers = {name: torch.tensor(ids) for name, ids in (job["answers"] or {}).items()}
    for number in sorted({spec["lens"] for spec in specs}):
        logits = base = lens_logits(model, shape, found["reads"][number], rows)
        mine = [spec for spec in specs if spec["lens"] == number]
        if state and any(spec["kind"] in ("kl", "js") for spec in mine):
            base = lens_logits(model, shape, state["clean"]["reads"][number], rows)
        for spec in mine:
            parts = [
                column(tools["functions"], spec, part, base[:rows], answers)
                for part in logits.split(rows)
            ]
            found["lens"][spec["name"]] = torch.cat(parts)


def lens_logits(model, shape, stream, rows):
    """float32 logits (points * rows, vocab) that the end of the model makes of a stream."""
    lens = shape["lens"]
    hidden = module_at(model, lens["norm"])(stream)
    logits = unembed(module_at(model, lens["head"]), hidden, shape["vocab"], rows)
    return (
        logits if lens["softcap"] is None else lens["softcap"] * (logits / lens["softcap"]).tanh()
    )


# --- writes -----------------------------------------------------------------------------------


def apply(stream, edit, block, state, start):
    """Write one edit into `stream` (points * rows, tokens, width), in place.

    `start` is the token that stands first in `stream`. Of edges, it is (points * rows, heads,
    query tokens, key tokens).
    """
    tap, side = edit["tap"], edit.get("written", "base")
    rows, tokens, *keys = indices(edit, block, side)
    count = len(block["positions"][edit["position"]][side])
    place, tokens = rows + edit["slot"] * count, tokens - start
    if keys:
        old = stream[place, tap["low"] : tap["high"], tokens, keys[0]]
        new = operated(old, edit, block, state, rows)
        stream[place, tap["low"] : tap["high"], tokens, keys[0]] = new.to(stream.dtype)
        return
    old = stream[place, tokens][:, part_of(tap)]
    new = operated(old, edit, block, state, rows).to(stream.dtype)
    if "units" in tap:
        stream[place[:, None], tokens[:, None], part_of(tap)[None]] = new
    else:
        stream[place, tokens, tap["low"] : tap["high"]] = new


def operated(old, edit, block, state, rows):
    """The new value of `old` (pairs, width) under one edit; sums are taken in float32."""
    operand, op = edit["operand"], edit["op"]
    if op == "clamp":
        return old.clamp(operand.get("low"), operand.get("high"))
    if op == "noise":
        return old.float() + operand["std"] * noise(operand["seeds"], rows, old).to(old.device)
    new = source(old, edit, block, state)
    if op == "add":
        return old.float() + operand["scale"] * new
    if op == "mix":
        return (1 - operand["weight"]) * old.float() + operand["weight"] * new.float()
    return rescaled(old, new, operand) if op == "renormalize" else new


def rescaled(old, like, operand):
    """`old` with the lengths of `like`, or with a given length; zero stays zero."""
    old, like = old.float(), like.float()
    length = like[:, :1].abs() if operand["kind"] == "number" else like.norm(dim=-1, keepdim=True)
    own = old.norm(dim=-1, keepdim=True)
    return torch.where(own > 0, old * (length / own.clamp_min(1e-30)), old)


def source(old, edit, block, state):
    """What an edit sets, adds or mixes in, shaped as `old` (pairs, width)."""
    operand = edit["operand"]
    kind = operand["kind"]
    if kind in ("donor", "self"):
        return patched(edit, block, state)
    if kind == "number":
        return torch.full_like(old, operand["value"])
    if kind == "lowest":
        return torch.full_like(old, torch.finfo(old.dtype).min)
    if kind == "resample":
        drawn = state["references"][operand["plus"]]
        return torch.cat([drawn[key] for key in operand["partners"]]).to(old.device)
    vector = direction(operand, state["references"]).to(old.device)
    if vector.dim() == 2:
        # One mean for each token of the position, which every row has as many of.
        return vector.repeat(len(old) // len(vector), 1)
    return vector.expand_as(old)


def patched(edit, block, state):
    """What a patch reads, one line for each token that it is written to."""
    operand = edit["operand"]
    key = capture_key(operand)
    if "chain" in operand:
        found = state["chained"][operand["chain"], key]
    else:
        found = state["donor" if operand["kind"] == "donor" else "clean"]["captures"][key]
    found = found[:, part_of(operand["tap"])]
    if "keys" in operand:
        return found
    theirs = block["positions"][operand["position"]]
    counts = [len(tokens) for tokens in theirs["donor" if operand["kind"] == "donor" else "base"]]
    ours = block["positions"][edit["position"]][edit.get("written", "base")]
    parts = zip(found.split(counts), ours, strict=True)
    mean = theirs["mean"] and operand["kind"] == "donor"
    return torch.cat([matched(part, len(tokens), mean) for part, tokens in parts])


def matched(part, count, mean):
    """The tokens of one row (theirs, width) as (count, width): each, repeated, or their mean."""
    if mean:
        part = part.float().mean(0, keepdim=True).to(part.dtype)
    return part.expand(count, -1)


def direction(operand, references):
    if operand["kind"] == "vector":
        return torch.tensor(operand["values"])
    vector = references[operand["plus"]]
    vector = vector - references[operand["minus"]] if "minus" in operand else vector
    return vector / vector.norm() if operand.get("normalize") else vector


def noise(seeds, rows, old):
    """Standard normal numbers (pairs, width), each row's drawn from its own seed on the CPU."""
    parts = []
    for row, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        shape = (int((rows == row).sum()), *old.shape[1:])
        parts.append(torch.randn(shape, generator=generator))
    return torch.cat(parts)


# --- answers of several tokens ----------------------------------------------------------------


def scores(model, tools, block, prompts, points, run):
    """Log-probability of whole answers behind prompts: name -> (points * rows,).

    Each token of an answer is read behind those before it, in one pass over all of them; shorter
    answers are filled up behind their end, where nothing reads.
    """
    shape, found = tools["shape"], {}
    width = len(prompts[0])
    for name in tools["summed"]:
        ids = block["answer_ids"][name] * points
        longest = max(map(len, ids))
        target = torch.tensor([one + [0] * (longest - len(one)) for one in ids])
        real = torch.tensor([[k < len(one) for k in range(longest)] for one in ids])
        logits = run["logits"][:, None].cpu()
        if longest > 1:
            # A cache that is gone on from grows; the next answer needs it as it was.
            cache = spread(run["cache"], lambda _: 1, width)
            later = {"logits": None}
            inputs = {"attention_mask": torch.ones(len(ids), width + longest - 1).long()}
            inputs |= {"past_key_values": cache, "use_cache": True}
            if shape["position_ids"]:
                places = torch.arange(width, width + longest - 1)
                inputs["position_ids"] = places[None].expand(len(ids), -1)
            trace_answer(model, target[:, :-1], inputs, later)
            logits = torch.cat([logits, later["logits"].cpu()], 1)
        picked = log_softmax(logits).gather(-1, target[..., None])[..., 0]
        found[name] = torch.where(real, picked, 0.0).sum(1)
    return found


def trace_answer(model, tokens, inputs, found):
    with model.trace(tokens, **inputs):
        found["logits"] = model.output.logits.detach().float()


# --- generation -------------------------------------------------------------------------------


def generate(model, tools, block, item, run, state):
    """Continue every row of a pass greedily; into run["generated"], (points * rows, 3 * tokens).

    Ids, log-probabilities and entropies of the new tokens; not a number behind an end token.
    """
    shape, spec = tools["shape"], tools["generate"]
    logits, cache, width = run["logits"], run.pop("cache"), len(block["ids"][0])
    done = torch.zeros(len(logits), dtype=torch.bool)
    ends, columns = torch.tensor(shape["eos"], dtype=torch.long), []
    here = one_token(block)
    edits = [edit | {"position": "@new"} for edit in item["edits"]]
    for step in range(1, spec["k"] + 1):
        spread_out = log_softmax(logits)
        token = logits.argmax(-1)
        log_prob = spread_out.gather(-1, token[:, None])[:, 0]
        entropy = -(spread_out.exp() * spread_out).sum(-1, dtype=torch.float64).float()
        column_of = torch.stack([token.float(), log_prob, entropy], -1).cpu()
        columns.append(column_of.masked_fill(done[:, None], torch.nan))
        done = done | torch.isin(token.cpu(), ends)
        if step == spec["k"] or bool(done.all()):
            break
        written = edits if step in spec["steps"] else []
        found = new_found(0)
        job = step_job(shape, token[:, None], width + step, cache, len(item["points"]), written)
        trace_step(model, shape, job, here, state, found)
        logits, cache = found["logits"], found["cache"]
    missing = spec["k"] - len(columns)
    columns += [torch.full_like(columns[0], torch.nan)] * missing
    run["generated"] = torch.stack(columns, -1).flatten(1)


def one_token(block):
    """A block whose only position is the one new token of each row."""
    places = [[0] for _ in block["ids"]]
    return {"positions": {"@new": {"base": places, "donor": places, "mean": False}}}


def step_job(shape, tokens, width, cache, points, edits):
    """One new token a row, behind the keys and values of all before it."""
    rows = len(tokens)
    inputs = {"attention_mask": torch.ones(rows, width, dtype=torch.long)}
    inputs |= {"past_key_values": cache, "use_cache": True}
    if shape["position_ids"]:
        inputs["position_ids"] = torch.full((rows, 1), width - 1)
    steps = edit_steps(sorted(edits, key=lambda edit: edit["tap"]["order"]))
    steps.sort(key=lambda step: step[0])
    job = {"tokens": tokens, "inputs": inputs, "steps": steps, "rows": rows // points}
    return job | {"resumes": [0] * points, "streams": {}, "start": 0}


def trace_step(model, shape, job, here, state, found):
    with model.trace(job["tokens"], **job["inputs"]):
        for order, kind, step in job["steps"]:
            act(model, shape, job, order, kind, step, here, state, found)
        found["cache"] = model.output.past_key_values
        found["logits"] = model.output.logits[:, -1].detach().float()


# --- estimates --------------------------------------------------------------------------------


def gradients(model, tools, block, edits):
    """One clean pass and one backward pass a measure, at every place that edits write.

    Returns:
        (path, side) -> (activation (rows, tokens, width), measure -> its gradient there).
    """
    shape, tokens = tools["shape"], torch.tensor(block["ids"])
    of = {spec["name"]: spec["of"] for spec in tools["measures"] if spec["kind"] == "attribution"}
    taps = {(edit["tap"]["path"], edit["tap"]["side"]): edit["tap"] for edit in edits}
    taps = dict(sorted(taps.items(), key=lambda item: item[1]["order"]))
    inputs = forward_inputs(shape, tokens, 0, block["measured"])
    answers = {name: torch.tensor(ids) for name, ids in block["answers"].items()}
    found = {"places": {}}
    with torch.enable_grad():
        trace_gradients(model, tools, tokens, inputs, taps, of, answers, block["measured"], found)
    rows = len(block["ids"])
    return {
        key: (
            activation(found["places"][key], rows).detach(),
            {name: activation(found[name][place], rows) for name in of},
        )
        for place, key in enumerate(taps)
    }


def trace_gradients(model, tools, tokens, inputs, taps, of, answers, at, found):
    with model.trace(tokens, use_cache=False, **inputs):
        first = module_at(model, tools["shape"]["sites"]["embed"]["path"]).output
        if not first.requires_grad:
            first.requires_grad_(True)
        for key, tap in taps.items():
            module = module_at(model, tap["path"])
            found["places"][key] = tensor_of(
                module.input if tap["side"] == "input" else module.output
            )
        logits = pick(model.output.logits, at, tokens.shape[1]).float()
        for name, spec in of.items():
            total = column(tools["functions"], spec, logits, logits, answers).sum()
            places = list(found["places"].values())
            found[name] = torch.autograd.grad(total, places, retain_graph=True)


def estimates(tools, block, item, state):
    """First-order estimates of what the edits of each point do: measure -> (points * rows,)."""
    names = [spec["name"] for spec in tools["measures"] if spec["kind"] == "attribution"]
    if not names:
        return {}
    slots = range(len(item["points"]))
    points = [estimated(names, block, item, slot, state) for slot in slots]
    return {name: torch.cat([point[name] for point in points]) for name in names}


def estimated(names, block, item, slot, state):
    """Gradient times what the edits of one point change in the clean run: measure -> (rows,)."""
    edits = [edit | {"slot": 0} for edit in item["edits"] if edit["slot"] == slot]
    found = {name: torch.zeros(len(block["ids"])) for name in names}
    if item["inert"]:
        return found
    places = {(edit["tap"]["path"], edit["tap"]["side"]): None for edit in edits}
    for key in places:
        clean, slopes = state["gradients"][key]
        stream = clean.clone()
        for edit in edits:
            if (edit["tap"]["path"], edit["tap"]["side"]) == key:
                apply(stream, edit, block, state, 0)
        change = (stream - clean).float()
        for name in names:
            moved = change * slopes[name].float()
            found[name] = found[name] + moved.flatten(1).sum(1).to(found[name].device)
    return found


# --- measuring --------------------------------------------------------------------------------


def measured(tools, run, block, state):
    """All measures of a pass: float32 (points * rows, columns) on the CPU."""
    rows = len(block["ids"])
    answers = {name: torch.tensor(ids) for name, ids in block["answers"].items()}
    found = []
    for low in range(0, len(run["logits"]), rows):
        part = {
            "logits": run["logits"][low : low + rows],
            "reads": [value[low : low + rows] for value in run["reads"]],
            "lens": {name: value[low : low + rows] for name, value in run["lens"].items()},
            "scores": {n: value[low : low + rows] for n, value in run.get("scores", {}).items()},
            "generated": run["generated"][low : low + rows] if "generated" in run else None,
            "estimates": {n: value[low : low + rows] for n, value in run["estimates"].items()},
        }
        found.append(measured_point(tools, part, answers, state))
    return torch.cat(found).detach().cpu()


def measured_point(tools, run, answers, state):
    """All measures of one point: float32 (rows, columns)."""
    functions, clean, logits = tools["functions"], state["clean"]["logits"], run["logits"]
    columns = []
    for spec in tools["measures"]:
        if "lens" in spec:
            found = run["lens"][spec["name"]]
        elif spec.get("tokens") == "sum":
            found = whole_answer(spec["kind"], run["scores"][spec["answer"]].to(logits.device))
        elif spec["kind"] == "generate":
            found = run["generated"].to(logits.device)
        elif spec["kind"] == "attribution":
            found = run["estimates"][spec["name"]].to(logits.device)
        elif spec["kind"] == "cosine":
            other = state["donor" if spec["against"] == "donor" else "clean"]["reads"]
            found = cosine(run["reads"][spec["read"]], other[spec["read"]])
        elif spec["kind"] == "recovery":
            ours, theirs, base = (
                alone(functions, spec["of"], one, answers)
                for one in (run, state["donor"], state["clean"])
            )
            found = recovered(ours, base, theirs, spec["min_gap"])
        else:
            found = column(functions, spec, logits, clean, answers)
        columns.append(found[:, None] if found.dim() == 1 else found)
    return torch.cat(columns, -1).float()


def alone(functions, spec, run, answers):
    """A measure of one run that compares it with no other: (rows,)."""
    if "lens" in spec:
        return run["lens"][spec["name"]]
    if spec.get("tokens") == "sum":
        return whole_answer(spec["kind"], run["scores"][spec["answer"]].to(run["logits"].device))
    return column(functions, spec, run["logits"], run["logits"], answers)


def whole_answer(kind, log_prob):
    """A measure of an answer of several tokens, from its log-probability."""
    if kind == "prob":
        return log_prob.exp()
    return -log_prob if kind == "cross_entropy" else log_prob


def column(functions, spec, logits, clean, answers):
    """A measure of logits (rows, vocab): (rows,), or (rows, numbers) of a list."""
    if spec["kind"] == "top_k":
        top = log_softmax(logits).topk(spec["k"])
        return torch.cat([top.indices.float(), top.values], -1)
    names = spec.get("answers") or ([spec["answer"]] if "answer" in spec else [])
    return functions[spec["kind"]](logits, clean, [answers[name] for name in names])


def log_softmax(logits):
    """Log-probabilities, float32; their sum is taken in float64 (see `nnsweep.measures`)."""
    top = logits.amax(-1, keepdim=True).detach()
    total = (logits - top).exp().sum(-1, keepdim=True, dtype=torch.float64)
    return logits - (top + total.log()).float()


def cosine(ours, theirs):
    """Cosine of the angle between two activations (rows, width); a zero has no direction."""
    ours, theirs = ours.float(), theirs.float()
    lengths = ours.norm(dim=-1) * theirs.norm(dim=-1)
    return torch.where(lengths > 0, (ours * theirs).sum(-1) / lengths, torch.nan).clamp(-1, 1)


def recovered(ours, base, theirs, min_gap):
    """(ours - base) / (theirs - base); not a number where the gap is too small to divide by."""
    gap = theirs - base
    return torch.where(gap.abs() < min_gap, torch.nan, (ours - base) / gap)


# --- places and inputs ------------------------------------------------------------------------


def indices(where, block, side):
    """Flat (rows, tokens) of a position in each prompt; of edges, (rows, tokens, keys).

    An edge is a query token and a key token that is not behind it.
    """
    places = block["positions"][where["position"]][side]
    if "keys" not in where:
        return pairs(places)
    keys = block["positions"][where["keys"]][side]
    found = [
        (row, token, key)
        for row, tokens in enumerate(places)
        for token in tokens
        for key in keys[row]
        if key <= token
    ]
    return tuple(torch.tensor(found, dtype=torch.long).reshape(-1, 3).T)


def pairs(places):
    """[[tokens of row 0], ...] -> flat row and token indices."""
    rows = [row for row, tokens in enumerate(places) for _ in tokens]
    return torch.tensor(rows), torch.tensor([token for tokens in places for token in tokens])


def gather(seen, at, start):
    """Values (pairs, width) of an activation whose first token is number `start`."""
    rows, tokens, *keys = at
    if keys:
        return seen[rows, :, tokens - start, keys[0]].clone()
    return seen[rows, tokens - start].clone()


def part_of(tap):
    """The slice of the last dimension, or the numbers, that a place consists of."""
    return torch.tensor(tap["units"]) if "units" in tap else slice(tap["low"], tap["high"])


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
    module = module_at(model, tap["path"])
    return activation(module.input if tap["side"] == "input" else module.output, rows)


def activation(value, rows):
    """The activation as (rows, tokens, width); some families fold rows and tokens into one.

    Attention stays (rows, heads, query tokens, key tokens).
    """
    found = tensor_of(value)
    return found if found.dim() > 2 else found.reshape(rows, -1, found.shape[-1])


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


def probe(model, shape, gradients):
    """What runs a session: dtype and device of the activations, torch, threads; a gradient."""
    found = {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
    trace_probe(model, shape, torch.tensor([[1, 2]]), found)
    if gradients:
        with torch.enable_grad():
            trace_slope(model, shape, torch.tensor([[1, 2]]), found)
    return found


def trace_slope(model, shape, tokens, found):
    with model.trace(tokens, use_cache=False):
        first = module_at(model, shape["sites"]["embed"]["path"]).output
        if not first.requires_grad:
            first.requires_grad_(True)
        logits = model.output.logits.float()
        found["slope"] = float(torch.autograd.grad(logits.sum(), [first])[0].norm())


def trace_probe(model, shape, tokens, found):
    with model.trace(tokens, use_cache=False):
        stream = tensor_of(layer_at(model, shape, 0).output)
        found["dtype"] = str(stream.dtype).replace("torch.", "")
        found["device"] = str(stream.device.type)
        found["logits"] = int(model.output.logits.shape[-1])
