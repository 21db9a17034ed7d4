"""Where lengths are only believed, a version begins its prompts by falling length, along its life.

A response may turn out many times longer than believed. The later it begins, the less time there is for that before
its version's deadline; and one that takes longer holds a DP group of the due version nearly alone, and the step with
it. Begun over the first half of their version's life in any order, 38 of its 8,192 responses would be late at 128 GPUs;
where the longest-believed begin right after the publish and the shortest last, fewer than one (docs/experiments.md). So
what is long among the prompts that wait begins early in a version's life, or waits for the next publish.

Among those that wait, not among those drawn: where long prompts pile up, later ones count as short, and so begin.
"""

from dora.orchestrator.core.line import Backlog

AT_ONCE = 1 / 12  # of a version's life: until then prompts of any length begin,
BEGUN = 3 / 4  # and from here on the shortest alone, rather than nothing


def limit_tokens(backlog: Backlog, age: float, window: int) -> float:
    """The longest response, as believed, that a version begins at an age of so many steps of the ``window``.

    Between the two moments the share of the waiting prompts that are short enough falls evenly from all to none, but
    never below one prompt.
    """
    share = 1.0 - (age / window - AT_ONCE) / (BEGUN - AT_ONCE)
    return backlog.longest_of_shortest(max(1, round(share * len(backlog))))
