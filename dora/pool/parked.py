"""One parked snapshot: its metadata, the place of its bytes, and the check of their integrity."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dora.kvtransfer.checksum import Seal
from dora.kvtransfer.transports.arena import STEP_BYTES

Bodies = Sequence[np.ndarray]  # the rounds of a snapshot, uint8


@dataclass(frozen=True, slots=True)
class ParkedRound:
    seal: Seal
    size_bytes: int


@dataclass(slots=True, eq=False)
class Parked:
    """The snapshot of one request, as it arrived."""

    request_id: str
    tokens: int  # tokens of the response
    head: bytes
    rounds: tuple[ParkedRound, ...]
    bodies: Bodies  # empty: only the file has them
    input_digest: bytes = b""  # of a session
    file: Path | None = None
    is_writing: bool = False
    readers: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.rounds)

    @property
    def memory_bytes(self) -> int:
        return sum(-(-each.size_bytes // STEP_BYTES) * STEP_BYTES for each in self.rounds) if self.bodies else 0

    @property
    def is_idle(self) -> bool:
        return bool(self.bodies) and not self.is_writing and self.file is None and not self.readers

    def damage(self, bodies: Bodies, secret: bytes) -> str:
        """Describes the damage to its bytes, or returns "". ``secret`` is the run's, for keyed checksums."""
        for number, (each, body) in enumerate(zip(self.rounds, bodies, strict=True), 1):
            chunk = each.seal.damaged(body.data, secret)
            if chunk:
                return f"round {number}, chunk {chunk}: its bytes are not those that came"
        return ""
