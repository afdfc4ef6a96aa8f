"""Prompt tables and sweeps that are unusual but say clearly what is wanted."""

import pyarrow.parquet as pq
import pytest

from workflow.inline import run_inline
from workflow.project import ROWS


def test_a_second_row_of_the_same_content_is_left_out_with_its_reason(
    copied, tmp_path, monkeypatch
):
    """To every engine the two are one row: it would count twice in every mean."""
    monkeypatch.chdir(copied.root)
    copied.write_prompts([*ROWS, ("again", *ROWS[0][1:])])
    run_inline(copied, tmp_path / "results")
    table = pq.read_table(tmp_path / "results" / "local" / "values.parquet").to_pylist()
    twins = [row for row in table if row["row_id"] == "again"]
    assert len(twins) == 6
    assert all(row["status"] == "excluded" and "row france" in row["reason"] for row in twins)
    first = [row for row in table if row["row_id"] == "france"]
    assert all(row["status"] == "ok" for row in first)


def test_a_donor_that_nothing_reads_is_no_obstacle(copied, tmp_path, monkeypatch):
    monkeypatch.chdir(copied.root)
    copied.write_sweep(axes={}, writes=[])
    run_inline(copied, tmp_path / "results")
    table = pq.read_table(tmp_path / "results" / "local" / "values.parquet")
    assert table["status"].to_pylist().count("ok") == len(ROWS) - 1
    assert table["drift"].drop_null().to_pylist() == pytest.approx([0.0] * 5)
