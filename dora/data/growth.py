"""The rule of groups that grow: which members have started is a function of the group's verdicts.

Core, response buffer and log apply it alike, so a restart finds each group as it was.
"""

from collections.abc import Iterable


def has_decided(rewards: Iterable[float]) -> bool:
    """Returns whether two of these valid rewards differ, so that the whole group is worth sampling."""
    return len(set(rewards)) > 1


def members_started(size: int, at_once: int, rewards: Iterable[float], late_has_begun: bool) -> int:
    """Returns how many members have started, which are the first ones. ``rewards`` are the valid ones so far. If
    ``late_has_begun``, a member beyond the first ``at_once`` has tokens, or has been replaced.
    """
    return size if late_has_begun or has_decided(rewards) else at_once
