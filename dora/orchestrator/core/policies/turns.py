"""Groups of one version that end one after the other, a turn apart, as fast as the trainer takes them.

Where most prompts have a response of about the greatest length and all begin with their version, they would all end
with its last step: the trainer waits for most of the step, and then has most of it before it. So they take turns: the
one with the longest to come ends last, each other one as much sooner as training takes on those after it. Half a step's
training sooner on average, which costs pace: only where what is saved is a fair part of a step (pacing.py), and only as
far as the DP groups have the room.
"""

from collections.abc import Callable

import numpy as np

from dora.orchestrator.core.table import Column

SOONEST = 0.35  # of the time that a version has left each has at least this share
HALVINGS = 8


def groups_after(groups: Column, remaining: Column) -> Column:
    """By row: how many groups end after its own; that with the longest response to come is the last. float64.

    ``groups``: by row, equal for responses of one group; ``remaining``: tokens that each has still to come.
    """
    _, of_row = np.unique(groups, return_inverse=True)
    longest = np.zeros(of_row.max(initial=-1) + 1)
    np.maximum.at(longest, of_row, remaining)
    after = np.empty_like(longest)
    after[np.argsort(-longest, kind="stable")] = np.arange(len(longest))
    by_row: Column = after[of_row]
    return by_row


def left_in_turn(left_s: float, after: Column, turn_s: float, fits: Callable[[Column], bool]) -> Column:
    """By row: seconds that a response has of the ``left_s`` of its version, at the longest turn for which all fit.

    ``fits`` is asked of such a column. Turns of no time at all are taken even where these do not fit.
    """

    def left(turn_s: float) -> Column:
        column: Column = np.maximum(left_s - turn_s * after, SOONEST * left_s)
        return column

    if fits(left(turn_s)):
        return left(turn_s)
    fitting_s = 0.0
    for _ in range(HALVINGS):
        middle_s = (fitting_s + turn_s) / 2
        if fits(left(middle_s)):
            fitting_s = middle_s
        else:
            turn_s = middle_s
    return left(fitting_s)
