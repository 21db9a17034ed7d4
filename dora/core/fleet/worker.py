"""One worker as the core knows it: what it hosts, what it holds, what is on its way to it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from dora.errors import one_of

QUEUE_SLOTS: Final = 2  # moves may over-subscribe a worker up to this many times its slots


@dataclass(slots=True)
class Worker:
    """One worker. ``loaded``/``target``/``loading``: versions in memory, wanted, and on their way; -1: none."""

    worker_id: str
    epoch: int
    index: int
    slots: int
    kv_tokens: int
    host: str = ""
    loaded: int = -1
    target: int = -1
    loading: int = -1
    draining: bool = False
    stopping: bool = False  # it was told to end, or its end was asked for
    evicted: bool = False  # the latter
    load_began_s: float = 0.0
    load_is_void: bool = False  # what it loads was published anew since it was told: it loads again
    load_failures: int = 0
    rests_until_s: float = 0.0  # it had no room for a parked request: no request is placed on it before
    rows: set[int] = field(default_factory=set)  # requests it owns
    inbound: int = 0  # handoffs on their way to it
    kv_claimed: int = 0  # prompts and expected lengths of both
    kv_used: int = 0  # as last reported
    kv_change: int = 0  # since then: context of the requests given to it, less that of those moved off
    kv_inbound: int = 0  # context of those on their way to it
    lent_slots: int = 0  # to evaluations, beside ``slots``
    lent_kv_tokens: int = 0  # the same, beside ``kv_tokens``
    waiting: int = 0  # queued inside the engine, as last reported

    @property
    def kv_expected(self) -> int:
        """KV in use once all that was sent has arrived."""
        return max(0, self.kv_used + self.kv_change) + self.kv_inbound

    @property
    def hosts(self) -> int:
        """The version it takes requests of; -1: none."""
        return self.loaded if self.loaded == self.target and self.loading < 0 and not self.draining else -1

    @property
    def vacating(self) -> bool:
        return self.loaded >= 0 and self.hosts < 0

    @property
    def held(self) -> int:
        return len(self.rows) + self.inbound


def one_of_workers(workers: Iterable[str], name: str) -> str:
    """What is allowed instead of the id of no worker: the nearest, then all; of many, some."""
    known = sorted(workers)
    return (
        one_of(name, known, cutoff=0.6, listed_by="dora workers") if known else "the id of a worker, and there is none"
    )
