"""User functions run in processes of their own: never in the event loop, each call limited in time."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from dora.errors import InvalidValue
from dora.rewards import frames

START_TIMEOUT_S: Final = 60.0
_SPEC: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class _Job:
    call: dict[str, Any]
    reply: asyncio.Future[dict[str, Any]]


class FunctionPool:
    """One process a worker, all taking calls from one bounded queue.

    While the queue is full a call waits for a place: nothing is refused, nothing is lost. A process that ran out
    of time, or ended, is replaced before its worker takes the next call. Made by ``start``, ended by ``close``.
    """

    OPTION = "--function"  # what an error calls the function's name
    SECTION = "function"  # and its settings

    def __init__(self, spec: str, command: list[str], timeout_s: float, queue_max: int) -> None:
        self.spec = spec
        self._command = command
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
    ) -> Self:
        """Starts the processes and waits until each has loaded the function ``module:function``.

        ``tokenizer_folder`` holds tokenizer.json: responses given without text are decoded in the process.
        Raises InvalidValue for a value out of range and for a function that cannot be loaded.
        """
        if not _SPEC.fullmatch(spec):
            raise InvalidValue(cls.OPTION, spec, "module:function")
        for field, value in (("workers", workers), ("timeout_s", timeout_s), ("queue_max", queue_max)):
            if value <= 0:
                raise InvalidValue(f"{cls.SECTION}.{field}", value, "above 0")
        command = [sys.executable, "-m", "dora.rewards.process", spec]
        if tokenizer_folder is not None:
            command.append(str(tokenizer_folder))
        started = await asyncio.gather(*(_Process.started(command) for _ in range(workers)), return_exceptions=True)
        processes = [process for process in started if isinstance(process, _Process)]
        failures = [error for error in started if isinstance(error, BaseException)]
        if failures:
            await asyncio.gather(*(process.kill() for process in processes))
            if isinstance(failures[0], _Failure):
                raise InvalidValue(cls.OPTION, spec, f"a function that can be loaded: it {failures[0]}")
            raise failures[0]
        pool = cls(spec, command, timeout_s, queue_max)
        pool._workers = [asyncio.create_task(pool._serve(process)) for process in processes]
        return pool

    async def call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """What a process answers; ``{"failure": the end of a sentence}`` for whatever went wrong in it.

        Raises RuntimeError after ``close``.
        """
        if not self._workers:
            raise RuntimeError(f"the processes of {self.spec} are closed")
        job = _Job(dict(message), asyncio.get_running_loop().create_future())
        await self._jobs.put(job)
        return await job.reply

    async def close(self) -> None:
        """Stops the processes. Calls that still wait are cancelled."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        while not self._jobs.empty():
            self._jobs.get_nowait().reply.cancel()

    async def _serve(self, process: "_Process | None") -> None:
        """One worker: takes calls one by one; a process that failed is replaced before the next call."""
        try:
            while True:
                job = await self._jobs.get()
                try:
                    if process is None:
                        process = await _Process.started(self._command)
                    reply = await process.ask(job.call, self._timeout_s)
                except _Failure as failure:
                    reply = {"failure": str(failure)}
                    if process is not None:
                        await process.kill()
                    process = None
                except asyncio.CancelledError:
                    job.reply.cancel()
                    raise
                if not job.reply.done():  # its caller may have been cancelled meanwhile
                    job.reply.set_result(reply)
        finally:
            if process is not None:
                await process.kill()


class _Failure(Exception):
    """What the function, or its process, did: the end of a sentence. The process is of no more use."""


class _Process:
    """One reward process, ready for calls."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._calls = process.stdin
        self._replies = process.stdout

    @classmethod
    async def started(cls, command: list[str]) -> Self:
        """Starts a process and waits until it has loaded its function; raises _Failure with the reason it did not."""
        # A session of its own: Ctrl-C is for the service, which drains; and a kill reaches what a plug-in has started.
        pipe = asyncio.subprocess.PIPE
        process = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True))
        try:
            reply = await process._exchange(b"", START_TIMEOUT_S)
        except BaseException:  # cancellation too: nobody else knows the process yet
            await process.kill()
            raise
        if "failure" in reply:
            await process.kill()
            raise _Failure(reply["failure"])
        return process

    async def ask(self, call: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One call and its answer. Raises _Failure for a time-out and for a process that ended."""
        return await self._exchange(frames.encode(call), timeout_s)

    async def kill(self) -> None:
        """Ends the process and everything it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._calls.close()

    async def _exchange(self, frame: bytes, timeout_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(ConnectionError):  # it has ended: the missing answer tells
                    self._calls.write(frame)
                    await self._calls.drain()
                reply = await frames.read_async(self._replies)
        except TimeoutError as error:
            raise _Failure(f"took longer than {timeout_s:g} s and was stopped") from error
        except ValueError as error:
            raise _Failure(f"wrote into the answers of its process ({error})") from error
        if reply is None:
            raise _Failure(f"ended its process (exit code {await self._process.wait()})")
        return reply
