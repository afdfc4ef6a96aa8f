"""Measures: one function each, from next-token logits to one float32 number a row.

The functions run inside a session, next to the weights, so they use torch and nothing else.
Each takes `logits` (rows, vocab) of the run under the writes, `clean` (rows, vocab) of the same
prompts without writes, both float32, and `answers`, a list of (rows,) token ids; each returns
(rows,).

They import torch themselves: figures and pages, which need the registry alone, do without.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Function = Callable[[Tensor, Tensor, list[Tensor]], Tensor]


def match(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """1 where the most likely next token is the answer, else 0."""
    return (logits.argmax(-1) == answers[0].to(logits.device)).float()


def logit(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """The answer's logit."""
    return logits.gather(-1, answers[0].to(logits.device)[:, None])[:, 0]


def logit_diff(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """The target's logit minus the foil's."""
    import torch

    both = torch.stack(answers, -1).to(logits.device)
    picked = logits.gather(-1, both)
    return picked[:, 0] - picked[:, 1]


def log_prob(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """Natural logarithm of the probability of the answer, or of any of several answers."""
    import torch

    picked = logits.log_softmax(-1).gather(-1, torch.stack(answers, -1).to(logits.device))
    return picked[:, 0] if len(answers) == 1 else picked.logsumexp(-1)


def cross_entropy(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """The loss of the answer as the next token."""
    return -logits.log_softmax(-1).gather(-1, answers[0].to(logits.device)[:, None])[:, 0]


def prob(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """The probability of the answer, or of any of several answers."""
    import torch

    return logits.softmax(-1).gather(-1, torch.stack(answers, -1).to(logits.device)).sum(-1)


def rank(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """How many tokens have a strictly larger logit than the answer."""
    own = logits.gather(-1, answers[0].to(logits.device)[:, None])
    return (logits > own).sum(-1).float()


def kl(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """Kullback-Leibler divergence of the run under the writes from the clean run."""
    p, q = clean.log_softmax(-1), logits.log_softmax(-1)
    # Never negative but for rounding.
    return (p.exp() * (p - q)).sum(-1).clamp_min(0)


def js(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """Jensen-Shannon divergence between the clean run and the run under the writes."""
    import torch

    p, q = clean.log_softmax(-1), logits.log_softmax(-1)
    # log((e^p + e^q) / 2), written so that equal distributions give exactly 0.
    spread = torch.log1p((p - q).abs().neg().exp()) - torch.log1p(torch.ones_like(p[:, :1]))
    middle = torch.maximum(p, q) + spread
    both = (p.exp() * (p - middle)).sum(-1) + (q.exp() * (q - middle)).sum(-1)
    return (both / 2).clamp_min(0)


def entropy(logits: Tensor, clean: Tensor, answers: list[Tensor]) -> Tensor:
    """Entropy of the next-token distribution."""
    q = logits.log_softmax(-1)
    return -(q.exp() * q).sum(-1)


@dataclass(frozen=True)
class Entry:
    """A measure as the docs and the figures show it."""

    function: Function | None
    unit: str
    low: float | None
    high: float | None
    discrete: bool
    definition: str
    source: str


_PATCHING = "Heimersheim and Nanda, How to use and interpret activation patching, 2024"
_SHANNON = "Shannon, A mathematical theory of communication, 1948"
_IIA = "Geiger et al., Causal abstractions of neural networks, 2021"

REGISTRY: dict[str, Entry] = {
    "match": Entry(
        match,
        "fraction",
        0,
        1,
        True,
        "1 where the argmax of the next-token logits is the answer, else 0; its mean under "
        "patching from a donor whose answer it is, is the interchange intervention accuracy (IIA)",
        _IIA,
    ),
    "logit": Entry(logit, "logits", None, None, False, "logit of the answer", _PATCHING),
    "log_prob": Entry(
        log_prob,
        "nats",
        None,
        0,
        False,
        "log softmax of the logits at the answer; of a set of answers, the logarithm of their "
        "summed probability",
        _PATCHING,
    ),
    "cross_entropy": Entry(
        cross_entropy, "nats", 0, None, False, "minus the log softmax at the answer", _SHANNON
    ),
    "prob": Entry(
        prob,
        "probability",
        0,
        1,
        False,
        "softmax at the answer; of a set of answers, their sum",
        _PATCHING,
    ),
    "rank": Entry(
        rank,
        "tokens",
        0,
        None,
        True,
        "number of tokens whose logit is strictly larger than the answer's; 0 is the top",
        _PATCHING,
    ),
    "logit_diff": Entry(
        logit_diff,
        "logits",
        None,
        None,
        False,
        "logit of the first answer minus logit of the second",
        "Wang et al., Interpretability in the wild, 2022",
    ),
    "entropy": Entry(
        entropy, "nats", 0, None, False, "entropy of the next-token distribution", _SHANNON
    ),
    "kl": Entry(
        kl,
        "nats",
        0,
        None,
        False,
        "KL(clean || under the writes) of the next-token distributions",
        _PATCHING,
    ),
    "js": Entry(
        js,
        "nats",
        0,
        math.log(2),
        False,
        "Jensen-Shannon divergence between the next-token distributions of the clean run and of "
        "the run under the writes",
        "Lin, Divergence measures based on the Shannon entropy, 1991",
    ),
    "top_k": Entry(
        None,
        "tokens",
        None,
        None,
        True,
        "list of the `k` most likely next tokens, each with its id, its text and its "
        "log-probability; it is not averaged over rows",
        _PATCHING,
    ),
    "cosine": Entry(
        None,
        "cosine",
        -1,
        1,
        False,
        "cosine of the angle between the activation at the place `read` under the writes and the "
        "same activation of the clean run, or of the donor's",
        "Singhal, Modern information retrieval: a brief overview, 2001",
    ),
    "contains": Entry(
        None,
        "fraction",
        0,
        1,
        True,
        "1 where the generated text contains the answer's text, else 0; needs `generate`",
        "string matching",
    ),
    "attribution": Entry(
        None,
        "units of `of`",
        None,
        None,
        False,
        "estimate, to first order, of the change of the measure named by `of`: its gradient in the "
        "clean run, times what the writes change there (attribution patching); no run under writes",
        "Nanda, Attribution patching, 2023",
    ),
    "recovery": Entry(
        None,
        "fraction",
        None,
        None,
        False,
        "(m - m_clean) / (m_donor - m_clean) of the measure m named by `of`, with the clean and "
        "the donor run of the same row; null where the gap is smaller than `min_gap`; of a lens, a "
        "column for each of its layers",
        _PATCHING,
    ),
}
"""Every kind of measure; the kernel itself computes those without a function of logits."""


def functions() -> dict[str, Function]:
    """Kind -> function, the plain mapping that a session carries."""
    return {kind: entry.function for kind, entry in REGISTRY.items() if entry.function}
