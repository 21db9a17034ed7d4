"""A user's filter of scored groups, as a share of them. (A service asks ``selection.filter`` instead.)"""

from random import Random
from typing import Final

from dora.sim.workload import SimPrompt

FILTERED: Final = "filtered: it teaches nothing"


class Filter:
    """Lets a share of the groups go once all their responses are scored, as DAPO does where all rewards are equal.

    Which ones follows from the seed and the prompt's draw. The prompt of such a group comes again in the next epoch.
    """

    def __init__(self, fraction: float, seed: int) -> None:
        self._fraction, self._seed = fraction, seed

    def lets_go(self, prompt: SimPrompt) -> bool:
        if not self._fraction:
            return False
        return Random(f"filter {self._seed} {prompt.prompt_id}").random() < self._fraction
