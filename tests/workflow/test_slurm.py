"""Chunks as SLURM jobs, on a real SLURM: side by side, killed and run again, to the same bytes."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from workflow.cluster import Cluster, Job, slurm
from workflow.project import Done, Project, digest, environment

TARGET = "results/tiny/local/values.parquet"
SIDE_BY_SIDE = 4
SECONDS = 900


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm(tmp_path_factory.mktemp("slurm") / "c") as running:
        yield running


def submit(
    project: Project, cluster: Cluster, *more: str, **config: str
) -> subprocess.Popen[bytes]:
    """Start Snakemake with the shipped profile; only the cut of the plan and the wait differ."""
    command = [sys.executable, "-m", "snakemake", "--nocolor", "--profile", "profiles/slurm"]
    wait = ["--slurm-init-seconds-before-status-checks", "4"]
    chosen = {"sweep": "tiny", "threads": "1", "batch_rows": "3", "chunk_passes": "3"} | config
    pairs = [f"{key}={value}" for key, value in chosen.items()]
    with (project / "said").open("wb") as said:
        return subprocess.Popen(
            [*command, *wait, TARGET, *more, "--config", *pairs],
            cwd=project.root,
            env=environment(cluster.env),
            stdout=said,
            stderr=said,
            start_new_session=True,
        )


def watch(
    project: Project, cluster: Cluster, process: subprocess.Popen[bytes]
) -> Iterator[list[Job]]:
    """The jobs at every look, until Snakemake has ended."""
    deadline = time.monotonic() + SECONDS
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, (project / "said").read_text()
            yield cluster.jobs()
            time.sleep(0.2)
    finally:
        process.kill()
        process.wait()


def running(jobs: list[Job]) -> list[Job]:
    return [job for job in jobs if job.state == "RUNNING"]


def chunk_of(job: Job) -> str:
    """The chunk that a job runs; only rule run_chunk is submitted."""
    match = re.fullmatch(r"rule_run_chunk_wildcards_.*?([0-9a-f]{16}).*", job.comment)
    assert match, job
    return match[1]


def log_of(project: Project, job: Job) -> Path:
    return project / f"logs/tiny/run_chunk/local/{chunk_of(job)}.log"


@dataclass
class Run:
    """A run on the cluster: Snakemake's end, the jobs, the most at once, and the one cancelled."""

    project: Project
    done: Done
    jobs: list[Job]
    most: int
    killed: Job | None


@pytest.fixture(scope="module")
def submitted(cluster: Cluster, finished: Project, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The tiny sweep on the cluster, one chunk's job cancelled while it ran."""
    project = finished.copy(tmp_path_factory.mktemp("submitted") / "project")
    project.unplan()
    process = submit(project, cluster)
    most, killed = 0, None
    for jobs in watch(project, cluster, process):
        most = max(most, len(running(jobs)))
        begun = [job for job in running(jobs) if log_of(project, job).exists()]
        if most >= SIDE_BY_SIDE and begun and not killed:
            killed = begun[0]
            cluster.ask("scancel", killed.name)
    done = Done(process.returncode, (project / "said").read_text())
    return Run(project, done, cluster.jobs(), most, killed)


def test_chunks_run_side_by_side_to_the_same_bytes(submitted, finished):
    assert submitted.done.code == 0, submitted.done.out
    assert submitted.most >= SIDE_BY_SIDE
    assert digest(submitted.project.values) == digest(finished.values)


def test_a_cancelled_job_is_submitted_again_with_more_memory(submitted):
    chunk = chunk_of(submitted.killed)
    first, second = [job for job in submitted.jobs if chunk_of(job) == chunk]
    assert [job for job in submitted.jobs if job.state == "CANCELLED"] == [first]
    assert second.state == "COMPLETED"
    assert int(second.memory.rstrip("M")) == 2 * int(first.memory.rstrip("M"))


def test_only_chunks_are_submitted(submitted):
    plan = submitted.project.plan()
    chunks = [chunk_of(job) for job in submitted.jobs]
    assert set(chunks) == {*plan["chunks"], plan["controls"]}
    assert len(chunks) == len(plan["chunks"]) + 2
    assert {job.partition for job in submitted.jobs} == {"batch"}
    assert {job.gpus for job in submitted.jobs} == {"N/A"}


def test_a_gpu_is_asked_for_where_the_device_is_cuda(submitted, cluster, tmp_path):
    """The node pretends to have GPUs: the jobs are seen in the queue, and cancelled."""
    project = submitted.project.copy(tmp_path / "project")
    shutil.rmtree(project / "results/tiny/local")
    place = ("--set-resources", "run_chunk:slurm_partition=large")
    process = submit(project, cluster, "--retries", "0", *place, device="cuda")
    for jobs in watch(project, cluster, process):
        for job in jobs[len(submitted.jobs) :]:
            cluster.ask("scancel", job.name)
    assert process.returncode != 0
    asked = cluster.jobs()[len(submitted.jobs) :]
    assert len(asked) == len(project.plan()["chunks"]) + 1
    assert {job.partition for job in asked} == {"large"}
    assert {job.gpus for job in asked} == {"gres:gpu:1"}


def test_arrays_are_refused_before_anything_is_submitted(submitted, cluster, tmp_path):
    """In them a task that ends before the first one loses its chunk."""
    project = submitted.project.copy(tmp_path / "project")
    shutil.rmtree(project / "results/tiny/local")
    before = cluster.jobs()
    process = submit(project, cluster, "--slurm-array-jobs", "run_chunk")
    assert process.wait(SECONDS) != 0
    assert (
        "--slurm-array-jobs: a task of an array waits for another" in (project / "said").read_text()
    )
    assert cluster.jobs() == before
