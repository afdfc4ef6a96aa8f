"""Prompt tables and sweeps that are unusual but say clearly what is wanted."""

import pyarrow.parquet as pq
import pytest

from nnsweep.errors import UserError
from workflow.inline import run_inline
from workflow.project import ROWS


def test_two_rows_of_the_same_content_are_both_measured_or_refused_at_once(
    copied, tmp_path, monkeypatch
):
    monkeypatch.chdir(copied.root)
    copied.write_prompts([*ROWS, ("france_again", *ROWS[0][1:])])
    try:
        run_inline(copied, tmp_path / "results")
    except UserError as error:
        assert "'france'" in str(error)
        assert "france_again" in str(error)
        return
    table = pq.read_table(tmp_path / "results" / "local" / "values.parquet")
    rows = {name: [] for name in ("france", "france_again")}
    for row in table.to_pylist():
        if row["row_id"] in rows:
            rows[row["row_id"]].append(row["gap"])
    assert rows["france"] == rows["france_again"]
    assert len(rows["france"]) == 6


def test_a_donor_that_nothing_reads_is_no_obstacle(copied, tmp_path, monkeypatch):
    monkeypatch.chdir(copied.root)
    copied.write_sweep(axes={}, writes=[])
    run_inline(copied, tmp_path / "results")
    table = pq.read_table(tmp_path / "results" / "local" / "values.parquet")
    assert table["status"].to_pylist().count("ok") == len(ROWS) - 1
    assert table["drift"].drop_null().to_pylist() == pytest.approx([0.0] * 5)
