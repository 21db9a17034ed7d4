"""Slurm: one job for the service, and one of its own for each host, so that nodes come and go.

A notice is TERM or USR1, to the job's steps or to its script: the host's workers drain, and the script requeues its
job, because Slurm takes a script that ends with 0 for completed. Jobs find the service by the file ``address`` in the
shared folder, also after it began again on another node.

    FOLDER/run.toml, token, service.sh, host.sh   written by ``up``
    FOLDER/address       of the service that runs
    FOLDER/ended         the run was ended; released/JOB: a host was. Their jobs are not requeued
    FOLDER/refused/      why jobs ended that would be refused again
    FOLDER/state/        of the service
    FOLDER/logs/
"""

import hashlib
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import Field

from dora.cluster.adapter import HOST, SERVICE, Job
from dora.cluster.commands import called
from dora.cluster.rendering import rendered
from dora.cluster.run_file import RunFile
from dora.cluster.starting import PENDING, REFUSED, check_started, job_of, leaving, starting
from dora.config.reading import SLURM
from dora.config.section import Section
from dora.data.validation import validated_as
from dora.errors import InvalidValue

TABLE: Final = SLURM
ENDS_S: Final = 30.0  # after its notice a job may still take
POLL_S: Final = 0.5


class SlurmTable(Section):
    folder: str = Field(min_length=1, description="on storage that all nodes share: scripts, logs, token, state")
    hosts: int = Field(1, ge=0, le=4096, description="host jobs at the start")
    workers: int = Field(-1, ge=-1, le=256, description="of each host; -1: as the service's own host")
    port: int = Field(7070, ge=1, le=65535, description="of the service, on its node")
    address: str = Field("$(hostname -f)", description="the node's address for other nodes; the shell expands it")
    service: tuple[str, ...] = Field((), description="options of sbatch for the service's job, such as --partition=cpu")
    host: tuple[str, ...] = Field((), description="options of sbatch for a host's job, such as --gres=gpu:8")
    setup: tuple[str, ...] = Field((), description="lines of shell before DORA, such as source venv/bin/activate")
    dora: str = Field("dora", description="the command on the nodes")


class SlurmCluster:
    def __init__(self, file: RunFile) -> None:
        self._file = file
        self._table = validated_as(SlurmTable, file.table, TABLE)
        self._folder = Path(self._table.folder).absolute()
        name = hashlib.blake2b(str(self._folder).encode(), digest_size=4).hexdigest()
        self._names = {part: f"dora-{name}-{part}" for part in (SERVICE, HOST)}

    def planned(self) -> Mapping[str, str]:
        follows = self._file.config.cluster.autoscale == "act"
        values = {**self._table.model_dump(), "folder": self._folder, "follows": follows}

        def script(part: str, job: str) -> str:
            own = {"job": job, "options": getattr(self._table, part), "service": self._names[SERVICE]}
            return rendered(f"slurm_{part}.sh.j2", {**values, **own})

        return {f"{part}.sh": script(part, job) for part, job in self._names.items()}

    def up(self, hosts: int | None) -> list[Job]:
        with starting(self, self._file, self._folder, self._prepare):
            self._submit(SERVICE)
            for _ in range(self._table.hosts if hosts is None else hosts):
                self._submit(HOST)
            return self.jobs()

    def jobs(self) -> list[Job]:
        found, parts = [], {name: part for part, name in self._names.items()}
        listed = _called("squeue", "--noheader", f"--name={','.join(parts)}", "--sort=i", "--format=%j|%i|%T|%N|%r")
        for line in listed.splitlines():
            name, number, state, machine, reason = line.strip().split("|", 4)
            part, why = parts[name], "" if reason == "None" else reason
            found.append(Job(number, part, state.lower(), machine, why, f"h{number}" if part == HOST else ""))
        for file in sorted(self._folder.glob("refused/*")):
            name, _, number = file.name.rpartition("-")
            reason = file.read_text(encoding="utf-8").strip().removeprefix("dora: ")
            found.append(Job(number, parts[name], REFUSED, "", reason))
        return found

    def want(self, hosts: int) -> list[Job]:
        check_started(self._file, jobs := self.jobs())
        present = [job for job in jobs if job.part == HOST and self._is_wanted(job)]
        for _ in range(hosts - len(present)):
            self._submit(HOST)
        for job in leaving(present, hosts):
            self._release(job)
        return self.jobs()

    def release(self, host: str) -> None:
        self._release(job_of(host, self.jobs()))

    def down(self) -> list[str]:
        if self._folder.is_dir():
            (self._folder / "ended").touch()
        for job in self.jobs():
            self._end(job)
        ends_s = time.monotonic() + self._file.config.host.notice_s + ENDS_S
        while (left := self.jobs()) and time.monotonic() < ends_s:
            time.sleep(POLL_S)
        for job in left:
            self._cancel(job)
        return [job.name for job in left]

    # ------------------------------------------------------------------------------------------------------------ own

    def _prepare(self) -> None:
        """Writes what the jobs read."""
        folder = self._folder
        for each in (folder / "logs", folder / "released", folder / "refused"):
            each.mkdir(mode=0o700, exist_ok=True)
        for left in (folder / "ended", folder / "address", *(folder / "released").iterdir()):
            left.unlink(missing_ok=True)
        shutil.copyfile(self._file.path, folder / "run.toml")
        for name, text in self.planned().items():
            (folder / name).write_text(text, encoding="utf-8")

    def _submit(self, part: str) -> None:
        _called("sbatch", "--parsable", str(self._folder / f"{part}.sh"), setting=f"{TABLE}.{part}")

    def _release(self, host: Job) -> None:
        self._released(host.name).touch()
        self._end(host)

    def _end(self, job: Job) -> None:
        if job.state == REFUSED:
            (self._folder / "refused" / f"{self._names[job.part]}-{job.name}").unlink(missing_ok=True)
            return
        self._cancel(job, *(() if job.state == PENDING else ("--signal=TERM",)))

    def _cancel(self, job: Job, *options: str) -> None:
        """Runs scancel, which may refuse a job that has ended meanwhile."""
        try:
            _called("scancel", *options, job.name)
        except InvalidValue:
            if any(each.name == job.name and each.state != "completing" for each in self.jobs()):
                raise

    def _is_wanted(self, job: Job) -> bool:
        return job.state != REFUSED and not self._released(job.name).exists()

    def _released(self, job: str) -> Path:
        return self._folder / "released" / job


def _called(command: str, *arguments: str, setting: str = TABLE) -> str:
    """Runs one of Slurm's commands. Raises InvalidValue for ``setting`` with the reason if it fails."""
    done = called(command, *arguments, setting=setting, which="a login node of Slurm", answers="slurmctld")
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise InvalidValue(setting, " ".join((command, *arguments)), f"what Slurm accepts: {said[-1]}")
    return done.stdout
