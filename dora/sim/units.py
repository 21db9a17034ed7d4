"""The unit in which people are shown the time of a step: seconds where minutes would be 0.0 something."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class StepUnit:
    """A unit of time, short and in words."""

    name: str
    word: str
    seconds: float

    def of_min(self, minutes: float) -> float:
        """So many minutes in this unit."""
        return minutes * 60.0 / self.seconds


SECONDS: Final = StepUnit("s", "seconds", 1.0)
MINUTES: Final = StepUnit("min", "minutes", 60.0)


def step_unit(times_min: Iterable[float]) -> StepUnit:
    """One unit for all these step times: seconds where the shortest is below a minute."""
    return SECONDS if min(times_min, default=1.0) < 1.0 else MINUTES
