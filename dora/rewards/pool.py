"""Runs user functions in separate processes, outside the event loop, with a time limit for each call."""

import asyncio
import contextlib
import math
import os
import re
import secrets
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from dora.errors import InvalidValue
from dora.rewards import frames
from dora.rewards.frames import CALLS, ENDED, LASTED_S, START_TIMEOUT_S, TICKET
from dora.rewards.function import PARAMETERS, Kind
from dora.rewards.limits import DEFAULT_LIMITS, UserLimits
from dora.rewards.running_time import RunningTime
from dora.rewards.verdict import one_line
from dora.system.environment import child_environment

SUPERVISOR_GRACE_S: Final = 10.0  # beyond a time limit, which the keeper counts; then the keeper itself has failed
LOG_BYTES: Final = 64 << 10  # the part of a user process's output that goes into the service's log
REPLACED_LOG_BYTES: Final = 4 << 10  # and of one that takes the place of another
BATCH_S: Final = 0.05  # twice as many calls are asked together next time if they took less, else half as many
BATCH_CALLS: Final = 256
BATCH_BYTES: Final = 1 << 20  # to which calls are added to a batch
_SPEC: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class _Job:
    ticket: bytes
    frame: bytes  # as the user process gets it
    reply: asyncio.Future[dict[str, Any]]


class FunctionPool:
    """One process for each worker task; all tasks take calls from one bounded queue.

    While the queue is full, a call waits for a place: no call is refused or lost. A process that timed out or ended is
    replaced before its task takes the next call. Waiting short calls are sent together and answered one by one: each
    has its own time limit and fails alone. ``start`` creates a pool, ``close`` ends it.
    """

    KIND: ClassVar[Kind]
    OPTION: ClassVar[str]  # the function's setting in errors
    SECTION: ClassVar[str]  # and its settings

    def __init__(
        self, spec: str, arguments: list[str], environment: Sequence[str], timeout_s: float, queue_max: int
    ) -> None:
        self.spec = spec
        self._arguments = arguments
        self._environment = environment
        self._timeout_s = timeout_s
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue(maxsize=queue_max)
        self._workers: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        spec: str,
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
        tokenizer_folder: Path | None = None,
        queue_max: int = 8192,
        environment: Sequence[str] = (),
        limits: UserLimits = DEFAULT_LIMITS,
    ) -> Self:
        """Starts the processes and waits until each has loaded the function ``module:function``.

        ``tokenizer_folder`` has tokenizer.json: the process decodes responses that are given without text.
        ``environment`` names variables that the processes get beside those of the allow-list; ``limits`` holds for each
        process. Raises InvalidValue for a value out of range and for a function that cannot be loaded.
        """
        if not _SPEC.fullmatch(spec):
            raise InvalidValue(cls.OPTION, spec, "module:function")
        for field, value in (("workers", workers), ("timeout_s", timeout_s), ("queue_max", queue_max)):
            if value <= 0:
                raise InvalidValue(f"{cls.SECTION}.{field}", value, "above 0")
        folder = [] if tokenizer_folder is None else [str(tokenizer_folder)]
        arguments = [cls.KIND, spec, limits.as_argument(), *folder]
        starts = (_Process.started(arguments, environment, LOG_BYTES) for _ in range(workers))
        started = await asyncio.gather(*starts, return_exceptions=True)
        processes = [process for process in started if isinstance(process, _Process)]
        failures = [error for error in started if isinstance(error, BaseException)]
        if failures:
            await asyncio.gather(*(process.kill() for process in processes))
            if isinstance(failures[0], _Failure):
                parameters = ", ".join(PARAMETERS[cls.KIND])
                allowed = f"a function of ({parameters}) that can be loaded; this one {failures[0]}"
                raise InvalidValue(cls.OPTION, spec, allowed)
            raise failures[0]
        pool = cls(spec, arguments, environment, timeout_s, queue_max)
        pool._workers = [asyncio.create_task(pool._serve(process)) for process in processes]
        await asyncio.sleep(0)  # each has begun: a task that is cancelled before would leave its process behind
        return pool

    async def call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a process's answer or ``{"failure": end of a sentence}``. Raises RuntimeError after ``close``."""
        if not self._workers:
            raise RuntimeError(f"the processes of {self.spec} are closed")
        ticket = secrets.token_bytes(16)
        frame = frames.encode({**message, TICKET: ticket})
        job = _Job(ticket, frame, asyncio.get_running_loop().create_future())
        await self._jobs.put(job)
        return await job.reply

    async def close(self) -> None:
        """Stops the processes. Waiting calls are cancelled."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        while not self._jobs.empty():
            self._jobs.get_nowait().reply.cancel()

    async def _serve(self, process: "_Process | None") -> None:
        jobs: deque[_Job] = deque()  # not answered yet
        together = 1
        try:
            while True:
                if not jobs:
                    jobs.append(await self._jobs.get())
                    self._add_waiting(jobs, together)
                lasted_s = 0.0
                try:
                    if process is not None and process.ended:  # since its last call, by what that has left behind
                        await process.kill()
                        process = None
                    if process is None:
                        process = await _Process.started(self._arguments, self._environment, REPLACED_LOG_BYTES)
                    lasted_s = await process.ask(jobs, self._timeout_s)
                except _Failure as failure:
                    _answer(jobs.popleft(), {"failure": str(failure)})
                    if process is not None:
                        await process.kill()
                    process, lasted_s = None, BATCH_S
                together = min(2 * together, BATCH_CALLS) if lasted_s < BATCH_S else max(1, together // 2)
        finally:
            for job in jobs:
                job.reply.cancel()
            if process is not None:
                await process.kill()

    def _add_waiting(self, jobs: deque[_Job], most: int) -> None:
        share = math.ceil((1 + self._jobs.qsize()) / max(1, len(self._workers)))
        size_bytes = len(jobs[0].frame)
        while len(jobs) < min(share, most) and size_bytes < BATCH_BYTES:
            job = self._jobs.get_nowait()
            size_bytes += len(job.frame)
            jobs.append(job)


def _answer(job: _Job, reply: dict[str, Any]) -> None:
    if not job.reply.done():  # its caller may have been cancelled
        job.reply.set_result(reply)


class _Failure(Exception):
    """The function or its process failed, for the reason in the end of a sentence. The process is unusable."""


class _Process:
    def __init__(self, supervisor: asyncio.subprocess.Process) -> None:
        assert supervisor.stdin is not None and supervisor.stdout is not None
        self._supervisor = supervisor
        self._calls = supervisor.stdin
        self._answers = supervisor.stdout
        self._used_up = False
        self._has_called = False
        self._lasted_s = 0.0  # duration of the answered calls of the last request

    @classmethod
    async def started(cls, arguments: list[str], environment: Sequence[str], log_bytes: int) -> Self:
        """Starts a process and waits until it has loaded its function. Raises _Failure with the reason if it has not.

        ``arguments`` are the kind, the function's name, its limits, and the folder of a tokenizer, if any.
        """
        kind, spec, *rest = arguments
        command = [sys.executable, "-u", "-m", "dora.rewards.supervisor", kind, spec, str(log_bytes), *rest]
        pipe = asyncio.subprocess.PIPE
        try:
            # A separate session: Ctrl-C is for the service, which drains.
            supervisor = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, start_new_session=True, env=child_environment(environment)
            )
        except OSError as error:  # no memory, or too many processes or files: the call fails, and the next one tries
            raise _Failure(f"could not be started ({error.strerror})") from error
        process = cls(supervisor)
        try:
            first = _Job(b"", b"", asyncio.get_running_loop().create_future())
            await process._exchange(b"", deque([first]), START_TIMEOUT_S)
        except BaseException:  # cancellation too: nobody else knows the process yet
            await process.kill()
            raise
        return process

    @property
    def ended(self) -> bool:
        return self._used_up or self._answers.at_eof()

    async def ask(self, jobs: deque[_Job], timeout_s: float) -> float:
        """Sends these calls, in order; each leaves ``jobs`` when it is answered. Returns the time that the process
        took.

        Returns early if the process is unusable for the remaining calls. Raises _Failure if the first of them caused
        that.
        """
        calls = [(job.ticket, job.frame) for job in jobs]
        self._lasted_s = 0.0
        is_first, self._has_called = not self._has_called, True
        await self._exchange(frames.encode({CALLS: calls, "timeout_s": timeout_s}), jobs, timeout_s, is_first)
        return self._lasted_s

    async def kill(self) -> None:
        """Ends the process and all that it started, by closing its supervisor's stdin."""
        self._calls.close()
        ending = asyncio.create_task(self._supervisor.wait())
        await asyncio.wait({ending}, timeout=SUPERVISOR_GRACE_S)
        if not ending.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._supervisor.pid, signal.SIGKILL)
        await ending

    async def _exchange(self, frame: bytes, jobs: deque[_Job], limit_s: float, is_first: bool = True) -> None:
        """Writes ``frame`` and reads the answers. The supervisor limits the calls' time, this only its own."""
        exchanging = asyncio.create_task(self._written_and_read(frame, jobs, is_first))
        try:
            while not exchanging.done():
                left, time_left = len(jobs), RunningTime(limit_s + SUPERVISOR_GRACE_S)  # for each answer
                while not exchanging.done() and len(jobs) == left:
                    left_s = time_left.next_slice_s()
                    await asyncio.wait({exchanging}, timeout=left_s)
                    if left_s <= 0.0 and not exchanging.done() and len(jobs) == left:
                        raise _Failure(f"took longer than {limit_s:g} s, and its keeper does not answer")
            exchanging.result()
        except ValueError as error:
            raise _Failure(f"wrote into the answers of its keeper ({error})") from error
        finally:
            exchanging.cancel()

    async def _written_and_read(self, frame: bytes, jobs: deque[_Job], is_first: bool) -> None:
        """If ``is_first``, a process that ends before this call fails it, for the next process would do the same."""
        with contextlib.suppress(ConnectionError):  # it has ended, which the missing answer shows
            self._calls.write(frame)
            await self._calls.drain()
        sent = len(jobs)
        while jobs and not self._used_up:
            reply = await frames.read_async(self._answers, frames.ANSWER_MAX_BYTES)
            if reply is None:
                code = await self._supervisor.wait()
                if not code and (len(jobs) < sent or not is_first):  # between two calls; the next one was not made
                    return
                raise _Failure(f"ended its keeper (exit code {code})" if code else "ended its process before this call")
            if reply.pop(TICKET, None) != jobs[0].ticket:
                raise _Failure("answered another call than was asked")
            self._used_up = reply.pop(ENDED, False)
            self._lasted_s += reply.pop(LASTED_S, 0.0)
            if self._used_up and "failure" in reply:
                raise _Failure(one_line(reply["failure"]))
            _answer(jobs.popleft(), reply)
