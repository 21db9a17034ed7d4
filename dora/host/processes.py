"""Starts, restarts and stops the worker processes and pools of this machine.

It is a launcher (``launcher.py``) of the service's own host, and within an agent that of a joined host.
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
from dora.host.last_words import last_words
from dora.host.launcher import Scaled, WorkerStartError, scaled, worker_name
from dora.host.survivors import Adopted, Survivors
from dora.system.environment import DEVICES, child_environment, left_out

log = logging.getLogger("dora.service")

RESTART_PAUSE_S = 0.5  # doubled at each early death, up to
RESTART_PAUSE_MAX_S = 15.0
HEALTHY_S = 30.0  # a process that lived this long is restarted quickly
DEATHS_WITHIN_S = 600.0  # ``workers.restarts`` counts deaths within this time
STOP_GRACE_S = 10.0


@dataclass(slots=True)
class _Worker:
    worker_id: str
    is_pool: bool = False
    process: asyncio.subprocess.Process | Adopted | None = None
    waiting: bool = False  # its process waits for its arguments
    adopted: bool = False  # its process comes from an earlier incarnation of the service
    leaving: bool = False
    excluded: bool = False  # it died too often and is not restarted
    not_started: str = ""  # the reason why its last process could not start; empty if it could
    restarts: int = 0
    died_s: deque[float] = field(default_factory=deque)  # within the last DEATHS_WITHIN_S

    def dies(self, now_s: float) -> int:
        self.died_s.append(now_s)
        while now_s - self.died_s[0] > DEATHS_WITHIN_S:
            self.died_s.popleft()
        return len(self.died_s)

    def send(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


class Processes:
    """``command(worker_id)`` returns the argv after the interpreter. ``environment(worker_id)``, called at each start,
    is added to what children inherit. ``prefix`` starts each worker's id; ``open`` starts ``pool_ids``.

    A worker that dies more often than ``workers.restarts`` times in ten minutes is not restarted; the others continue.
    ``failed`` is set once none is left. Workers continue without their pools. ``unwritable`` is called if a log file
    cannot be created. If ``bound``, processes end when this process ends for any reason.
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
        check: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``living`` is the file of processes for a later incarnation of the service, if any. ``check`` raises
        InvalidValue for more workers than the host has devices for.
        """
        self._check = check
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
        self._reported = False  # which variables workers do not get
        self._starts = asyncio.Event()  # clear: nothing is restarted at the moment
        self._starts.set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(name for name, worker in self._workers.items() if not (worker.leaving or worker.excluded))

    def names(self, workers: int) -> Set[str]:
        """Returns the ids of its pools and of ``workers`` workers."""
        return {*self._pools, *(worker_name(self._prefix, index) for index in range(workers))}

    def adopt(self, living: Mapping[str, Adopted], workers: int) -> None:
        """Continues processes of an earlier incarnation, by name, instead of starting new ones. Called before
        ``begin``.

        A process whose name no longer belongs to a wanted worker or pool is told to end.
        """
        for name, process in living.items():
            if name in self._pools:
                self._pools[name].process, self._pools[name].adopted = process, True
            elif name in self.names(workers):
                self._begun.append(_Worker(name, process=process, adopted=True))
            else:
                process.send_signal(signal.SIGTERM)

    async def begin(self, workers: int) -> None:
        """Starts processes that import their engine, which takes seconds, before ``command`` can be called.

        They wait for ``start``, which sends their arguments; the model can be prepared meanwhile. At most one for each
        core is started, since more would delay each other.
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
        """Ends a worker, and with ``again`` restarts it. A pool can only be stopped with ``again``."""
        worker = self._workers.get(worker_id) or (self._pools.get(worker_id) if again else None)
        if worker is not None:
            worker.leaving |= not again
            worker.send(signal.SIGKILL if again else signal.SIGTERM)
            if not again:
                asyncio.get_running_loop().call_later(STOP_GRACE_S, worker.send, signal.SIGKILL)

    def scale(self, workers: int) -> Scaled:
        self._check(workers)
        change = scaled(self._prefix, self.workers, workers)
        for worker_id in change.started:
            self.start(worker_id)
        return change

    def stand_still(self) -> None:
        """Suspends restarts until ``proceed``, while there is no service to join. Running processes continue."""
        self._starts.clear()

    def proceed(self) -> None:
        self._starts.set()

    def statuses(self) -> dict[str, str]:
        """Returns the workers that do not run properly, with the reason."""
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
        """Asks every process to end, then kills it. May be called again."""
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
        """Keeps a process running. ``before`` is the task of the previous process, which may not have ended."""
        if before is not None:
            await before
        loop = asyncio.get_running_loop()
        pause_s = RESTART_PAUSE_S
        while not worker.leaving:
            began_s = loop.time()
            worker.not_started, code = "", 0
            try:
                process = await self._told(worker)
                if worker.leaving:  # it was stopped before its process existed
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
                env=self._child_environment(worker.worker_id),
                process_group=0,  # a terminal's signals are for the service, which drains
                stdin=asyncio.subprocess.PIPE if WAIT_OPTION in command else asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )

    def _child_environment(self, worker_id: str) -> dict[str, str]:
        environment = child_environment((*DEVICES, *self._config.environment), self._environment(worker_id))
        if not self._reported:
            self._reported = True
            if absent := left_out(environment):
                names = ", ".join(absent)
                log.info("workers do not get these variables as they are here: %s (workers.environment)", names)
        return environment

    def _log_file(self, worker: _Worker) -> Path:
        return self._log_folder / f"{worker.worker_id}.log"

    def _sink(self, log_file: Path) -> BinaryIO:
        try:
            self._log_folder.mkdir(parents=True, exist_ok=True)
            return log_file.open("ab")
        except OSError as error:
            self._unwritable(error)
        return open(os.devnull, "ab")

    def early_death(self) -> str | None:
        """Returns why a worker that never answered died twice, or None."""
        for worker in self._workers.values():
            if worker.restarts >= 2:
                return f"worker {worker.worker_id} ends at start: {self._last_words(worker)}"
        return None

    def _last_words(self, worker: _Worker) -> str:
        return worker.not_started or last_words(self._log_file(worker))

    def _exclude(self, worker: _Worker, reason: str) -> None:
        worker.excluded = True
        log.error("%s is not started again: it %s", worker.worker_id, reason)
        if not self.workers and not worker.is_pool:
            said = f"no worker is left: {worker.worker_id} {reason}"
            if not self.failed.done():
                self.failed.set_exception(WorkerStartError(said, "worker_id", worker.worker_id))
