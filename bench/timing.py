"""What every way shares: threads, the number by which ways are compared, the clock."""

import json
import resource
import time

import torch

THREADS = 2
WARM_POINTS = 3


def read_task(path):
    """A task's ids and answers as tensors, and the rest of it as it is."""
    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)
    with open(path) as stream:
        task = json.load(stream)
    found = {name: torch.tensor(task[name]) for name in ("base", "donor", "answers")}
    return task | found


def difference(logits, answers):
    """Mean over rows of the logit of the first answer minus that of the second."""
    row = torch.arange(len(logits))
    return (logits[row, answers[0]] - logits[row, answers[1]]).mean().item()


def report(run, warm, whole):
    """Run a small part untimed, then the whole, and print seconds, peak memory and means."""
    run(warm)
    began = time.perf_counter()
    means = run(whole)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak": peak, "means": means}))
