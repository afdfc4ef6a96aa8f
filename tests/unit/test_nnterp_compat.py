"""The adaptation of nnterp works, and is still needed."""

import subprocess
import sys


def test_nnterp_imports_with_the_adaptation():
    found = "load_nnterp().StandardizedTransformer"
    code = f"from nnsweep.nnterp_compat import load_nnterp; print({found})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "StandardizedTransformer" in done.stdout


def test_nnterp_does_not_import_without_it():
    """When this fails, nnterp has caught up: delete nnsweep.nnterp_compat and import nnterp."""
    done = subprocess.run([sys.executable, "-c", "import nnterp"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "nnsight.intervention.tracing" in done.stderr
