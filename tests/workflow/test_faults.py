"""Killed, deleted, damaged and doubled: what was finished stays, what is missing runs again."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from workflow.project import Done, Project, digest, finish, times

TARGET = "results/tiny/local/values.parquet"

HOOK = '''
"""Kill Snakemake and its jobs at one moment of writing a chunk's results."""
import os
import signal

fsync, replace = os.fsync, os.replace


def die():
    os.killpg(0, signal.SIGKILL)


def dying_fsync(handle):
    path = os.readlink(f"/proc/self/fd/{handle}")
    if "/local/chunks/" in path and ".parquet" in path:
        die()
    fsync(handle)


def dying_replace(source, target, **options):
    replace(source, target, **options)
    if "/local/chunks/" in str(target) and str(target).endswith(".json"):
        die()


if os.environ["KILL_AT"] == "writing the part":
    os.fsync = dying_fsync
else:
    os.replace = dying_replace
'''


def readable_parts(project: Project) -> set[str]:
    """Names of all visible parts; every one of them must be a whole table."""
    found = sorted((project.results / "local" / "chunks").glob("*.parquet"))
    for path in found:
        assert pq.read_table(path).num_rows
    return {path.stem for path in found}


def kill_the_job(process: subprocess.Popen[str], log: Path) -> Done:
    """SIGKILL to the processes of the chunk's job, and not to Snakemake, once it has begun."""
    deadline = time.monotonic() + 900
    while not log.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    jobs = psutil.Process(process.pid).children(recursive=True)
    assert jobs
    for job in jobs:
        job.send_signal(signal.SIGKILL)
    return finish(process)


def test_a_killed_run_resumes_to_the_same_bytes(finished, copied, tmp_path):
    first, second = copied.parts()
    part = copied.parts()[second]
    part.unlink()
    part.with_suffix(".json").unlink()
    copied.values.unlink()
    log = copied / f"logs/tiny/run_chunk/local/{second}.log"
    log.unlink()
    before = times({first: copied.parts()[first]})

    done = kill_the_job(copied.start(TARGET), log)
    assert done.code != 0
    assert second not in readable_parts(copied)

    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join(filter(None, [str(hook), os.environ.get("PYTHONPATH")]))
    for moment in ("between facts and part", "writing the part"):
        done = copied.run(TARGET, env={"PYTHONPATH": path, "KILL_AT": moment})
        assert done.code == -signal.SIGKILL, done.out
        assert second not in readable_parts(copied)
        assert not copied.values.exists()
        locked = copied.run(TARGET)
        assert locked.code != 0
        assert "--unlock" in locked.out
        assert copied.run("--unlock").code == 0

    done = copied.run(TARGET)
    assert done.code == 0, done.out
    assert done.jobs("run_chunk") == 1
    assert digest(copied.values) == digest(finished.values)
    assert times({first: copied.parts()[first]}) == before
    assert copied.run(TARGET).idle


def test_a_deleted_part_runs_again_alone(finished, copied):
    first, second = copied.parts()
    copied.parts()[second].unlink()
    before = times({first: copied.parts()[first]})
    done = copied.run()
    assert done.code == 0, done.out
    assert done.jobs("run_chunk") == done.jobs("merge_chunks") == 1
    assert done.jobs("prepare_prompts") == done.jobs("expand_sweep") == 0
    assert times({first: copied.parts()[first]}) == before
    assert digest(copied.values) == digest(finished.values)


def test_a_truncated_part_is_named_with_what_to_do(copied):
    part = next(iter(copied.parts().values()))
    part.write_bytes(part.read_bytes()[:-40])
    refused(copied, str(part.relative_to(copied.root)), "Delete it and run again")
    part.unlink()


def test_a_part_with_doubled_rows_is_refused(copied):
    part = next(iter(copied.parts().values()))
    table = pq.read_table(part)
    pq.write_table(pa.concat_tables([table, table.slice(0, 2)]), part)
    refused(copied, table["point_key"][0].as_py(), "stands twice", str(part.name))


def test_a_part_with_a_missing_row_is_refused(copied):
    part = next(iter(copied.parts().values()))
    table = pq.read_table(part)
    pq.write_table(table.slice(1), part)
    refused(copied, f"{len(table) - 1} values, the plan takes {len(table)}.", part.name)


def refused(project: Project, *texts: str) -> None:
    """The merge ends in one line that holds these texts, and writes no table."""
    before = digest(project.values) if project.values.exists() else None
    done = project.run(TARGET)
    assert done.code != 0
    (line,) = [line for line in done.out.splitlines() if line.startswith("nnsweep: ")]
    for text in texts:
        assert text in line, line
    assert "Traceback" not in done.out
    assert not project.values.exists() or digest(project.values) != before
