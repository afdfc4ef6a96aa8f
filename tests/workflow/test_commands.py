"""What the commands say to a person."""

import pytest

from workflow.project import Done, Project, command

SWEEP = "config/sweeps/tiny.yaml"


def nnsweep(project: Project, *words: str) -> Done:
    """Run the command in the project's folder."""
    return command("nnsweep", *words, cwd=project.root, env={"HF_HUB_OFFLINE": "1"})


def test_validate_says_what_a_sweep_is(finished):
    done = nnsweep(finished, "validate", SWEEP)
    assert done.code == 0
    assert "valid. Prompt rows: 6. Axes: position: 2 values, layer: 3 values" in done.out


def test_explain_shows_sizes_and_tokens(finished):
    done = nnsweep(finished, "explain", SWEEP, "--rows", "1")
    assert done.code == 0, done.out
    for words in (
        "points          6 over axes ['position', 'layer']",
        "prompt rows     5 usable of 6",
        "values          90",
        "chunks          1 chunk of ",
        " null controls",
        "(a loop without reuse: 24)",
        "row france (ok)",
        "text   |The| capital| of| France| is|",
        "position subject: [3] | France|  <-  donor [3] | Germany|",
        "measured after [4] | is|",
        "answer target: 'Berlin' -> [",
    ):
        assert words in done.out, words
    exact = nnsweep(finished, "explain", SWEEP, "--recompute", "exact")
    assert "not reused      tokens before a write (recompute: exact)" in exact.out


def test_explain_says_what_a_server_would_get(finished):
    done = nnsweep(finished, "explain", SWEEP, "--engine", "ndif")
    assert done.code == 0, done.out
    assert "requests        2 and one trial session (one trace a point: 6)" in done.out


def test_model_lists_every_site(finished):
    done = nnsweep(finished, "model", "model")
    assert done.code == 0, done.out
    sites = {line.split()[0]: line.split() for line in done.out.splitlines() if " of " in line}
    assert sites["k"][1:6] == ["0..3", "0..1", "16", "output", "of"]
    assert sites["z"][1:4] == ["0..3", "0..3", "16"]
    assert sites["resid_post"][1:4] == ["0..3", "-", "64"]


def test_show_says_where_the_extremes_are(finished):
    done = nnsweep(finished, "show", "results/tiny/local")
    assert done.code == 0, done.out
    assert "6 points, 30 value rows, 6 excluded, 0 in error" in done.out
    assert "gap: largest" in done.out
    assert "null controls: 4 hold" in done.out


def test_show_says_that_the_sweep_has_changed(copied):
    copied.write_sweep(axes={"position": ["last"], "layer": [0, 1]})
    assert copied.run("results/tiny/plan.json").code == 0
    done = nnsweep(copied, "show", "results/tiny/local")
    assert done.out.startswith("The sweep has changed since this run.")


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"layer": [0, 0], "position": ["last"]}, "axes.layer: 0 is given twice"),
        ({"layer": [0.5], "position": ["last"]}, "0.5 is not a whole number, as $layer must be"),
        ({"layer": [], "position": ["last"]}, "axes.layer: no values"),
    ],
)
def test_validate_checks_axes_without_a_model(copied, axes, said):
    copied.write_sweep(axes=axes)
    done = nnsweep(copied, "validate", SWEEP)
    assert done.code == 2
    assert said in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "results/tiny/ndif"), "no finished run here. Run snakemake first."),
        (("explain", SWEEP, "--recompute", "quick"), "recompute: got 'quick', expected 'fast'"),
        (("model", "model", "--attention", "flash"), "attention: got 'flash', expected 'sdpa'"),
        (("validate", "config/sweeps/none.yaml"), "none.yaml: there is no such file. Sweeps in "),
        (("explain", "config/sweeps/tinny.yaml"), "there is no such file. Did you mean tiny?"),
    ],
)
def test_mistakes_are_one_line(finished, words, said):
    done = nnsweep(finished, *words)
    assert done.code == 2
    assert len(done.out.strip().splitlines()) == 1
    assert said in done.out


def test_gc_leaves_a_finished_run_finished(copied):
    """Whatever the plan needs stays, Snakemake's own files included."""
    earlier = copied.results / "chunks/0123456789abcdef.json"
    earlier.write_text("{}")
    done = nnsweep(copied, "gc", "--delete")
    assert done.code == 0, done.out
    assert "in 1 leftovers" in done.out
    assert not earlier.exists()
    assert copied.run().idle
