"""The trainer's lease: a trainer that is connected and makes no progress loses the right to exclude others.

A turn of the trainer is the time in which the service waits for it alone: from a full step to its commit, from a commit
to the next request, or from a rejected version until that is published again. The waiting for groups is no turn, and
neither is a turn's time during an evaluation of this service or a storage fault.

The lease of a turn that is too long lapses. This ends nothing: the trainer may still commit, which renews the lease.
But another trainer may attach without ``take_over`` and gets the same groups again; only that fences the first one. So
no group leaves the step that it was taken for (C2, C3), and a slow trainer is never ended because it is slow.
"""

from typing import Final

from dora.core import commands as do
from dora.core.rules import stalls
from dora.core.state import Lease, State

TURNS: Final = 20  # of a trainer's own longest turns
KEPT: Final = 0.99  # of the longest turn, at each commit
COMMITS_FIRST: Final = 2  # before these the pace is unknown: a first step compiles, loads and warms up


def attached(state: State) -> None:
    state.lease = Lease(looked_s=state.now_s)


def requested(state: State) -> None:
    """Ends a turn: the trainer has asked for a step that still takes groups."""
    _progressed(state)


def committed(state: State) -> None:
    """Ends a turn by a commit."""
    lease = state.lease
    lease.commits += 1
    lease.longest_s *= KEPT
    _progressed(state)


def republished(state: State) -> None:
    """Ends a turn: a rejected version has been published again."""
    _progressed(state)


def _progressed(state: State) -> None:
    lease = state.lease
    if lease.commits >= COMMITS_FIRST:
        lease.longest_s = max(lease.longest_s, lease.turn_s)
    lease.turn_s, lease.lapsed = 0.0, ""


def patience_s(state: State) -> float:
    """The limit of a turn: at least ``service.trainer_stall_timeout_s``; infinite while the pace is unknown."""
    least_s, lease = state.config.service.trainer_stall_timeout_s, state.lease
    if not least_s or lease.commits < COMMITS_FIRST:
        return float("inf")
    return max(least_s, TURNS * lease.longest_s)


def overdue(state: State) -> None:
    """Counts the time of the trainer's turn, and lets the lease lapse that is overdue.

    Time between two ticks counts as two seconds at most, so that a service that was stopped blames nobody.
    """
    lease = state.lease
    since_s, lease.looked_s = state.now_s - lease.looked_s, state.now_s
    if not _is_its_turn(state):
        return
    lease.turn_s += min(since_s, max(stalls.REPORT_GAP_S, 2.0 * state.config.service.tick_s))
    limit_s = patience_s(state)
    if lease.turn_s >= limit_s and not lease.lapsed:
        why = f"no commit of step {state.window.newest} in {lease.turn_s:.0f} s of its turn (limit {limit_s:.0f} s)"
        lease.lapsed = stalls.STALLED + why
        state.counters.leases_lapsed += 1
        state.out.append(do.LapseLease(state.trainer_epoch, lease.lapsed))


def _is_its_turn(state: State) -> bool:
    waits = state.stream_step is None and bool(state.leased or state.finished or state.rejected)
    return waits and bool(state.trainer_epoch) and not state.window.closed and not state.evaluations.running
