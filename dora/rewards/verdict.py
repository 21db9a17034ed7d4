"""Converts the results of user functions to bounded, finite values. Only this module reads them.

A verdict is a message: {"reward", "components", "log"} of a reward function, {"keep"} of a filter, or {"failure": the
end of a sentence about the function}. The user process makes it from the function's result. The service checks it
again, because user code shares the process that wrote it.
"""

import math
import numbers
import reprlib
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

from dora.data.types import Reward
from dora.data.verdict import ALLOWED_REWARD, is_reward, remarks

FAILURE_MAX_CHARS: Final = 500
ALLOWED_RESULT: Final = f'{ALLOWED_REWARD}, or a mapping with such a "reward"'

Message = dict[str, Any]
Describe = Callable[[BaseException], str]  # an error as one line

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 120


def described(error: BaseException) -> str:
    """Returns an exception of user code as one line, even if its ``__str__`` fails."""
    try:
        return one_line(f"{type(error).__name__}: {error}")
    except BaseException:  # it may raise SystemExit too
        return type(error).__name__


def verdict(result: object, describe: Describe = described) -> Message:
    """Returns a reward function's result as a message, or a failure if it is not ``ALLOWED_RESULT``. Never raises."""
    return _guarded(lambda result: _verdict(result, describe), result, describe)


def decision(result: object, describe: Describe = described) -> Message:
    """Returns a filter's result as a message, or a failure if it is neither True nor False. Never raises."""
    return _guarded(_decision, result, describe)


def reward_of(spec: str, message: Message) -> Reward:
    """Returns the reward in a verdict's message, or for anything else an invalid one, whose log gives the reason."""
    if "failure" not in message:
        message = verdict(message)
    if "failure" in message:
        failure = one_line(message["failure"])
        return Reward(value=0.0, log=f"reward function {spec!r} {failure}", valid=False)
    return Reward(value=message["reward"], components=message["components"], log=message["log"])


def one_line(text: object) -> str:
    """Returns foreign text for one line of a log: bounded, without control characters."""
    words = " ".join(str(text)[: 2 * FAILURE_MAX_CHARS].split())
    printable = "".join(character if character.isprintable() else "?" for character in words)
    return printable[:FAILURE_MAX_CHARS]


def _guarded(read: Callable[[object], Message], result: object, describe: Describe) -> Message:
    """Returns ``read(result)``. A result of a user's class may raise anything while it is read."""
    try:
        return read(result)
    except BaseException as error:  # SystemExit too, which would end the process without a reason
        return {"failure": f"returned a value that cannot be read: {describe(error)}"}


def _verdict(result: object, describe: Describe) -> Message:
    if isinstance(result, Reward):
        result = {"reward": result.value, "components": result.components, "log": result.log}
    record = result if isinstance(result, Mapping) else {"reward": result}
    reward = _finite(record.get("reward"))
    if reward is None or not is_reward(reward):
        return {"failure": f"returned {_shortened(result)}; allowed is {ALLOWED_RESULT}"}
    try:
        components, log = remarks(record.get("components"), record.get("log"), _finite)
    except BaseException as error:  # of the classes of a user's values, SystemExit too
        components, log = {}, f"(left out: components and log, which cannot be read: {describe(error)})"
    return {"reward": reward, "components": components, "log": log}


def _decision(result: object) -> Message:
    keep = _scalar(result)
    if not isinstance(keep, bool):
        return {"failure": f"returned {_shortened(result)}; allowed is True or False"}
    return {"keep": keep}


def _finite(value: object) -> float | None:
    number = _scalar(value)
    if not isinstance(number, numbers.Real | Decimal):
        return None
    try:
        as_float = float(number)
    except (OverflowError, ValueError):  # a whole number that no float holds, a signalling NaN
        return None
    return as_float if math.isfinite(as_float) else None


def _scalar(value: object) -> object:
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value


def _shortened(value: object) -> str:
    return one_line(_REPR.repr(value))[:200]
