"""Devices whose copies and kernels run late: in any order that events allow (``Simulated``), or as late as they may.

Work is queued on two streams, the copies' and the engine's. A stream runs its work in order; between the streams only
waits decide. ``Simulated`` draws which stream runs next, and runs work when a host waits for it, or at any call.
"""

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dora.worker.copying.streams import DONE, HostStreams, Mark


@dataclass(eq=False)
class Work:
    """One copy, kernel, wait or event of a stream."""

    run: Callable[[], None]
    after: tuple["Work", ...] = ()
    is_done: bool = False


@dataclass(eq=False)
class Event:
    """A recorded event."""

    device: "Simulated | LateStreams"
    work: Work

    def synchronize(self) -> None:
        self.device.until(self.work)


def _nothing() -> None:
    pass


@dataclass
class Simulated:
    """Both streams of one device, and ``Streams`` of its copies."""

    random: random.Random
    copies: deque[Work] = field(default_factory=deque)
    engine: deque[Work] = field(default_factory=deque)
    freed: list[torch.Tensor] = field(default_factory=list)
    _last_copy: Work | None = None
    _last_engine: Work | None = None

    # The engine's stream.

    def kernel(self, run: Callable[[], None]) -> Event:
        """Queues a kernel on the engine's stream."""
        return Event(self, self._queue_engine(Work(run)))

    def free(self, memory: torch.Tensor) -> None:
        """Returns device memory, as an allocator gets it back: work that is queued may still use it."""
        self.freed.append(memory)

    # ``Streams``.

    def device_memory(self, size_bytes: int) -> torch.Tensor:
        fitting = [at for at, memory in enumerate(self.freed) if len(memory) >= size_bytes]
        if fitting:
            return self.freed.pop(self.random.choice(fitting))[:size_bytes]
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def host_memory(self, size_bytes: int) -> np.ndarray:
        return np.zeros(size_bytes, np.uint8)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        self._queue_copy(Work(_nothing, () if self._last_engine is None else (self._last_engine,)))
        yield
        self.some()

    def run(self, copies: Callable[[], None]) -> None:
        self._queue_copy(Work(copies))

    def ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        there = torch.zeros(len(block_ids), dtype=torch.int64)
        sent = torch.tensor(block_ids, dtype=torch.int64)

        def send() -> None:
            there.copy_(sent)

        self._queue_copy(Work(send))
        return there

    def mark(self) -> Mark:
        return Event(self, self._queue_copy(Work(_nothing)))

    def hold_up(self, mark: Mark) -> None:
        if mark is not DONE:
            assert isinstance(mark, Event)
            self._queue_engine(Work(_nothing, (mark.work,)))

    # Time passes.

    def some(self) -> None:
        """Runs any number of works that may run."""
        while self.random.random() < 0.5 and (ready := self._ready()):
            self._run(self.random.choice(ready))

    def until(self, work: Work) -> None:
        """Runs works in a drawn order until this one is done."""
        while not work.is_done:
            self._run(self.random.choice(self._ready()))

    def all(self) -> None:
        while ready := self._ready():
            self._run(self.random.choice(ready))

    def _ready(self) -> list[deque[Work]]:
        return [queue for queue in (self.copies, self.engine) if queue and all(each.is_done for each in queue[0].after)]

    def _run(self, queue: deque[Work]) -> None:
        work = queue.popleft()
        work.run()
        work.is_done = True

    def _queue_copy(self, work: Work) -> Work:
        self.copies.append(work)
        self._last_copy = work
        return work

    def _queue_engine(self, work: Work) -> Work:
        self.engine.append(work)
        self._last_engine = work
        return work


class LateStreams(HostStreams):
    """A CPU whose copies run when something waits for them, and no earlier."""

    def __init__(self) -> None:
        self._queued: deque[Work] = deque()
        self._order = threading.RLock()

    def run(self, copies: Callable[[], None]) -> None:
        with self._order:
            self._queued.append(Work(copies))

    def mark(self) -> Mark:
        work = Work(_nothing)
        with self._order:
            self._queued.append(work)
        return Event(self, work)

    def hold_up(self, mark: Mark) -> None:
        mark.synchronize()

    def until(self, work: Work) -> None:
        with self._order:
            while not work.is_done:
                each = self._queued.popleft()
                each.run()
                each.is_done = True
