"""A real Slurm on this machine: slurmctld and several slurmd, on ports of their own at loopback."""

import getpass
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import psutil
import pytest

from tests.clusters.fetch import FOLDER
from tests.prometheus.server import free_address

CONFIG: Final = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MailProg=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=1,sched_interval=2
{nodes}
PartitionName=low Nodes=n[0-{last}] Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=30
PartitionName=high Nodes=n[0-{last}] MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """``environment``: in which Slurm's commands find it."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self.folder = folder
        self._nodes = [f"n{number}" for number in range(nodes)]
        plugins = FOLDER / "usr/lib/x86_64-linux-gnu/slurm-wlm"
        self.environment = {
            **os.environ,
            "PATH": f"{FOLDER}/usr/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{plugins.parent}:{plugins}",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        ports = [free_address().rpartition(":")[2] for _ in range(1 + nodes)]
        lines = "\n".join(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2"
            for name, port in zip(self._nodes, ports[1:], strict=True)
        )
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        values = {"port": ports[0], "user": getpass.getuser(), "folder": folder, "plugins": plugins, "nodes": lines}
        (folder / "slurm.conf").write_text(CONFIG.format(**values, last=nodes - 1))

    def __enter__(self) -> Self:
        self._start("slurmctld", "slurmctld-wlm")
        for node in self._nodes:
            self.start_node(node)
        while self.call("sinfo", "--noheader", "--format=%t", "--partition=low").split() != ["idle"]:
            for name, daemon in self._daemons.items():
                if daemon.poll() is not None:
                    self.__exit__()
                    pytest.skip(f"{name} does not run here: {(self.folder / f'{name}.log').read_text()[-300:]}")
            time.sleep(0.2)
        return self

    def __exit__(self, *exception: object) -> None:
        for daemon in self._daemons.values():
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons.values():
            daemon.wait(20)
        for process in with_marks([f"SLURM_CONF={self.folder}/"]):  # of a test that failed
            process.kill()

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd-wlm", "-N", node, "-d", f"{FOLDER}/usr/sbin/slurmstepd-wlm")

    def lose_node(self, node: str, job: str) -> None:
        """The machine dies: slurmd, and the processes of the job that it runs."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        for marks in ([f"slurmstepd-wlm: [{job}."], [f"SLURM_JOB_ID={job} "]):  # first those that would tell of the end
            for process in with_marks(marks, f"SLURM_CONF={self.folder}/"):
                process.kill()

    def call(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout

    def _start(self, name: str, command: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [FOLDER / "usr/sbin" / command, "-D", "-f", self.folder / "slurm.conf", *arguments],
                cwd=self.folder,  # a step that is killed may leave a core dump
                env=self.environment,
                stdout=log,
                stderr=log,
            )


def with_marks(marks: Sequence[str], also: str = "") -> list[psutil.Process]:
    """The processes with one of these texts in their environment or command line, and ``also`` that one."""
    found = []
    for process in psutil.process_iter():
        try:
            # psutil ends at a gap, which a process with another title has in its environment
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            text = f"{' '.join(process.cmdline())} {variables} "
        except (psutil.Error, OSError):
            continue
        if process.pid != os.getpid() and also in text and any(mark in text for mark in marks):
            found.append(process)
    return found


def is_there() -> bool:
    return (FOLDER / "usr/sbin/slurmd-wlm").is_file() and shutil.which("bash") is not None
