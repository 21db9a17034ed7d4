"""The state table of one live request's handoff between two workers of one version, or a worker and a pool.

                            ┌─────────────frozen: few blocks─────────────┐
                            │                                            ▼
    PLANNED ──reserved──▶ RESERVED ──copy began──▶ COPYING ──frozen──▶ FROZEN ──copied in──▶ COMMITTED ──▶ RELEASED
       │                    │                         │                  │ └──source lost──▶ STRANDED ──▶ RELEASED
       └────────────────────┴─────────────────────────┴──────────────────┴──▶ ABORTED: the source goes on

The source owns the request until COMMITTED, and the target owns it afterwards. The request has exactly one owner at any
time, and the source frees its blocks only after COMMITTED. From then on the loss of either is an ordinary worker loss.

In RESERVED both ends know each other: the source has the target's address, and the target has reserved and knows which
source may connect. In COPYING full blocks travel in rounds while the source decodes. A request with few full blocks is
frozen at once and skips COPYING. Both phases fail alike: if one end is lost, the work of the other end is void. A
source whose copy fails continues decoding, and is thawed if it was frozen for the last round. A target is ordered to
drop the received rounds and its reserved slot. In FROZEN the target has everything and does not need the source.
docs/architecture.md is drawn from TABLE.

Parking is a handoff whose target is a pool: after COMMITTED the request waits. Resuming is a handoff whose source is a
pool. If that is ABORTED, the request waits again, and its KV is re-prefilled unless only the target was lost. From a
pool whose host leaves, a parked request is carried to another pool; if that fails, it stays parked where it is.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from dora.core.plan import Trigger
from dora.errors import IllegalTransition


class Phase(Enum):
    PLANNED = auto()  # the target was asked to take the request
    RESERVED = auto()  # the target reserved a slot; the source was ordered to copy
    COPYING = auto()  # full blocks are copied in rounds while the source decodes, then the other blocks
    FROZEN = auto()  # the target has the whole snapshot and was ordered to load it
    STRANDED = auto()  # FROZEN, but the source was lost: only the target has a copy
    COMMITTED = auto()  # the target owns the request; the source was ordered to free it
    RELEASED = auto()
    ABORTED = auto()


class Signal(Enum):
    RESERVED = auto()
    REFUSED = auto()  # the target refuses the request
    COPY_BEGAN = auto()  # the source copies before the freeze
    FROZEN = auto()  # the source has frozen the request, and the target has all of it
    NOT_MOVABLE = auto()  # the source cannot move it exactly, or the target cannot convert it to its own blocks
    COPY_FAILED = auto()  # the source does not have it (it just finished) or could not send it to the target
    COPIED_IN = auto()
    COPY_REFUSED = auto()  # the target refused the snapshot
    SOURCE_FREED = auto()
    SOURCE_LOST = auto()
    TARGET_LOST = auto()
    FINISHED = auto()  # the response ended at the source
    UNDO = auto()  # timeout or cancelled group


class Action(Enum):
    COPY_OUT = auto()
    COPY_IN = auto()
    COMMIT = auto()  # the target becomes the owner
    FREE_SOURCE = auto()
    THAW_SOURCE = auto()
    CANCEL_TARGET = auto()
    RESTART_AT_TARGET = auto()  # stop at the source, re-prefill at the target
    ORPHAN = auto()  # no process holds it: it waits for another worker and is re-prefilled
    RELEASE_SNAPSHOT = auto()


VACATING: Final = "vacating"  # the request's worker changes version or leaves
SESSION: Final = "session"  # the KV of a session between two turns makes room, or follows its session
SLOT: Final = "slot"  # a worker has a free slot for a parked request
NOTICE: Final = "notice"  # the request's host leaves by a deadline
REASONS: Final = (*(trigger.value for trigger in Trigger), VACATING, SESSION, SLOT, NOTICE)  # of handoffs


class HandoffKind(Enum):
    MOVE = auto()  # from worker to worker
    PARK = auto()  # from worker to pool
    RESUME = auto()  # from pool to worker
    CARRY = auto()  # from pool to pool


FROM_POOL: Final = frozenset({HandoffKind.RESUME, HandoffKind.CARRY})
TO_POOL: Final = frozenset({HandoffKind.PARK, HandoffKind.CARRY})


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

LIVE = frozenset({P.PLANNED, P.RESERVED, P.COPYING, P.FROZEN, P.STRANDED})  # a handoff in these phases is in progress


@dataclass(slots=True)
class Handoff:
    """One attempt to move one request. ``row`` is its row in the request table."""

    row: int
    request_id: str
    source: str
    target: str
    began_s: float
    kind: HandoffKind = HandoffKind.MOVE
    phase: Phase = Phase.PLANNED
    locator: str = ""
    had_ended: bool = False  # the response ended at the source just before the copy
    overdue: str = ""  # reason, if it was undone after a timeout
    tokens: int = 0  # response tokens in the snapshot
    reason: str = SESSION  # one of REASONS

    def advance(self, signal: Signal) -> tuple[Action, ...]:
        """Applies a signal; returns its actions. Raises IllegalTransition, without a change, if TABLE has no entry."""
        try:
            self.phase, actions = TABLE[self.phase, signal]
        except KeyError:
            raise IllegalTransition(f"handoff of {self.request_id}: {signal.name} in phase {self.phase.name}") from None
        return actions
