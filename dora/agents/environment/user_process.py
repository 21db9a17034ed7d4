"""The process in which a user's environments run: it makes them, and calls them for the driver of their sessions.

    python -m dora.agents.environment.user_process SPEC LIMITS TIMEOUT_S SOCKET MARKS

The driver sends {call, of, do, given} or {cancel: call}. It gets {call, found} or {call, error}, and ticks while the
event loop runs. Whatever ends this process, its *marks* are left in memory that the driver reads: the number of the
environment whose code ran, and last words with a line of the stack.
"""

import asyncio
import contextvars
import faulthandler
import json
import mmap
import os
import socket
import struct
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from functools import partial
from types import FrameType
from typing import Any, Final, cast

from dora.agents.chat.reply import ToolCall
from dora.agents.environment.calls import Calls, EnvironmentFailed
from dora.agents.environment.guard import Guard
from dora.agents.environment.loading import load_environment
from dora.agents.environment.pool import prepare
from dora.agents.environment.protocol import End, Environment, Reply, Task
from dora.agents.environment.verdicts import is_deterministic
from dora.errors import InvalidValue
from dora.rewards import frames
from dora.rewards.limits import UserLimits
from dora.system.prefixed_output import prefix_output
from dora.system.process_tree import end_descendants

TICK_S: Final = 0.5
STACK_SIGNAL: Final = 50  # asks for a line of the stack: no use of it is known
MARK: Final = struct.Struct("<q")  # at the beginning of the marks; the last words follow


class Instance:
    """One environment. ``name`` is that of its session, for the log."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = "environment"
        self.made: Any = None


_RUNNING: Final[contextvars.ContextVar[Instance | None]] = contextvars.ContextVar("environment", default=None)


class Marks:
    """The marks of this process. Their memory has the ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._number = descriptor, mmap.mmap(descriptor, MARK.size)
        os.lseek(descriptor, MARK.size, os.SEEK_SET)
        faulthandler.enable(descriptor, all_threads=False)
        faulthandler.register(STACK_SIGNAL, descriptor)

    def enter(self, instance: Instance | None) -> None:
        MARK.pack_into(self._number, 0, instance.number if instance is not None else 0)

    def say(self, reason: str, frame: FrameType | None) -> None:
        at = f'\n  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}' if frame else ""
        os.pwrite(self._descriptor, f"{reason}{at}\n".encode(errors="replace"), MARK.size)

    def note_exits(self) -> None:
        """Makes ``os._exit`` leave last words."""
        own_id, leave = os.getpid(), os._exit

        def leaving(code: int) -> None:
            if os.getpid() == own_id and (instance := _RUNNING.get()) is not None:
                self.enter(instance)
                self.say(f"os._exit({code})", sys._getframe(1))
            leave(code)

        os._exit = leaving  # type: ignore[assignment]

    def ending(self, reason: str, *, is_blocked: bool) -> None:
        """Notes that the process ends itself at a limit, which may be that of all its environments."""
        if not is_blocked:
            self.enter(None)
        self.say(reason, sys._current_frames().get(threading.main_thread().ident or 0) if is_blocked else None)


class _Marked:
    """Awaits a coroutine of an environment. Each of its steps is marked, and none ends the process by an exception."""

    def __init__(self, call: Coroutine[Any, Any, Any], instance: Instance, marks: Marks) -> None:
        self._call, self._instance, self._marks = call, instance, marks

    def __await__(self) -> Generator[Any, Any, Any]:
        step, given = self._call.send, None
        while True:
            self._marks.enter(self._instance)
            try:
                waited = step(given)
            except StopIteration as ended:
                return ended.value
            except (SystemExit, KeyboardInterrupt) as error:
                raise EnvironmentFailed(f"{type(error).__name__}: {error}{_where(error)}") from None
            finally:
                self._marks.enter(None)
            try:
                step, given = self._call.send, (yield waited)
            except BaseException as error:
                step, given = self._call.throw, error


def _task(marks: Marks, loop: asyncio.AbstractEventLoop, call: Any, **about: Any) -> asyncio.Task[Any]:
    """Makes each task of an environment a marked one, those that it begins itself too."""
    instance = (about.get("context") or contextvars.copy_context()).get(_RUNNING)
    if instance is None:
        return asyncio.Task(call, loop=loop, **about)

    async def marked() -> Any:
        return await _Marked(call, instance, marks)

    return asyncio.Task(marked(), loop=loop, **about)


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code if trace is not None else None
    return f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno} in {code.co_name})" if code and trace else ""


class Server:
    """Makes and calls the environments of one process."""

    def __init__(
        self, make: Callable[[], Environment], guard: Guard, calls: Calls, writer: asyncio.StreamWriter
    ) -> None:
        self._make, self._guard, self._calls, self._writer = make, guard, calls, writer
        self._instances: dict[int, Instance] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._own_id = os.getpid()
        self._ending: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Answers calls until the driver has left."""
        ticking = asyncio.create_task(self._tick())
        while (asked := await frames.read_async(reader, frames.FRAME_MAX_BYTES)) is not None:
            if "cancel" in asked:
                if task := self._running.get(asked["cancel"]):
                    ending = asyncio.create_task(self._calls.end(task))
                    self._ending.add(ending)
                    ending.add_done_callback(self._ending.discard)
                continue
            number, instance = asked["call"], self._instances.setdefault(asked["of"], Instance(asked["of"]))
            context = contextvars.copy_context()
            context.run(_RUNNING.set, instance)
            answering = self._answer(number, instance, asked["do"], json.loads(asked["given"]))
            self._running[number] = task = asyncio.get_running_loop().create_task(answering, context=context)
            task.add_done_callback(lambda _, number=number: self._running.pop(number, None))  # type: ignore[misc]
        ticking.cancel()

    def send(self, message: Mapping[str, Any]) -> None:
        if os.getpid() == self._own_id:  # a fork that returns from the user's code ends
            self._writer.write(frames.encode(dict(message)))
        else:
            os._exit(0)

    async def _answer(self, number: int, instance: Instance, do: str, given: Any) -> None:
        about: dict[str, Callable[[], Awaitable[Any]]] = {
            "prepare": lambda: self._prepared(instance),
            "reset": lambda: _reset(instance, Task(**given)),
            "step": lambda: _stepped(instance, given),
            "close": lambda: self._closed(instance),
        }
        try:
            found = json.dumps(await about[do](), default=_plain)
            if len(found) > frames.FRAME_MAX_BYTES // 2:
                raise EnvironmentFailed(
                    f"{do}() has returned {len(found):,} bytes: at most {frames.FRAME_MAX_BYTES // 2:,}"
                )
            self.send({"call": number, "found": found})
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # of the user's class, SystemExit too
            self.send({"call": number, "error": f"{self._guard.described(error)}{_where(error)}"})

    async def _prepared(self, instance: Instance) -> Any:
        instance.made = self._make()
        await prepare(instance.made)
        return is_deterministic(instance.made)

    async def _closed(self, instance: Instance) -> None:
        del self._instances[instance.number]
        if close := getattr(instance.made, "close", None):
            await close()

    async def _tick(self) -> None:
        while True:
            self._guard.tick()
            self.send({"tick": True})
            await asyncio.sleep(TICK_S)


async def _reset(instance: Instance, task: Task) -> Any:
    instance.name = task.session_id
    return [await instance.made.reset(task), getattr(instance.made, "tools", None)]


async def _stepped(instance: Instance, given: dict[str, Any]) -> Any:
    calls = tuple(ToolCall(**each) for each in given.pop("tool_calls"))
    found = await instance.made.step(Reply(**{**given, "token_ids": tuple(given["token_ids"])}, tool_calls=calls))
    if isinstance(found, End):
        return {"end": [found.reward, found.components, list(found.turn_rewards.items()), found.log]}
    if isinstance(found, tuple):
        *rest, info = found or (None,)
        components = info.get("components") if isinstance(info, Mapping) else None
        return {"tuple": [*rest, {"components": components}]}
    return {"messages": found}


def _plain(value: object) -> Any:
    item = getattr(value, "item", None)
    if callable(item) and not getattr(value, "ndim", 0):  # a scalar of numpy or torch
        return item()
    if isinstance(value, Mapping):
        return dict(value)
    raise EnvironmentFailed(f"returned a {type(value).__name__}, which is no JSON")


async def run(spec: str, limits: UserLimits, timeout_s: float, connected: socket.socket, marks: Marks) -> None:
    reader, writer = await asyncio.open_connection(sock=connected, limit=1 << 20)
    calls = Calls()
    guard = Guard(limits, timeout_s, calls, marks.ending)
    try:
        make = cast(Callable[[], Environment], load_environment(spec))
    except InvalidValue as refused:
        writer.write(frames.encode({"refused": refused.allowed}))
        await writer.drain()
        return
    server = Server(make, guard, calls, writer)
    guard.begin()
    marks.note_exits()
    asyncio.get_running_loop().set_task_factory(partial(_task, marks))
    server.send({"ready": True})
    await server.serve(reader)


def main(spec: str, limits: UserLimits, timeout_s: float, descriptor: int, memory: int) -> None:
    os.dup2(2, 1)
    prefix_output(lambda: found.name if (found := _RUNNING.get()) is not None else "environment")
    for each in (descriptor, memory):
        os.set_inheritable(each, False)
    marks = Marks(memory)
    try:
        asyncio.run(run(spec, limits, timeout_s, socket.socket(fileno=descriptor), marks))
    except SystemExit as error:  # of a callback of the user's
        marks.say(f"SystemExit: {error}{_where(error)}", None)
        raise
    finally:
        end_descendants()


if __name__ == "__main__":
    main(sys.argv[1], UserLimits.from_argument(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:]))
