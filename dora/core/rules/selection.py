"""Redundant rollout: a step need not wait for its slowest groups if others can replace them. Off by default.

StaleFlow, section 4.3 and appendix C. Groups with later deadlines are the redundant ones: they run anyway. A step that
waits only for its last due groups, at most ``selection.redundant_fraction`` of it, takes as many finished groups of
later deadlines instead and is complete. If nothing runs beyond the step (a window of 1, or a strategy that begins one
batch at a time), none is dropped. The promises hold: the slow groups are cancelled, with their reason, as on request.
"""

from typing import Final

import numpy as np

from dora.core import events as on
from dora.core.rules import lifecycle
from dora.core.state import OPEN, State

REDUNDANT: Final = "redundant: its step has enough"


def drop_surplus(state: State) -> None:
    """Cancels the groups that are redundant now; the step is then complete."""
    fraction, window = state.config.selection.redundant_fraction, state.window
    if state.stream_step != window.step:
        return
    if not 0 < window.due == window.left <= spare_groups(fraction, window.groups_per_step):
        return
    for group_id in _replaceable(state):
        lifecycle.cancel(state, on.GroupCancelled(group_id, REDUNDANT))
        state.counters.groups_redundant += 1


def spare_groups(fraction: float, groups_per_step: int) -> int:
    return int(fraction * groups_per_step + 1e-9)


def _replaceable(state: State) -> list[str]:
    """The due groups if as many finished ones wait. A group that lacks only verdicts is waited for."""
    if sum(map(len, state.finished.values())) < state.window.left:
        return []
    groups = state.groups
    due = np.flatnonzero((groups["deadline"] == state.window.step) & (groups["status"] == OPEN))
    return [state.group_id[group] for group in due.tolist()] if groups["unfinished"][due].all() else []
