"""One pool in the core: host memory, with optional spill to disk, for requests that no worker has room for.

A pool is an end of a handoff like a worker, but it hosts no version, has no slots and runs nothing.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Pool:
    """One epoch of one pool. KV is counted in tokens."""

    pool_id: str
    epoch: int
    index: int
    kv_tokens: int  # capacity
    host: str = ""
    rows: set[int] = field(default_factory=set)  # requests parked here
    inbound: int = 0  # incoming handoffs
    kv_claimed: int = 0  # of parked requests and incoming handoffs; at most the capacity
    stopping: bool = False  # its end was asked for
    leaving: bool = False  # its host leaves: what it holds goes elsewhere
    refused: set[int] = field(default_factory=set)  # those of ``rows`` that a worker refused to take from this pool

    @property
    def worker_id(self) -> str:
        return self.pool_id

    @property
    def free(self) -> int:
        """KV that can still be parked here."""
        return 0 if self.leaving else self.kv_tokens - self.kv_claimed
