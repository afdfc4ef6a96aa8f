"""Measures in a sweep file: what is computed, and where inside the model it reads."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from nnsweep.documents import Strict
from nnsweep.sweep_words import EDGES, HEADED, LAYERLESS, Selection, Site

MEASURES: dict[str, tuple[str, ...]] = {
    "match": ("answer",),
    "logit": ("answer",),
    "log_prob": ("answer", "answers"),
    "cross_entropy": ("answer",),
    "prob": ("answer", "answers"),
    "rank": ("answer",),
    "logit_diff": ("answers",),
    "entropy": (),
    "kl": (),
    "js": (),
    "top_k": ("k",),
    "cosine": ("read",),
    "contains": ("answer",),
    "recovery": ("of",),
    "attribution": ("of",),
}
"""The field each kind of measure asks for, or one of several (definitions: `nnsweep.registry`)."""

AGAINST_CLEAN = ("kl", "js", "cosine", "recovery", "attribution")
"""Kinds that compare with the clean run of the same prompt."""

GUARDED = ("recovery", "cosine")
"""Kinds that are no number where they would divide by nothing; such a value is null, no error."""

TEXTS = ("contains",)
"""Kinds that read the generated text."""

SUMMED = ("log_prob", "prob", "cross_entropy")
"""Kinds that are defined for answers of several tokens."""

NO_LENS = ("cosine", "contains", "recovery", "attribution")
"""Kinds that read no logits of their own."""


class Read(Strict):
    """A place that a measure reads under the writes."""

    site: Site
    layer: Annotated[int, Field(strict=True, ge=0)] | None = Field(None, description="from 0")
    head: Annotated[int, Field(strict=True, ge=0)] | None = Field(None, description="from 0")
    position: str = Field("last", description="of several tokens, the last is read")

    @model_validator(mode="after")
    def _place(self) -> "Read":
        if (self.layer is None) != (self.site in LAYERLESS):
            need = "no layer" if self.site in LAYERLESS else "a layer"
            raise ValueError(f"site {self.site} takes {need}")
        if (self.head is None) == (self.site in HEADED):
            raise ValueError(f"site {self.site} takes {'a' if self.site in HEADED else 'no'} head")
        if self.site in (*EDGES, "logits"):
            raise ValueError(f"site {self.site} is no vector of the model's inside; read another")
        return self


class Lens(Strict):
    """The logit lens: final norm and output embedding on the stream inside the model."""

    site: Literal["resid_pre", "resid_mid", "resid_post"] = Field(
        "resid_post", description="which stream is read"
    )
    layers: Selection = Field("all", description="a column for each layer")
    position: str | None = Field(
        None, description="of several tokens, the last is read; null is `measure_at`"
    )


class Reading(Strict):
    """What measures of logits have in common."""

    kind: str
    answer: str | None = Field(None, description="name of an answer")
    answers: list[str] | None = Field(
        None, description="[target, foil]; of prob and log_prob a set, summed", min_length=2
    )
    tokens: Literal["one", "sum"] = Field(
        "one",
        description="answers of several tokens: refused, or their log-probabilities summed, each "
        "after those before it (log_prob, prob and cross_entropy of one answer)",
    )
    lens: Lens | None = Field(None, description="read logits inside the model (logit lens)")

    @model_validator(mode="after")
    def _fields_of_kind(self) -> "Reading":
        allowed = MEASURES[self.kind]
        fields = ("answer", "answers", "of", "k", "read")
        given = [name for name in fields if getattr(self, name, None) is not None]
        for field in given:
            if field not in allowed:
                raise ValueError(f"kind {self.kind} takes no '{field}'")
        if len(given) != bool(allowed):
            raise ValueError(f"kind {self.kind} needs '{"' or '".join(allowed)}'")
        if self.kind == "logit_diff" and len(self.answers or []) != 2:
            raise ValueError("kind logit_diff needs two answers, [target, foil]")
        if self.tokens == "sum" and (self.kind not in SUMMED or self.answers or self.lens):
            raise ValueError(
                f"tokens: sum is for {', '.join(SUMMED)} of one answer, without a lens"
            )
        if self.lens and self.kind in NO_LENS:
            raise ValueError(f"kind {self.kind} takes no lens")
        return self


class Inner(Reading):
    """A measure that another one is taken of, without a column of its own."""

    kind: Literal[
        "match", "logit", "log_prob", "cross_entropy", "prob", "rank", "logit_diff", "entropy"
    ]


class Measure(Reading):
    """One number per point and prompt row, computed from the logits."""

    kind: Literal[
        "match",
        "logit",
        "log_prob",
        "cross_entropy",
        "prob",
        "rank",
        "logit_diff",
        "entropy",
        "kl",
        "js",
        "top_k",
        "cosine",
        "contains",
        "recovery",
        "attribution",
    ]
    of: str | Inner | None = Field(
        None,
        description="the measure that is recovered (of a lens, at each layer) or estimated (no "
        "lens, no tokens: sum): its name, or its keys where it needs no column",
    )
    min_gap: float = Field(0.1, gt=0, description="smallest clean-to-donor gap of `of` that counts")
    k: Annotated[int, Field(strict=True, ge=1, le=100)] | None = Field(
        None, description="top_k: how many tokens"
    )
    read: Read | None = Field(None, description="cosine: which activation is compared")
    against: Literal["text", "donor"] = Field("text", description="cosine: with which clean run")


def recoverable(measure: Reading) -> bool:
    """Whether a measure is a number of a run alone, whose recovery can be asked for."""
    return measure.kind not in (*AGAINST_CLEAN, *TEXTS, "top_k")


def needs_one_token(measure: Reading) -> bool:
    """Whether the answers of a measure must be single tokens."""
    return measure.tokens == "one" and measure.kind not in TEXTS


def smooth(measure: Reading) -> bool:
    """Whether a measure has a gradient at the one token where it is read."""
    alone = measure.lens is None and measure.tokens == "one"
    return recoverable(measure) and measure.kind not in ("match", "rank") and alone


def unfit(measure: Measure, of: Reading) -> str | None:
    """Why `measure` cannot be taken of another measure, or None."""
    if measure.kind == "attribution" and of.lens is not None:
        return "is read through a lens, which attribution does not estimate; take its recovery"
    if measure.kind == "attribution" and of.tokens == "sum":
        return (
            "is read behind several tokens (tokens: sum), attribution takes one gradient, at "
            "the prompt's last; estimate the first token's log_prob, or take its recovery"
        )
    if measure.kind == "attribution" and not smooth(of):
        return "has no slope"
    return None if recoverable(of) else "is no number of one run alone"
