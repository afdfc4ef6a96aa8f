"""A sweep that changes runs only what is new."""

import json

import pyarrow.compute as pc
import pyarrow.parquet as pq

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


def rows_in(project: Project, chunk: str) -> set[str]:
    """The keys of the rows in a chunk."""
    blocks = json.loads((project.results / f"chunks/{chunk}.json").read_text())["blocks"]
    return {key for block in blocks for key in block["row_keys"]}


def test_a_changed_prompt_runs_only_its_points(finished, copied):
    before = times(copied.parts())
    rows = [*ROWS[:-1], ("king", "It was dark when the {} sat on the", *ROWS[-1][2:])]
    copied.write_prompts(rows)
    (new,) = ran(copied.run(TARGET), copied)
    assert len(rows_in(copied, new)) == 1
    after = times(copied.parts())
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {new}
    old, now = by_key(pq.read_table(finished.values)), by_key(pq.read_table(copied.values))
    assert all(now[key] == old[key] for key in old if key[2] != "king")
    assert any(now[key] != old[key] for key in old if key[2] == "king")


def test_what_is_removed_runs_nothing_and_may_come_back(finished, copied):
    """A layer, a measure and two rows less; then all of it again."""
    whole = copied.values.read_bytes()
    measures = {"difference": SWEEP["measures"]["gap"]}
    copied.write_sweep(axes=SWEEP["axes"] | {"layer": [2, 0]}, measures=measures)
    copied.write_prompts(ROWS[1:-1])
    done = copied.run(TARGET)
    assert ran(done, copied) == set()
    assert done.jobs("run_chunk") == 0
    old, now = by_key(pq.read_table(finished.values)), pq.read_table(copied.values)
    assert now.num_rows == 2 * 2 * 4
    gap = list(SWEEP["measures"]).index("gap")
    assert all(
        row["difference"] == old[row["position"], row["layer"], row["row_id"]][gap]
        for row in now.to_pylist()
    )
    copied.write_sweep()
    copied.write_prompts(ROWS)
    assert ran(copied.run(TARGET), copied) == set()
    assert copied.values.read_bytes() == whole


def test_another_name_runs_nothing(finished, copied):
    """Snakemake takes what the other sweep has finished for its own, at other threads it does not.

    Nothing is taken away from the first sweep.
    """
    copied.write_sweep(name="other")
    done = copied.run(sweep="other")
    assert done.code == 0, done.out
    assert "Running chunk" not in done.out
    assert "3 finished parts of other sweeps serve here" in done.out + log_of(copied, "other")
    values = copied / "results/other/local/values.parquet"
    assert values.read_bytes() == finished.values.read_bytes()
    assert copied.run(sweep="other").idle
    assert copied.run().idle
    copied.write_sweep(name="third")
    assert copied.run("results/third/plan.json", sweep="third", threads=2).code == 0
    assert not list((copied / "results/third").glob("local/chunks/*"))


def log_of(project: Project, sweep: str) -> str:
    """What rule expand_sweep said."""
    return (project / f"logs/{sweep}/expand_sweep.log").read_text()


def planned(project: Project, **config) -> set[str]:
    """The chunks, null controls left out, that are still to be run."""
    assert project.run("results/tiny/plan.json", **config).code == 0
    return ran(project.run("-n", **config), project)


def test_larger_chunks_leave_finished_chunks_as_they_are(copied):
    assert planned(copied, chunk_passes=1000) == set()
