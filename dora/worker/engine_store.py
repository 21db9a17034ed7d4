"""A worker's engine as a store of handoffs."""

from collections.abc import Callable
from typing import Final

from dora.errors import Conflict
from dora.kvtransfer.endpoint import ReserveOrder, Room
from dora.kvtransfer.layout import body_bytes_most
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.plane import Arrived
from dora.worker.engine import RolloutEngine
from dora.worker.prefixes import SentPrefixes
from dora.worker.rounds import EngineRounds

QUEUE_SLOTS: Final = 2  # requests taken in by handoff where there is no pool: this many times the slots


class EngineStore:
    """The engine's thread uses it, between two steps."""

    def __init__(self, engine: RolloutEngine, holds: Callable[..., None], remove: Callable[[str], None]) -> None:
        """``holds`` is told of a request that the engine has taken in; ``remove`` removes one."""
        self._engine = engine
        self._holds = holds
        self._sent = SentPrefixes()
        self.release = engine.release
        self.thaw = engine.thaw
        self.remove = remove

    def reserve(self, order: ReserveOrder) -> Room:
        if order.version != self._engine.version:
            raise Conflict("version", order.version, f"{self._engine.version}, the one loaded", why="is not loaded")
        load, capability = self._engine.load(), self._engine.capability
        held = load.running + load.waiting + self._engine.reserved
        limit = (1 if order.needs_slot else QUEUE_SLOTS) * capability.slots
        if held >= limit:
            raise Conflict("requests held", held, f"below {limit}", why="is too much for another")
        if order.kv_tokens > capability.kv_tokens:
            raise Conflict("kv_tokens", order.kv_tokens, f"at most {capability.kv_tokens}", why="is too much")
        most_bytes = body_bytes_most(self._engine.layout, capability.max_model_len_tokens)
        return Room(most_bytes, self._engine.reserve(order.request_id, order.kv_tokens))

    def accept(self, arrived: Arrived, row: int) -> None:
        self._engine.take_in(arrived.snapshot)
        self._holds(arrived.snapshot.request, row, arrives=True)

    def rounds_of(self, request_id: str, peer: Peer) -> EngineRounds:
        return EngineRounds(self._engine, peer, request_id, self._sent)

    def forget_sent(self) -> None:
        """Peers of the next service are others: what was sent counts no more."""
        self._sent = SentPrefixes()
