"""A request's rounds on its way out of an engine: full blocks ahead, while it decodes, and the rest once frozen.

    decodes  ─ round ─ round ─ ... ─ freeze ─ last round: what is left, and the request's state ─▶ it is all there

A round has the blocks that have become full since the round before. The engine's thread copies nothing, so a round
takes no time of a step, whatever its size: the thread shows the blocks, which do not change, and the data plane reads
them beside the steps. Rounds end when little is left, when what is left does not shrink, or after ``ROUNDS_MAX``: only
what is left then is copied while the request is frozen. The first round brings the opening of the snapshot's head, with
the tokens of then, of which the target makes ready what takes time; so the last round is small for any length.

Blocks that another request has brought to this target do not travel again: the first round names them. If the target
no longer has them, the copy begins again with all of them.
"""

from typing import Final

from dora.data.types import RequestSpec
from dora.errors import Conflict, DoraError
from dora.kvtransfer.codec import Opening, closing_of, opening_of, parts_of, round_of
from dora.kvtransfer.copying import NotMovable, Round
from dora.kvtransfer.layout import blocks_for
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.snapshot import NO_PREFIX, FullBlocks, Stay
from dora.worker.engine import RolloutEngine
from dora.worker.prefixes import SentPrefixes

ROUNDS_MAX: Final = 8  # while it decodes
LEFT_BLOCKS: Final = 2  # full blocks that are as well copied with the last round


class EngineRounds:
    """Rounds of a request that an engine decodes. The engine's thread uses it, between two steps."""

    opened: Final = None

    def __init__(self, engine: RolloutEngine, peer: Peer, request_id: str, sent: SentPrefixes) -> None:
        self._engine = engine
        self._peer = peer
        self._request_id = request_id
        self._sent = sent
        self._stay: Stay = (0, 0)
        self._prefix = NO_PREFIX  # what the target has of it by another request
        self._may_share = True  # until it is known whether it does
        self._rounds: list[int] = []  # blocks of each that has arrived, or is on its way
        self._begun = 0
        self._opening: Opening | None = None  # which the first of these rounds has brought
        self.tokens = -1

    def next_round(self) -> Round | None:
        try:
            if self._may_share and not self._knows_prefix():
                return None
            full = self._engine.full_blocks(self._request_id, self._done)
        except Conflict as error:
            self._begin_again()
            return self._last(str(error))
        if self._rounds and full.stay != self._stay:  # it was preempted meanwhile: all that was copied is void
            self._begin_again()
            full = self._engine.full_blocks(self._request_id, 0)
        found = full.end - self._done
        is_little = found <= LEFT_BLOCKS and (self._rounds or not self._prefix.blocks)
        shrinks = not self._rounds or found < self._rounds[-1]
        if is_little or not shrinks or self._begun >= ROUNDS_MAX:
            return self._last()
        return self._round(full, found)

    def restarts(self) -> bool:
        """Whatever the target has answered to a round that names a prefix, one without may do better."""
        if not self._prefix.blocks or len(self._rounds) > 1:
            return False
        self._begin_again()
        return True

    def close(self, error: DoraError | None) -> None:
        """Nothing to do: the engine keeps the blocks until the request is removed or thawed."""

    @property
    def _done(self) -> int:
        """Blocks that are at the target."""
        return self._prefix.blocks + sum(self._rounds)

    def _knows_prefix(self) -> bool:
        """Finds out what the target has of it by another request. False: that is still on its way there."""
        stay, end = self._engine.final_blocks(self._request_id)
        found = self._sent.find(self._peer, self._request_id, stay)
        if found is not None:
            self._may_share = False
            blocks = min(found.blocks, end - 1)  # the target is asked by a round, which has to bring something
            self._prefix = found._replace(blocks=blocks) if blocks > 0 else NO_PREFIX
        return found is not None

    def _begin_again(self) -> None:
        self._prefix, self._rounds = NO_PREFIX, []

    def _round(self, full: FullBlocks, count: int) -> Round:
        is_first, prefix = not self._rounds, self._prefix
        self._stay = full.stay
        self._begun += 1
        self._rounds.append(count)
        parts = parts_of(self._engine.layout, full.blocks, 0, count)
        if not is_first:
            return Round(parts, goes_on=True)
        head = self._open(self._engine.request(self._request_id)).raw
        if prefix.blocks:
            return Round(parts, head, goes_on=True, prefix=prefix, is_first=True)
        siblings = self._engine.siblings(self._request_id, count)
        return Round(
            parts,
            head,
            goes_on=True,
            is_first=True,
            leaves=lambda done: self._sent.note(self._peer, done, siblings),
        )

    def _last(self, why: str = "it has no token") -> Round:
        """Freezes the request; the rest of it."""
        self._engine.freeze(self._request_id)
        done, is_first = self._done, not self._rounds
        snapshot = self._engine.export(self._request_id, done)
        if snapshot is None:
            raise NotMovable(f"{self._request_id} cannot move exactly just now: {why}")
        self.tokens = len(snapshot.request.output_token_ids)
        left = blocks_for(snapshot.kv_tokens, snapshot.layout.block_tokens) - done
        head = self._open(snapshot.request).raw if is_first else b""
        assert self._opening is not None
        head += closing_of(snapshot, self._opening, [*self._rounds, left])
        return Round(round_of(snapshot, done), head, is_first=is_first)

    def _open(self, request: RequestSpec) -> Opening:
        self._opening = opening_of(self._engine.layout, request, self._prefix.blocks)
        return self._opening
