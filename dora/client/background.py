"""The event loop of the synchronous clients: one per process, in a thread of its own.

The thread starts when the first client opens and ends when the last one closes. The loop is kept for the next one: gRPC
may have events of a closed client left, and delivers them to the loop in which its calls were made. Each client has at
most one call in progress and waits for its result, so calls do not accumulate.
"""

import asyncio
import atexit
import os
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Final, Generic, TypeVar

from dora.errors import Conflict

Result = TypeVar("Result")

_CANCEL_S: Final = 5.0  # wait for the end of an interrupted call


class _Thread:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._stop = asyncio.Event()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="dora.sync", daemon=True)
        self._thread.start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        with ThreadPoolExecutor(thread_name_prefix="dora.sync-") as pool:  # as asyncio's own, which only ends once
            self.loop.set_default_executor(pool)
            self.loop.call_soon(started.set)
            self.loop.run_until_complete(self._stop.wait())
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks))

    def end(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()


class _Shared:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None  # once a client was opened
        self.thread: _Thread | None = None
        self.clients = 0
        self.lost_in_fork = False  # a client was opened before this process was forked: gRPC cannot be used here

    def after_fork(self) -> None:
        self.lost_in_fork = self.lost_in_fork or self.loop is not None
        if self.loop is not None and self.thread is None:
            self.loop.close()
        self.lock, self.loop, self.thread, self.clients = threading.Lock(), None, None, 0

    def take(self) -> asyncio.AbstractEventLoop:
        with self.lock:
            if self.loop is None:
                # A selector without a kernel object: one that a fork closes would be closed for its parent too.
                self.loop = asyncio.SelectorEventLoop(selectors.PollSelector())
            if self.thread is None:
                self.thread = _Thread(self.loop)
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

    def exit(self) -> None:
        with self.lock:
            self.end()
            loop, self.loop = self.loop, None
        if loop is not None:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


_shared: Final = _Shared()
os.register_at_fork(after_in_child=_shared.after_fork)
atexit.register(_shared.exit)  # for clients that were not closed


def _stand_still(is_failed: bool = False) -> None:
    """Returns unless the interpreter ends. Then a daemon thread stands still, as it would in any other blocking call:
    executors and loops are being closed under it, which is no error of the thread's.

    ``is_failed`` is set after an error, which may be that of an executor that was closed. The interpreter closes
    executors, and waits for their work, while its main thread still counts as alive.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main and (not main.is_alive() or (is_failed and _are_executors_closed())):
        threading.Event().wait()


def _are_executors_closed() -> bool:
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(int)
    except RuntimeError:
        return True
    return False


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
        """Raises Conflict if it is open already, or if the process was forked after a client was opened."""
        _stand_still()
        if _shared.lost_in_fork:
            allowed = "opened in a spawned process, or in one forked before any client is opened"
            raise self._conflict(allowed, "cannot be opened in a process forked after a client was opened")
        if self.opened_here:
            raise self._conflict("opened once", "is open already")
        self._loop, self._process = _shared.take(), os.getpid()

    def close(self) -> None:
        """Ends the thread with the last client. Does nothing in a forked process: the client belongs to its parent."""
        _stand_still()
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
        except BaseException as error:
            _stand_still(is_failed=True)
            if not isinstance(error, CancelledError):
                raise
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
