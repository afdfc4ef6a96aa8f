"""Results on a file system that is slow, as a shared one can be."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from workflow.project import Project, digest

TARGET = "results/tiny/local/values.parquet"
RATES = ("--read-rate=100k", "--write-rate=20k")
"""A part of the tiny sweep takes about a second to be written."""


@pytest.fixture
def slow(copied: Project) -> Iterator[Project]:
    """The project without its parts and tables, its results behind a slow mount."""
    for path in ("local", "chunks"):
        shutil.rmtree(copied.results / path)
    (copied.results / "plan.json").unlink()
    real, place = copied / "real", copied / "results"
    place.rename(real)
    place.mkdir()
    mount(real, place)
    yield copied
    subprocess.run(["umount", str(place)], check=True)


def mount(real: Path, place: Path) -> None:
    """Mount with bindfs, where that can be."""
    if shutil.which("bindfs") is None:
        missing = "bindfs is not installed: apt-get install bindfs"
        pytest.fail(missing) if "NNSWEEP_CI" in os.environ else pytest.skip(missing)
    done = subprocess.run(
        ["bindfs", *RATES, str(real), str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no FUSE file system may be mounted here: {done.stderr.strip()}")


def test_a_slow_disk_costs_time_and_no_value(finished: Project, slow: Project) -> None:
    written = time.perf_counter()
    (slow / "results/probe").write_bytes(b"0" * 40_000)
    assert time.perf_counter() - written > 1, "the mount is as fast as the disk"
    done = slow.run(TARGET)
    assert done.code == 0, done.out
    assert digest(slow / TARGET) == digest(finished.values)
    assert not list((slow / "real").rglob(".*.part"))
    assert slow.run(TARGET).idle
