"""A sweep that changes runs only what is new."""

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from workflow.project import ROWS, SWEEP, Project, times

TARGET = "results/tiny/local/values.parquet"


def ran(done, project: Project) -> set[str]:
    """The chunks, null controls left out, that a run worked on."""
    assert done.code == 0, done.out
    controls = project.plan()["controls"]
    lines = [line for line in done.out.splitlines() if "Running chunk" in line]
    return {line.split("Running chunk ")[1].split()[0] for line in lines} - {controls}


def test_reordered_rows_run_nothing_and_a_new_layer_only_itself(finished, copied):
    before = times(copied.parts())
    copied.write_prompts(ROWS[::-1])
    assert ran(copied.run(TARGET), copied) == set()
    table = pq.read_table(copied.values)
    assert table["row_id"].to_pylist()[: len(ROWS)] == [row[0] for row in ROWS[::-1]]
    assert by_key(table) == by_key(pq.read_table(finished.values))

    copied.write_prompts(ROWS)
    axes = SWEEP["axes"] | {"layer": [0, 1, 2, 3]}
    copied.write_sweep(axes=axes)
    new = ran(copied.run(TARGET), copied)
    assert new == set(copied.parts()) - set(before)
    assert len(new) == 1
    assert {k: v for k, v in times(copied.parts()).items() if k in before} == before
    grown = pq.read_table(copied.values)
    assert grown.num_rows == 8 * len(ROWS)
    old = grown.filter(pc.less(grown["layer"], 3))
    assert old.equals(pq.read_table(finished.values))


def by_key(table):
    """(position, layer, row) -> measures."""
    measures = list(SWEEP["measures"])
    return {
        (row["position"], row["layer"], row["row_id"]): [row[name] for name in measures]
        for row in table.to_pylist()
    }


def test_a_changed_prompt_runs_only_the_chunks_of_its_length(finished, copied):
    before = times(copied.parts())
    rows = [*ROWS[:-1], ("king", "It was dark when the {} sat on the", *ROWS[-1][2:])]
    copied.write_prompts(rows)
    new = ran(copied.run(TARGET), copied)
    assert len(new) == 1
    kept = set(copied.parts()) & set(before)
    assert len(kept) == 1
    assert not kept & new
    after = times(copied.parts())
    assert all(after[name] == before[name] for name in kept)
    old, now = by_key(pq.read_table(finished.values)), by_key(pq.read_table(copied.values))
    assert all(now[key] == old[key] for key in old if key[2] not in ("king", "dog"))
    assert all(now[key] == pytest.approx(old[key], abs=1e-4) for key in old if key[2] == "dog")
    assert any(now[key] != old[key] for key in old if key[2] == "king")


def planned(project: Project, **config) -> set[str]:
    """The chunks, null controls left out, that are still to be run."""
    assert project.run("results/tiny/plan.json", **config).code == 0
    return ran(project.run("-n", **config), project)


def test_larger_chunks_leave_finished_chunks_as_they_are(copied):
    assert planned(copied, chunk_passes=1000) == set()
