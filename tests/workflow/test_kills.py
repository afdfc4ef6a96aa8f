"""Kills at every moment, full disks, clocks that jump: nothing finished is lost or doubled."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from workflow.project import BIN, Project, digest, environment, finish, times

TARGET = "results/tiny/local/values.parquet"
CHUNKS = "results/tiny/local/chunks"
YEAR = 365 * 24 * 3600

HOOK = '''
"""SIGKILL to the job of a chunk at one moment; no other process comes there."""
import importlib.util
import os
import signal
import sys

fsync, replace = os.fsync, os.replace
ENGINE, AT = "nnsweep.engines.local", os.environ["KILL_AT"]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dying_fsync(handle):
    path = os.readlink(f"/proc/self/fd/{handle}")
    if AT == "writing the part" and "/local/chunks/" in path and ".parquet" in path:
        die()
    fsync(handle)


def dying_replace(source, target, **options):
    replace(source, target, **options)
    ending = {"after the facts": ".json", "after the part": ".parquet"}.get(AT)
    if ending and "/local/chunks/" in str(target) and str(target).endswith(ending):
        die()


class Finder:
    """Meets the engine's module when it is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != ENGINE:
            return None
        if AT == "before the model opens":
            die()
        sys.meta_path.remove(Finder)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            run = module.LocalEngine.run
            module.LocalEngine.run = lambda self, chunk, report: run(self, chunk, lambda _: die())

        spec.loader.exec_module = exec_module
        return spec


os.fsync, os.replace = dying_fsync, dying_replace
if AT in ("before the model opens", "during passes"):
    sys.meta_path.insert(0, Finder)
'''
MOMENTS = [
    "before the model opens",
    "during passes",
    "after the facts",
    "writing the part",
    "after the part",
]


@pytest.fixture
def dying(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """The environment in which a chunk's job dies at one moment."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join(filter(None, [str(hook), os.environ.get("PYTHONPATH")]))
    return lambda moment: {"PYTHONPATH": path, "KILL_AT": moment}


@pytest.fixture
def half(copied: Project) -> tuple[Project, str, str]:
    """A run that has yet to work on its second chunk: (project, first chunk, second chunk)."""
    first, second = copied.parts()
    for ending in (".parquet", ".json"):
        copied.parts()[second].with_suffix(ending).unlink()
    copied.values.unlink()
    (copied / f"logs/tiny/run_chunk/local/{second}.log").unlink()
    return copied, first, second


def resumes(project: Project, finished: Project, kept: dict[str, int], *chunks: int) -> None:
    """The next run works on so many chunks, leaves the others, and ends with the same bytes."""
    done = project.run(TARGET)
    assert done.code == 0, done.out
    assert done.jobs("run_chunk") in chunks
    assert digest(project.values) == digest(finished.values)
    assert {name: times(project.parts())[name] for name in kept} == kept
    assert project.run(TARGET).idle


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_job_killed_at_any_moment_loses_its_own_chunk_alone(finished, half, dying, moment):
    project, first, second = half
    kept = times({first: project.parts()[first]})
    done = project.run(TARGET, env=dying(moment))
    assert done.code != 0
    assert "Error in rule run_chunk" in done.out
    assert not project.values.exists()
    assert not project.parts()[second].exists(), "Snakemake removes what a failed job wrote"
    resumes(project, finished, kept, 1)


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 900
    while not true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_snakemake_killed_alone_says_how_to_go_on(finished, half):
    """Its job lives on, and may finish before, while or after the next run works on the chunk."""
    project, first, second = half
    kept = times({first: project.parts()[first]})
    process = project.start(TARGET)
    wait_until((project / f"logs/tiny/run_chunk/local/{second}.log").exists, process)
    orphans = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    assert finish(process).code == -signal.SIGKILL
    locked = project.run(TARGET)
    assert locked.code != 0
    assert "--unlock" in locked.out
    assert project.run("--unlock").code == 0
    resumes(project, finished, kept, 0, 1)
    psutil.wait_procs(orphans, timeout=600)
    assert digest(project.values) == digest(finished.values)


def test_a_second_snakemake_in_the_folder_is_refused_and_disturbs_nothing(finished, half):
    project, _, second = half
    process = project.start(TARGET)
    wait_until((project / f"logs/tiny/run_chunk/local/{second}.log").exists, process)
    other = project.run(TARGET)
    assert other.code != 0
    assert "no other Snakemake process" in other.out
    assert "--unlock" in other.out
    done = finish(process)
    assert done.code == 0, done.out
    assert digest(project.values) == digest(finished.values)


# --- disks that are full --------------------------------------------------------------------------


@pytest.fixture
def small_disk(half) -> Iterator[Path]:
    """The folder of the parts on a disk of its own with one free page.

    Only root may mount one; a limit on the size of files, which anybody may set, is tested too.
    """
    folder = half[0] / CHUNKS
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    stamps = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "nnsweep-test", str(folder)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"no disk of its own can be mounted here: {mounted.stderr.strip()}")
    try:
        for name, content in kept.items():
            (folder / name).write_bytes(content)
            os.utime(folder / name, ns=(stamps[name], stamps[name]))
        free = os.statvfs(folder)
        (folder / "filler").write_bytes(bytes((free.f_bavail - 1) * free.f_bsize))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(finished, half, small_disk):
    project, first, second = half
    kept = times({first: project.parts()[first]})
    done = project.run(TARGET)
    assert done.code != 0
    (line,) = [line for line in done.out.splitlines() if line.startswith("nnsweep: ")]
    assert second in line
    assert "No space left" in line
    assert "Traceback" not in done.out
    assert not project.parts()[second].exists()
    assert not list(small_disk.glob(".*")), "half-written files are removed"
    (small_disk / "filler").unlink()
    resumes(project, finished, kept, 1)


def test_a_file_that_may_not_grow_is_one_line(half, tmp_path):
    """The second way to a full disk, which needs no rights: no file over a few bytes."""
    project, _, second = half
    chunk = project.results / f"chunks/{second}.json"
    process = subprocess.Popen(
        [str(BIN / "nnsweep"), "run-chunk", str(chunk), str(tmp_path / "out"), "--threads", "1"],
        cwd=project.root,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
    )
    done = finish(process)
    assert done.code == 1, done.out
    (line,) = [line for line in done.out.splitlines() if line.startswith("nnsweep: ")]
    assert f"{second}.json" in line
    assert "File too large" in line
    assert "run again" in line
    assert not list((tmp_path / "out").iterdir())


# --- files that are damaged -----------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".json", ".parquet"])
def test_a_damaged_file_is_named_and_made_anew(finished, copied, ending):
    first, second = copied.parts()
    path = copied.parts()[first].with_suffix(ending)
    kept = times({second: copied.parts()[second]})
    for left in (60, 0):
        path.write_bytes(path.read_bytes()[:left])
        done = copied.run(TARGET)
        assert done.code != 0
        (line,) = [line for line in done.out.splitlines() if line.startswith("nnsweep: ")]
        assert str(path.relative_to(copied.root)) in line
        assert "Delete it and run again" in line
        assert "Traceback" not in done.out
    path.unlink()
    resumes(copied, finished, kept, 1)


# --- clocks that jump -----------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [-YEAR, YEAR])
@pytest.mark.parametrize(
    "which",
    [
        "results/tiny/local/chunks/*.parquet",
        "results/tiny/*.*",
        "config/prompts/tiny.csv",
        "results/tiny/**/*.*",
    ],
)
def test_no_chunk_runs_again_when_the_clock_has_jumped(finished, copied, which, shift):
    """Tables may be written again: they cost nothing."""
    moved = [path for path in copied.root.glob(which) if path.is_file()]
    assert moved
    for path in moved:
        stamp = path.stat().st_mtime + shift
        os.utime(path, (stamp, stamp))
    before = times(copied.parts())
    done = copied.run(TARGET)
    assert done.code == 0, done.out
    assert done.jobs("run_chunk") == 0
    assert times(copied.parts()) == before
    assert digest(copied.values) == digest(finished.values)
