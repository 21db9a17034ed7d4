"""Which versions DP groups take up: each, or every few, where there are few DP groups to a version.

A version's last responses hold a DP group that empties for most of a step, and nothing of another version can fill it.
So the more DP groups a version has, the less of them that is; of three it is a third. The window does not ask for every
version to be used: one that is taken up goes on for as long as its groups still end in time, and the next is the one
that is newest then. With a stride of ``W - 1`` steps two versions share the DP groups for one step, in which the older
one is due, and then the newer one has them all.

A version that may begin nothing more is followed by the newest at once: a trainer that is behind sees every version.
"""

from collections.abc import Callable

LEAST_GROUPS = 3.5  # DP groups that a version should have between its first and its last step


def stride_of(groups: int, window: int) -> int:
    """Steps from a version that is taken up to the next: the fewest that give each enough of so many DP groups.

    A divisor of ``window - 1``, so that as one version comes another one is due. One DP group alone takes up every
    version: two could not share it.
    """
    if groups < 2 or window < 2:
        return 1
    for stride in range(1, window):
        if (window - 1) % stride == 0 and groups * stride >= LEAST_GROUPS * (window - 1):
            return stride
    return window - 1


def leading(newest: int, hosted: int, stride: int, admits: Callable[[int], bool]) -> int:
    """The version that new work goes to first, and that DP groups without a version get.

    ``hosted``: the newest version that a DP group is to host, negative where there is none.
    """
    if 0 <= newest - hosted < stride and hosted >= 0 and admits(hosted):
        return hosted
    return newest
