"""Starts a run on a scheduler, and chooses the hosts that leave first."""

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from dora.cluster.adapter import HOST, SERVICE, Cluster, Job
from dora.cluster.run_file import RunFile
from dora.errors import InvalidValue
from dora.system.files import replace_durably
from dora.system.ownership import check_locks, hold

PENDING: Final = "pending"
REFUSED: Final = "refused"


def check_new(file: RunFile, jobs: Iterable[Job]) -> None:
    if (running := next(iter(jobs), None)) is not None:
        allowed = "a run without jobs: `dora cluster down` ends them"
        raise InvalidValue("--file", str(file.path), allowed, why=f"has job {running.name}")


def check_started(file: RunFile, jobs: Iterable[Job]) -> None:
    if all(job.part != SERVICE or job.state == REFUSED for job in jobs):
        raise InvalidValue("--file", str(file.path), "started first, by `dora cluster up`", why="has no service")


@contextmanager
def starting(
    cluster: Cluster, file: RunFile, folder: Path, prepare: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Makes the run's folder with the owner's token, and starts the run in the block. If that fails or is interrupted,
    all that was started ends.

    Raises InvalidValue for a run that has jobs or is being started, and for a folder that will not do.
    """
    check_new(file, cluster.jobs())  # before the folder of a run is touched
    with ExitStack() as held:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_locks(folder)
            if (locks := hold(folder / "starting")) is None:
                raise InvalidValue("--file", str(file.path), "a run that nobody starts now", why="is being started")
            held.callback(locks.close)
            check_new(file, cluster.jobs())
            if not (folder / "token").exists():
                replace_durably(folder / "token", secrets.token_hex(32))
            prepare()
        except OSError as error:
            allowed = f"a folder to write in, with locks and fsync ({error.strerror})"
            raise InvalidValue(f"{file.scheduler}.folder", str(folder), allowed) from error
        try:
            yield
        except BaseException:  # also Ctrl-C
            with suppress(InvalidValue):  # the first reason is what the user needs
                cluster.down()
            raise


def leaving(jobs: Iterable[Job], hosts: int) -> list[Job]:
    """Returns the jobs of hosts beyond so many: those that have not begun, then the latest ones."""
    by_worth = sorted(jobs, key=lambda job: (job.state != PENDING, -int(job.name.removeprefix("h"))))
    return by_worth[: max(0, len(by_worth) - hosts)]


def job_of(host: str, jobs: Iterable[Job]) -> Job:
    for job in jobs:
        if (job.name, job.part) == (host, HOST):
            return job
    raise InvalidValue("host", host, "the name of a host's job, as `dora cluster status` lists it")
