"""Writes become edits: place, position, operation and operand as plain data, checked on rows."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from nnsweep.chunks import slices
from nnsweep.errors import UserError
from nnsweep.grid import Origin, origins
from nnsweep.planned import Plain, VectorLoader
from nnsweep.prompts import PromptRow
from nnsweep.row_places import place_of, seen_keys, tokens_of
from nnsweep.sites import EDGES, limits_of, require_site, resumes_at, tap
from nnsweep.sweep import Sweep, goes_on, position_spec
from nnsweep.sweep_words import HEADED
from nnsweep.sweep_writes import source_key
from nnsweep.tables import digest


class Edits:
    """Resolves the writes of one sweep on one model and one prompt table.

    Attributes:
        references: What is taken over the rows (means, rows to resample), by a digest of it.
    """

    def __init__(
        self,
        sweep: Sweep,
        shape: Plain,
        rows: Sequence[PromptRow],
        load_vector: VectorLoader,
    ) -> None:
        """Begin without references.

        Args:
            sweep: The sweep.
            shape: The model's shape.
            rows: All prompt rows.
            load_vector: Reads vector files.
        """
        self.sweep, self.shape, self.rows = sweep, shape, rows
        self.load_vector = load_vector
        self.goes_on = goes_on(sweep)
        self.references: dict[str, Plain] = {}
        self.origins = origins(sweep, limits_of(shape))

    def usable(self, names: Iterable[str]) -> tuple[int, ...]:
        """Numbers of the rows on which all these positions are known."""
        return tuple(
            i
            for i, row in enumerate(self.rows)
            if row.reason is None and not any(row.positions[name].reason for name in names)
        )

    def edits(self, writes: Sequence[Plain]) -> list[Plain]:
        """The resolved writes of a point as the kernel reads them.

        Raises:
            UserError: a place, a width or a vector that does not fit, with its path in the file.
        """
        pairs = zip(writes, self.origins, strict=True)
        return [self._edit(write, origin) for write, origin in pairs]

    def _edit(self, write: Plain, origin: Origin) -> Plain:
        """One write: place, position name, operation, operand."""
        where = self._where(write, f"{origin.where}.site")
        op, operand = self._operand(write, where, origin)
        resume = resumes_at(write["site"], write.get("layer"), self.shape["layers"])
        # What comes behind the prompt goes on from the keys and values of every layer.
        resume = 0 if self.goes_on else resume
        return where | {"op": op, "operand": operand, "resume": resume}

    def _where(self, write: Plain, path: str) -> Plain:
        """tap, position and, of edges, keys of a write or of what a patch reads."""
        site, layer, head = write["site"], write.get("layer"), write.get("head")
        require_site(self.shape, site, path)
        place = tap(self.shape, site, layer, head, write.get("units"))
        if write.get("heads") == "all":
            count = limits_of(self.shape)[HEADED[site]]
            place["high"] = (place["high"] - place["low"]) * count
        found = {"tap": place, "position": write["position"]}
        return found | ({"keys": write.get("keys", "@all")} if site in EDGES else {})

    def _operand(self, write: Plain, where: Plain, origin: Origin) -> tuple[str, Plain]:
        if "add" in write:
            return "add", self._vector(write, where, f"{origin.where}.add") | {
                "scale": float(write["add"]["scale"])
            }
        if "noise" in write:
            noise = write["noise"]
            return "noise", {"kind": "noise", "std": float(noise["std"]), "seed": noise["seed"]}
        if "clamp" in write:
            bounds = {name: float(value) for name, value in write["clamp"].items()}
            return "clamp", {"kind": "clamp"} | bounds
        if "mix" in write:
            source = self._source(write["mix"]["source"], where, origin)
            return "mix", source | {"weight": float(write["mix"]["weight"])}
        if "knockout" in write:
            return "set", {"kind": "lowest"}
        if "renormalize" in write:
            return "renormalize", self._length(write["renormalize"], where)
        return "set", self._source(write["set"], where, origin)

    def _length(self, value: Any, where: Plain) -> Plain:
        """What a renormalized activation takes its length from."""
        if isinstance(value, str):
            return where | {"kind": "donor" if value == "donor" else "self"}
        return {"kind": "number", "value": float(value)}

    def _source(self, value: Any, where: Plain, origin: Origin) -> Plain:
        path = f"{origin.where}.{source_key(origin.write)}"
        if not isinstance(value, dict):
            return {"kind": "number", "value": float(value)}
        if "patch" in value:
            return self._patch(value, where, origin, path)
        if "resample" in value:
            number = self._reference(value["resample"], where, "rows", path)
            return {"kind": "resample", "plus": number, "seed": value["seed"]}
        how = "tokens" if value["per_token"] else "mean"
        return {"kind": "mean", "plus": self._reference(value["mean"], where, how, path)}

    def _patch(self, value: Plain, where: Plain, origin: Origin, path: str) -> Plain:
        """The activation of a run: which prompt, where, under which writes."""
        theirs = self._where(value, f"{path}.site")
        ours = where["tap"]
        if _width(theirs["tap"]) != _width(ours):
            raise UserError(
                f"{path}: the patch reads {_width(theirs['tap'])} numbers a token at site "
                f"{value['site']}, the write takes {_width(ours)}. Patch from a site of that width."
            )
        found = theirs | {"kind": "donor" if value["patch"] == "donor" else "self"}
        inner = zip(value.get("under", []), origin.under, strict=True) if "under" in value else ()
        under = [self._edit(write, of) for write, of in inner]
        return found | ({"under": under} if under else {})

    def _vector(self, write: Plain, where: Plain, path: str) -> Plain:
        vector, width = write["add"]["vector"], _width(where["tap"])
        if "unit" in vector:
            if vector["unit"] >= width:
                raise UserError(
                    f"{path}.vector.unit: {vector['unit']} is outside 0..{width - 1}, the "
                    f"components that are written at {write['site']}."
                )
            return {"kind": "vector", "values": [float(i == vector["unit"]) for i in range(width)]}
        if "file" in vector:
            return {"kind": "vector", "values": self._loaded(vector, write, width, path)}
        plus, minus = (
            self._reference(vector[name], where, "mean", path) for name in ("mean", "minus")
        )
        found = {"kind": "mean", "plus": plus, "minus": minus}
        return found | ({"normalize": True} if vector["normalize"] else {})

    def _loaded(self, vector: Plain, write: Plain, width: int, path: str) -> list[float]:
        values = self.load_vector(vector, write.get("layer"))
        if len(values) != width:
            raise UserError(
                f"{path}.vector: {vector['file']} has width {len(values)}, site {write['site']} "
                f"has {width}. Give a vector of that width."
            )
        if not vector["normalize"]:
            return values
        length = math.sqrt(math.fsum(value * value for value in values))
        if length == 0:
            raise UserError(f"{path}.vector: {vector['file']} is all zeros, and has no direction.")
        return [value / length for value in values]

    def _reference(self, role: str, where: Plain, how: str, path: str) -> str:
        """Name of what is to be taken over the rows (see the kernel): a digest of all of it.

        Tokens and places of every row enter, so that whatever moves a mean is another mean.
        """
        rows, position = self.usable([where["position"]]), where["position"]
        wanted = where | {"role": role, "how": how, "rows": list(rows)}
        found = [self.rows[i] for i in rows]
        facts = sorted(
            [row.row_key, place_of(row, position, False), place_of(row, position, role == "donor")]
            for row in found
        )
        name = digest([where["tap"], role, how, facts])
        if name not in self.references:
            if how == "tokens":
                self._check_per_token(wanted, path)
            self.references[name] = wanted
        return name

    def _check_per_token(self, wanted: Plain, path: str) -> None:
        donor = wanted["role"] == "donor"
        counts = {len(place_of(self.rows[i], wanted["position"], donor)) for i in wanted["rows"]}
        own = {len(place_of(self.rows[i], wanted["position"], False)) for i in wanted["rows"]}
        if len(counts | own) > 1:
            raise UserError(
                f"{path}.per_token: it needs as many tokens in every row, position "
                f"{wanted['position']} has {sorted(counts | own)}. Leave per_token out."
            )

    def check(self, edits: Sequence[Plain], rows: Sequence[int]) -> None:
        """Refuse the edits of a point that cannot mean what they say on some row.

        Raises:
            UserError: tokens that do not correspond, a token that sees nothing, no partner.
        """
        self._check(edits, self.origins, rows)

    def _check(
        self, edits: Sequence[Plain], origins: Sequence[Origin], rows: Sequence[int]
    ) -> None:
        for edit, origin in zip(edits, origins, strict=True):
            operand = edit["operand"]
            if "under" in operand:
                self._check(operand["under"], origin.under, rows)
            path = f"{origin.where}.{source_key(origin.write)}"
            if "tap" in operand:
                self._check_span(edit, operand, "position", rows, path)
                self._check_edges(edit, rows, path)
            if operand["kind"] == "resample":
                self._check_partners(operand, rows, path)
        self._check_knockouts(edits, origins, rows)

    def _check_span(
        self, edit: Plain, operand: Plain, name: str, rows: Sequence[int], path: str
    ) -> None:
        """Refuse a patch whose tokens do not correspond to those that it is written to."""
        donor, ours, theirs = operand["kind"] == "donor", edit[name], operand[name]
        if ours == theirs and ours != "@all":
            return  # The same position was compared when the rows were prepared.
        for i in rows:
            row = self.rows[i]
            have, want = len(tokens_of(row, theirs, donor)), len(tokens_of(row, ours, False))
            if have != want and (name == "keys" or have != 1):
                raise UserError(
                    f"{path}: row {row.row_id}: {theirs.strip('@')} has {have} tokens, "
                    f"{ours.strip('@')} {want}. Patch from one token or from as many."
                )

    def _check_edges(self, edit: Plain, rows: Sequence[int], path: str) -> None:
        """Refuse edges of which one exists in one prompt alone: its key is behind its query."""
        operand = edit["operand"]
        if "keys" not in operand:
            return
        self._check_span(edit, operand, "keys", rows, path)
        for row in (self.rows[i] for i in rows):
            ours = seen_keys(row, edit, False)
            if ours != seen_keys(row, operand, operand["kind"] == "donor"):
                raise UserError(
                    f"{path}: row {row.row_id}: a key lies behind its query in one of the prompts "
                    "only. Choose positions in the same order in both."
                )

    def _check_partners(self, operand: Plain, rows: Sequence[int], path: str) -> None:
        """Refuse to resample a row that no other row has as many tokens as."""
        wanted = self.references[operand["plus"]]
        name, donor = wanted["position"], wanted["role"] == "donor"
        sizes = {i: len(place_of(self.rows[i], name, donor)) for i in wanted["rows"]}
        counts = Counter(sizes.values())
        for i in rows:
            own = len(place_of(self.rows[i], name, False))
            if counts[own] == (sizes.get(i) == own):
                raise UserError(
                    f"{path}: row {self.rows[i].row_id}: no other row has {own} tokens at "
                    f"position {name} to resample from. Use token: last, or more rows."
                )

    def _check_knockouts(
        self, edits: Sequence[Plain], origins: Sequence[Origin], rows: Sequence[int]
    ) -> None:
        """Refuse to leave a token without anything to attend to: its attention would be noise."""
        pairs = zip(edits, origins, strict=True)
        cut = [(edit, origin) for edit, origin in pairs if edit["operand"]["kind"] == "lowest"]
        for path in {edit["tap"]["path"] for edit, _ in cut}:
            here = [edit for edit, _ in cut if edit["tap"]["path"] == path]
            where = next(origin.where for edit, origin in cut if edit["tap"]["path"] == path)
            for row in (self.rows[i] for i in rows):
                blind = _blind_tokens(row, here)
                if blind:
                    raise UserError(
                        f"{where}: row {row.row_id}: knockout leaves token {min(blind)} of "
                        f"{row.tokens} no token to attend to. Leave it one, as the first."
                    )

    def meaning(self, edit: Plain) -> Plain:
        """What of a write decides a value: places and operands by content, not by name."""
        found = {}
        for key, value in edit.items():
            if key in ("position", "keys"):
                found[key] = position_spec(self.sweep, value) if value != "@all" else value
            elif key == "operand":
                found[key] = self.meaning(value)
            elif key == "under":
                found[key] = [self.meaning(under) for under in value]
            elif key != "resume":  # From which layer on it is computed decides nothing.
                found[key] = value
        return found

    def drawn(self, edit: Plain, block: Sequence[int]) -> Plain:
        """An edit with everything that is drawn at random for the rows of a block.

        Neither the point's other axes nor the standard deviation of noise enter, so that a
        corrupted prompt is the same prompt at every point that corrupts it the same way.
        """
        operand = edit["operand"]
        if "under" in operand:
            under = [self.drawn(one, block) for one in operand["under"]]
            return edit | {"operand": operand | {"under": under, "chain": digest(under)}}
        if "seed" not in operand:
            return edit
        tap, rows = edit["tap"], [self.rows[i] for i in block]
        place = [operand["seed"], tap["path"], tap["side"], tap["low"], *tap.get("units", [])]
        # From the tokens, not from the key, which may have to tell rows of equal tokens apart.
        facts = [[*place, row.positions[edit["position"]].base, row.key()] for row in rows]
        seeds = [int(digest(fact)[:15], 16) for fact in facts]
        if operand["kind"] == "noise":
            return edit | {"operand": operand | {"seeds": seeds}}
        partners = [
            self._partner(i, operand["plus"], seed) for i, seed in zip(block, seeds, strict=True)
        ]
        return edit | {"operand": operand | {"partners": partners}}

    def _partner(self, row: int, reference: str, seed: int) -> str:
        """Key of the row that a row is resampled from: another one, with as many tokens."""
        wanted = self.references[reference]
        name, donor = wanted["position"], wanted["role"] == "donor"
        count = len(place_of(self.rows[row], name, False))
        others = [self.rows[i] for i in wanted["rows"] if i != row]
        keys = sorted(o.row_key for o in others if len(place_of(o, name, donor)) == count)
        return keys[seed % len(keys)]

    def reference_set(self, name: str, batch_rows: int) -> Plain:
        """What is taken over the rows of a reference, in batches of prompts of one length."""
        reference = self.references[name]
        donor = reference["role"] == "donor"
        by_length: dict[int, list[PromptRow]] = {}
        for i in reference["rows"]:
            row = self.rows[i]
            by_length.setdefault(len(row.donor_ids if donor else row.ids), []).append(row)
        batches = []
        for length in sorted(by_length):
            members = sorted(by_length[length], key=lambda row: row.row_key)
            for part in slices(members, batch_rows):
                batches.append(
                    {
                        "row_keys": [row.row_key for row in part],
                        "ids": [row.donor_ids if donor else row.ids for row in part],
                        "at": [place_of(row, reference["position"], donor) for row in part],
                    }
                )
        return {"tap": reference["tap"], "how": reference["how"], "batches": batches}


def _width(place: Plain) -> int:
    """How many numbers a token a place has."""
    return len(place["units"]) if "units" in place else place["high"] - place["low"]


def edit_positions(edit: Plain) -> list[str]:
    """Names of the positions that an edit touches or reads."""
    operand = edit["operand"]
    found = [one[key] for one in (edit, operand) for key in ("position", "keys") if key in one]
    return found + [name for under in operand.get("under", []) for name in edit_positions(under)]


def _blind_tokens(row: PromptRow, edits: Sequence[Plain]) -> set[int]:
    """Query tokens of a row for which some head loses every key."""
    lost: dict[tuple[int, int], set[int]] = {}
    for edit in edits:
        keys = tokens_of(row, edit["keys"], False)
        for token in tokens_of(row, edit["position"], False):
            for head in range(edit["tap"]["low"], edit["tap"]["high"]):
                lost.setdefault((token, head), set()).update(k for k in keys if k <= token)
    return {token for (token, _), keys in lost.items() if len(keys) == token + 1}


def reading(edit: Plain, kind: str) -> Plain:
    """An operand that reads the very place of an edit in a run without writes."""
    return {"kind": kind} | {key: edit[key] for key in ("tap", "position", "keys") if key in edit}
