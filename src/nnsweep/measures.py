"""Measures: one function each, from next-token logits to one float32 number a row.

The functions run inside a session, next to the weights, so they use torch and nothing else.
Each takes `logits` (rows, vocab) of the run under the writes, `clean` (rows, vocab) of the same
prompts without writes, both float32, and `answers`, a list of (rows,) token ids; each returns
(rows,).
"""

from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor, Tensor, list[Tensor]], Tensor]


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities (rows, vocab), float32, with their sum taken in float64.

    In float32 the sum over a large vocabulary is off by up to 3e-5 where the distribution is flat.
    """
    top = logits.amax(-1, keepdim=True).detach()
    total = (logits - top).exp().sum(-1, keepdim=True, dtype=torch.float64)
    return logits - (top + total.log()).float()


def match(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """1 where the most likely next token is the answer, else 0."""
    return (logits.argmax(-1) == answers[0].to(logits.device)).float()


def logit(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """The answer's logit."""
    return logits.gather(-1, answers[0].to(logits.device)[:, None])[:, 0]


def logit_diff(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """The target's logit minus the foil's."""
    both = torch.stack(answers, -1).to(logits.device)
    picked = logits.gather(-1, both)
    return picked[:, 0] - picked[:, 1]


def log_prob(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """Natural logarithm of the probability of the answer, or of any of several answers."""
    picked = log_softmax(logits).gather(-1, torch.stack(answers, -1).to(logits.device))
    return picked[:, 0] if len(answers) == 1 else picked.logsumexp(-1)


def cross_entropy(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """The loss of the answer as the next token."""
    return -log_softmax(logits).gather(-1, answers[0].to(logits.device)[:, None])[:, 0]


def prob(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """The probability of the answer, or of any of several answers."""
    picked = log_softmax(logits).gather(-1, torch.stack(answers, -1).to(logits.device))
    return picked.exp().sum(-1)


def rank(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """How many tokens have a strictly larger logit than the answer."""
    own = logits.gather(-1, answers[0].to(logits.device)[:, None])
    return (logits > own).sum(-1).float()


def kl(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """Kullback-Leibler divergence of the run under the writes from the clean run."""
    p, q = log_softmax(clean), log_softmax(logits)
    # Never negative but for rounding.
    return (p.exp() * (p - q)).sum(-1, dtype=torch.float64).float().clamp_min(0)


def js(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """Jensen-Shannon divergence between the clean run and the run under the writes."""
    p, q = log_softmax(clean), log_softmax(logits)
    # log((e^p + e^q) / 2), written so that equal distributions give exactly 0.
    spread = torch.log1p((p - q).abs().neg().exp()) - torch.log1p(torch.ones_like(p[:, :1]))
    middle = torch.maximum(p, q) + spread
    both = p.exp() * (p - middle) + q.exp() * (q - middle)
    return (both.sum(-1, dtype=torch.float64) / 2).float().clamp_min(0)


def entropy(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """Entropy of the next-token distribution."""
    q = log_softmax(logits)
    return -(q.exp() * q).sum(-1, dtype=torch.float64).float()


def functions() -> dict[str, Function]:
    """Kind -> function, the plain mapping that a session carries (kinds: `nnsweep.registry`)."""
    found = (
        match,
        logit,
        log_prob,
        cross_entropy,
        prob,
        rank,
        logit_diff,
        entropy,
        kl,
        js,
    )
    return {function.__name__: function for function in found}
