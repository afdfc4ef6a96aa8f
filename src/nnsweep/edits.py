"""Writes become edits: place, position, operation and operand as plain data, checked on rows."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from nnsweep.chunks import slices
from nnsweep.errors import UserError
from nnsweep.planned import Plain, VectorLoader
from nnsweep.prompts import PromptRow
from nnsweep.row_places import place_of, seen_keys, tokens_of
from nnsweep.sites import EDGES, limits_of, resumes_at, tap
from nnsweep.sweep import Sweep, goes_on, position_spec
from nnsweep.sweep_words import HEADED
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
        estimating: bool,
    ) -> None:
        """Begin without references.

        Args:
            sweep: The sweep.
            shape: The model's shape.
            rows: All prompt rows.
            load_vector: Reads vector files.
            estimating: Whether a measure estimates from gradients.
        """
        self.sweep, self.shape, self.rows = sweep, shape, rows
        self.load_vector, self.estimating = load_vector, estimating
        self.goes_on = goes_on(sweep)
        self.references: dict[str, Plain] = {}

    def usable(self, names: Iterable[str]) -> tuple[int, ...]:
        """Numbers of the rows on which all these positions are known."""
        return tuple(
            i
            for i, row in enumerate(self.rows)
            if row.reason is None and not any(row.positions[name].reason for name in names)
        )

    def edit(self, write: Plain) -> Plain:
        """A write as the kernel reads it: place, position name, operation, operand."""
        where = self._where(write)
        op, operand = self._operand(write, where)
        resume = resumes_at(write["site"], write.get("layer"), self.shape["layers"])
        # What comes behind the prompt goes on from the keys and values of every layer.
        resume = 0 if self.goes_on else resume
        return where | {"op": op, "operand": operand, "resume": resume}

    def _where(self, write: Plain) -> Plain:
        """tap, position and, of edges, keys of a write or of what a patch reads."""
        site, layer, head = write["site"], write.get("layer"), write.get("head")
        if site not in HEADED and head is not None:
            raise UserError(f"writes: site {site} has no heads. Remove head from the patch.")
        if site in HEADED and head is None and "heads" not in write:
            raise UserError(f"writes: a patch from site {site} needs a head. Give it one.")
        place = tap(self.shape, site, layer, head, write.get("units"))
        if write.get("heads") == "all":
            count = limits_of(self.shape)[HEADED[site]]
            place["high"] = (place["high"] - place["low"]) * count
        found = {"tap": place, "position": write["position"]}
        return found | ({"keys": write.get("keys", "@all")} if site in EDGES else {})

    def _operand(self, write: Plain, where: Plain) -> tuple[str, Plain]:
        if "add" in write:
            return "add", self._vector(write, where) | {"scale": float(write["add"]["scale"])}
        if "noise" in write:
            noise = write["noise"]
            if noise["std"] < 0:
                raise UserError(f"writes: noise std {noise['std']} is negative. Give 0 or more.")
            return "noise", {"kind": "noise", "std": float(noise["std"]), "seed": noise["seed"]}
        if "clamp" in write:
            bounds = {name: float(value) for name, value in write["clamp"].items()}
            if bounds.get("low", -math.inf) > bounds.get("high", math.inf):
                raise UserError(f"writes: clamp {bounds}: low is above high. Swap them.")
            return "clamp", {"kind": "clamp"} | bounds
        if "mix" in write:
            source = self._source(write["mix"]["source"], where)
            return "mix", source | {"weight": float(write["mix"]["weight"])}
        if "knockout" in write:
            return "set", {"kind": "lowest"}
        if "renormalize" in write:
            return "renormalize", self._length(write["renormalize"], where)
        return "set", self._source(write["set"], where)

    def _length(self, value: Any, where: Plain) -> Plain:
        """What a renormalized activation takes its length from."""
        if isinstance(value, str):
            return where | {"kind": "donor" if value == "donor" else "self"}
        if value < 0:
            raise UserError(f"writes: renormalize {value} is negative. Give a length of 0 or more.")
        return {"kind": "number", "value": float(value)}

    def _source(self, value: Any, where: Plain) -> Plain:
        if not isinstance(value, dict):
            return {"kind": "number", "value": float(value)}
        if "patch" in value:
            return self._patch(value, where)
        if "resample" in value:
            number = self._reference(value["resample"], where, "rows")
            return {"kind": "resample", "plus": number, "seed": value["seed"]}
        how = "tokens" if value["per_token"] else "mean"
        return {"kind": "mean", "plus": self._reference(value["mean"], where, how)}

    def _patch(self, value: Plain, where: Plain) -> Plain:
        """The activation of a run: which prompt, where, under which writes."""
        theirs = self._where(value)
        ours = where["tap"]
        if _width(theirs["tap"]) != _width(ours) or ("keys" in theirs) != ("keys" in where):
            raise UserError(
                f"writes: the patch reads {_width(theirs['tap'])} numbers a token at site "
                f"{value['site']}, the write takes {_width(ours)}. Patch from a site of that width."
            )
        found = theirs | {"kind": "donor" if value["patch"] == "donor" else "self"}
        under = [self.edit(write) for write in value.get("under", [])]
        return found | ({"under": under} if under else {})

    def _vector(self, write: Plain, where: Plain) -> Plain:
        vector, width = write["add"]["vector"], _width(where["tap"])
        if "unit" in vector:
            if vector["unit"] >= width:
                raise UserError(
                    f"writes: unit {vector['unit']} is outside 0..{width - 1} at {write['site']}."
                )
            return {"kind": "vector", "values": [float(i == vector["unit"]) for i in range(width)]}
        if "file" in vector:
            return {"kind": "vector", "values": self._loaded(vector, write, width)}
        plus, minus = (self._reference(vector[name], where, "mean") for name in ("mean", "minus"))
        found = {"kind": "mean", "plus": plus, "minus": minus}
        return found | ({"normalize": True} if vector["normalize"] else {})

    def _loaded(self, vector: Plain, write: Plain, width: int) -> list[float]:
        values = self.load_vector(vector, write.get("layer"))
        if len(values) != width:
            raise UserError(
                f"writes: {vector['file']} has width {len(values)}, site {write['site']} "
                f"has {width}. Give a vector of that width."
            )
        if not vector["normalize"]:
            return values
        length = math.sqrt(math.fsum(value * value for value in values))
        if length == 0:
            raise UserError(f"writes: {vector['file']} is all zeros. It cannot be normalized.")
        return [value / length for value in values]

    def _reference(self, role: str, where: Plain, how: str) -> str:
        """Name of what is to be taken over the rows (see the kernel): a digest of all of it.

        Tokens and places of every row enter, so that whatever moves a mean is another mean.
        """
        rows, position = self.usable([where["position"]]), where["position"]
        wanted = where | {"role": role, "how": how, "rows": list(rows)}
        places = [place_of(self.rows[i], position, role == "donor") for i in rows]
        keys = [self.rows[i].row_key for i in rows]
        name = digest([where["tap"], role, how, sorted(zip(keys, places, strict=True))])
        if name not in self.references:
            if how == "tokens":
                self._check_per_token(wanted)
            self.references[name] = wanted
        return name

    def _check_per_token(self, wanted: Plain) -> None:
        donor = wanted["role"] == "donor"
        counts = {len(place_of(self.rows[i], wanted["position"], donor)) for i in wanted["rows"]}
        own = {len(place_of(self.rows[i], wanted["position"], False)) for i in wanted["rows"]}
        if len(counts | own) > 1:
            raise UserError(
                f"writes: per_token needs as many tokens in every row, position "
                f"{wanted['position']} has {sorted(counts | own)}. Leave per_token out."
            )

    def check(self, edits: Sequence[Plain], rows: Sequence[int]) -> None:
        """Refuse edits that cannot mean what they say on some row.

        Raises:
            UserError: tokens that do not correspond, a token that sees nothing, no gradient.
        """
        self._check_estimates(edits)
        self._check_spans(edits, rows)
        self._check_knockouts(edits, rows)

    def _check_spans(self, edits: Sequence[Plain], rows: Sequence[int]) -> None:
        """Refuse a patch whose tokens do not correspond to those that it is written to."""
        for edit in edits:
            operand = edit["operand"]
            self.check(operand.get("under", []), rows)
            if "tap" in operand:
                for name in ("position", "keys"):
                    if name in edit:
                        self._check_span(edit[name], operand, name, rows)
                self._check_edges(edit, rows)

    def _check_span(self, ours: str, operand: Plain, name: str, rows: Sequence[int]) -> None:
        donor, theirs = operand["kind"] == "donor", operand[name]
        if ours == theirs and ours != "@all":
            return  # The same position was compared when the rows were prepared.
        for i in rows:
            row = self.rows[i]
            have, want = len(tokens_of(row, theirs, donor)), len(tokens_of(row, ours, False))
            if have != want and (name == "keys" or have != 1):
                raise UserError(
                    f"writes: row {row.row_id}: {theirs.strip('@')} has {have} tokens, "
                    f"{ours.strip('@')} {want}. Patch from one token or from as many."
                )

    def _check_estimates(self, edits: Sequence[Plain]) -> None:
        """Refuse writes whose effect has no first-order estimate."""
        for edit in edits if self.estimating else []:
            if edit["tap"]["side"] == "logits" or edit["operand"]["kind"] == "lowest":
                raise UserError(
                    "measures: attribution estimates writes inside the model, and no knockout. "
                    "Measure this sweep by running it."
                )

    def _check_edges(self, edit: Plain, rows: Sequence[int]) -> None:
        """Refuse edges of which one exists in one prompt alone: its key is behind its query."""
        operand = edit["operand"]
        for row in (self.rows[i] for i in rows if "keys" in operand):
            ours = seen_keys(row, edit, False)
            if ours != seen_keys(row, operand, operand["kind"] == "donor"):
                raise UserError(
                    f"writes: row {row.row_id}: a key lies behind its query in one of the prompts "
                    "only. Choose positions in the same order in both."
                )

    def _check_knockouts(self, edits: Sequence[Plain], rows: Sequence[int]) -> None:
        """Refuse to leave a token without anything to attend to: its attention would be noise."""
        cut = [edit for edit in edits if edit["operand"]["kind"] == "lowest"]
        for path in {edit["tap"]["path"] for edit in cut}:
            here = [edit for edit in cut if edit["tap"]["path"] == path]
            for row in (self.rows[i] for i in rows):
                blind = _blind_tokens(row, here)
                if blind:
                    raise UserError(
                        f"writes: row {row.row_id}: knockout leaves token {min(blind)} of "
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
            else:
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
        if not keys:
            raise UserError(
                f"writes: row {self.rows[row].row_id}: no other row has {count} tokens at "
                f"position {name} to resample from. Use token: last, or more rows."
            )
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
