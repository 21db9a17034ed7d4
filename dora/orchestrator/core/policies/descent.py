"""Where lengths are only believed, a version begins its prompts by falling length, along its life.

A response may turn out many times longer than believed. The later it begins, the less time there is for that before
its version's deadline; and one that takes longer holds a DP group of the due version nearly alone, and the step with
it. Begun over the first half of their version's life in any order, 38 of its 8,192 responses would be late at 128 GPUs;
where the longest-believed begin right after the publish and the shortest last, fewer than one (docs/experiments.md). So
a prompt that has come too late to begin in its turn waits for the next publish.
"""

from math import inf

from dora.orchestrator.core.rhythm import LengthMix

AT_ONCE = 1 / 12  # of a version's life: until then prompts of any length begin,
BEGUN = 3 / 4  # and from here on none, but for the shortest where nothing else can
MOST = 1.0 - 1e-9


def limit_tokens(mix: LengthMix, age: float, window: int) -> float:
    """The longest response, as believed, that a version begins at an age of so many steps of the ``window``.

    Between the two moments the share of the prompts drawn of late that are short enough falls evenly from all to none.
    """
    share = 1.0 - (age / window - AT_ONCE) / (BEGUN - AT_ONCE)
    if share > MOST:
        return inf
    return mix.longest_quantile(share) if share > 0.0 else 0.0
