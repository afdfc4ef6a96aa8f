"""The adaptation of nnterp: needed still, and enough."""

import os
import subprocess
import sys


def run(code, repository):
    env = os.environ | {"PYTHONPATH": str(repository / "src")}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_nnterp_does_not_import_alone_and_does_with_the_adaptation(repository):
    """The day the first half fails is the day to delete `nnsweep.nnterp_compat`."""
    alone = run("import nnterp", repository)
    assert alone.returncode != 0
    assert "nnsight.intervention.tracing" in alone.stderr
    code = "from nnsweep.nnterp_compat import load_nnterp; load_nnterp().StandardizedTransformer"
    adapted = run(code, repository)
    assert adapted.returncode == 0, adapted.stderr
