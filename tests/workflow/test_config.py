"""Values given on the command line: the right type, or refused naming the key and the value."""

import shutil

import pytest

from workflow.forks import dry_runs
from workflow.project import Done, copy_workflow, times

REFUSED = {
    # Cases that broke systems of this kind: what Snakemake makes of each is not what it looks like.
    "layers=[0,1,2]": ("layers", "0"),
    "remote=true": ("remote", "true"),
    "engine=NDIF": ("engine", "NDIF"),
    "engnie=ndif": ("engnie", "ndif", "did you mean 'engine'"),
    "seed=007": ("seed", "7"),
    "revision=1e5": ("revision", "100000.0"),
    "chunk_size=0": ("chunk_size", "0"),
    "alpha=nan": ("alpha", "nan"),
    "engine=": ("engine", "None"),
    "sweep={layers: [7]}": ("sweep", "layers", "7"),
    # The same kinds on keys that exist.
    "chunk_passes=0": ("chunk_passes", "0", "1"),
    "batch_rows=1e2": ("batch_rows", "100.0"),
    "threads=true": ("threads", "true"),
    "sweep=007": ("sweep", "7"),
    "sweep=nosuch": ("config/sweeps/nosuch.yaml",),
    "sweep=../secret": ("sweep", "../secret"),
    "bootstrap={confidence: 2}": ("bootstrap.confidence", "2"),
    "bootstrap={resamples: many}": ("bootstrap.resamples", "many"),
    "bootstrap={resample: 9}": ("bootstrap.resample", "9", "did you mean 'resamples'"),
}
ACCEPTED = [
    *("engine=reference", "recompute=exact"),
    # Snakemake gives nested numbers as text.
    *("bootstrap={confidence: 0.9}", "parity={points: 5}"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory):
    """A dry run with each pair, and the folder they ran in."""
    clone = copy_workflow(tmp_path_factory.mktemp("config") / "project")
    pairs = [*REFUSED, *ACCEPTED]
    found = dry_runs(clone.root, [("--config", pair) for pair in pairs])
    return clone, dict(zip(pairs, found, strict=True))


@pytest.mark.parametrize(("pair", "texts"), REFUSED.items(), ids=REFUSED)
def test_refused_naming_key_and_value(outcomes, pair, texts):
    message = refusal(outcomes[1][pair])
    for text in texts:
        assert text in message


def refusal(done: Done) -> str:
    """The line that says why nothing was planned."""
    assert done.code != 0
    lines = done.out.splitlines()
    (place,) = [i for i, line in enumerate(lines) if line.startswith("WorkflowError")]
    assert "Traceback" not in done.out
    assert done.jobs("total") == 0
    return lines[place + 1]


@pytest.mark.parametrize("pair", ACCEPTED)
def test_accepted(outcomes, pair):
    done = outcomes[1][pair]
    assert done.code == 0, done.out
    assert done.jobs("run_chunk") + done.jobs("expand_sweep") > 0


def test_nothing_was_written(outcomes):
    clone, _ = outcomes
    for name in ("results", "logs", "benchmarks"):
        assert not (clone / name).exists()


def test_accepted_values_reach_their_rules(copied):
    """Each value changes the jobs that depend on it, and only those."""
    path = copied / "config/config.yaml"
    shipped = path.read_text()
    path.write_text(shipped + "\nbootstrap: {confidence: 0.9}\n")
    interval = copied.run("-n")
    assert interval.jobs("summarize") == 1, interval.out
    assert interval.jobs("merge_chunks") == interval.jobs("run_chunk") == 0
    path.write_text(shipped)
    assert copied.run("-n").idle


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"threads": 2}, "threads: 3 finished chunks in results/tiny/local/chunks were made with "),
        ({"device": "cuda"}, "device: 3 finished chunks in results/tiny/local/chunks were made "),
        ({"threads": 2, "engine": "ndif"}, "threads: 3 finished chunks in results/tiny/local"),
    ],
)
@pytest.mark.parametrize("how", [(), ("-n",)])
def test_what_was_made_otherwise_is_neither_removed_nor_mixed_in(copied, given, said, how):
    """Snakemake would remove every finished chunk, and a table hold numbers of two machines."""
    before = times(copied.parts())
    done = copied.run(*how, env={"CUDA_VISIBLE_DEVICES": ""}, **given)
    assert done.code != 0
    assert said in done.out
    assert times(copied.parts()) == before
    assert copied.run().idle
    assert copied.run("-n", device="cpu").idle


def test_a_part_that_a_killed_run_left_is_not_mixed_with_others(copied):
    """Snakemake has not noted it, so no change of `threads` would ever run it again."""
    shutil.rmtree(copied / ".snakemake")
    assert "were made with threads=1, not 2" in copied.run("-n", threads=2).out


def test_a_gpu_that_is_not_there_costs_one_line(copied):
    shutil.rmtree(copied / "results/tiny/local")
    done = copied.run(env={"CUDA_VISIBLE_DEVICES": ""}, device="cuda")
    assert done.code != 0
    (line,) = [line for line in done.out.splitlines() if line.startswith("nnsweep: ")]
    assert line == "nnsweep: device: cuda was asked for, torch sees no GPU here. Use auto or cpu."
    assert "Running chunk" not in done.out
