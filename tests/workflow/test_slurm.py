"""Chunks as SLURM jobs, on a real SLURM: side by side, killed and run again, to the same bytes."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from workflow.cluster import Cluster, Job, slurm
from workflow.project import Done, Project, copy_workflow, digest, environment

TARGET = "results/tiny/local/values.parquet"
SIDE_BY_SIDE = 4
SECONDS = 240


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm(tmp_path_factory.mktemp("slurm") / "c") as running:
        yield running


def submit(project: Project, cluster: Cluster) -> subprocess.Popen[bytes]:
    """Start Snakemake with the shipped profile; only the cut of the plan and the wait differ."""
    command = [sys.executable, "-m", "snakemake", "--nocolor", "--profile", "profiles/slurm"]
    wait = ["--slurm-init-seconds-before-status-checks", "4"]
    config = ["sweep=tiny", "threads=1", "batch_rows=3", "chunk_passes=3"]
    with (project / "said").open("wb") as said:
        return subprocess.Popen(
            [*command, *wait, TARGET, "--config", *config],
            cwd=project.root,
            env=environment(cluster.env),
            stdout=said,
            stderr=said,
            start_new_session=True,
        )


def watch(project: Project, cluster: Cluster, process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Most chunk jobs that SLURM ran at once, and the chunk whose job was cancelled on the way."""
    most, killed, deadline = 0, "", time.monotonic() + SECONDS
    while process.poll() is None:
        assert time.monotonic() < deadline, (project / "said").read_text()
        jobs = cluster.jobs("RUNNING")
        most = max(most, len(jobs))
        begun = [job for job in jobs if log_of(project, chunk_of(job)).exists()]
        if most >= SIDE_BY_SIDE and begun and not killed:
            killed = chunk_of(begun[0])
            cluster.ask("scancel", begun[0].name)
        time.sleep(0.2)
    return most, killed


def chunk_of(job: Job) -> str:
    """The chunk that a job runs; only rule run_chunk is submitted."""
    match = re.fullmatch(r"rule_run_chunk_wildcards_.*?([0-9a-f]{16}).*", job.comment)
    assert match, job
    return match[1]


def log_of(project: Project, chunk: str) -> Path:
    return project / f"logs/tiny/run_chunk/local/{chunk}.log"


@pytest.fixture(scope="module")
def submitted(cluster: Cluster, model: Path, tmp_path_factory: pytest.TempPathFactory):
    """The tiny sweep on the cluster, one chunk's job cancelled while it ran."""
    project = copy_workflow(tmp_path_factory.mktemp("submitted") / "project", model)
    process = submit(project, cluster)
    try:
        most, killed = watch(project, cluster, process)
    finally:
        process.kill()
    return project, Done(process.wait(), (project / "said").read_text()), most, killed


def test_chunks_run_side_by_side_to_the_same_bytes(submitted, finished):
    project, done, most, _ = submitted
    assert done.code == 0, done.out
    assert most >= SIDE_BY_SIDE
    assert digest(project.values) == digest(finished.values)


def test_a_cancelled_job_is_submitted_again_with_more_memory(submitted, cluster):
    killed = submitted[3]
    first, second = [job for job in cluster.jobs("all") if chunk_of(job) == killed]
    assert cluster.jobs("CANCELLED") == [first]
    assert second in cluster.jobs("COMPLETED")
    assert int(second.memory.rstrip("M")) == 2 * int(first.memory.rstrip("M"))


def test_only_chunks_are_submitted(submitted, cluster):
    plan = submitted[0].plan()
    jobs = [chunk_of(job) for job in cluster.jobs("all")]
    assert set(jobs) == {*plan["chunks"], plan["controls"]}
    assert len(jobs) == len(plan["chunks"]) + 2
