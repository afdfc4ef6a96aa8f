"""The workflow passes the checks that the Workflow Catalog runs."""

from workflow.project import ROOT, command


def test_snakemake_lint(bare):
    done = command("snakemake", "--lint", cwd=bare.root)
    assert done.code == 0, done.out
    assert "Congratulations" in done.out, done.out


def test_snakefmt():
    done = command("snakefmt", "--check", "Snakefile", "workflow", cwd=ROOT)
    assert done.code == 0, done.out
