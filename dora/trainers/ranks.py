"""The ranks of one trainer: the leader sends orders, the others execute them, and all are notified of failures.

    with joined(timeout_s=60) as ranks:
        if ranks.leads:
            ranks.tell("work", [part_of_rank_0, part_of_rank_1])   # bytes; or tell("finish") without
            ...
            ranks.tell("end")
        else:
            ranks.follow(obey)   # which is given each order, until the end
            # on every rank, at the same place: collectives of the model, and ranks.agree({"step": 3, "loss": 0.5})

A rank that fails in ``joined`` reports it through the store, so each of the others raises :class:`RankFailed` with its
reason within seconds: its watch reads the report, and the next collective aborts when the failed rank's process ends. A
rank that dies, or does not answer for ``timeout_s``, is named by the ranks that wait for it. A waiting leader sends
"idle" at least every ``tick_s``, so any longer silence is a failure.

Messages are bytes and JSON; nothing is pickled. Sources: torch.distributed's TCPStore and ProcessGroupGloo.
"""

import gc
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dora.errors import DoraError, InvalidValue, described

log = logging.getLogger(__name__)

_NAME_BYTES: Final = 32  # of an order
_HEAR_S: Final = 2.0  # how long a report of a failure may take: it is sent before the rank's connections close
_TICK_MOST_S: Final = 2.0
_RUN_S: Final = timedelta(days=365)


class RankFailed(DoraError):
    """Another rank of this trainer has failed, died, or does not answer. This rank's work is not committed."""


class RanksDisagree(DoraError):
    """The ranks of this trainer differ in step or result. Every rank raises it; nothing is committed."""


@dataclass(frozen=True, slots=True)
class Order:
    name: str
    content: bytes


class Ranks:
    """One rank's end. ``Ranks()`` is a single rank that leads; all its methods return at once."""

    def __init__(self, rank: int = 0, count: int = 1, timeout_s: float = 0.0, news: "_News | None" = None) -> None:
        self.rank, self.count = rank, count
        self.tick_s = min(timeout_s / 4, _TICK_MOST_S) if count > 1 else None  # how often to send "idle"
        self._timeout_s = timeout_s
        self._news = news

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def tell(self, order: str, parts: Sequence[bytes] = ()) -> None:
        """Sends every other rank the order, with its part (by rank) if there are any. Called by the leader."""
        if self.count == 1:
            return
        name = order.encode()
        sizes = [len(part) for part in parts] or [0] * self.count
        dist.broadcast(torch.tensor([*name.ljust(_NAME_BYTES), *sizes]), 0)
        for rank, part in enumerate(parts):
            if rank and part:
                dist.send(_tensor(part), rank)

    def next_order(self) -> Order:
        """Waits for the leader's next order. Called by the others."""
        header = torch.zeros(_NAME_BYTES + self.count, dtype=torch.int64)
        dist.broadcast(header, 0)
        content = torch.zeros(int(header[_NAME_BYTES + self.rank]), dtype=torch.uint8)
        if len(content):
            dist.recv(content, 0)
        return Order(bytes(header[:_NAME_BYTES].tolist()).decode().rstrip(), content.numpy().tobytes())

    def follow(self, obey: Callable[[Order], None]) -> None:
        """Passes each of the leader's orders, except "idle", to ``obey`` until the end. Called by the others."""
        while (order := self.next_order()).name != "end":
            if order.name != "idle":
                obey(order)

    def any(self, here: bool) -> bool:
        """Whether ``here`` is true on any rank. A collective, like the methods that follow."""
        return bool(self.largest(np.array([float(here)]))[0])

    def sum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the sum over all ranks, on all of them, in float64."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return self._reduced(values, dist.ReduceOp.MAX)

    def agree(self, values: Mapping[str, Any]) -> None:
        """Compares the values of all ranks, exactly. Raises RanksDisagree on all of them, naming the difference."""
        if self.count == 1:
            return
        said = [json.loads(each) for each in self.gather(json.dumps(dict(values), sort_keys=True).encode())]
        for name in sorted({name for each in said for name in each}):
            found = [json.dumps(each.get(name)) for each in said]
            if len(set(found)) > 1:
                shown = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(found))
                raise RanksDisagree(f"the ranks disagree on {name}: {shown}; nothing is committed")

    def gather(self, content: bytes) -> list[bytes]:
        """Returns the contents of all ranks, by rank, on all of them."""
        if self.count == 1:
            return [content]
        sizes = torch.zeros(self.count, dtype=torch.int64)
        sizes[self.rank] = len(content)
        dist.all_reduce(sizes)
        padded = [torch.zeros(int(sizes.max()), dtype=torch.uint8) for _ in range(self.count)]
        dist.all_gather(padded, _tensor(content.ljust(len(padded[0]), b"\0")))
        return [each[:size].numpy().tobytes() for each, size in zip(padded, sizes.tolist(), strict=True)]

    def _reduced(self, values: npt.NDArray[np.float64], how: Any) -> npt.NDArray[np.float64]:
        if self.count == 1:
            return values
        found = torch.from_numpy(values.copy())
        dist.all_reduce(found, how)
        return found.numpy()

    def fail(self, error: BaseException) -> NoReturn:
        """Handles an error of :func:`joined`: raises it once the others have received it, or raises another rank's.

        A broken connection indicates another rank's failure. If no rank has reported a reason, the error names the
        ranks that show no sign of life.
        """
        if self._news is None or isinstance(error, RanksDisagree):
            raise error
        lost = isinstance(error, RuntimeError)  # torch.distributed raises it, but it may have another cause
        if reason := self._news.heard(_HEAR_S if lost else 0.0):
            raise RankFailed(reason) from error
        name = f"rank {self.rank} of {self.count}"
        if not ((lost and isinstance(error, dist.DistError)) or "gloo" in str(error)):
            self._news.tell(f"{name} failed: {error if isinstance(error, DoraError) else described(error)}")
            raise error
        missing = self._news.missing()
        who = f"rank {', '.join(map(str, missing))} of {self.count}" if missing else "another rank"
        reason = f"{who} has died, or has not answered for {self._timeout_s:g} s, as {name} found; nothing is committed"
        self._news.tell(reason)
        raise RankFailed(reason) from error


class _News:
    def __init__(self, store: Any, rank: int, count: int) -> None:
        self._store, self._rank, self._count = store, rank, count
        self._reason = ""
        self._come = threading.Event()
        self._watch = store.clone()  # a store handles one call at a time
        self._listener = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._listener.start()

    def heard(self, wait_s: float) -> str:
        self._come.wait(wait_s)
        return self._reason

    def tell(self, reason: str) -> None:
        """Returns once the others have received it, so this process may end."""
        others = [rank for rank in range(self._count) if rank != self._rank]
        with suppress(RuntimeError):  # the store or a rank is gone; the error itself follows
            for rank in others:
                self._store.set(f"news/{rank}", reason)
            self._store.wait([f"heard/{rank}" for rank in others], timedelta(seconds=_HEAR_S))

    def missing(self) -> list[int]:
        found = []
        try:
            self._store.set(f"here/{self._rank}", "")
            for rank in range(self._count):
                try:
                    self._store.wait([f"here/{rank}"], timedelta(seconds=_HEAR_S / 2))
                except dist.DistStoreError:
                    found.append(rank)
        except RuntimeError:  # rank 0 hosts the store, unless torchrun does
            return [0]
        return found

    def leave(self) -> None:
        """Ends the watch, which must not use the store when the process ends."""
        with suppress(RuntimeError):
            self._store.set(f"news/{self._rank}", "")
        self._listener.join(_HEAR_S)

    def _listen(self) -> None:
        try:
            self._watch.wait([f"news/{self._rank}"], _RUN_S)
            self._reason = self._watch.get(f"news/{self._rank}").decode()
            if self._reason:
                log.error("%s", self._reason)
                self._watch.set(f"heard/{self._rank}", "")
                self._come.set()
        except RuntimeError:
            pass  # the store is gone: a rank that waits for another one notices its broken connection


@contextmanager
def joined(timeout_s: float = 120.0) -> Iterator[Ranks]:
    """Yields the ranks named by torchrun's variables (``RANK``, ``WORLD_SIZE``, ...), or a single one without them.

    Collectives on CPU tensors use gloo, others use NCCL if there is CUDA. ``timeout_s`` limits one collective,
    including a micro-batch of the slowest rank. An exception inside is raised on every rank: see :meth:`Ranks.fail`.
    Raises InvalidValue for an invalid timeout.
    """
    if not timeout_s > 0:
        raise InvalidValue("--rank-timeout", timeout_s, "above 0 seconds")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    store, rank, count = next(iter(dist.rendezvous("env://")))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timedelta(seconds=timeout_s))
    news = _News(dist.PrefixStore("dora", store), rank, count)
    ranks = Ranks(rank, count, timeout_s, news)
    try:
        yield ranks
    except BaseException as error:
        ranks.fail(error)
    finally:
        news.leave()
        gc.collect()  # a sharded model has cycles and holds the process group, which must not survive this
        dist.destroy_process_group()


def _tensor(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())
