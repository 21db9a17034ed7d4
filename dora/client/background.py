"""Where the synchronous clients run the asynchronous ones: the process's one event loop, in a thread of its own.

The thread begins with the first client that opens and ends with the last that closes. A call is handed over to it,
and its caller waits for the outcome: each client has one call under way at most, so nothing piles up.
"""

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Final, Generic, TypeVar

from dora.errors import Conflict

Result = TypeVar("Result")

_CANCEL_S: Final = 5.0  # to wait until an interrupted call has ended


class _Thread:
    """An event loop in a thread, until :meth:`end`."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)), name="dora.sync", daemon=True)
        self._thread.start()
        started.wait()

    async def _run(self, started: threading.Event) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._stop.wait()

    def end(self) -> None:
        """What still runs is cancelled."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()


class _Shared:
    """The thread that the process's open clients share, and how many they are."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: _Thread | None = None
        self.clients = 0
        self.lost_in_fork = False  # it ran when this process was forked: gRPC cannot be used here any more

    def after_fork(self) -> None:
        self.lost_in_fork = self.lost_in_fork or self.thread is not None
        self.lock, self.thread, self.clients = threading.Lock(), None, 0

    def take(self) -> asyncio.AbstractEventLoop:
        with self.lock:
            if self.thread is None:
                self.thread = _Thread()
            self.clients += 1
            return self.thread.loop

    def give_back(self) -> None:
        with self.lock:
            self.clients -= 1
            if not self.clients:
                self.end()

    def end(self) -> None:
        thread, self.thread = self.thread, None
        if thread is not None:
            thread.end()


_shared: Final = _Shared()
os.register_at_fork(after_in_child=_shared.after_fork)
atexit.register(_shared.end)  # of clients that nobody closed


class Background:
    """One synchronous client's access to the event loop."""

    def __init__(self, kind: str, name: str) -> None:
        """``kind`` and ``name`` say in errors whose it is, e.g. trainer and its address."""
        self._kind, self._name = kind, name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0  # that opened it
        self._busy = threading.Lock()

    @property
    def opened_here(self) -> bool:
        return self._loop is not None and self._process == os.getpid()

    def open(self) -> None:
        """Raises Conflict where it is open, or in a process that was forked while a client was open."""
        if _shared.lost_in_fork:
            allowed = "opened in a process that is spawned, or forked before any client is opened"
            raise self._conflict(allowed, "cannot be opened in a process forked while a client was open")
        if self.opened_here:
            raise self._conflict("opened once", "is open already")
        self._loop, self._process = _shared.take(), os.getpid()

    def close(self) -> None:
        """Ends the thread with the last client. In a forked process nothing happens: the client is its parent's."""
        if self.opened_here:
            self._loop = None
            _shared.give_back()

    def run(self, call: Callable[[], Coroutine[Any, Any, Result]], *, whole: bool = False) -> Result:
        """The outcome of ``call``, which the event loop carries out; it raises what the call raises.

        Where the wait is interrupted (Ctrl-C), the call is cancelled, and KeyboardInterrupt raised once it has ended.
        A ``whole`` call is not cut short by the first Ctrl-C, which is raised when the call is over, but by a second.
        Raises Conflict where the client is not open, or not this process's or thread's to use.
        """
        if self._loop is None:
            raise self._conflict("used within its with statement, or between open() and close()", "is not open")
        if self._process != os.getpid():
            allowed = "used in the process that opened it; open one of its own here"
            raise self._conflict(allowed, f"was opened by process {self._process}, of which this is a fork")
        if not self._busy.acquire(blocking=False):
            raise self._conflict("used by one thread at a time", "is in use by another thread")
        under_way = _Call(call, self._loop)
        try:
            try:
                under_way.begin()
                return under_way.outcome.result()
            except KeyboardInterrupt:
                if whole:
                    under_way.begin()  # where it came before the beginning
                    under_way.outcome.exception()  # waits until it is over, whatever its outcome
                raise
        except CancelledError as error:
            raise self._conflict("open as long as it is used", "was closed meanwhile") from error
        finally:
            if not under_way.outcome.done():
                under_way.give_up()
                under_way.ended.wait(_CANCEL_S)
            self._busy.release()

    def _conflict(self, allowed: str, why: str) -> Conflict:
        return Conflict(self._kind, self._name, allowed, why)


class _Call(Generic[Result]):
    """One call that the event loop carries out. Ctrl-C may come at any moment, so each method may be repeated."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, Result]], loop: asyncio.AbstractEventLoop) -> None:
        self.outcome: Future[Result] = Future()
        self.ended = threading.Event()
        self._call, self._loop = call, loop
        self._task: asyncio.Task[None] | None = None
        self._given_up = False

    def begin(self) -> None:
        self._loop.call_soon_threadsafe(self._begin)

    def give_up(self) -> None:
        """Cancels it, or keeps it from beginning."""
        self._loop.call_soon_threadsafe(self._give_up)

    def _begin(self) -> None:
        if self._task is None and not self._given_up:
            self._task = self._loop.create_task(self._run())

    def _give_up(self) -> None:
        self._given_up = True
        if self._task is None:
            self.ended.set()
        else:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            self.outcome.set_result(await self._call())
        except asyncio.CancelledError:
            self.outcome.cancel()
            raise
        except Exception as error:  # raised where it was called
            self.outcome.set_exception(error)
        finally:
            self.ended.set()
