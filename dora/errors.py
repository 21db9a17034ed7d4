"""Errors that reach people. Each one names the field, the value that was given and what is allowed."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from traceback import extract_tb


class DoraError(Exception):
    """Base of every expected failure. Bugs raise other exceptions and crash."""


class InvalidValue(DoraError):
    """A value outside its domain: ``field`` was ``value``, while only ``allowed`` is accepted."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field} = {value!r} is not allowed: {allowed}")


class Conflict(InvalidValue):
    """The value is well-formed but does not fit the present state (a duplicate id, a wrong version)."""


class NotFound(InvalidValue):
    """No such worker, request, group, version or file."""


class SnapshotRefused(DoraError):
    """A KV snapshot failed its check (identity, layout, version or checksum); the request must be re-prefilled."""


class CanaryMismatch(DoraError):
    """Freshly loaded weights do not reproduce the published canary logprobs."""


class IllegalTransition(DoraError):
    """An event that the state machine's table does not allow in the present state; the state is unchanged."""


def one_of(name: str, known: Iterable[str], cutoff: float = 0.4) -> str:
    """What is allowed instead of an unknown name: all known ones, and the one that was probably meant, in any case.

    ``cutoff``: how alike that one has to be, 0 to 1 (``difflib.get_close_matches``).
    """
    spelled = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=cutoff)
    return f"one of {', '.join(spelled.values())}" + (f"; did you mean {spelled[near[0]]}?" if near else "")


def told(error: Exception) -> str:
    """A bug in one line: the exception's kind, what it says, and where it was raised."""
    frames = extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
