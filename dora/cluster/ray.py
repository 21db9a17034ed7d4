"""Ray: a placement group for the service and one for each host, each with a small actor (``ray_part.py``).

A group has one bundle, so each host comes and goes alone: its group waits until a node has room, and moves if its node
dies. Ray is imported when a run is started or asked for: the service knows none of it.

    FOLDER/token             the owner's, where ``up`` was called
    FOLDER/run.toml, state/  on the service's node
"""

import hashlib
import itertools
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final, Self

from dora.cluster.adapter import HOST, SERVICE, Job
from dora.cluster.ray_order import Order, RayTable, State, command_of
from dora.cluster.run_file import RunFile, read_run_file
from dora.cluster.starting import check_started, job_of, leaving, starting
from dora.config.reading import RAY
from dora.data.validation import validated_as
from dora.errors import MISSING, InvalidValue
from dora.release import __version__
from dora.rpc.roles import Role, TokenGeneration

DRAIN_S: Final = 90.0  # a host drains for at most a minute
POLL_S: Final = 0.5


class Cluster:
    """A run on Ray: from a script of one's own, or as the adapter of `dora cluster`.

        with dora.ray.Cluster("run.toml", hosts=3) as cluster:
            with dora.sync.Trainer(cluster.address, token=cluster.token) as trainer:
                ...

    The block begins once the service listens. When it ends, all that was started ends; the state stays. Without
    ``hosts`` the file says how many. A ``detached`` run lives on without the process that started it.
    """

    def __init__(self, run: RunFile | str | Path, hosts: int | None = None, *, detached: bool = False) -> None:
        """Raises InvalidValue for a wrong file."""
        self._file = run if isinstance(run, RunFile) else read_run_file(Path(run), RAY)
        self._table = validated_as(RayTable, self._file.table, RAY)
        self._check_ranks()
        self._wanted = self._table.hosts if hosts is None else hosts
        self._folder = Path(self._table.folder).absolute()
        self._run = f"dora-{hashlib.blake2b(str(self._folder).encode(), digest_size=4).hexdigest()}"
        self._lifetime = "detached" if detached else None
        self._actors: list[Any] = []  # Ray ends those that are not detached once nothing refers to them

    def __enter__(self) -> Self:
        self.up(self._wanted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def address(self) -> str:
        """The service's address, which changes if it moves. Raises InvalidValue while there is none."""
        machine = next((job.machine for job in self.jobs() if job.part == SERVICE), "")
        if not machine:
            raise InvalidValue("address", MISSING, "of a service that runs: see `dora cluster status`")
        return machine

    @property
    def token(self) -> str:
        """The owner's token."""
        return (self._folder / "token").read_text(encoding="utf-8").strip()

    def planned(self) -> Mapping[str, str]:
        address, found = f"NODE:{self._table.port}", {}
        for title, name in ((SERVICE, SERVICE), (f"{HOST}, {self._wanted} times", "h0")):
            command = shlex.join(("dora", *command_of(self._order(name, ""), address)))
            found[title] = f"# a placement group of {self._bundle(name)}, and an actor that runs\n{command}\n"
        return found

    def up(self, hosts: int | None) -> list[Job]:
        names = [SERVICE, *(f"h{number}" for number in range(self._wanted if hosts is None else hosts))]
        for name in names[:2]:
            if self._ray.lacks_room(self._bundle(name)):
                allowed = "resources that a node of Ray's has: `ray status` shows them"
                raise InvalidValue(_setting(name), self._bundle(name), allowed)
        with starting(self, self._file, self._folder):
            for name in names:
                self._start(name)
            found = self._accepted()
            while any(job.state in (State.STARTING, State.SILENT) for job in found):
                time.sleep(POLL_S)
                found = self._accepted()
            return found

    def jobs(self) -> list[Job]:
        return sorted(self._ray.reports(self._run), key=lambda job: (job.part == HOST, len(job.name), job.name))

    def want(self, hosts: int) -> list[Job]:
        check_started(self._file, jobs := self.jobs())
        present = [job for job in jobs if job.part == HOST and job.state not in (State.RELEASED, State.ENDED)]
        free = (name for number in itertools.count() if (name := f"h{number}") not in {job.name for job in jobs})
        for _ in range(hosts - len(present)):
            self._start(next(free))
        for job in leaving(present, hosts):
            self._release(job)
        return self.jobs()

    def release(self, host: str) -> None:
        self._release(job_of(host, self.jobs()))

    def down(self) -> list[str]:
        ends_s = time.monotonic() + DRAIN_S
        while (left := self.jobs()) and time.monotonic() < ends_s:
            for job in left:
                self._release(job)
            time.sleep(POLL_S)
        for job in left:
            self._ray.remove(self._run, job.name)
        return [job.name for job in left]

    # ------------------------------------------------------------------------------------------------------------ own

    @property
    def _ray(self) -> ModuleType:
        """Ray's calls, of a process that is connected. Raises InvalidValue if Ray is not installed or does not run."""
        try:
            from dora.cluster import ray_calls
        except ModuleNotFoundError as error:
            allowed = "installed here and on all nodes: its extra `ray`, by pip install '.[ray]' in DORA's folder"
            raise InvalidValue("ray", MISSING, allowed) from error
        ray_calls.connect(self._table.address)
        return ray_calls

    def _accepted(self) -> list[Job]:
        """Returns the jobs. Raises InvalidValue if one is refused."""
        for job in (found := self.jobs()):
            if job.state == State.REFUSED:
                refused = f"{job.name} was refused: {job.reason}"
                raise InvalidValue(job.name, job.machine or "?", "one that runs", said=refused)
        return found

    def _release(self, job: Job) -> None:
        """Lets a part drain, and removes one that has nothing to drain."""
        if job.state in (State.PENDING, State.SILENT, State.ENDED, State.REFUSED):
            self._ray.remove(self._run, job.name)
        elif job.state != State.RELEASED:
            self._ray.release(self._run, job.name)

    def _start(self, name: str) -> None:
        token = self.token if name == SERVICE else TokenGeneration.following(self.token).of[Role.HOST]
        from dora.cluster.ray_part import start

        bundle = self._bundle(name)
        try:
            self._actors.append(start(self._order(name, token), bundle, self._lifetime))
        except ValueError as error:
            raise InvalidValue(_setting(name), bundle, f"what Ray accepts ({error})") from error

    def _bundle(self, name: str) -> dict[str, float]:
        needs = self._table.service if name == SERVICE else {"CPU": self._table.cpus, "GPU": self._table.gpus}
        return {resource: amount for resource, amount in needs.items() if amount}

    def _order(self, name: str, token: str) -> Order:
        config = self._file.path.read_text(encoding="utf-8")
        return Order(name, self._run, __version__, token, self._table, str(self._folder), str(Path.cwd()), config)

    def _check_ranks(self) -> None:
        """Raises InvalidValue if a host's GPUs cannot hold an engine."""
        gpus, ranks = self._table.gpus, self._file.config.workers.ranks
        if 0 < gpus < ranks:
            allowed = f"at least {ranks}, or fewer ranks (workers.tensor_parallel, workers.pipeline_parallel)"
            raise InvalidValue("ray.gpus", gpus, allowed, why="is not enough for an engine, whose ranks share one host")


def _setting(name: str) -> str:
    """Returns the setting that says what a job needs."""
    return "ray.service" if name == SERVICE else "ray"
