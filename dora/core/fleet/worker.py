"""One worker in the core: its versions, its requests and its incoming handoffs."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from dora.errors import one_of

QUEUE_SLOTS: Final = 2  # moves may over-subscribe a worker up to this many times its slots


@dataclass(slots=True)
class Worker:
    """``loaded``, ``target`` and ``loading`` are the version in memory, the planned one and the loading one, or -1."""

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
    stopping: bool = False  # it was ordered to end, or an operator asked for its end
    evicted: bool = False  # its end was asked for
    full_precision: bool = False  # its engine has none of the configured quantisation
    load_began_s: float = 0.0
    load_is_void: bool = False  # the version being loaded was published again meanwhile, so it must be loaded again
    load_failures: int = 0
    rests_until_s: float = 0.0  # it had no room for a parked request, so no request is placed on it before this time
    rows: set[int] = field(default_factory=set)  # requests that it runs
    kept: set[int] = field(default_factory=set)  # sessions between two turns whose KV it has; they hold no slot
    waiting_turns: dict[int, None] = field(default_factory=dict)  # those of ``kept`` whose next turn waits, in order
    inbound: int = 0  # incoming handoffs
    kv_claimed: int = 0  # prompts and expected lengths of owned and incoming requests
    kv_used: int = 0  # as last reported
    kv_change: int = 0  # change since the last report: context of requests given to it, less that of requests moved off
    kv_inbound: int = 0  # context of incoming requests
    lent_slots: int = 0  # slots for evaluations, in addition to ``slots``
    lent_kv_tokens: int = 0  # KV for evaluations, in addition to ``kv_tokens``
    waiting: int = 0  # queued inside the engine, as last reported
    reported_s: float = 0.0  # time of its last report
    barren_s: float = 0.0  # time in which it reported and yielded no token, though it had requests (rules/stalls.py)
    gap_s: float = 0.0  # longest such time that ended with a token, of late

    @property
    def kv_expected(self) -> int:
        """KV in use after everything in transit has arrived."""
        return max(0, self.kv_used + self.kv_change) + self.kv_inbound

    @property
    def hosts(self) -> int:
        """The version whose requests it takes, or -1."""
        return self.loaded if self.loaded == self.target and self.loading < 0 and not self.draining else -1

    @property
    def vacating(self) -> bool:
        return self.loaded >= 0 and self.hosts < 0

    @property
    def assigned(self) -> int:
        return len(self.rows) + self.inbound

    @property
    def is_empty(self) -> bool:
        """Returns whether it holds no request and no KV of one."""
        return not self.assigned and not self.kept


def one_of_workers(workers: Iterable[str], name: str) -> str:
    """The allowed ids for an error about an unknown worker: the nearest, then all, or some of many."""
    known = sorted(workers)
    return (
        one_of(name, known, cutoff=0.6, listed_by="dora workers") if known else "the id of a worker, and there is none"
    )
