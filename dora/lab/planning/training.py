"""The trainer's side of Algorithm 1: the best layout for each number of accelerators, and the time of a step on it.

StreamRL (section 4.2) takes the best time over all parallel configurations, from a profiler. DORA uses step times that
were measured on some numbers of accelerators (:class:`~dora.lab.planning.allocation.TrainingTime`). The layouts
determine on which other numbers the trainer fits into memory, and how much longer a step is if they divide the model
badly.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from math import ceil, inf

import numpy as np

from dora.data.hardware import Hardware
from dora.errors import InvalidValue
from dora.lab.planning.allocation import TrainingTime
from dora.lab.planning.layout import ReplicaLayout, limit_bytes
from dora.lab.planning.models import ModelSpec
from dora.lab.planning.options import CONTEXTS, Option, best, even_s, longest_that_fits, options, shortest_pipelines
from dora.lab.planning.pace import batch_of
from dora.lab.planning.workload import StepWorkload


class Trainers:
    """The trainers of ``model`` on one kind of accelerator; ``time`` is their measured step time.

    Several ranks share a sequence only if nothing fits on that number of accelerators with fewer. Raises InvalidValue
    if no layout has room for a micro-batch with the longest response.
    """

    def __init__(self, model: ModelSpec, hardware: Hardware, workload: StepWorkload, time: TrainingTime) -> None:
        self.time = time
        self.limit_bytes = limit_bytes(hardware)
        batch = batch_of(workload)
        self._tiers = [_Tier(model, options(model, hardware, batch, context)) for context in CONTEXTS]
        least = [option.least_gpus(time.multiple) for tier in self._tiers for option in tier.options]
        if not least:
            most = longest_that_fits(model, hardware, batch.longest_tokens) - ceil(workload.prompt_tokens)
            allowed = f"at most {max(0, most):,}: no layout of {model.name} on {hardware.name} fits a longer response"
            raise InvalidValue("cap_tokens", workload.cap_tokens, allowed)
        self.least = min(least)
        self._found, self.seconds = cache(self._find), cache(self._seconds)  # queried for every split
        # How unevenly the measured numbers divide the model, which their times include.
        at = [] if time.even else [gpus for gpus, _ in time.points if self.fits(gpus)]
        self._measured_at, self._worse_there = at or [1], [self._known(gpus)[1] for gpus in at] or [1.0]

    def fits(self, gpus: int) -> bool:
        return self._found(gpus) is not None

    def layout(self, gpus: int) -> ReplicaLayout:
        """The best layout on exactly this many accelerators. Raises InvalidValue if none fits."""
        return self._known(gpus)[0]

    def numbers(self, most: int) -> Sequence[int]:
        """Numbers of accelerators, up to ``most``, on which it fits and a step is shorter than on fewer; ascending."""
        multiple, found, shortest_s = self.time.multiple, [], inf
        for gpus in range(multiple, most + 1, multiple):
            if self.fits(gpus) and (step_s := self.seconds(gpus)) < shortest_s:
                shortest_s = step_s
                found.append(gpus)
        return found

    def measured(self, gpus: int) -> bool:
        return self.time.measured(gpus)

    def _seconds(self, gpus: int) -> float:
        """Returns the seconds of a step, scaled by how much worse the layout divides the model. Raises InvalidValue."""
        worse = self._known(gpus)[1] / float(np.interp(gpus, self._measured_at, self._worse_there))
        return self.time.seconds(gpus) * worse

    def _known(self, gpus: int) -> tuple[ReplicaLayout, float]:
        found = self._found(gpus)
        if found is None:
            raise InvalidValue("train_gpus", gpus, f"a number on which a layout fits, such as on {self.least}")
        return found

    def _find(self, gpus: int) -> tuple[ReplicaLayout, float] | None:
        compared: list[Option] = []
        for tier in self._tiers:
            compared += tier.compared
            option = best(tier.dividing(gpus), gpus)
            if option is not None:
                return option.layout(gpus), option.step_s(gpus) / even_s([option, *compared], gpus)
        return None


class _Tier:
    """The options with equally many ranks per sequence. Others are compared with ``compared``."""

    def __init__(self, model: ModelSpec, options: Sequence[Option]) -> None:
        self.options = options
        shortest = shortest_pipelines(model)
        self.compared = [option for option in options if option.replica.pipeline in shortest]
        self._by_gpus: dict[int, list[Option]] = defaultdict(list)
        for option in options:
            self._by_gpus[option.replica.gpus].append(option)

    def dividing(self, gpus: int) -> list[Option]:
        return [option for each, options in self._by_gpus.items() if gpus % each == 0 for option in options]
