"""The worker processes of this machine, and its pool's: started, started again when they die, stopped at the end.

It is a launcher (``launcher.py``): that of the service's own host, and within an agent that of another one.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from dora.config import WorkersConfig
from dora.host.command import WAIT_OPTION, WORKER_MODULE
from dora.host.launcher import Scaled, WorkerStartError, scaled, worker_name
from dora.host.survivors import Adopted, Survivors

log = logging.getLogger("dora.service")

RESTART_PAUSE_S = 0.5  # doubled at each early death, up to
RESTART_PAUSE_MAX_S = 15.0
HEALTHY_S = 30.0  # a process that lived so long has earned a quick restart
DEATHS_WITHIN_S = 600.0  # deaths count for so long: ``workers.restarts`` is a rate, not a whole life's sum
LOG_TAIL_BYTES = 2000
STOP_GRACE_S = 10.0


@dataclass(slots=True)
class _Worker:
    """One worker id, or pool id, and its process at present."""

    worker_id: str
    is_pool: bool = False
    process: asyncio.subprocess.Process | Adopted | None = None
    waiting: bool = False  # its process has yet to be told what it is for
    adopted: bool = False  # its process is of an earlier life of the service
    leaving: bool = False
    excluded: bool = False  # it died too often: it is not started again
    not_started: str = ""  # why its last process could not be: empty where it could
    restarts: int = 0
    died_s: deque[float] = field(default_factory=deque)  # within the last DEATHS_WITHIN_S

    def dies(self, now_s: float) -> int:
        """Counts a death. Returns how many there were lately."""
        self.died_s.append(now_s)
        while now_s - self.died_s[0] > DEATHS_WITHIN_S:
            self.died_s.popleft()
        return len(self.died_s)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process, where one runs."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


class Processes:
    """``command(worker_id)`` is the argv after the interpreter; ``environment(worker_id)``, asked for at each start, is
    added to this process's. ``prefix`` begins each worker's id; ``pool_ids`` are started by ``open``.

    A worker that dies more often than ``workers.restarts`` times in ten minutes is not started again. The others go on;
    ``failed`` is set once none is left. They go on without their pools. ``unwritable`` hears why a log could not be
    made; ``bound``: processes end with this one, however it ends.
    """

    def __init__(
        self,
        config: WorkersConfig,
        command: Callable[[str], list[str]],
        environment: Callable[[str], Mapping[str, str]],
        log_folder: Path,
        unwritable: Callable[[OSError], None] = lambda _: None,
        pool_ids: Iterable[str] = (),
        prefix: str = "",
        bound: bool = False,
        living: Survivors | None = None,
    ) -> None:
        """``living``: where the processes are written down, for a later life of the service; None: nowhere."""
        self._config = config
        self._command = command
        self._environment = environment
        self._log_folder = log_folder
        self._unwritable = unwritable
        self._prefix = prefix
        self._bound = bound
        self._living = living
        self._workers: dict[str, _Worker] = {}
        self._pools = {name: _Worker(name, is_pool=True) for name in pool_ids}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._begun: list[_Worker] = []  # with processes already, of workers that were not started yet
        self._starts = asyncio.Event()  # else nothing is started again just now
        self._starts.set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(name for name, worker in self._workers.items() if not (worker.leaving or worker.excluded))

    def names(self, workers: int) -> Set[str]:
        """Ids of its pools, and of its workers where there are so many."""
        return {*self._pools, *(worker_name(self._prefix, index) for index in range(workers))}

    def adopt(self, living: Mapping[str, Adopted], workers: int) -> None:
        """These processes of an earlier life, by their names, go on; none is started in their place. Before ``begin``.

        One whose name none of so many workers and no pool has any more is told to end.
        """
        for name, process in living.items():
            if name in self._pools:
                self._pools[name].process, self._pools[name].adopted = process, True
            elif name in self.names(workers):
                self._begun.append(_Worker(name, process=process, adopted=True))
            else:
                process.send_signal(signal.SIGTERM)

    async def begin(self, workers: int) -> None:
        """Starts processes that import their engine, before ``command`` can be asked: it takes them some seconds.

        They wait for ``start``, which tells them the rest; so the model can be prepared meanwhile. More than there are
        cores would only wait for each other.
        """
        if self._config.engine != "vllm":
            return
        names = [worker_name(self._prefix, index) for index in range(workers)]
        adopted = {worker.worker_id for worker in self._begun}
        for name in [name for name in names if name not in adopted][: os.cpu_count() or 1]:
            worker = _Worker(name)
            worker.process = await self._spawn(worker, ["-m", WORKER_MODULE, WAIT_OPTION])
            worker.waiting = True
            self._begun.append(worker)

    def open(self) -> None:
        """Starts the pools."""
        for pool in self._pools.values():
            self._tasks[pool.worker_id] = asyncio.create_task(self._keep(pool), name=pool.worker_id)

    def start(self, worker_id: str) -> None:
        known = self._workers.get(worker_id)
        if known is not None and not known.excluded and not known.leaving:
            return
        worker = next((each for each in self._begun if each.worker_id == worker_id), None) or _Worker(worker_id)
        self._begun = [each for each in self._begun if each is not worker]
        before, self._workers[worker_id] = self._tasks.get(worker_id), worker
        self._tasks[worker_id] = asyncio.create_task(self._keep(worker, before), name=worker_id)

    def stop(self, worker_id: str, *, again: bool = False) -> None:
        """Of a pool only with ``again``."""
        worker = self._workers.get(worker_id) or (self._pools.get(worker_id) if again else None)
        if worker is not None:
            worker.leaving |= not again
            worker.send(signal.SIGKILL if again else signal.SIGTERM)
            if not again:
                asyncio.get_running_loop().call_later(STOP_GRACE_S, worker.send, signal.SIGKILL)

    def scale(self, workers: int) -> Scaled:
        change = scaled(self._prefix, self.workers, workers)
        for worker_id in change.started:
            self.start(worker_id)
        return change

    def stand_still(self) -> None:
        """What runs goes on, and what ends is not started again until ``go_on``: there is no service to join."""
        self._starts.clear()

    def go_on(self) -> None:
        self._starts.set()

    def statuses(self) -> dict[str, str]:
        """Each worker of those that do not run as they should, with the reason."""
        found = {}
        for worker in self._workers.values():
            if worker.excluded:
                found[worker.worker_id] = f"not started again: {self._last_words(worker)}"
            elif worker.restarts and not worker.leaving:
                found[worker.worker_id] = f"started again {worker.restarts} times"
        return found

    @property
    def _all(self) -> list[_Worker]:
        return [*self._begun, *self._pools.values(), *self._workers.values()]

    async def close(self, grace_s: float = STOP_GRACE_S) -> None:
        """Asks every process to end, then makes it. May be called again."""
        self._starts.set()
        for worker in self._all:
            worker.leaving = True
            worker.send(signal.SIGTERM)
            if worker.waiting and worker.process is not None:
                await worker.process.wait()
        if not self._tasks:
            return
        _, slow = await asyncio.wait(self._tasks.values(), timeout=grace_s)
        for worker in self._all:
            worker.send(signal.SIGKILL)
        if slow:
            await asyncio.wait(slow)
        if not self.failed.done():
            self.failed.cancel()

    async def _keep(self, worker: _Worker, before: asyncio.Task[None] | None = None) -> None:
        """``before``: what kept the process that had this id last, and may not have ended yet."""
        if before is not None:
            await before
        loop = asyncio.get_running_loop()
        pause_s = RESTART_PAUSE_S
        while not worker.leaving:
            began_s = loop.time()
            worker.not_started, code = "", 0
            try:
                process = await self._told(worker)
                if worker.leaving:  # it was stopped before it was there
                    worker.send(signal.SIGTERM)
                code = await process.wait()
            except OSError as error:  # no memory, or too many processes or files: it passes, or it is a death
                worker.not_started = f"it could not be started ({error.strerror})"
                log.warning("%s: %s", worker.worker_id, worker.not_started)
            if worker.leaving:
                return
            deaths = worker.dies(loop.time())
            if deaths > self._config.restarts:
                self._exclude(worker, f"ended {deaths} times lately, last with {code}: {self._last_words(worker)}")
                return
            worker.restarts += 1
            pause_s = RESTART_PAUSE_S if loop.time() - began_s > HEALTHY_S else min(2 * pause_s, RESTART_PAUSE_MAX_S)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(pause_s)
            await self._starts.wait()

    async def _told(self, worker: _Worker) -> asyncio.subprocess.Process | Adopted:
        """A process that knows what it is for: the one that lives, or waits, else a new one."""
        if worker.adopted and worker.process is not None:
            worker.adopted = False
            return worker.process
        worker.process = await self._told_new(worker)
        if self._living is not None:
            self._living.note(worker.worker_id, worker.process.pid)
        return worker.process

    async def _told_new(self, worker: _Worker) -> asyncio.subprocess.Process | Adopted:
        command = self._command(worker.worker_id)
        if worker.waiting and worker.process is not None and worker.process.stdin is not None:
            worker.waiting = False
            worker.process.stdin.write(json.dumps(command).encode() + b"\n")
            worker.process.stdin.close()
            return worker.process
        return await self._spawn(worker, command)

    async def _spawn(self, worker: _Worker, command: list[str]) -> asyncio.subprocess.Process:
        if self._bound:
            command = ["-m", "dora.host.bound", str(os.getpid()), *command]
        with self._sink(self._log_file(worker)) as sink:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                env={**os.environ, **self._environment(worker.worker_id)},
                stdin=asyncio.subprocess.PIPE if WAIT_OPTION in command else asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )

    def _log_file(self, worker: _Worker) -> Path:
        return self._log_folder / f"{worker.worker_id}.log"

    def _sink(self, log_file: Path) -> BinaryIO:
        """Where a worker's words go: to its log; nowhere where that cannot be made."""
        try:
            self._log_folder.mkdir(parents=True, exist_ok=True)
            return log_file.open("ab")
        except OSError as error:
            self._unwritable(error)
        return open(os.devnull, "ab")

    def early_death(self) -> str | None:
        """Why a worker that never answered has died already twice; None while all is well."""
        for worker in self._workers.values():
            if worker.restarts >= 2:
                return f"worker {worker.worker_id} ends at start: {self._last_words(worker)}"
        return None

    def _last_words(self, worker: _Worker) -> str:
        """Why a worker has ended, as far as it could say."""
        return worker.not_started or _tail(self._log_file(worker))

    def _exclude(self, worker: _Worker, reason: str) -> None:
        """The worker is not started again; the others go on."""
        worker.excluded = True
        log.error("%s is not started again: it %s", worker.worker_id, reason)
        if not self.workers and not worker.is_pool:
            self._fail(f"no worker is left: {worker.worker_id} {reason}")

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(WorkerStartError(reason))


def _tail(log: Path) -> str:
    """The last lines that a dead worker wrote."""
    try:
        text = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
    except OSError as error:
        return str(error)
    lines = [line for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-3:]) or "it wrote nothing"
