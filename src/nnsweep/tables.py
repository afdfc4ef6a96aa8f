"""Arrow schemas, atomic deterministic writes, digests and provenance.

A file written here either holds everything or does not exist, and holds the same bytes
whenever it holds the same values: no pandas metadata, no time, no host, one row group size.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nnsweep.errors import NnsweepError

ROW_GROUP = 1 << 17

AXIS_TYPES = {"index": pa.int32(), "string": pa.string(), "number": pa.float64()}
"""Arrow type of an axis column, by the kind of axis (see `nnsweep.sweep.axis_kinds`)."""

SUMMARY_COLUMNS = [
    ("measure", pa.string()),
    ("n", pa.int32()),
    ("mean", pa.float64()),
    ("std", pa.float64()),
    ("ci_low", pa.float64()),
    ("ci_high", pa.float64()),
]

SESSIONS = pa.schema(
    [
        ("chunk_id", pa.string()),
        ("engine", pa.string()),
        ("session", pa.int32()),
        ("points", pa.int32()),
        ("rows", pa.int32()),
        ("passes", pa.int32()),
        ("attempts", pa.int32()),
        ("payload_bytes", pa.int64()),
        ("result_bytes", pa.int64()),
        ("seconds_queued", pa.float64()),
        ("seconds_running", pa.float64()),
        ("seconds_downloading", pa.float64()),
        ("dtype", pa.string()),
        ("server_versions", pa.string()),
    ]
)


NUMBERS = {"id": pa.int32(), "log_prob": pa.float32(), "entropy": pa.float32()}


def tokens_type(fields: Sequence[str]) -> pa.DataType:
    """Arrow type of a list of tokens: id, text and some numbers of each."""
    named = [("id", pa.int32()), ("token", pa.string())]
    return pa.list_(pa.struct(named + [(f, NUMBERS[f]) for f in fields if f != "id"]))


def part_schema(measures: Sequence[str]) -> pa.Schema:
    """Schema of one chunk's values: keys, status, one float32 column a measure."""
    keys = [("point_key", pa.string()), ("row_key", pa.string())]
    state = [("status", pa.string()), ("reason", pa.string())]
    return pa.schema(keys + state + [(name, pa.float32()) for name in measures])


def points_schema(axes: Mapping[str, str]) -> pa.Schema:
    """Schema of points.parquet: the ids, one typed column an axis, the resolved writes.

    `inert_rows` says on how many rows the point cannot differ from the clean run.
    """
    columns = [(name, AXIS_TYPES[kind]) for name, kind in axes.items()]
    ids = [("point_id", pa.string()), ("point_key", pa.string())]
    return pa.schema(ids + columns + [("writes", pa.string()), ("inert_rows", pa.int32())])


def values_schema(
    axes: Mapping[str, str],
    measures: Sequence[str],
    lists: Mapping[str, Sequence[str]] | None = None,
    text: bool = False,
) -> pa.Schema:
    """Schema of values.parquet (one row per point and prompt row).

    Args:
        axes: Axis -> kind.
        measures: Columns of numbers, and of those in `lists`, tokens.
        lists: Column -> what there is of each of its tokens.
        text: Whether there is a column of generated text.
    """
    lists = lists or {}
    columns = [(name, AXIS_TYPES[kind]) for name, kind in axes.items()]
    state = [("row_id", pa.string()), ("status", pa.string()), ("reason", pa.string())]
    found = [(n, tokens_type(lists[n]) if n in lists else pa.float32()) for n in measures]
    found += [("text", pa.string())] if text else []
    return pa.schema([("point_id", pa.string()), *columns, *state, *found])


def read_values(path: Path, axes: Mapping[str, str], measures: Collection[str]) -> pa.Table:
    """Read values.parquet of a sweep with these axes and measures.

    Raises:
        NnsweepError: the file is unreadable or belongs to another sweep.
    """
    table = read_table(path)
    names = table.schema.names[4 + len(axes) :]
    head = table.schema.names[: 4 + len(axes)]
    fits = table.select(head).schema.equals(values_schema(axes, []))
    if not fits or list(dict.fromkeys(map(measure_of, names))) != list(measures):
        raise NnsweepError(f"{path}: its columns are not those asked for. Delete it and run again.")
    return table


def measure_of(column: str) -> str:
    """The measure that a column belongs to: NAME, or NAME.LAYER of a lens."""
    return column.partition(".")[0]


def number_columns(table: pa.Table, axes: Mapping[str, str]) -> list[str]:
    """Columns of values.parquet that hold numbers and can be averaged."""
    names = table.schema.names[4 + len(axes) :]
    return [name for name in names if table.schema.field(name).type == pa.float32()]


def summary_schema(axes: Mapping[str, str]) -> pa.Schema:
    """Schema of summary.parquet (one row per point and measure)."""
    columns = [(name, AXIS_TYPES[kind]) for name, kind in axes.items()]
    return pa.schema([("point_id", pa.string()), *columns, *SUMMARY_COLUMNS])


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits that name a plain value, whatever its key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Write beside `path`, flush to disk and rename, so that no half-written file appears.

    Raises:
        NnsweepError: the file cannot be written, for want of room or of rights.
    """
    try:
        _write_atomically(path, write)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise NnsweepError(f"{path}: could not be written ({why}). Mend that and run again.")


def _write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        write(part)
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        part.chmod(0o666 & ~_umask())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_table(path: Path, table: pa.Table, schema: pa.Schema) -> None:
    """Write `table` with exactly `schema`; raise when its columns do not fit."""
    if table.schema.names != schema.names:
        raise NnsweepError(f"{path.name}: columns {table.schema.names} are not {schema.names}")
    clean = table.cast(schema).replace_schema_metadata(None)

    def write(part: Path) -> None:
        pq.write_table(clean, part, row_group_size=ROW_GROUP, compression="zstd")

    write_atomically(path, write)


def read_table(path: Path, schema: pa.Schema | None = None) -> pa.Table:
    """Read a table; with `schema`, refuse a file with other columns or types.

    Raises:
        NnsweepError: the file is unreadable or has another schema.
    """
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowInvalid) as error:
        raise NnsweepError(f"{path}: not a readable table ({error}). Delete it and run again.")
    if schema is not None and not table.schema.equals(schema):
        raise NnsweepError(f"{path}: its columns are not those asked for. Delete it and run again.")
    return table


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8."""

    def write(part: Path) -> None:
        part.write_text(text, encoding="utf-8")

    write_atomically(path, write)


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write a plain value as JSON with sorted keys."""
    text = json.dumps(value, indent=indent, sort_keys=True, allow_nan=False, ensure_ascii=False)
    write_text(path, text + "\n")


def read_json(path: Path) -> Any:
    """Read JSON; a file that is not JSON is named in one line."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NnsweepError(f"{path}: not readable ({error}). Delete it and run again.")
