"""The event loop of the synchronous clients: one per process, in a thread of its own.

The thread starts when the first client opens and ends when the last one closes. Each client has at most one call in
progress and waits for its result, so calls do not accumulate.
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

_CANCEL_S: Final = 5.0  # wait for the end of an interrupted call


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
        """Cancels the running calls and joins the thread."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()


class _Shared:
    """The thread shared by the process's open clients, and their number."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: _Thread | None = None
        self.clients = 0
        self.lost_in_fork = False  # the thread ran when this process was forked: gRPC cannot be used here

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
atexit.register(_shared.end)  # for clients that were not closed


class Background:
    """One synchronous client's access to the event loop."""

    def __init__(self, kind: str, name: str) -> None:
        """``kind`` and ``name`` identify the client in errors, for example a trainer and its address."""
        self._kind, self._name = kind, name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0  # id of the process that opened it
        self._busy = threading.Lock()

    @property
    def opened_here(self) -> bool:
        return self._loop is not None and self._process == os.getpid()

    def open(self) -> None:
        """Raises Conflict if it is open already, or if the process was forked while a client was open."""
        if _shared.lost_in_fork:
            allowed = "opened in a spawned process, or in one forked before any client is opened"
            raise self._conflict(allowed, "cannot be opened in a process forked while a client was open")
        if self.opened_here:
            raise self._conflict("opened once", "is open already")
        self._loop, self._process = _shared.take(), os.getpid()

    def close(self) -> None:
        """Ends the thread with the last client. Does nothing in a forked process: the client belongs to its parent."""
        if self.opened_here:
            self._loop = None
            _shared.give_back()

    def run(self, call: Callable[[], Coroutine[Any, Any, Result]], *, whole: bool = False) -> Result:
        """Runs ``call`` in the event loop; returns its result or raises its error.

        Ctrl-C cancels the call and raises KeyboardInterrupt once it has ended. A ``whole`` call first runs to its end;
        only a second Ctrl-C cancels it. Raises Conflict if the client is not open, belongs to another process, or is in
        use by another thread.
        """
        if self._loop is None:
            raise self._conflict("used within its with statement, or between open() and close()", "is not open")
        if self._process != os.getpid():
            allowed = "used in the process that opened it; open a new one here"
            raise self._conflict(allowed, f"was opened by process {self._process}, which forked this one")
        if not self._busy.acquire(blocking=False):
            raise self._conflict("used by one thread at a time", "is in use by another thread")
        under_way = _Call(call, self._loop)
        try:
            try:
                under_way.begin()
                return under_way.outcome.result()
            except KeyboardInterrupt:
                if whole:
                    under_way.begin()  # if the interrupt came before the start
                    under_way.outcome.exception()  # waits for the end, ignoring the result
                raise
        except CancelledError as error:
            raise self._conflict("kept open while it is in use", "was closed meanwhile") from error
        finally:
            if not under_way.outcome.done():
                under_way.give_up()
                under_way.ended.wait(_CANCEL_S)
            self._busy.release()

    def _conflict(self, allowed: str, why: str) -> Conflict:
        return Conflict(self._kind, self._name, allowed, why)


class _Call(Generic[Result]):
    """A call in the event loop. Ctrl-C may interrupt any method, so each may be repeated."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, Result]], loop: asyncio.AbstractEventLoop) -> None:
        self.outcome: Future[Result] = Future()
        self.ended = threading.Event()
        self._call, self._loop = call, loop
        self._task: asyncio.Task[None] | None = None
        self._given_up = False

    def begin(self) -> None:
        self._loop.call_soon_threadsafe(self._begin)

    def give_up(self) -> None:
        """Cancels the call, or prevents its start."""
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
        except Exception as error:  # raised at the caller
            self.outcome.set_exception(error)
        finally:
            self.ended.set()
