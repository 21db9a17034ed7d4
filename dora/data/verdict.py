"""The limits of a verdict, the same for reward functions, environments and agents.

A reward outside its bound is refused by name. Components and log are remarks: what exceeds a limit is cut or left out,
the log says so, and the reward counts.
"""

import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

from dora.errors import InvalidValue

REWARD_MAX: Final = 1e6  # of a session, a response or a turn; its negative is the minimum
LOG_MAX_BYTES: Final = 32 << 10
COMPONENTS_MAX: Final = 128
NAME_MAX_BYTES: Final = 200  # of a component: all of them and the log take at most 64 KiB, which fits into a trajectory
ALLOWED_REWARD: Final = f"a finite number from {-REWARD_MAX:,.0f} to {REWARD_MAX:,.0f}"
_NAMED: Final = 8  # components that a log names as left out


def is_reward(value: float) -> bool:
    """Returns whether a reward is within its bound. NaN is not."""
    return abs(value) <= REWARD_MAX


def check_reward(field: str, value: float) -> None:
    """Raises InvalidValue for a reward outside its bound."""
    if not is_reward(value):
        raise InvalidValue(field, value, ALLOWED_REWARD)


def finite(value: object) -> float | None:
    """Returns a finite number as a float; None for anything else."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def remarks(
    components: object, log: object, number: Callable[[object], float | None] = finite
) -> tuple[dict[str, float], str]:
    """Returns components and log within their limits. ``number`` reads a component, or returns None."""
    kept: dict[str, float] = {}
    left_out = [] if components is None or isinstance(components, Mapping) else ["components, which are no mapping"]
    for key, value in islice(components.items(), 2 * COMPONENTS_MAX) if isinstance(components, Mapping) else ():
        name, found = cut(key, NAME_MAX_BYTES), number(value)
        if found is None or len(kept) == COMPONENTS_MAX:
            left_out.append(name)
        else:
            kept[name] = found
    more = ", ..." if len(left_out) > _NAMED else ""
    note = f"\n(left out: {', '.join(left_out[:_NAMED])}{more})" if left_out else ""
    return kept, (cut("" if log is None else log, LOG_MAX_BYTES - len(note.encode())) + note).removeprefix("\n")


def cut(text: object, most_bytes: int) -> str:
    """Returns ``str(text)`` as valid UTF-8 of at most ``most_bytes``."""
    return str(text)[:most_bytes].encode("utf-8", "replace")[:most_bytes].decode("utf-8", "ignore")
