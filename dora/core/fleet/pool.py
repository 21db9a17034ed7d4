"""One pool as the core knows it: host memory, with what it may spill to disk, for requests that no worker has room for.

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
    inbound: int = 0  # handoffs on their way to it
    kv_claimed: int = 0  # of both: never above its capacity
    refused: set[int] = field(default_factory=set)  # of ``rows``, those that a worker has refused to take from here

    @property
    def worker_id(self) -> str:
        """As commands to it say it."""
        return self.pool_id

    @property
    def free(self) -> int:
        """KV that may still be parked here."""
        return self.kv_tokens - self.kv_claimed
