"""The number of workers to add if generation lags training (StreamRL section 4.2, dynamic adjustment)."""

import math
from collections.abc import Callable

from dora.errors import InvalidValue


def groups_to_add(
    generation_s: float,
    training_s: float,
    engines: int,
    gain_s: Callable[[int], float] | None = None,
    most: int = 4096,
) -> int:
    """The workers to add so that generation lags training by less than one more worker would gain.

    ``delta`` is the lag. A worker is added while ``delta >= gain_s(engines)``, the seconds that one worker more than
    ``engines`` saves (by default ``even_gain_s``). If it saves nothing, for example because one response alone takes
    that long, none is added. The result is at most ``most``. The trainer is never resized, as that would require its
    restart. Raises InvalidValue for a value outside its domain.
    """
    for field, value in (("generation_s", generation_s), ("training_s", training_s)):
        if not 0.0 < value < math.inf:
            raise InvalidValue(field, value, "a finite number above 0")
    if engines < 1:
        raise InvalidValue("engines", engines, "1 or above")
    gain_s = gain_s or even_gain_s(generation_s, engines)
    added, lag_s = 0, generation_s - training_s
    while added < most and 0.0 < (gain := gain_s(engines + added)) <= lag_s:
        lag_s -= gain
        added += 1
    return added


def even_gain_s(generation_s: float, engines: int) -> Callable[[int], float]:
    """The gain of one more worker if the time is inversely proportional to their number, from one measurement."""
    work_s = generation_s * engines
    return lambda count: work_s / count - work_s / (count + 1)
