"""Positions in a sweep file: which tokens of each prompt."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from nnsweep.documents import Strict
from nnsweep.sweep_words import Name, Whole

BUILT_IN_POSITIONS: dict[str, int | Literal["all"]] = {"last": -1, "all": "all"}

FORMS: dict[str, tuple[str, ...]] = {
    "last": (),
    "span": (),
    "text": ("donor_text", "occurrence", "token"),
    "segment": ("occurrence", "token"),
    "union": (),
}
"""The forms of a position that is written with keys, and which keys go with each (and `align`)."""

GENERATION = "generation"
"""The segment of a chat prompt that the template appends for the model to go on from."""

Members = Annotated[list[Whole | Name], Field(min_length=1)]


class Tokens(Strict):
    """Tokens of each prompt. Exactly one of `last`, `span`, `text`, `segment`, `union`."""

    last: Annotated[int, Field(strict=True, ge=1)] | None = Field(
        None, description="how many tokens from the end"
    )
    span: list[Whole | None] | None = Field(
        None, description="[a, b]: tokens a up to, not including, b; b null is the end"
    )
    text: str | None = Field(None, description="column holding the text to find in the prompt")
    donor_text: str | None = Field(None, description="column for the donor; null is `text`")
    segment: str | None = Field(
        None, description="role of a chat message, or `generation`, the generation prompt"
    )
    union: Members | None = Field(None, description="indices and names of positions, with `align`")
    occurrence: Whole | None = Field(
        None, description="1 is the first, -1 the last; null refuses what is found twice"
    )
    token: Literal["all", "first", "last"] = Field(
        "all", description="which tokens of what is found"
    )
    align: Literal["first", "last", "mean"] | None = Field(
        None,
        description="how tokens meet a donor that has more or fewer there: from the first, from "
        "the last, or each from the mean over the donor's; null refuses it",
    )

    @field_validator("occurrence")
    @classmethod
    def _not_zero(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("occurrences count from 1 (first) or -1 (last)")
        return value

    @field_validator("span")
    @classmethod
    def _bounds(cls, value: list[int | None] | None) -> list[int | None] | None:
        if value is None:
            return None
        low, high = value if len(value) == 2 else (None, None)
        if low is None:
            raise ValueError(f"got {value}, expected [a, b], where b may be null (to the end)")
        if high is not None and (low < 0) == (high < 0) and low >= high:
            back = f"runs backwards; write [{high}, {low}]" if low > high else "holds no token"
            raise ValueError(f"{value} {back} (b is not included)")
        return value

    @model_validator(mode="after")
    def _one_form(self) -> "Tokens":
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(FORMS)} (given: {given or 'none'})")
        for name, default in (("donor_text", None), ("occurrence", None), ("token", "all")):
            if getattr(self, name) != default and name not in FORMS[self.form]:
                raise ValueError(f"{self.form} takes no '{name}'")
        if self.segment == GENERATION and self.occurrence is not None:
            raise ValueError("segment generation takes no 'occurrence'")
        if self.union and self.align is None:
            raise ValueError(f"without align, write the list alone: {self.union}")
        return self

    @property
    def form(self) -> str:
        """Which of the forms is given."""
        return next(name for name in FORMS if getattr(self, name) is not None)


Position = Whole | Literal["all"] | Members | Tokens
