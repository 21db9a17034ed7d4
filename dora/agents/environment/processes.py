"""The processes in which a user's environments run, apart from the driver of their sessions.

All environments share one process. If it ends, its marks name the environment whose code ran (user_process.py), or else
those with a call under way are suspects. Others have no fault in it. The sessions of a prompt that has ended the shared
process, or was suspected twice, get a process each. If a prompt ends two of these, its group is cancelled.
"""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import sys
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

from dora.agents.environment.calls import Ended, EnvironmentFailed, Fault
from dora.agents.environment.loading import LOADS_S
from dora.agents.environment.protocol import End, Messages, Reply, Task
from dora.agents.environment.spec import OPTION
from dora.agents.environment.user_process import MARK, STACK_SIGNAL
from dora.config import EnvironmentConfig
from dora.errors import InvalidValue
from dora.rewards import frames
from dora.rewards.limits import UserLimits
from dora.system.environment import without_secrets

log = logging.getLogger("dora.environment")

PAUSE_S: Final = 1.0  # between two starts of the shared process
SILENT_S: Final = 5.0  # without a tick: its event loop is blocked
STACK_S: Final = 0.2  # for a line of the stack
ENDS_WITHIN_S: Final = 5.0
WORDS_BYTES: Final = 64 << 10
ALONE_MAX: Final = 16  # processes of one session at a time
ALONE_DEATHS: Final = 2  # of a prompt: then it is cancelled
SUSPECTED: Final = 2  # suspicions of a prompt: then its sessions run alone
PROMPTS_MAX: Final = 4096  # that are remembered
_OUTER_FOLDERS: Final = re.compile(r'(?<=^File ").*/(?=[^/"]*/[^/"]*")')  # of a place: a reason has 200 characters


class Remote:
    """An environment in a process of its kind, as :class:`Environment`."""

    tools: Any = None
    deterministic = False

    def __init__(self, processes: "Processes", process: "UserProcess | None" = None) -> None:
        self._processes, self._process = processes, process
        self.number = processes.next_number()
        self.task = Task("")
        self.outcome: Ended | None = None

    async def enter(self) -> None:
        """Waits until its process runs. Raises InvalidValue as ``UserProcess.begin``."""
        if self._process is None:
            self._process = await self._processes.shared()

    async def prepare(self) -> None:
        await self.enter()
        self.deterministic = await self._of().call(self, "prepare")

    async def reset(self, task: Task) -> Messages:
        self.task = task
        messages, self.tools = await self._of().call(self, "reset", asdict(task))
        return messages

    async def step(self, reply: Reply) -> Any:
        found = await self._of().call(self, "step", asdict(reply))
        if "end" in found:
            reward, components, turn_rewards, said = found["end"]
            return End(reward, components, dict(turn_rewards), said)
        return tuple(found["tuple"]) if "tuple" in found else found["messages"]

    async def close(self) -> None:
        if (process := self._process) is not None:
            try:
                await process.call(self, "close")
            finally:
                process.forget(self)

    async def ended(self) -> Ended | None:
        """Returns how its process has ended, or None if it runs."""
        if self._process is not None and self._process.is_ending:
            await asyncio.wait({self._process.over})
        return self.outcome

    @property
    def is_lost(self) -> bool:
        return self._process is None or self._process.is_ending

    def _of(self) -> "UserProcess":
        assert self._process is not None, "prepared"
        return self._process


class UserProcess:
    """One process. ``over`` is done when it has ended, and every environment in it has its ``outcome``."""

    def __init__(self, processes: "Processes", *, is_alone: bool) -> None:
        self._processes, self._is_alone = processes, is_alone
        self._remotes: dict[int, Remote] = {}
        self._asked: dict[int, tuple[Remote, asyncio.Future[Any]]] = {}
        self._calls = 0
        self._said = ""
        self.is_ending = False

    async def begin(self, settings: EnvironmentConfig) -> None:
        """Raises InvalidValue if it cannot load the class."""
        ours, theirs = socket.socketpair()
        self._marks = os.memfd_create("environment")
        os.truncate(self._marks, MARK.size)
        argv = [sys.executable, "-m", "dora.host.bound", str(os.getpid()), "-m", "dora.agents.environment.user_process"]
        limits = UserLimits(settings.memory_mb, settings.open_files, settings.processes, section="environment")
        passed = (theirs.fileno(), self._marks)
        words = (settings.spec, limits.as_argument(), str(settings.timeout_s), *map(str, passed))
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *argv, *words, env=without_secrets(), pass_fds=passed, start_new_session=True
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        try:
            async with asyncio.timeout(LOADS_S):
                first = await frames.read_async(self._reader, frames.FRAME_MAX_BYTES) or {}
        except (ValueError, TimeoutError):
            first = {}
        self._ticked_s = asyncio.get_running_loop().time()
        self.over = asyncio.create_task(self._watch())
        if "ready" not in first:
            self.end("")
            await asyncio.wait({self.over})
            raise InvalidValue(OPTION, settings.spec, first.get("refused", f"one that loads within {LOADS_S} s"))

    async def call(self, remote: Remote, do: str, given: Any = None) -> Any:
        """Calls an environment. Raises Failed with what it raises, and Ended."""
        if self.is_ending:
            await asyncio.wait({self.over})
            remote.outcome = remote.outcome or Ended("the process of its environment has ended", "another")
            raise remote.outcome
        self._remotes[remote.number] = remote
        self._calls += 1
        number, answer = self._calls, asyncio.get_running_loop().create_future()
        self._asked[number] = remote, answer
        self._send({"call": number, "of": remote.number, "do": do, "given": json.dumps(given)})
        try:
            return await answer
        except asyncio.CancelledError:
            silent_s = asyncio.get_running_loop().time() - self._ticked_s
            if silent_s > min(SILENT_S, self._processes.settings.timeout_s / 2):
                self.end(f"has blocked the event loop for {silent_s:.0f} s, and a call has waited for its timeout")
            else:
                self._send({"cancel": number})
            raise
        finally:
            self._asked.pop(number, None)

    def forget(self, remote: Remote) -> None:
        self._remotes.pop(remote.number, None)
        if self._is_alone:
            self.end("")

    def end(self, reason: str) -> None:
        """Ends the process. ``reason`` says why, if it is the fault of the environment whose code runs."""
        if self.is_ending:
            return
        self.is_ending, self._said = True, reason
        if reason:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, STACK_SIGNAL)
        delay_s = STACK_S if reason else 0.0 if self._asked else ENDS_WITHIN_S
        self._writer.close()
        asyncio.get_running_loop().call_later(delay_s, self._kill)

    def _send(self, message: Mapping[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(frames.encode(dict(message)))

    async def _watch(self) -> None:
        reading = asyncio.create_task(self._read())
        waiting = asyncio.create_task(self._process.wait())
        await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done() and not self.is_ending:  # it has closed its socket, or written into it
            self._kill()
        self.is_ending = True
        code = await waiting
        await asyncio.wait({reading}, timeout=STACK_S)  # answers that it gave before
        reading.cancel()
        self._kill()  # what it has started
        self._writer.close()
        self._settle(code)

    async def _read(self) -> None:
        with suppress(ValueError):
            while (found := await frames.read_async(self._reader, frames.FRAME_MAX_BYTES)) is not None:
                self._ticked_s = asyncio.get_running_loop().time()
                _, answer = self._asked.get(found.get("call", 0), (None, None))
                if answer is None or answer.done():
                    continue
                if "found" in found:
                    answer.set_result(json.loads(found["found"]))
                else:
                    answer.set_exception(EnvironmentFailed(str(found.get("error", "no answer"))))

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _settle(self, code: int) -> None:
        (number,) = MARK.unpack(os.pread(self._marks, MARK.size, 0))
        words = os.pread(self._marks, WORDS_BYTES, MARK.size).decode(errors="replace").strip("\0").splitlines()
        os.close(self._marks)
        threads = [number for number, each in enumerate(words) if "hread 0x" in each]  # the main thread is the last
        places = (each.strip() for each in words[max(threads, default=0) :] if each.startswith("  File "))
        at = _OUTER_FOLDERS.sub("", next(places, ""))
        said = ", ".join(each for each in (self._said or (words[0] if words else ""), at) if each)
        status = f"signal {-code}" if code < 0 else f"exit status {code}"
        marked = self._remotes.get(number)
        asked = {each.number: each for each, _ in self._asked.values()}
        suspects = [marked] if marked is not None else list(asked.values())
        is_sure = marked is not None or self._is_alone
        for each in suspects:
            fault: Fault = self._processes.suspect(each.task, is_sure=is_sure, is_alone=self._is_alone)
            each.outcome = Ended(f"prompt {each.task.prompt_id} has ended its process ({status}): {said}", fault)
        who = f"by session {suspects[0].task.session_id}" if is_sure and suspects else f"({status}) {said}"
        for each in self._remotes.values():
            each.outcome = each.outcome or Ended(f"the process of its environment was ended {who}", "another")
        if self._remotes and not (is_sure and suspects):  # otherwise the service logs the outcome
            names = ", ".join(f"{each.task.session_id} of {each.task.prompt_id}" for each in suspects[:8])
            log.warning("the process of the environments has ended (%s) %s; calls under way: %s", status, said, names)
        for remote, answer in self._asked.values():
            if remote.outcome is not None and not answer.done():
                answer.set_exception(remote.outcome)


class Processes:
    def __init__(self, settings: EnvironmentConfig) -> None:
        self.settings = settings
        self._numbers = 0
        self._shared: UserProcess | None = None
        self._starting = asyncio.Lock()
        self._room = asyncio.Semaphore(ALONE_MAX)
        self._all: set[UserProcess] = set()
        self._suspicions: OrderedDict[str, list[int]] = OrderedDict()  # by prompt: suspicions, ends of own processes

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def make(self) -> Remote:
        return Remote(self)

    async def alone(self, task: Task) -> Remote | None:
        """Returns an environment with a process of its own for a session of a suspected prompt; None for others."""
        if self._suspicions.get(task.prompt_id, [0])[0] < SUSPECTED:
            return None
        await self._room.acquire()
        try:
            process = await self._started(is_alone=True)
        except BaseException:
            self._room.release()
            raise
        process.over.add_done_callback(lambda _: self._room.release())
        return Remote(self, process)

    async def shared(self) -> UserProcess:
        """Returns the shared process, which is started again if it has ended."""
        async with self._starting:
            if self._shared is None or self._shared.is_ending:
                if self._shared is not None:
                    await asyncio.sleep(PAUSE_S)
                self._shared = await self._started(is_alone=False)
            return self._shared

    async def _started(self, *, is_alone: bool) -> UserProcess:
        process = UserProcess(self, is_alone=is_alone)
        await process.begin(self.settings)
        self._all.add(process)
        process.over.add_done_callback(lambda _: self._all.discard(process))
        return process

    def suspect(self, task: Task, *, is_sure: bool, is_alone: bool) -> Fault:
        """Notes that a session may have ended its process. Returns whose fault that is."""
        fault: Fault = "session" if is_sure else "another"
        if not task.prompt_id:  # it was prepared, and knows no prompt
            return fault
        found = self._suspicions.setdefault(task.prompt_id, [0, 0])
        self._suspicions.move_to_end(task.prompt_id)
        if len(self._suspicions) > PROMPTS_MAX:
            self._suspicions.popitem(last=False)
        found[0] += SUSPECTED if is_sure else 1
        found[1] += is_alone
        if found[1] == ALONE_DEATHS:
            found[1] = 0
            return "prompt"
        return fault

    async def stop(self) -> None:
        over = [each.over for each in self._all]
        for each in list(self._all):
            each.end("")
        await asyncio.gather(*over, return_exceptions=True)
