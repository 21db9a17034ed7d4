"""Groups that grow: a group starts with some of its members, and with the rest only if its rewards differ.

    DORMANT ──two valid rewards of the group differ──▶ WAITING
       └──all started members are scored, and none differ──▶ SKIPPED

A group whose rewards are all equal teaches nothing: its advantages are 0. Its prompt sets the least size
(``group_size_min``) and the full one (``group_size``). All members have rows, ids and numbers from the admission on.
Members beyond the least size are dormant: they are on no worker, in no queue, and no demand for their version.

The rule is a function of the group's verdicts alone, so a restart derives it from the log (data/growth.py).
"""

from collections.abc import Sequence

from dora.core import commands as do
from dora.core import events as on
from dora.core.state import DORMANT, SKIPPED, State
from dora.data.growth import has_decided


def begin(state: State, group: int) -> Sequence[int]:
    """Leaves the members of a new group beyond the least size dormant. Returns the rows of the others."""
    rows, at_once = state.members[group], int(state.groups["at_once"][group])
    late = rows[at_once:]
    if late:
        state.requests["status"][late] = DORMANT
        state.groups["unfinished"][group] = state.groups["unscored"][group] = at_once
        state.undecided[group] = ()
    return rows[:at_once]


def scored(state: State, group: int, event: on.RequestScored) -> None:
    """Notes the verdict on a member of a group with dormant ones, which start or are skipped if it decides."""
    if event.valid:
        rewards = state.undecided[group] = tuple({*state.undecided[group], event.reward})
        if has_decided(rewards):
            _start(state, group)
            return
    if not state.groups["unscored"][group]:
        _skip(state, group)


def _start(state: State, group: int) -> None:
    """Queues the dormant members before all that have not begun: their group is open the longest."""
    late = _dormant(state, group)
    state.rates.decided(grows=True)
    for row in reversed(late):  # the last one queued is the first to start
        if state.requests["prompt_tokens"][row]:
            state.wait_first(row)
        else:
            state.idles(row)  # its environment gives the prompt
    state.groups["unfinished"][group] += len(late)
    state.groups["unscored"][group] += len(late)
    state.counters.members_started_late += len(late)
    state.out.append(do.GrowGroup(state.group_id[group], tuple(state.request_id[row] for row in late)))


def _skip(state: State, group: int) -> None:
    late = _dormant(state, group)
    state.rates.decided(grows=False)
    state.requests["status"][late] = SKIPPED
    state.counters.members_skipped += len(late)


def _dormant(state: State, group: int) -> list[int]:
    del state.undecided[group]
    return [row for row in state.members[group] if state.requests["status"][row] == DORMANT]
