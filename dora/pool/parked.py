"""One parked snapshot: what is known of it, where its bytes are, and whether they are still those that came."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dora.kvtransfer.arena import STEP_BYTES
from dora.kvtransfer.checksum import Seal

Bodies = Sequence[np.ndarray]  # of a snapshot's rounds, uint8


@dataclass(frozen=True, slots=True)
class Round:
    """What is known of a round beside its bytes."""

    seal: Seal
    size_bytes: int


@dataclass(slots=True, eq=False)
class Parked:
    """The snapshot of one request, as it arrived."""

    request_id: str
    tokens: int  # of the response
    head: bytes
    rounds: tuple[Round, ...]
    bodies: Bodies  # empty: only the file has them
    file: Path | None = None
    is_writing: bool = False
    readers: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.rounds)

    @property
    def memory_bytes(self) -> int:
        """Of its places in the arena."""
        return sum(-(-each.size_bytes // STEP_BYTES) * STEP_BYTES for each in self.rounds) if self.bodies else 0

    @property
    def is_idle(self) -> bool:
        """Whether it lies in memory and nobody is at it."""
        return bool(self.bodies) and not self.is_writing and self.file is None and not self.readers

    def damage(self, bodies: Bodies, secret: bytes) -> str:
        """What is wrong with bytes that were kept of it; empty: nothing. ``secret``: of the run, for keyed sums."""
        for number, (each, body) in enumerate(zip(self.rounds, bodies, strict=True), 1):
            chunk = each.seal.damaged(body.data, secret)
            if chunk:
                return f"round {number}, chunk {chunk}: its bytes are not those that came"
        return ""
