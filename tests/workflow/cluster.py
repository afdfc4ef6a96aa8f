"""A SLURM of its own on this machine: munged, slurmctld and slurmd, every file in one folder."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from nnsweep.ndif.ports import Ports

PROGRAMS = (
    "setpriv",
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "squeue",
    "scancel",
    "scontrol",
)
CPUS, MEMORY_MB, GPUS = 8, 64000, 2
"""What the node pretends to have (no more than that is asked for; nothing is really reserved)."""

COLUMNS = "JobID:20,State:20,Partition:20,MinMemory:20,tres-per-job:20,Comment:200"
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
MinJobAge=600
KillWait=2
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=batch Nodes={host} Default=YES MaxTime=INFINITE State=UP
PartitionName=large Nodes={host} MaxTime=INFINITE State=UP
"""


class Job(NamedTuple):
    """A job as squeue shows it."""

    name: str
    state: str
    partition: str
    memory: str
    gpus: str
    comment: str


@dataclass
class Cluster:
    """A running SLURM."""

    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """What commands need to find this cluster and no other."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def ask(self, *command: str) -> str:
        """The output of a SLURM command; empty when it failed."""
        done = subprocess.run(
            command, env=os.environ | self.env, capture_output=True, text=True, timeout=120
        )
        return done.stdout if done.returncode == 0 else ""

    def jobs(self) -> list[Job]:
        """Every job there was, in the order of submission."""
        lines = self.ask("squeue", "-h", "-S", "i", "-t", "all", "-O", COLUMNS).splitlines()
        return [Job(*line.strip().split(maxsplit=5)) for line in lines]


@contextmanager
def slurm(folder: Path) -> Iterator[Cluster]:
    """Start the daemons, and end them and every process of theirs, whatever happens.

    SLURM is no part of the environment that `make test` installs; `.ci/run` installs it, and there
    nothing is skipped.
    """
    for name in PROGRAMS:
        if shutil.which(name) is None:
            missing = f"no {name} on this machine: apt-get install slurm-wlm munge"
            pytest.fail(missing) if "NNSWEEP_CI" in os.environ else pytest.skip(missing)
    cluster = Cluster(folder)
    try:
        _start(cluster)
        yield cluster
    finally:
        cluster.ask("scancel", "--user", getpass.getuser())
        for daemon in reversed(cluster.daemons):
            daemon.send_signal(signal.SIGTERM)
        _end(cluster)


def _start(cluster: Cluster) -> None:
    folder = cluster.folder
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    values = {"host": socket.gethostname().split(".")[0], "user": getpass.getuser()}
    free = Ports().resolve()
    ports = {"controller": free["api"], "node": free["store"]}
    size = {"cpus": CPUS, "memory": MEMORY_MB, "gpus": GPUS}
    (folder / "gres.conf").write_text(f"Name=gpu File=/dev/tty[1-{GPUS}]\n")
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, **values, **ports, **size))
    _wrap_srun(cluster)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    munge = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file")]
    more = [f"--key-file={key}", f"--log-file={folder}/munge.log", f"--seed-file={folder}/seed"]
    _daemon(cluster, "munged", "--foreground", "--force", *munge, *more)
    _wait(cluster, lambda: (folder / "munge.socket").exists(), "munged answers")
    _daemon(cluster, "slurmctld", "-D", "-c")
    _daemon(cluster, "slurmd", "-D", "-N", values["host"])
    _wait(cluster, lambda: "idle" in cluster.ask("sinfo", "-h", "-o", "%T"), "the node is idle")


def _wrap_srun(cluster: Cluster) -> None:
    """Snakemake's plugin calls srun without SLURM's variables, SLURM_CONF among them."""
    wrapped = cluster.folder / "bin" / "srun"
    wrapped.parent.mkdir()
    conf = cluster.env["SLURM_CONF"]
    wrapped.write_text(f'#!/bin/sh\nSLURM_CONF={conf} exec {shutil.which("srun")} "$@"\n')
    wrapped.chmod(0o755)


def _daemon(cluster: Cluster, *command: str) -> None:
    """Start a daemon that ends with this process, even where that is killed."""
    log = (cluster.folder / f"{command[0]}.out").open("wb")
    with log:
        cluster.daemons.append(
            subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],
                env=os.environ | cluster.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )


def _wait(cluster: Cluster, holds, what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            logs = [*cluster.folder.glob("*.log"), *cluster.folder.glob("*.out")]
            said = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs)
            pytest.fail(f"not true within {seconds:.0f} s: {what}\n{said}")
        time.sleep(0.2)


def _end(cluster: Cluster) -> None:
    """Wait for the daemons; then kill whatever still belongs to this cluster (job steps, jobs)."""
    for daemon in cluster.daemons:
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(10)
    for process in _processes(cluster):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for daemon in cluster.daemons:
        daemon.wait()


def _processes(cluster: Cluster) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if process.environ().get("SLURM_CONF") == cluster.env["SLURM_CONF"]:
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]
