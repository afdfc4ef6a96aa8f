"""Let nnterp 1.3.0 import beside nnsight 0.8.0.

nnterp asks for two names that nnsight 0.8 no longer has. `tests/unit/test_nnterp_compat.py`
fails on the day nnterp imports without this module, which is the day to delete it.
"""

import sys
import types


def load_nnterp() -> types.ModuleType:
    """Import nnterp, giving it the two names it misses; returns the module."""
    import nnsight
    from nnsight.intervention.envoy import Envoy

    package = "nnsight.intervention.tracing"
    if package not in sys.modules:
        tracing, names = types.ModuleType(package), types.ModuleType(f"{package}.globals")
        names.Object = nnsight.Object  # type: ignore[attr-defined]
        tracing.globals = names  # type: ignore[attr-defined]
        sys.modules[package], sys.modules[f"{package}.globals"] = tracing, names
    if not hasattr(Envoy, "_model"):
        Envoy._model = property(lambda envoy: envoy._module)
    import nnterp

    return nnterp
