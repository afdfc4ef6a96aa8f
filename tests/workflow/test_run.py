"""One sweep from end to end: files, schemas, order, and bytes that do not follow the way taken."""

import json
import re
import socket
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workflow.inline import run_inline
from workflow.project import ROWS, SWEEP, Project, digest

AXES = [("position", pa.string()), ("layer", pa.int32())]
MEASURES = list(SWEEP["measures"])
VALUES = pa.schema(
    [("point_id", pa.string()), *AXES]
    + [(name, pa.string()) for name in ("row_id", "status", "reason")]
    + [(name, pa.float32()) for name in MEASURES]
)
SUMMARY = pa.schema(
    [("point_id", pa.string()), *AXES, ("measure", pa.string()), ("n", pa.int32())]
    + [(name, pa.float64()) for name in ("mean", "std", "ci_low", "ci_high")]
)
FILES = ["sweep.json", "prompts.parquet", "points.parquet"] + [
    f"local/{name}"
    for name in (
        "values.parquet",
        "summary.parquet",
        "sessions.parquet",
        "run.json",
        *(f"figures/{measure}.svg" for measure in MEASURES),
    )
]
RECORD = {
    *("sweep", "engine", "model", "versions", "device", "dtype", "attention", "threads"),
    *("settings", "digests", "points", "values", "controls", "forward_passes"),
    *("forward_passes_naive", "peak_memory_bytes", "seconds"),
}


def test_all_promised_files_are_there(finished):
    missing = [name for name in FILES if not (finished.results / name).is_file()]
    assert not missing
    left = [path for path in finished.root.rglob("*.part") if path.is_file()]
    assert not left


def test_tables_have_exactly_the_published_columns(finished):
    assert pq.read_schema(finished.values).equals(VALUES, check_metadata=True)
    summary = finished.results / "local" / "summary.parquet"
    assert pq.read_schema(summary).equals(SUMMARY, check_metadata=True)


def test_rows_stand_in_the_order_of_the_sweep_then_of_the_prompts(finished):
    table = pq.read_table(finished.values).to_pylist()
    axes = SWEEP["axes"]
    expected = list(product(axes["position"], axes["layer"], [row[0] for row in ROWS]))
    assert [(row["position"], row["layer"], row["row_id"]) for row in table] == expected
    summary = pq.read_table(finished.results / "local" / "summary.parquet").to_pylist()
    wanted = list(product(axes["position"], axes["layer"], MEASURES))
    assert [(row["position"], row["layer"], row["measure"]) for row in summary] == wanted


def test_an_unusable_row_is_kept_with_its_reason(finished):
    table = pq.read_table(finished.values).to_pylist()
    excluded = [row for row in table if row["status"] == "excluded"]
    assert {row["row_id"] for row in excluded} == {"iceland"}
    assert len(excluded) == 6
    assert all("Reykjavik" in row["reason"] and "tokens" in row["reason"] for row in excluded)
    assert all(row[name] is None for row in excluded for name in MEASURES)
    used = [row for row in table if row["row_id"] != "iceland"]
    assert all(row["status"] == "ok" and row["reason"] is None for row in used)
    assert all(row[name] is not None for row in used for name in MEASURES)
    summary = pq.read_table(finished.results / "local" / "summary.parquet")
    assert set(summary["n"].to_pylist()) == {len(ROWS) - 1}


def test_run_record_says_where_the_numbers_come_from(finished):
    record = json.loads((finished.results / "local" / "run.json").read_text())
    assert set(record) >= RECORD
    assert record["values"] == {"ok": 30, "excluded": 6, "error": 0}
    assert record["threads"] == 1
    assert {"python", "torch", "nnsight", "transformers", "nnsweep"} <= set(record["versions"])
    assert {"sweep", "prompts", "points", "code"} <= set(record["digests"])
    controls = record["controls"]
    assert {"self_patch_0", "self_patch_1", "zero_steer", "full_donor"} == set(controls)
    assert all(control["holds"] and control["rows"] for control in controls.values())


def test_tables_name_no_host_user_path_or_time(finished):
    machine = [socket.gethostname(), Path.home().owner(), str(finished.root), str(Path.home())]
    for name in ("values.parquet", "summary.parquet"):
        path = finished.results / "local" / name
        words = _words(path)
        for text in [*machine, "local", "reference"]:
            assert not re.search(rf"\b{re.escape(text)}\b", words), f"{name} holds {text!r}"
        assert not re.search(r"\d\d:\d\d:\d\d|20\d\d-\d\d", words)
        assert not any(word.startswith("/") for word in words.split())
        assert str(finished.root).encode() not in path.read_bytes()


def _words(path: Path) -> str:
    """Everything in a table that can be read as text: cells, column names, file metadata."""
    table = pq.read_table(path)
    texts = [column for column in table.columns if column.type == pa.string()]
    cells = [str(cell) for column in texts for cell in column.to_pylist()]
    file = pq.ParquetFile(path)
    assert set(file.metadata.metadata or {}) <= {b"ARROW:schema"}
    assert not table.schema.metadata
    assert not any(field.metadata for field in table.schema)
    return "\n".join([*cells, *table.column_names, file.metadata.created_by])


def test_a_second_run_and_a_moved_folder_find_nothing_to_do(copied, tmp_path):
    assert copied.run().idle
    moved = tmp_path / "elsewhere" / "deeper"
    moved.parent.mkdir()
    copied.root.rename(moved)
    done = Project(moved).run()
    assert done.idle, done.out


def test_one_core_and_one_large_chunk_give_the_same_bytes(finished, copied):
    """From the plan on: what was decided before stays, what ran is thrown away."""
    copied.unplan()
    done = copied.run(cores=1, chunk_passes=1000)
    assert done.code == 0, done.out
    assert len(copied.plan()["chunks"]) == 1
    assert len(finished.plan()["chunks"]) == 2
    for name in FILES:
        if name not in ("local/run.json", "local/sessions.parquet"):
            assert digest(copied.results / name) == digest(finished.results / name), name


@pytest.mark.parametrize("chunk_passes", [1, 7])
def test_chunk_size_moves_no_bit(finished, tmp_path, monkeypatch, chunk_passes):
    monkeypatch.chdir(finished.root)
    results = tmp_path / "results/tiny"
    plan = run_inline(finished, results, chunk_passes=chunk_passes)
    assert len(plan.chunks) == -(-12 // chunk_passes)
    assert digest(results / "local" / "values.parquet") == digest(finished.values)
