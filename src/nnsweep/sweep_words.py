"""The words of a sweep file: names, numbers, references to axes, and the sites."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StrictFloat, StrictInt, StrictStr

NAME = r"^[a-z0-9][a-z0-9_]{0,63}$"
SITES = (
    *("embed", "resid_pre", "ln1", "q", "k", "v", "attn_scores", "pattern", "z", "attn_out"),
    *("resid_mid", "ln2", "mlp_pre", "mlp_post", "mlp_out", "resid_post", "ln_final", "logits"),
)

HEADED = {
    **{"q": "head", "k": "kv_head", "v": "kv_head", "z": "head"},
    **{"attn_scores": "head", "pattern": "head"},
}
"""Sites with heads, and whose: under grouped-query attention keys and values have fewer."""

UNITED = ("mlp_pre", "mlp_post")
"""Sites whose components are neurons, of which a write may choose some."""

EDGES = ("attn_scores", "pattern")
"""Sites with one number for each query and key token."""

BETWEEN = "<-"
"""Stands between the names of two positions, and in no name."""


def edges_name(position: str, keys: str) -> str:
    """What the edges from query tokens to key tokens are called among the positions of a row."""
    return f"{position}{BETWEEN}{keys}"


LAYERLESS = ("embed", "ln_final", "logits")

PROMPTS = {"text", "donor"}
"""The runs without writes that a write may patch from."""

Ref = Annotated[str, Field(pattern=r"^\$[a-z][a-z0-9_]*$")]
Name = Annotated[str, Field(pattern=NAME)]
Scalar = StrictInt | StrictFloat | StrictStr
Index = Annotated[int, Field(strict=True, ge=0)] | Ref
Number = StrictFloat | StrictInt | Ref
Whole = Annotated[int, Field(strict=True)]


def _each_once(values: list[int]) -> list[int]:
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice; once is enough")
    return values


Numbers = Annotated[
    list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=1), AfterValidator(_each_once)
]
Selection = Literal["all"] | Numbers
"""Several layers or heads."""

Site = Literal[
    "embed",
    "resid_pre",
    "ln1",
    "q",
    "k",
    "v",
    "attn_scores",
    "pattern",
    "z",
    "attn_out",
    "resid_mid",
    "ln2",
    "mlp_pre",
    "mlp_post",
    "mlp_out",
    "resid_post",
    "ln_final",
    "logits",
]
