"""What all tests share: one thread, repeatable examples, the real model, opened engines."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: threads that wait for work must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "nnsweep",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("nnsweep")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share a server, a run or a model stay in one worker."""
    from groups import Groups

    return Groups(config, log)


REAL = {"id": "smollm2-135m", "revision": None, "dtype": "float32", "attention": "sdpa"}


@pytest.fixture(scope="session")
def real_model() -> dict[str, Any]:
    """The prepared default model: id, revision, shape."""
    from nnsweep.log import quiet_libraries
    from nnsweep.models import prepare

    quiet_libraries()
    return prepare(REAL)


@pytest.fixture(scope="session")
def tokenizer(real_model: dict[str, Any]) -> Any:
    """The real model's tokenizer."""
    from nnsweep.models import load_tokenizer

    return load_tokenizer(real_model)


@pytest.fixture(scope="session")
def tiny_model(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A factory of prepared tiny models: family, attention, dtype, changes of the config."""
    from nnsweep.models import prepare
    from tiny import attention_of, save_tiny

    made: dict[str, dict[str, Any]] = {}

    def build(
        family: str, attention: str | None = None, dtype: str = "float32", **changes: Any
    ) -> dict[str, Any]:
        how = {"attention": attention or attention_of(family), "dtype": dtype}
        key = repr((family, how, sorted(changes.items())))
        if key not in made:
            folder = save_tiny(family, tmp_path_factory.mktemp(family), tokenizer, **changes)
            made[key] = prepare({"id": str(folder), "revision": None, **how})
        return made[key]

    return build


@pytest.fixture(scope="session")
def opened() -> Callable[[str, Any], Any]:
    """A factory of engines by name and model; each is opened once."""
    from nnsweep.engines.local import LocalEngine
    from nnsweep.engines.reference import ReferenceEngine

    kinds = {"local": LocalEngine, "reference": ReferenceEngine}
    engines: dict[str, Any] = {}

    def get(name: str, model: dict[str, Any]) -> Any:
        key = repr((name, {k: v for k, v in model.items() if k != "shape"}))
        if key not in engines:
            engines[key] = kinds[name](model, "cpu", 1)
        return engines[key]

    return get


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).parents[1]
