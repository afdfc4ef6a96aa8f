"""Null controls (see docs/checks.md): passes whose outcome is known before they run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nnsweep.edits import reading
from nnsweep.measure_plan import controlled
from nnsweep.planned import Plain, Point, identity, without_block
from nnsweep.row_places import equal_lengths
from nnsweep.sites import tap
from nnsweep.tables import digest

if TYPE_CHECKING:
    from nnsweep.plan import Context


class NullControls:
    """Composes the controls of one plan."""

    def __init__(self, context: "Context") -> None:
        """Compose in the surroundings of a plan."""
        self.context = context

    def controls(self, points: Sequence[Point]) -> Plain | None:
        """A chunk of null controls on a few rows (see docs/checks.md), or None without rows."""
        rows = max((point.rows for point in points), key=len)
        if not rows:
            return None
        blocks = [block[:8] for block in self.context.blocks(rows)]
        rows_of = self.context.rows
        equal = [b for b in blocks if self.context.donors and equal_lengths(rows_of[b[0]])]
        inert = {b: self._first_inert(points, b) for b in equal or blocks}
        block = next((b for b in inert if inert[b]), (equal or blocks)[0])
        first, last = points[0], points[-1]
        passes = [self._control(block, "clean", [])]
        passes += [
            self._control(block, f"self_patch_{n}", self._self_patch(p), p)
            for n, p in enumerate([first, last])
            if p.edits and set(block) <= set(p.rows)
        ]
        if idle := inert[block]:
            passes.append(self._control(block, "inert", idle.edits, idle))
        passes.append(self._control(block, "zero_steer", [self._zero_steer()]))
        if equal:
            passes.append(self._control(block, "full_donor", [self._full_donor()]))
        chunk = self.context.chunk(passes)
        chunk["measures"] = controlled(chunk["measures"])
        # Controls read and write every token.
        nothing = {"shared": 0, "donor_shared": 0}
        chunk["blocks"] = [each | nothing for each in chunk["blocks"]]
        if equal:
            donor = self.context.block(block, swap=True)
            alone = self._control(block, "donor", [])
            chunk["blocks"].append(donor | {"passes": [without_block(alone)]})
        return chunk | {"chunk_id": digest(["controls", chunk["chunk_id"]])}

    def _first_inert(self, points: Sequence[Point], block: tuple[int, ...]) -> Point | None:
        """A point that cannot differ on these rows."""
        return next(
            (
                p
                for p in points
                if p.edits and set(block) <= set(p.rows) and self.context.is_inert(p, block)
            ),
            None,
        )

    def _control(
        self, block: tuple[int, ...], name: str, edits: list[Plain], like: Point | None = None
    ) -> Plain:
        key = f"control:{name}"
        point = Point(key, key, {}, [], edits, block)
        start = self.context.start(like, block) if like else 0
        # The key of a control says nothing of its model and places, its pass must.
        more = [identity(self.context.model), edits]
        return self.context.one_pass(block, [point], start, more, inert=False)

    def _self_patch(self, point: Point) -> list[Plain]:
        return [edit | {"op": "set", "operand": reading(edit, "self")} for edit in point.edits]

    def _zero_steer(self) -> Plain:
        place = tap(self.context.shape, "resid_post", self.context.shape["layers"] // 2, None)
        values = [1.0] * (place["high"] - place["low"])
        operand = {"kind": "vector", "values": values, "scale": 0.0}
        return self._plain_edit(place, "add", operand, self.context.shape["layers"] // 2 + 1)

    def _full_donor(self) -> Plain:
        place = tap(self.context.shape, "resid_post", self.context.shape["layers"] - 1, None)
        operand = reading({"tap": place, "position": "@all"}, "donor")
        return self._plain_edit(place, "set", operand, self.context.shape["layers"])

    def _plain_edit(self, place: Plain, op: str, operand: Plain, resume: int) -> Plain:
        resume = 0 if self.context.goes_on else resume
        return {"tap": place, "position": "@all", "op": op, "operand": operand, "resume": resume}
