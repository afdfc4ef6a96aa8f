"""Two engines, value by value: identical, within tolerance, different, missing, extra, not finite.

Equality of engines is a claim about values, so the comparison joins on (point_id, row_id) and
classes every single value. It refuses to compare different questions, and an empty comparison is
a failure, never a success.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from nnsweep.errors import CheckFailed, UserError
from nnsweep.registry import REGISTRY
from nnsweep.sweep import Sweep
from nnsweep.sweep_measures import GUARDED
from nnsweep.tables import read_json, read_table, write_json, write_table

CLASSES = ("identical", "within", "different", "missing", "extra", "nonfinite")
GOOD = ("identical", "within")
KEYS = ["point_id", "row_id"]
STATE = ("status", "reason")
PLACE = "@place"
"""Column of the lines' places; what begins with @ is the name of no axis and no measure."""
WORST = 20


@dataclass(frozen=True)
class Tolerance:
    """Largest distance that counts as the same value.

    Attributes:
        absolute: In the measure's own unit.
        ulps: In units in the last place of the served dtype, at the size of the value.
    """

    absolute: float
    ulps: float


TOLERANCES = {
    "float32": Tolerance(1e-4, 64),
    "bfloat16": Tolerance(1.0, 8),
    "float16": Tolerance(0.1, 16),
}
"""By the coarser dtype of the two runs. float32 batch noise was measured at 4e-5; bfloat16 moves a
logit by up to 0.56 with what else is in the batch."""

EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
SCHEMA_TAIL = [
    ("measure", pa.string()),
    ("a", pa.float32()),
    ("b", pa.float32()),
    ("distance", pa.float64()),
    ("ulps", pa.float64()),
    ("class", pa.string()),
]


def check_parity(a: Path, b: Path, output: Path) -> None:
    """Rule check_parity: compare two engines' folders.

    Args:
        a: `results/SWEEP/ENGINE` of the first engine (values.parquet and run.json).
        b: The second engine's.
        output: The verdict's file, `parity/A-vs-B.json`; table and figure lie beside it.

    Raises:
        UserError: the two runs answer different questions.
        CheckFailed: some value is not within tolerance (the verdict is written first).
    """
    publish(*compare(a, b), output)


def check_sample(sweep: Sweep, engine: str, parts: Sequence[Path], b: Path, output: Path) -> None:
    """Rule check_parity with `parity.points: N`: one engine's sample against the other's table.

    Args:
        sweep: The sweep.
        engine: The engine that ran the sample.
        parts: The sample's parts.
        b: `results/SWEEP/ENGINE` of the engine that ran everything.
        output: As for `check_parity`.
    """
    from nnsweep.merge import sample_values

    facts = read_json(parts[0].with_suffix(".json"))
    run = read_json(b / "run.json")
    records = read_json(b.parent / "plan.json")["sample"]
    ours = sample_values(sweep, b.parent, parts, records)
    theirs = _with_keys_of(read_table(b / "values.parquet"), ours)
    dtype = coarser(str(facts["dtype"]), str(run["dtype"]))
    table = classify(ours, theirs, run["kinds"], dtype)
    publish(judged(table, [engine, str(run["engine"])], dtype), table, output)


def _with_keys_of(table: pa.Table, sample: pa.Table) -> pa.Table:
    wanted = set(zip(*(sample[key].to_pylist() for key in KEYS), strict=True))
    pairs = zip(*(table[key].to_pylist() for key in KEYS), strict=True)
    return table.filter(pa.array([pair in wanted for pair in pairs]))


def publish(verdict: dict[str, Any], table: pa.Table, output: Path) -> None:
    """Write table, verdict and figure; then raise CheckFailed if parity does not hold."""
    write_table(output.with_suffix(".parquet"), table, table.schema)
    write_json(output.with_suffix(".json"), verdict)
    from nnsweep.parity_figure import plot_parity

    plot_parity(verdict, table.to_pandas(), output.with_suffix(".svg"))
    if not verdict["holds"]:
        raise CheckFailed(f"parity of {verdict['a']} and {verdict['b']} fails: {sentence(verdict)}")


def compare(a: Path, b: Path) -> tuple[dict[str, Any], pa.Table]:
    """Compare two engines' folders without writing anything: (verdict, table of values)."""
    runs = [read_json(folder / "run.json") for folder in (a, b)]
    refuse_other_questions(*runs)
    frames = [read_table(folder / "values.parquet") for folder in (a, b)]
    dtype = coarser(*(str(run["dtype"]) for run in runs))
    table = classify(frames[0], frames[1], runs[0]["kinds"], dtype)
    names = [f"{run['engine']}" for run in runs]
    return judged(table, names, dtype), table


def refuse_other_questions(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Refuse runs of other points, prompts, models or meanings.

    Raises:
        UserError: naming what differs.
    """
    for name in ("sweep", "semantics", "kinds"):
        if a[name] != b[name]:
            raise UserError(f"parity: {name} differs ({a[name]} and {b[name]}). Run both anew.")
    for name in ("revision", "dtype", "attention"):
        if a["model"][name] != b["model"][name]:
            pair = f"{a['model'][name]} and {b['model'][name]}"
            raise UserError(f"parity: the model's {name} differs ({pair}). Run both on one model.")


def coarser(a: str, b: str) -> str:
    """The dtype with the larger rounding error."""
    unknown = [name for name in (a, b) if name not in EPSILON]
    if unknown:
        raise UserError(f"parity: dtype {unknown[0]} is none of {', '.join(EPSILON)}.")
    return max(a, b, key=EPSILON.__getitem__)


def classify(a: pa.Table, b: pa.Table, kinds: Mapping[str, str], dtype: str) -> pa.Table:
    """One line a value: both numbers, their distance, and its class.

    Args:
        a: values.parquet of one engine.
        b: values.parquet of the other.
        kinds: measure -> kind (see `nnsweep.registry.REGISTRY`).
        dtype: The dtype whose tolerance holds.

    Raises:
        CheckFailed: a (point_id, row_id) stands twice in one table, or the columns differ.
    """
    if a.schema.names != b.schema.names:
        raise UserError(f"parity: columns differ: {a.schema.names} and {b.schema.names}.")
    axes = [n for n in a.schema.names if n not in (*KEYS, *STATE, *kinds, "text")]
    schema = pa.schema(
        [("point_id", pa.string()), ("row_id", pa.string())]
        + [(name, a.schema.field(name).type) for name in axes]
        + SCHEMA_TAIL
    )
    if not len(a) and not len(b):
        return schema.empty_table()
    lists = [name for name in kinds if pa.types.is_list(a.schema.field(name).type)]
    numbers = [name for name in kinds if name not in lists]
    sides = [_keyed(table, numbers) for table in (a, b)]
    joined = sides[0].merge(sides[1], on=KEYS, how="outer", suffixes=("@a", "@b"), indicator=True)
    where = pd.concat([t.select([*KEYS, *axes]).to_pandas() for t in (a, b)]).drop_duplicates(KEYS)
    joined = joined.merge(where, on=KEYS, how="left", validate="one_to_one")
    asked = _asked(joined)
    ids = {name: [_ids(table[name]) for table in (a, b)] for name in lists}
    parts = [_values(asked, name, kind, dtype, ids.get(name)) for name, kind in kinds.items()]
    frame = pd.concat(parts, ignore_index=True)
    return pa.Table.from_pandas(frame[schema.names], schema=schema, preserve_index=False)


def _keyed(table: pa.Table, measures: list[str]) -> pd.DataFrame:
    frame = table.select([*KEYS, "status", *measures]).to_pandas()
    doubled = frame[frame.duplicated(KEYS)]
    if len(doubled):
        point, row = doubled.iloc[0][KEYS]
        raise CheckFailed(f"parity: point {point} on row {row} stands twice in one table.")
    return frame.assign(**{PLACE: np.arange(len(frame))})


def _asked(joined: pd.DataFrame) -> pd.DataFrame:
    """Rows excluded on both sides were asked of neither engine."""
    out = (joined["status@a"] == "excluded") & (joined["status@b"] == "excluded")
    return joined[~out]


def _values(
    joined: pd.DataFrame,
    name: str,
    kind: str,
    dtype: str,
    ids: Sequence[np.ndarray] | None,
) -> pd.DataFrame:
    """The lines of one measure; of a list of tokens, `ids` holds those of both tables."""
    if ids is not None:
        a, b = _first_difference(*(_at(ids[i], joined[f"{PLACE}@{s}"]) for i, s in enumerate("ab")))
    else:
        a, b = (joined[f"{name}@{side}"].to_numpy(np.float32) for side in "ab")
    with np.errstate(invalid="ignore"):
        distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
        step = np.maximum(np.maximum(np.abs(a), np.abs(b)), 1.0).astype(np.float64)
        ulps = distance / (step * EPSILON[dtype])
    classes = _classes(joined, a, b, distance, ulps, kind, dtype)
    return joined.assign(measure=name, a=a, b=b, distance=distance, ulps=ulps, **{"class": classes})


def _ids(column: pa.ChunkedArray) -> np.ndarray:
    """The ids of lists of tokens, a line each, filled up with NaN."""
    whole = column.combine_chunks()
    counts = pc.fill_null(pc.list_value_length(whole), 0).to_numpy()
    found = np.full((len(whole), max(1, counts.max(initial=0))), np.nan, np.float32)
    there = np.arange(found.shape[1]) < counts[:, None]
    found[there] = pc.struct_field(whole.flatten(), "id").to_numpy()
    return found


def _at(ids: np.ndarray, places: pd.Series) -> np.ndarray:
    """The lines of some places; NaN where there is no such line."""
    there = places.notna().to_numpy()
    found = np.full((len(places), ids.shape[1]), np.nan, np.float32)
    found[there] = ids[places[there].to_numpy(np.int64)]
    return found


def _first_difference(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of two lists of tokens, the first ids that differ, or the first ids; NaN without a list.

    A list that ends before the other is compared as far as it goes.
    """
    width = min(a.shape[1], b.shape[1])
    ours, theirs = a[:, :width], b[:, :width]
    both = ~(np.isnan(ours) | np.isnan(theirs))
    first = ((ours != theirs) & both).argmax(axis=1)
    lines = np.arange(len(a))
    return ours[lines, first], theirs[lines, first]


def _classes(
    joined: pd.DataFrame,
    a: np.ndarray,
    b: np.ndarray,
    distance: np.ndarray,
    ulps: np.ndarray,
    kind: str,
    dtype: str,
) -> np.ndarray:
    """The class of every value; rank-like measures are whole numbers and must be identical."""
    limit, discrete = TOLERANCES[dtype], kind == "generate" or REGISTRY[kind].discrete
    same = a.view(np.uint32) == b.view(np.uint32)
    near = (distance <= limit.absolute) | (ulps <= limit.ulps)
    found = np.where(same, "identical", np.where(near & (not discrete), "within", "different"))
    # A ratio without a number is guarded where both engines say ok: its gap is too small.
    ok = (joined["status@a"] == "ok").to_numpy() & (joined["status@b"] == "ok").to_numpy()
    empty = np.isnan(a) & np.isnan(b)
    guarded = empty & ok & (kind in GUARDED)
    found = np.where(guarded, "identical", found)
    found = np.where((empty & ~guarded) | np.isinf(a) | np.isinf(b), "nonfinite", found)
    found = np.where(np.isnan(a) != np.isnan(b), "different", found)
    found = np.where((joined["_merge"] == "left_only").to_numpy(), "missing", found)
    return np.where((joined["_merge"] == "right_only").to_numpy(), "extra", found)


def judged(table: pa.Table, engines: Sequence[str], dtype: str) -> dict[str, Any]:
    """The verdict: counts by class, the largest distances, and whether parity holds.

    `empty` counts the ratios that are guarded on both sides: no disagreement, but no proof either.
    """
    frame = table.to_pandas()
    counts = {name: int((frame["class"] == name).sum()) for name in CLASSES}
    bad = sum(counts[name] for name in CLASSES if name not in GOOD)
    empty = int(((frame["class"] == "identical") & frame["a"].isna()).sum())
    both = frame[np.isfinite(frame["distance"])]
    limit = TOLERANCES[dtype]
    return {
        "a": engines[0],
        "b": engines[1],
        "dtype": dtype,
        "tolerance": {"absolute": limit.absolute, "ulps": limit.ulps},
        "values": len(frame),
        "points": int(frame["point_id"].nunique()),
        "classes": counts,
        "empty": empty,
        "holds": bool(len(frame) > empty and bad == 0),
        "largest": {
            measure: float(part["distance"].max()) for measure, part in both.groupby("measure")
        },
        "worst": _worst(frame),
    }


def _worst(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The values that matter most: the bad classes first, then the largest distances."""
    order = {name: place for place, name in enumerate(reversed(CLASSES))}
    ranked = frame.assign(
        badness=frame["class"].map(order), size=-frame["distance"].fillna(np.inf)
    ).sort_values(["badness", "size"], kind="stable")
    some = ranked[ranked["class"] != "identical"].head(WORST).drop(columns=["badness", "size"])
    return [
        {str(key): _plain(value) for key, value in record.items()}
        for record in some.to_dict(orient="records")
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def sentence(verdict: Mapping[str, Any]) -> str:
    """One line for a log and a terminal."""
    classes, total = verdict["classes"], verdict["values"]
    if verdict["empty"] == total:
        return "nothing was compared: no value is a number on either side."
    parts = [f"{n} {name}" for name, n in classes.items() if n]
    text = f"{total} values of {verdict['points']} points: {', '.join(parts)}"
    if verdict["empty"]:
        text += f"; {verdict['empty']} guarded values have no number on either side"
    if verdict["largest"]:
        name, size = max(verdict["largest"].items(), key=lambda item: item[1])
        text += f"; largest distance {size:.2g} ({name})"
    if not verdict["holds"] and verdict["worst"]:
        worst = verdict["worst"][0]
        where = f"point {worst['point_id']}, row {worst['row_id']}, {worst['measure']}"
        text += f"; first: {worst['class']} at {where} ({worst['a']} and {worst['b']})"
    return text + f" (dtype {verdict['dtype']})."
