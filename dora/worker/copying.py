"""One request on its way out of this worker: full blocks ahead in rounds, while it decodes, and the rest once frozen.

    decodes  ─ round ─ round ─ ... ─ freeze ─ last round: what is left, and the request's state ─▶ it is all there

A round copies the blocks that have become full since the round before. The engine's thread copies nothing, so a round
takes no time of a step, whatever its size: the thread shows the blocks, which do not change, and the data plane reads
them beside the steps. Rounds end when little is left, when what is left does not shrink, or after ``ROUNDS_MAX``: only
what is left then is copied while the request is frozen. The first round brings the opening of the snapshot's head, with
the tokens of then, of which the target makes ready what takes time; so the last round is small for any length.

Blocks that another request has brought to this target do not travel again: the first round names them. Where the target
has them no longer, the copy begins anew with all of them.
"""

from typing import Final

from dora.data.types import RequestSpec
from dora.errors import Conflict, TransferFailed
from dora.kvtransfer.codec import Opening, closing_of, opening_of, parts_of, round_of
from dora.kvtransfer.layout import blocks_for
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.plane import DataPlane
from dora.kvtransfer.snapshot import NO_PREFIX, FullBlocks, Stay
from dora.kvtransfer.transfer import Sent, Transfer
from dora.session.failure import NotMovable
from dora.worker.engine import RolloutEngine
from dora.worker.prefixes import SentPrefixes

ROUNDS_MAX: Final = 8  # while it decodes
LEFT_BLOCKS: Final = 2  # full blocks that are as well copied with the last round


class Copying:
    """``advance`` between two steps of the engine, until it has returned the last round."""

    def __init__(
        self, engine: RolloutEngine, plane: DataPlane, peer: Peer, request_id: str, sent: SentPrefixes
    ) -> None:
        self._engine = engine
        self._plane = plane
        self._peer = peer
        self._request_id = request_id
        self._sent = sent
        self._stay: Stay = (0, 0)
        self._prefix = NO_PREFIX  # what the target has of it by another request
        self._may_share = True  # until it is known whether it does
        self._rounds: list[int] = []  # blocks of each that has arrived, or is on its way
        self._begun = 0
        self._opening: Opening | None = None  # which the first of these rounds has brought
        self.ahead: list[Sent] = []  # rounds that have arrived while it decoded
        self.current: Transfer | None = None
        self.tokens = -1  # response tokens when it was frozen; -1: it decodes

    @property
    def is_ahead(self) -> bool:
        """Whether rounds are under way while the request decodes."""
        return self._begun > 0 and self.tokens < 0

    def cancel(self) -> None:
        """What has arrived is void."""
        if self.current is not None:
            self.current.cancel()

    def advance(self) -> Transfer | None:
        """Begins the next round where the one before has arrived. Returns the last one, whose end is the copy's.

        Raises NotFound for a request that has ended, NotMovable, TransferFailed where a round did not arrive.
        """
        if self.current is not None and not self.current.done.done():
            return None
        after = self._before()
        try:
            if self._may_share and not self._knows_prefix():
                return None
            full = self._engine.full_blocks(self._request_id, self._done)
        except Conflict as error:
            self._begin_anew()
            return self._finish("", str(error))
        if self._rounds and full.stay != self._stay:  # it was preempted meanwhile: all that was copied is void
            after = ""
            self._begin_anew()
            full = self._engine.full_blocks(self._request_id, 0)
        found = full.end - self._done
        is_little = found <= LEFT_BLOCKS and (self._rounds or not self._prefix.blocks)
        shrinks = not self._rounds or found < self._rounds[-1]
        if is_little or not shrinks or self._begun >= ROUNDS_MAX:
            return self._finish(after)
        self._send_round(full, found, after)
        return None

    @property
    def _done(self) -> int:
        """Blocks that are at the target."""
        return self._prefix.blocks + sum(self._rounds)

    def _before(self) -> str:
        """The key of the round that has arrived; empty: the next one is the first."""
        if self.current is None:
            return ""
        try:
            self.ahead.append(self.current.done.result())
        except TransferFailed:
            if not self._prefix.blocks or len(self._rounds) > 1:
                raise
            self._begin_anew()  # whatever has become of a round that names a prefix, one without may do better
            self.current = None
            return ""
        return self.ahead[-1].key

    def _knows_prefix(self) -> bool:
        """Finds out what the target has of it by another request. False: that is still on its way there."""
        stay, end = self._engine.final_blocks(self._request_id)
        found = self._sent.find(self._peer, self._request_id, stay)
        if found is not None:
            self._may_share = False
            blocks = min(found.blocks, end - 1)  # the target is asked by a round, which has to bring something
            self._prefix = found._replace(blocks=blocks) if blocks > 0 else NO_PREFIX
        return found is not None

    def _begin_anew(self) -> None:
        self._prefix, self._rounds = NO_PREFIX, []

    def _send_round(self, full: FullBlocks, count: int, after: str) -> None:
        self._stay = full.stay
        self._begun += 1
        self._rounds.append(count)
        parts = parts_of(self._engine.layout, full.blocks, 0, count)
        head = b"" if after else self._open(self._engine.request(self._request_id)).raw
        self.current = self._plane.send_parts(
            self._peer,
            self._request_id,
            parts,
            head,
            after,
            goes_on=True,
            prefix=NO_PREFIX if after else self._prefix,
        )
        if not after and not self._prefix.blocks:
            siblings = self._engine.siblings(self._request_id, count)
            self._sent.note(self._peer, self.current.done, siblings)

    def _finish(self, after: str, why: str = "it has no token") -> Transfer:
        """Freezes the request and sends what is left of it."""
        self._engine.freeze(self._request_id)
        done = self._done
        snapshot = self._engine.export(self._request_id, done)
        if snapshot is None:
            raise NotMovable(f"{self._request_id} cannot move exactly just now: {why}")
        self.tokens = len(snapshot.request.output_token_ids)
        left = blocks_for(snapshot.kv_tokens, snapshot.layout.block_tokens) - done
        head = b"" if after else self._open(snapshot.request).raw
        assert self._opening is not None
        head += closing_of(snapshot, self._opening, [*self._rounds, left])
        self.current = self._plane.send_parts(self._peer, self._request_id, round_of(snapshot, done), head, after)
        return self.current

    def _open(self, request: RequestSpec) -> Opening:
        self._opening = opening_of(self._engine.layout, request, self._prefix.blocks)
        return self._opening
