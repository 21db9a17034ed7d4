"""Groups that are begun and not trained on: a user's filter, and redundant rollout. Both are off by default.

Either asks the core to cancel a group, with a reason, as a user does: no promise knows of them. The prompt of such a
group comes again in the next epoch.
"""

from random import Random
from typing import Final

from dora.sim.ledger import Ledger
from dora.sim.scenario import Scenario
from dora.sim.workload import SimPrompt

FILTERED: Final = "filtered: it teaches nothing"
DROPPED: Final = "redundant: its step has enough"


class Selection:
    """Decides which groups are to be cancelled."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._seed = seed
        self._filter_fraction = scenario.filter_fraction
        self._window, self._groups_per_step = scenario.window, scenario.trainer.groups_per_step
        self._spare = int(scenario.redundant_fraction * self._groups_per_step + 1e-9)

    @property
    def drops(self) -> bool:
        """Whether redundant rollout is on."""
        return self._spare > 0

    def filters(self, prompt: SimPrompt) -> bool:
        """Whether a user's filter lets this group go once all of it is scored.

        As where all its rewards are equal (DAPO's dynamic sampling). It follows from the seed and the prompt's draw.
        """
        if not self._filter_fraction:
            return False
        return Random(f"filter {self._seed} {prompt.prompt_id}").random() < self._filter_fraction

    def surplus(self, ledger: Ledger, step: int) -> list[str]:
        """The groups that redundant rollout drops now: of the batch, as in StaleFlow (section 4.3 and appendix C).

        The groups of later deadlines are the redundant ones: they run anyway. A step that waits for nothing but its
        last due groups, at most ``redundant_fraction`` of it, takes finished ones of later deadlines in their place as
        soon as there are as many, and is complete. Where nothing runs beyond the step (a window of 1, or a strategy
        that begins one batch at a time) none is dropped.
        """
        version, left = step - self._window + 1, self._groups_per_step - len(ledger.received)
        awaited = ledger.unfinished[version]
        if not 0 < awaited == left <= self._spare or ledger.finished < left:
            return []
        return [name for name, group in ledger.groups.items() if group.version == version and group.unscored]
