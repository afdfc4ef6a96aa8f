"""Every kind of measure as the docs, the figures and parity show it (no torch)."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A measure as the docs and the figures show it."""

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
        "fraction",
        0,
        1,
        True,
        "1 where the argmax of the next-token logits is the answer, else 0; its mean under "
        "patching from a donor whose answer it is, is the interchange intervention accuracy (IIA)",
        _IIA,
    ),
    "logit": Entry("logits", None, None, False, "logit of the answer", _PATCHING),
    "log_prob": Entry(
        "nats",
        None,
        0,
        False,
        "log softmax of the logits at the answer; of a set of answers, the logarithm of their "
        "summed probability",
        _PATCHING,
    ),
    "cross_entropy": Entry("nats", 0, None, False, "minus the log softmax at the answer", _SHANNON),
    "prob": Entry(
        "probability",
        0,
        1,
        False,
        "softmax at the answer; of a set of answers, their sum",
        _PATCHING,
    ),
    "rank": Entry(
        "tokens",
        0,
        None,
        True,
        "number of tokens whose logit is strictly larger than the answer's; 0 is the top",
        _PATCHING,
    ),
    "logit_diff": Entry(
        "logits",
        None,
        None,
        False,
        "logit of the first answer minus logit of the second",
        "Wang et al., Interpretability in the wild, 2022",
    ),
    "entropy": Entry("nats", 0, None, False, "entropy of the next-token distribution", _SHANNON),
    "kl": Entry(
        "nats",
        0,
        None,
        False,
        "KL(clean || under the writes) of the next-token distributions (float32 rounding "
        "moves it by about 2e-7)",
        _PATCHING,
    ),
    "js": Entry(
        "nats",
        0,
        math.log(2),
        False,
        "Jensen-Shannon divergence between the next-token distributions of the clean run and of "
        "the run under the writes",
        "Lin, Divergence measures based on the Shannon entropy, 1991",
    ),
    "top_k": Entry(
        "tokens",
        None,
        None,
        True,
        "list of the `k` most likely next tokens (1 to 100), each with its id, its text and its "
        "log-probability; which of exactly equal ones comes first is not defined; it is not "
        "averaged over rows",
        _PATCHING,
    ),
    "cosine": Entry(
        "cosine",
        -1,
        1,
        False,
        "cosine of the angle between the activation at the place `read` under the writes and the "
        "same activation of the clean run, or of the donor's",
        "Singhal, Modern information retrieval: a brief overview, 2001",
    ),
    "contains": Entry(
        "fraction",
        0,
        1,
        True,
        "1 where the generated text contains the answer's text, else 0; needs `generate`",
        "string matching",
    ),
    "attribution": Entry(
        "units of `of`",
        None,
        None,
        False,
        "estimate, to first order, of the change of the measure named by `of`: its gradient in the "
        "clean run, times what the writes change there (attribution patching); no run under writes",
        "Nanda, Attribution patching, 2023",
    ),
    "recovery": Entry(
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
"""Every kind; the kernel itself computes those that are no function in `nnsweep.measures`."""
