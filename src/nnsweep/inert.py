"""Which edits cannot move what is measured, so that no pass is needed for them."""

from collections.abc import Iterable, Sequence
from typing import Any

from nnsweep.prompts import PromptRow
from nnsweep.row_places import last_of, tokens_of
from nnsweep.sites import ORDER

Plain = dict[str, Any]


def cannot_move(edit: Plain, row: PromptRow, watched: Iterable[str], layers: int) -> bool:
    """Whether an edit of one row leaves what is measured as it is.

    It does where it writes what is there already, behind every measured token, or where nothing but
    its own token is computed any more.
    """
    operand = edit["operand"]
    measured = {last_of(row, name, donor=False) for name in watched}
    if 0 in (operand.get("scale"), operand.get("std"), operand.get("weight")):
        return True
    base = tokens_of(row, edit["position"], False)
    averaged = edit["position"] != "@all" and row.positions[edit["position"]].align == "mean"
    if (
        _puts_back(edit)
        and not averaged
        and _same_prefix(row, base, tokens_of(row, edit["position"], True))
    ):
        return True
    layer, rank = edit["tap"]["order"]
    # From the scores of the last layer on, no token reads another one any more.
    alone = layer >= layers - 1 and rank >= ORDER.index("attn_scores")
    return all(token > max(measured) or (alone and token not in measured) for token in base)


def _puts_back(edit: Plain) -> bool:
    """Whether an edit takes its very own place from the donor prompt without writes."""
    operand = edit["operand"]
    same = all(edit.get(key) == operand.get(key) for key in ("tap", "position"))
    plain = edit["op"] in ("set", "mix") and "keys" not in edit and "under" not in operand
    return operand["kind"] == "donor" and same and plain


def _same_prefix(row: PromptRow, base: Sequence[int], donor: Sequence[int]) -> bool:
    """Whether the donor is the same prompt up to the last token of a position."""
    end = max(base) + 1
    return base == donor and row.ids[:end] == row.donor_ids[:end]
