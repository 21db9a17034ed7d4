"""The handoff of one live request between two workers of one version, or a worker and a pool, as a table.

                            ┌─────────────frozen: few blocks─────────────┐
                            │                                            ▼
    PLANNED ──reserved──▶ RESERVED ──copy began──▶ COPYING ──frozen──▶ FROZEN ──copied in──▶ COMMITTED ──▶ RELEASED
       │                    │                         │                  │ └──source lost──▶ STRANDED ──▶ RELEASED
       └────────────────────┴─────────────────────────┴──────────────────┴──▶ ABORTED: the source goes on

The source owns the request until COMMITTED, the target from then on: exactly one owner at any time, and the source
frees its blocks only after COMMITTED. From there on the loss of either is an ordinary loss of a worker.

In RESERVED both ends have been told: the source where the target is, and the target, when it reserved, whom to let in.
In COPYING full blocks travel in rounds, while the source decodes; a request that has few of them is frozen at once, and
skips it. Either phase ends alike: whichever end is lost, the other's half is void. A source fails to copy and decodes
on, thawed if it was frozen for the last round; a target is told to drop the rounds that have come, and the slot it
kept. In FROZEN the target has everything, and needs the source no longer. docs/architecture.md is drawn from TABLE.

To park a request is a handoff whose target is a pool: once COMMITTED it waits. To resume it is one whose source is a
pool. Where that is ABORTED the request waits again; its KV is re-prefilled, unless only the target was lost.
"""

from dataclasses import dataclass
from enum import Enum, auto

from dora.errors import IllegalTransition


class Phase(Enum):
    PLANNED = auto()  # the target was asked whether it takes the request
    RESERVED = auto()  # the target keeps a slot for it; the source was told to copy
    COPYING = auto()  # full blocks are copied in rounds while the source decodes, then the rest
    FROZEN = auto()  # the target has the whole snapshot, and was told to take it in
    STRANDED = auto()  # FROZEN, but the source died: only the target's copy is left
    COMMITTED = auto()  # the target owns the request; the source was told to free
    RELEASED = auto()
    ABORTED = auto()


class Signal(Enum):
    RESERVED = auto()
    REFUSED = auto()  # the target does not take it
    COPY_BEGAN = auto()  # the source copies ahead of the freeze
    FROZEN = auto()  # the source has frozen it, and all of it is at the target
    NOT_MOVABLE = auto()  # the source cannot move it exactly, or the target cannot make its own blocks of it
    COPY_FAILED = auto()  # the source does not know it (it just finished) or could not bring it to the target
    COPIED_IN = auto()
    COPY_REFUSED = auto()  # the target refused the snapshot
    SOURCE_FREED = auto()
    SOURCE_LOST = auto()
    TARGET_LOST = auto()
    FINISHED = auto()  # the response ended at the source
    UNDO = auto()  # time limit, cancelled group


class Action(Enum):
    COPY_OUT = auto()
    COPY_IN = auto()
    COMMIT = auto()  # the target becomes the owner
    FREE_SOURCE = auto()
    THAW_SOURCE = auto()
    CANCEL_TARGET = auto()
    RESTART_AT_TARGET = auto()  # stop at the source, re-prefill at the target
    ORPHAN = auto()  # nobody holds it: it waits for another worker and is re-prefilled
    RELEASE_SNAPSHOT = auto()


class Kind(Enum):
    MOVE = auto()  # from worker to worker
    PARK = auto()  # from worker to pool
    RESUME = auto()  # from pool to worker


P, S, A = Phase, Signal, Action

TABLE: dict[tuple[Phase, Signal], tuple[Phase, tuple[Action, ...]]] = {
    (P.PLANNED, S.RESERVED): (P.RESERVED, (A.COPY_OUT,)),
    (P.PLANNED, S.REFUSED): (P.ABORTED, ()),
    (P.PLANNED, S.FINISHED): (P.ABORTED, (A.CANCEL_TARGET,)),
    (P.PLANNED, S.SOURCE_LOST): (P.ABORTED, (A.CANCEL_TARGET, A.ORPHAN)),
    (P.PLANNED, S.TARGET_LOST): (P.ABORTED, ()),
    (P.PLANNED, S.UNDO): (P.ABORTED, (A.CANCEL_TARGET,)),
    (P.RESERVED, S.COPY_BEGAN): (P.COPYING, ()),
    (P.RESERVED, S.FROZEN): (P.FROZEN, (A.COPY_IN,)),
    (P.RESERVED, S.NOT_MOVABLE): (P.ABORTED, (A.CANCEL_TARGET, A.RESTART_AT_TARGET)),
    (P.RESERVED, S.COPY_FAILED): (P.ABORTED, (A.CANCEL_TARGET, A.THAW_SOURCE)),
    (P.RESERVED, S.FINISHED): (P.ABORTED, (A.CANCEL_TARGET,)),
    (P.RESERVED, S.SOURCE_LOST): (P.ABORTED, (A.CANCEL_TARGET, A.ORPHAN)),
    (P.RESERVED, S.TARGET_LOST): (P.ABORTED, (A.THAW_SOURCE,)),
    (P.RESERVED, S.UNDO): (P.ABORTED, (A.CANCEL_TARGET, A.THAW_SOURCE)),
    (P.COPYING, S.FROZEN): (P.FROZEN, (A.COPY_IN,)),
    (P.COPYING, S.NOT_MOVABLE): (P.ABORTED, (A.CANCEL_TARGET, A.RESTART_AT_TARGET)),
    (P.COPYING, S.COPY_FAILED): (P.ABORTED, (A.CANCEL_TARGET, A.THAW_SOURCE)),
    (P.COPYING, S.FINISHED): (P.ABORTED, (A.CANCEL_TARGET,)),
    (P.COPYING, S.SOURCE_LOST): (P.ABORTED, (A.CANCEL_TARGET, A.ORPHAN)),
    (P.COPYING, S.TARGET_LOST): (P.ABORTED, (A.THAW_SOURCE,)),
    (P.COPYING, S.UNDO): (P.ABORTED, (A.CANCEL_TARGET, A.THAW_SOURCE)),
    (P.FROZEN, S.COPIED_IN): (P.COMMITTED, (A.COMMIT, A.FREE_SOURCE, A.RELEASE_SNAPSHOT)),
    (P.FROZEN, S.COPY_REFUSED): (P.ABORTED, (A.CANCEL_TARGET, A.THAW_SOURCE, A.RELEASE_SNAPSHOT)),
    (P.FROZEN, S.NOT_MOVABLE): (P.ABORTED, (A.CANCEL_TARGET, A.RESTART_AT_TARGET, A.RELEASE_SNAPSHOT)),
    (P.FROZEN, S.FINISHED): (P.ABORTED, (A.CANCEL_TARGET, A.RELEASE_SNAPSHOT)),
    (P.FROZEN, S.SOURCE_LOST): (P.STRANDED, ()),
    (P.FROZEN, S.TARGET_LOST): (P.ABORTED, (A.THAW_SOURCE, A.RELEASE_SNAPSHOT)),
    (P.FROZEN, S.UNDO): (P.ABORTED, (A.CANCEL_TARGET, A.THAW_SOURCE, A.RELEASE_SNAPSHOT)),
    (P.STRANDED, S.COPIED_IN): (P.RELEASED, (A.COMMIT, A.RELEASE_SNAPSHOT)),
    (P.STRANDED, S.COPY_REFUSED): (P.ABORTED, (A.CANCEL_TARGET, A.ORPHAN, A.RELEASE_SNAPSHOT)),
    (P.STRANDED, S.NOT_MOVABLE): (P.ABORTED, (A.CANCEL_TARGET, A.ORPHAN, A.RELEASE_SNAPSHOT)),
    (P.STRANDED, S.TARGET_LOST): (P.ABORTED, (A.ORPHAN, A.RELEASE_SNAPSHOT)),
    (P.STRANDED, S.UNDO): (P.ABORTED, (A.CANCEL_TARGET, A.ORPHAN, A.RELEASE_SNAPSHOT)),
    (P.COMMITTED, S.SOURCE_FREED): (P.RELEASED, ()),
}

LIVE = frozenset({P.PLANNED, P.RESERVED, P.COPYING, P.FROZEN, P.STRANDED})  # the request is between two workers


@dataclass(slots=True)
class Handoff:
    """One attempt to move one request. ``row`` is its row in the request table."""

    row: int
    request_id: str
    source: str
    target: str
    began_s: float
    kind: Kind = Kind.MOVE
    phase: Phase = Phase.PLANNED
    locator: str = ""
    had_ended: bool = False  # its source knew it no more: the response ended just before
    overdue: str = ""  # why it was undone, where it took too long
    tokens: int = 0  # response tokens in the snapshot

    def advance(self, signal: Signal) -> tuple[Action, ...]:
        """Moves on and says what to do. Raises IllegalTransition, unchanged, for a pair that is not in the table."""
        try:
            self.phase, actions = TABLE[self.phase, signal]
        except KeyError:
            raise IllegalTransition(f"handoff of {self.request_id}: {signal.name} in phase {self.phase.name}") from None
        return actions
