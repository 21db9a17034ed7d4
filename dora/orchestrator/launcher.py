"""Starts the rollout workers and the pool as processes of their own, starts dead ones again, stops all at the end."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from dora.config import KvConfig, WorkersConfig
from dora.errors import DoraError
from dora.orchestrator.storage import RUN_FOLDER, Storage

log = logging.getLogger("dora.service")

RESTART_PAUSE_S = 0.5  # doubled at each early death, up to
RESTART_PAUSE_MAX_S = 15.0
HEALTHY_S = 30.0  # a process that lived so long has earned a quick restart
DEATHS_WITHIN_S = 600.0  # deaths count for so long: ``workers.restarts`` is a rate, not a whole life's sum
LOG_TAIL_BYTES = 2000
WORKER_MODULE: Final = "dora.worker"
POOL_MODULE: Final = "dora.pool"
POOL_ID: Final = "pool-0"
WAIT_OPTION: Final = "--wait"  # of a worker: its arguments come on stdin, once its engine is imported
STOP_GRACE_S = 10.0


class WorkerStartError(DoraError):
    """A worker process ended before it ever answered."""


@dataclass(slots=True)
class _Worker:
    """One worker id, or pool id, and its process at present."""

    worker_id: str
    is_pool: bool = False
    process: asyncio.subprocess.Process | None = None
    waiting: bool = False  # its process has yet to be told what it is for
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


class Launcher:
    """``command(worker_id)`` is the argv after the interpreter; ``environment(worker_id)``, asked for at each start, is
    added to this process's.

    A worker that dies more often than ``workers.restarts`` times in ten minutes is not started again. The service goes
    on with the others; ``failed`` is set once none is left. It goes on without its pools (``pool_ids``).
    """

    def __init__(
        self,
        config: WorkersConfig,
        command: Callable[[str], list[str]],
        environment: Callable[[str], Mapping[str, str]],
        log_folder: Path,
        storage: Storage,
        pool_ids: Iterable[str] = (),
    ) -> None:
        self._config = config
        self._command = command
        self._environment = environment
        self._log_folder = log_folder
        self._storage = storage
        self._workers = {name: _Worker(name) for name in (f"w{i}" for i in range(config.count))}
        self._workers |= {name: _Worker(name, is_pool=True) for name in pool_ids}
        self._tasks: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def begin(self) -> None:
        """Starts processes that import their engine, before ``command`` can be asked: it takes them some seconds.

        They wait for ``start``, which tells them the rest; so the model can be prepared meanwhile. More than there are
        cores would only wait for each other.
        """
        if self._config.engine != "vllm":
            return
        for worker in [each for each in self._workers.values() if not each.is_pool][: os.cpu_count() or 1]:
            worker.process = await self._spawn(worker, ["-m", WORKER_MODULE, WAIT_OPTION])
            worker.waiting = True

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._keep(worker), name=worker.worker_id) for worker in self._workers.values()
        ]

    def kill(self, worker_id: str) -> None:
        """Ends an untrusted worker at once; it is started again. Ids that others started are ignored."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.send(signal.SIGKILL)

    def let_go(self, worker_id: str) -> None:
        """The worker was drained and leaves: do not start it again."""
        if worker_id in self._workers:
            self._workers[worker_id].leaving = True

    async def close(self) -> None:
        """Asks every process to end, then makes it."""
        for worker in self._workers.values():
            worker.leaving = True
            worker.send(signal.SIGTERM)
            if worker.waiting and worker.process is not None:
                await worker.process.wait()
        if not self._tasks:
            return
        _, slow = await asyncio.wait(self._tasks, timeout=STOP_GRACE_S)
        for worker in self._workers.values():
            worker.send(signal.SIGKILL)
        if slow:
            await asyncio.wait(slow)
        if not self.failed.done():
            self.failed.cancel()

    async def _keep(self, worker: _Worker) -> None:
        loop = asyncio.get_running_loop()
        pause_s = RESTART_PAUSE_S
        while not worker.leaving:
            began_s = loop.time()
            worker.not_started, code = "", 0
            try:
                code = await (await self._told(worker)).wait()
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

    async def _told(self, worker: _Worker) -> asyncio.subprocess.Process:
        """A process that knows what it is for: the one that waits, else a new one."""
        command = self._command(worker.worker_id)
        if worker.waiting and worker.process is not None and worker.process.stdin is not None:
            worker.waiting = False
            worker.process.stdin.write(json.dumps(command).encode() + b"\n")
            worker.process.stdin.close()
            return worker.process
        worker.process = await self._spawn(worker, command)
        return worker.process

    async def _spawn(self, worker: _Worker, command: list[str]) -> asyncio.subprocess.Process:
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
        with self._storage.tidying(RUN_FOLDER):
            self._log_folder.mkdir(parents=True, exist_ok=True)
            return log_file.open("ab")
        return open(os.devnull, "ab")

    def early_death(self) -> str | None:
        """Why a worker that never answered has died already twice; None while all is well."""
        for worker in self._workers.values():
            if worker.restarts >= 2 and not worker.is_pool:
                return f"worker {worker.worker_id} ends at start: {self._last_words(worker)}"
        return None

    def _last_words(self, worker: _Worker) -> str:
        """Why a worker has ended, as far as it could say."""
        return worker.not_started or _tail(self._log_file(worker))

    def _exclude(self, worker: _Worker, reason: str) -> None:
        """The worker is not started again; the others go on."""
        worker.excluded = True
        log.error("%s is not started again: it %s", worker.worker_id, reason)
        left = [each for each in self._workers.values() if not (each.is_pool or each.excluded or each.leaving)]
        if not left and not worker.is_pool:
            self._fail(f"no worker is left: {worker.worker_id} {reason}")

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(WorkerStartError(reason))


def worker_argv(
    config: WorkersConfig, worker_id: str, address: str, model: Path, kv_host: str = "", kv_tier: str = ""
) -> list[str]:
    """The arguments of the Python that runs one worker.

    ``kv_host``: where others reach it; empty: it finds out. ``kv_tier``: where the shared tier listens; empty: none.
    """
    options = {
        "--orchestrator": address,
        "--worker-id": worker_id,
        "--engine": config.engine,
        "--model": str(model),
        "--slots": config.slots,
        "--kv-tokens": config.kv_tokens,
        "--block-tokens": config.block_tokens,
        "--max-model-len-tokens": config.max_model_len_tokens,
        "--dtype": config.dtype,
        "--tensor-parallel": config.tensor_parallel,
        "--pipeline-parallel": config.pipeline_parallel,
        **({"--kv-host": kv_host} if kv_host else {}),
        **({"--kv-tier": kv_tier} if kv_tier else {}),
    }
    return ["-m", WORKER_MODULE, *(str(part) for option in options.items() for part in option)]


def pool_argv(config: KvConfig, pool_id: str, address: str) -> list[str]:
    """The same of a pool."""
    options = {
        "--orchestrator": address,
        "--pool-id": pool_id,
        "--memory-mb": config.pool_mb,
        "--spill-mb": config.spill_mb,
        **({"--spill-folder": config.spill_folder} if config.spill_folder else {}),
        **({"--kv-host": config.host} if config.host else {}),
    }
    return ["-m", POOL_MODULE, *(str(part) for option in options.items() for part in option)]


def worker_environment(config: WorkersConfig, token: str) -> dict[str, str]:
    """Threads are fixed before numpy and torch load. The token travels here, where other users cannot read it."""
    threads = str(config.threads)
    return {
        "DORA_TOKEN": token,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
    }


def _tail(log: Path) -> str:
    """The last lines that a dead worker wrote."""
    try:
        text = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
    except OSError as error:
        return str(error)
    lines = [line for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-3:]) or "it wrote nothing"
