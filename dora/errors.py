"""Errors for people. Each states what was given, why it is refused, and what is allowed."""

import difflib
import errno
from collections.abc import Iterable, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import ClassVar, Final, Self

SHOWN_MAX: Final = 200  # characters of a value that is refused
NAMED_MAX: Final = 20  # names that an error lists, where a command lists them too; of more it names some:
SOME_NAMED: Final = 4
GUESS: Final = "did you mean "  # how a guess begins


class DoraError(Exception):
    """Base of every expected failure. Bugs raise other exceptions and crash.

    ``field``, ``value``: the subject of the failure, for programs and tests, if it has one. The message states it too.
    """

    def __init__(self, message: str = "", field: str = "", value: object = None) -> None:
        self.field = field
        self.value = value
        super().__init__(message)


class Missing:
    """The type of MISSING, the value of a required field that is absent."""

    def __repr__(self) -> str:
        return "(none)"


MISSING: Final = Missing()


class InvalidValue(DoraError):
    """A refusal: what was given (``field``, ``value``), the reason (``why``), and what is allowed (``allowed``).

    ``why`` follows the value in the message. By default it is the class's ``REFUSED``; a Conflict always gives its own.
    ``allowed`` ends the sentence "it must be ...", or asks. ``said`` replaces the message if those parts make no
    sentence. The message reads, for example:

        slots = 0 is not valid: it must be at least 1
        request = 'g0.0' is in a handoff already: it must be a request that is running and in no handoff
        header is missing: it must be in the first message of an upload
    """

    REFUSED: ClassVar = "is not valid"

    def __init__(self, field: str, value: object, allowed: str, why: str = "", said: str = "") -> None:
        self.allowed = allowed
        self.why = why or ("is missing" if value is MISSING else self.REFUSED)
        subject = field if value is MISSING else f"{field} = {_shown(value)}"
        must = "" if allowed.startswith(GUESS) else "it must be "
        super().__init__(said or f"{subject} {self.why}: {must}{allowed}", field, value)

    def within(self, place: str) -> Self:
        """Returns the refusal with its field located in ``place``, for example a line of a file."""
        return type(self)(f"{place}: {self.field}", self.value, self.allowed, self.why)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than some thousand digits
        return "(a number of too many digits)"
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}... ({len(text):,} characters)"


class Conflict(InvalidValue):
    """The value is well-formed but does not fit the present state (a duplicate id, a wrong version)."""

    REFUSED = "does not fit the present state"


class VersionRejected(Conflict):
    """No worker could load a version that a trainer published: it must be published again before anything else.

    ``worker_ids``: the workers that refused it; empty if no host has its weights. ``canary_difference``: the largest
    difference of a logprob, 0 if none was compared.
    """

    REFUSED = "was rejected by the workers"
    LOST = "cannot be loaded any more"

    def __init__(self, version: int, reason: str, worker_ids: Sequence[str], canary_difference: float) -> None:
        self.version = version
        self.reason = reason
        self.worker_ids = tuple(worker_ids)
        self.canary_difference = canary_difference
        said = f"{', '.join(worker_ids)}: {reason}" if worker_ids else reason
        super().__init__("version", version, f"published anew ({said})", why="" if worker_ids else self.LOST)


class NotFound(InvalidValue):
    """No such worker, request, group, version or file."""

    REFUSED = "is not known"


class LimitExceeded(InvalidValue):
    """A full queue, a message over the size limit, or no room for weights."""

    REFUSED = "is too much"


class DeadlineExceeded(Conflict):
    """An operation did not end in the time that its size allows. A repetition may succeed."""

    REFUSED = "is too long"


class SnapshotRefused(DoraError):
    """A KV snapshot failed its check (identity, layout, version or checksum); the request must be re-prefilled."""


class LayoutMisfit(SnapshotRefused):
    """The KV's layout differs from this engine's and cannot be converted exactly; a retry is useless."""


class TransferFailed(DoraError):
    """A KV snapshot did not reach its target: the request continues at its source."""


class CanaryMismatch(DoraError):
    """Loaded weights do not reproduce the published canary logprobs, or give none.

    ``difference``: the largest of a logprob among those that must match; infinite if one is not finite.
    """

    def __init__(self, message: str, difference: float) -> None:
        self.difference = difference
        super().__init__(message)


class IllegalTransition(DoraError):
    """The state machine's table does not allow the event in the present state; the state is unchanged."""


def is_full(error: OSError) -> bool:
    """Returns whether a write failed for lack of space: the disk's, a quota's, or a file size limit's."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.4, most: int = 1) -> list[str]:
    """Returns the known names most similar to ``name``, ignoring case, the nearest first.

    ``cutoff``: required similarity, 0 to 1 (``difflib.get_close_matches``).
    """
    spelled = {each.lower(): each for each in known}
    return [spelled[each] for each in difflib.get_close_matches(name.lower(), spelled, most, cutoff)]


def one_of(name: str, known: Iterable[str], cutoff: float = 0.4, meant: Sequence[str] = (), listed_by: str = "") -> str:
    """Returns what is allowed instead of an unknown name: the probable one first, then all known names.

    ``meant``: the names to put first, if the caller knows them; otherwise the ``nearest``. ``listed_by``: a command
    that lists the known names; if they are many, only some of them are given.
    """
    names = list(known)
    meant = meant or nearest(name, names, cutoff)
    every = f"one of {', '.join(names)}"
    if listed_by and len(names) > NAMED_MAX:
        some = nearest(name, names, cutoff, SOME_NAMED) or names[:SOME_NAMED]
        every = f"one of {', '.join(some)}, or of the {len(names) - len(some)} others that `{listed_by}` lists"
    return f"{GUESS}{' or '.join(meant)}? {every[0].upper()}{every[1:]}" if meant else every


def described(error: BaseException) -> str:
    """Describes a bug in one line: the exception's kind, its message, and where it was raised."""
    frames = extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
