"""The process group of a pair of workers, with a deadline for everything that waits for the other rank.

A group is created directly rather than by ``init_process_group``, so that no global world must be formed again when a
worker dies. A failure is final: the group is aborted, and all later calls fail at once. The next try needs a new group.

NCCL creates its communicator with the first message, and torch's timeout does not bound that. So the first messages are
part of joining, in a thread that is given up at the deadline. The code is the same for gloo.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

from dora.errors import DoraError, TransferFailed

DEVICES: Final = {"gloo": "cpu", "nccl": "cuda"}
WORLD: Final = 2
_TAG: Final = 0


def make_group(backend: str, store: Any, rank: int, host: str, timeout_s: float) -> Any:
    """Creates one rank of a pair. ``host`` is this end's address, for gloo. Blocks until the other rank has joined."""
    import torch.distributed as distributed

    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        options._threads = 2
        return distributed.ProcessGroupGloo(store, rank, WORLD, options)
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # raises if a peer stops, instead of aborting the process
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, WORLD, options)


class Joining(threading.Thread):
    """Joins a group in a thread of its own, from its creation on."""

    def __init__(
        self, backend: str, connect: Callable[[timedelta], Any], rank: int, host: str, timeout_s: float
    ) -> None:
        """``connect`` returns the store in which both ranks find each other."""
        super().__init__(name="kv-join", daemon=True)
        self._backend = backend
        self._connect = connect
        self._rank = rank
        self._host = host
        self._timeout_s = timeout_s
        self._ends_s = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._is_given_up = False
        self._made: Any = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        made: Any = None
        try:
            store = self._connect(timedelta(seconds=self._timeout_s))
            made = make_group(self._backend, store, self._rank, self._host, self._timeout_s)
            self._greet(made)
        except Exception as error:  # torch raises its own exceptions; ``result`` raises them again
            _abort(made)
            self._error = error
            return
        with self._lock:
            self._made = made
            if self._is_given_up:
                _abort(made)

    def _greet(self, group: Any) -> None:
        """Exchanges one byte in both directions, which creates the communicator."""
        import torch

        device = DEVICES[self._backend]
        own = torch.full((1,), self._rank, dtype=torch.uint8, device=device)
        found = torch.full_like(own, self._rank)
        other = 1 - self._rank
        begun = [lambda: group.send([own], other, _TAG), lambda: group.recv([found], other, _TAG)]
        timeout = timedelta(seconds=self._timeout_s)
        for begin in begun if self._rank == 0 else reversed(begun):
            begin().wait(timeout)
        if int(found) != other:
            raise RuntimeError(f"the other end has rank {int(found)} instead of {other}")

    def result(self) -> Any:
        """Returns the group. Raises what creating it raised, and TimeoutError at the deadline."""
        self.join(max(0.0, self._ends_s - time.monotonic()))
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._made is None:
                self._is_given_up = True
                raise TimeoutError(f"the other end did not join within {self._timeout_s:g} s")
            return self._made

    def give_up(self) -> None:
        """Aborts the group, now or as soon as it exists. Does not wait."""
        with self._lock:
            self._is_given_up = True
            _abort(self._made)


class TorchGroup:
    """One rank of a joined pair, for one thread. Its methods raise TransferFailed, or ``failure`` if that is given."""

    def __init__(self, backend: str, timeout_s: float, failure: type[DoraError] = TransferFailed) -> None:
        self._backend = backend
        self._timeout_s = timeout_s
        self._failure = failure
        self._group: Any = None
        self._why_broken = "it has not joined"
        self._stream: Any = None  # of NCCL

    def join(self, joining: Joining) -> None:
        with self.failing():
            self._group = joining.result()
            self._why_broken = ""

    def send(self, tensor: Any, rank: int) -> Any:
        """Begins to send. Returns the work, for ``wait``."""
        with self.failing():
            return self._working().send([tensor], rank, _TAG)

    def receive(self, tensor: Any, rank: int) -> Any:
        """Begins to receive. Returns the work, for ``wait``."""
        with self.failing():
            return self._working().recv([tensor], rank, _TAG)

    def wait(self, works: Sequence[Any]) -> None:
        """Waits for all works, within the time of one."""
        ends_s = time.monotonic() + self._timeout_s
        with self.failing():
            for work in works:
                self._working()
                work.wait(timedelta(seconds=max(0.001, ends_s - time.monotonic())))

    def close(self) -> None:
        group, self._group = self._group, None
        self._why_broken = self._why_broken or "it is closed"
        _abort(group)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Raises an exception of the block as this transport's failure, and aborts the group.

        Copies and messages of the block run beside the engine's, on a stream of their own.
        """
        try:
            with self._beside():
                yield
        except (RuntimeError, ValueError, OSError, AttributeError, ImportError) as error:
            said = str(error).strip().splitlines()
            reason = said[0] if said else repr(error)
            self._why_broken = self._why_broken or reason
            self.close()
            raise self._failure(f"{self._backend}: {reason}") from error

    def _beside(self) -> contextlib.AbstractContextManager[Any]:
        if self._backend != "nccl":
            return contextlib.nullcontext()
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return torch.cuda.stream(self._stream)

    def _working(self) -> Any:
        if self._group is None:
            raise RuntimeError(self._why_broken)
        return self._group


def _abort(group: Any) -> None:
    """Ends a group without waiting for its other rank."""
    if group is not None:
        with contextlib.suppress(RuntimeError):  # gloo has no abort: its connections end with the object
            group.abort()
