"""Which versions DP groups take up: each, or every second, where there are few DP groups to a version.

A version's last responses hold a DP group that empties for most of a step, and nothing of another version can fill it.
So the more DP groups a version has, the less of them that is; of three it is a third. The window does not ask for every
version to be used: with a stride of two, one that is taken up has the DP groups of two, and the next but one follows.

A version that may begin nothing more is followed by the newest at once: a trainer that is behind sees every version.
"""

from collections.abc import Callable, Sequence

LEAST_GROUPS = 3.5  # DP groups that a version should have between its first and its last step
MOST = 2  # a longer one makes responses staler, for next to nothing


def stride_of(groups: int, window: int) -> int:
    """Steps from a version that is taken up to the next, for so many DP groups.

    A divisor of ``window - 1``, so that as one version comes another one is due. One DP group alone takes up every
    version: two could not share it.
    """
    if groups >= LEAST_GROUPS * (window - 1) or groups < 2 or (window - 1) % MOST:
        return 1
    return MOST


def life_of(groups: int, window: int) -> int:
    """Steps that a version is hosted for: the window, or fewer where its versions are more than DP groups."""
    return max(1, min(window, stride_of(groups, window) * (groups - 1) + 1))


def leading(newest: int, targets: Sequence[int], window: int, admits: Callable[[int], bool]) -> int:
    """The version that new work goes to first, and that DP groups without a version get.

    ``targets``: the version that each DP group is to host, negative where that is none.
    """
    hosted = max(targets, default=-1)
    if hosted >= 0 and newest - hosted < stride_of(len(targets), window) and admits(hosted):
        return hosted
    return newest
