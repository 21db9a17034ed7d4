"""What the log says, fact by fact. Every fact is plain data; ``encoded`` and ``decoded`` are its form on disk.

A *number* is a request's in the log. It is given once and never again, while ids may be lost with what was not yet on
disk, and rows are used again. A group has as many as it has requests, from ``number`` on.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Final, get_args

import msgpack
import numpy as np
import numpy.typing as npt

from dora.data.types import Prompt
from dora.errors import InvalidValue
from dora.journal.upgrades import upgraded

Column = npt.NDArray[Any]

_TEXT_ERRORS: Final = "surrogatepass"  # a reason may quote a file name that is no UTF-8
_DTYPES: Final[dict[str, np.dtype[Any]]] = {  # of the columns of Tokens
    "numbers": np.dtype("<i8"),
    "first_tokens": np.dtype("<u4"),
    "counts": np.dtype("<u4"),
    "ends": np.dtype("u1"),
    "token_ids": np.dtype("<i4"),
    "logprobs": np.dtype("<f4"),
    "routed_bytes": np.dtype("<u4"),
    "ats": np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class Begun:
    """A life of the service begins. ``life`` counts from 0; times as events have them, and since the Unix epoch."""

    incarnation: int
    started_at: float
    now_s: float
    config: str  # as JSON, without its token


@dataclass(frozen=True, slots=True)
class Event:
    """What the core was told, as its log of events has it; kept where everything is."""

    now_s: float
    kind: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Submitted:
    """Prompts that were queued: each with its place in the order of arrivals."""

    arrivals: list[int]
    prompts: list[list[Any]]  # prompt_values


@dataclass(frozen=True, slots=True)
class LetGo:
    """Prompts that are not to come any more, and have no group: submitted ones by their arrivals, the source's by
    their places in it. ``names``: what a user has cancelled them by."""

    arrivals: list[int]
    positions: list[int]
    names: list[str]


@dataclass(frozen=True, slots=True)
class PromptsEnded:
    """It was said that nothing more would be submitted."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A group. ``place``: of its prompt in the source, -1: it was submitted, as ``arrival`` says."""

    number: int
    group_id: str
    prompt: list[Any]  # prompt_values
    version: int
    deadline: int
    window_versions: int
    at: float
    rows: list[int]
    position: int
    arrival: int


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """A worker's report, as far as it is of admitted requests: columns of stretches, and of their tokens.

    Stretches of a request never overlap. ``stays``: [stretch, worker, first token, arrival] for each that begins with
    them. ``stops``: [stretch, stop string]. ``ends`` and ``routed_bytes`` are empty where all are 0; ``ats``, of each
    stretch, where all came ``at`` once.
    """

    at: float
    numbers: Column
    first_tokens: Column
    counts: Column
    ends: Column
    token_ids: Column
    logprobs: Column
    segment_starts: list[list[Any]] = field(default_factory=list)
    stops: list[list[Any]] = field(default_factory=list)
    routed_bytes: Column = field(default_factory=lambda: np.zeros(0, "<u4"))
    routed: bytes = b""
    ats: Column = field(default_factory=lambda: np.zeros(0, "<f8"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of a finished request."""

    number: int
    at: float
    value: float
    valid: bool
    log: str
    components: dict[str, float]


@dataclass(frozen=True, slots=True)
class Leased:
    """A step has taken the group."""

    number: int
    step: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group was cancelled. ``line``: of the run's record, as JSON; ``names``: what it may be asked for by."""

    number: int
    names: list[str]
    line: str


@dataclass(frozen=True, slots=True)
class Committed:
    """A step was trained, so its groups are forgotten. ``learnt``: what the core knows that no count says."""

    step: int
    digest: bytes
    at: float
    counters: dict[str, int]
    learnt: str


@dataclass(frozen=True, slots=True)
class Republished:
    version: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Rejected:
    """A version has to be published anew."""

    version: int
    reason: str
    worker_ids: list[str]
    canary_difference: float


@dataclass(frozen=True, slots=True)
class Retired:
    """A version has left the window. ``keeps``: its weights are not let go."""

    version: int
    keeps: bool


@dataclass(frozen=True, slots=True)
class Attached:
    trainer_epoch: int
    groups_per_step: int


@dataclass(frozen=True, slots=True)
class WorkerBegan:
    """An epoch of a worker or of a pool."""

    epoch: int


@dataclass(frozen=True, slots=True)
class WindowStands:
    """What of the window no group says."""

    size: int
    left_behind: int
    short_step: int


@dataclass(frozen=True, slots=True)
class Renumbered:
    """Tokens of these requests are lost: their group begins anew, under other numbers."""

    number: int
    new_number: int


@dataclass(frozen=True, slots=True)
class Standing:
    """All that is small, as the facts up to here have made it: the first record of each segment.

    ``groups``: [number, group id, size, step or -1, place in the order of taking]. What is not named here is no more.
    ``dropped``: [number, line] of the groups that were cancelled last, ``cancelled``: names likewise; None: an older
    DORA did not say. ``ends``: [number, position behind it] of each earlier segment that there is.
    """

    values: dict[str, Any]
    groups: list[list[Any]]
    arrivals: list[int]
    positions: list[int]
    versions: list[list[Any]]
    dropped: list[list[Any]] | None
    cancelled: list[str] | None
    ends: list[list[int]]


@dataclass(frozen=True, slots=True)
class HostStands:
    """A joined host and the epoch that it is in. ``marks``: of the tokens of its workers and pool, by names. Where
    these are None, the epoch is over, and nobody of it may come back."""

    name: str
    epoch: int
    marks: dict[str, str] | None


LogRecord = (
    Begun
    | Event
    | Submitted
    | LetGo
    | PromptsEnded
    | Admitted
    | Tokens
    | Verdict
    | Leased
    | Dropped
    | Committed
    | Republished
    | Rejected
    | Retired
    | Attached
    | WorkerBegan
    | WindowStands
    | Renumbered
    | Standing
    | HostStands
)
# by their codes on disk: a kind keeps its place for ever
KINDS: Final[tuple[type, ...]] = get_args(LogRecord)
_CODE: Final = {kind: code for code, kind in enumerate(KINDS)}
_NAMES: Final = {kind: tuple(each.name for each in fields(kind)) for kind in KINDS}


def encoded(record: LogRecord) -> bytes:
    names = _NAMES[type(record)]
    if isinstance(record, Tokens):
        values = [
            getattr(record, name)
            if name not in _DTYPES
            else np.ascontiguousarray(getattr(record, name), _DTYPES[name]).data
            for name in names
        ]
    else:
        values = [getattr(record, name) for name in names]
    packed: bytes = msgpack.packb([_CODE[type(record)], *values], unicode_errors=_TEXT_ERRORS)
    return packed


def decoded(body: bytes | memoryview, schema: int) -> LogRecord:
    """Raises InvalidValue for what no DORA has written so, or a newer one."""
    try:
        code, *values = upgraded(
            msgpack.unpackb(body, strict_map_key=False, unicode_errors=_TEXT_ERRORS, use_list=True), schema
        )
        kind = KINDS[code]
        names = _NAMES[kind]
        if len(values) != len(names):
            raise InvalidValue(f"fact {kind.__name__}", f"{len(values)} fields", f"{len(names)}")
        if kind is Tokens:
            values = [
                np.frombuffer(value, _DTYPES[name]) if name in _DTYPES else value
                for name, value in zip(names, values, strict=True)
            ]
        record: LogRecord = kind(*values)
    except (ValueError, TypeError, IndexError) as error:
        raise InvalidValue("fact", repr(error), "one that this DORA knows; a newer one may have written it") from error
    return record


def kind_of(body: bytes | memoryview) -> type | None:
    """Of a fact that is not decoded; None where it is none that this DORA knows."""
    return KINDS[body[1]] if len(body) > 1 and body[1] < len(KINDS) else None


def prompt_values(prompt: Prompt) -> list[Any]:
    """A prompt as a fact holds it."""
    sampling = {name: list(value) if isinstance(value, tuple) else value for name, value in prompt.sampling.items()}
    token_ids = np.array(prompt.token_ids, "<i8").tobytes()
    named = (prompt.prompt_id, prompt.task_id, token_ids, prompt.text, prompt.group_size, sampling)
    return [*named, prompt.verifier_json, prompt.priority]


def prompt_of(values: list[Any]) -> Prompt:
    prompt_id, task_id, token_ids, text, group_size, sampling, verifier_json, priority = values
    sampling = {name: tuple(value) if isinstance(value, list) else value for name, value in sampling.items()}
    ids = tuple(np.frombuffer(token_ids, "<i8").tolist())
    return Prompt(prompt_id, task_id, ids, text, group_size, sampling, verifier_json, priority)


def only(tokens: Tokens, chosen: Column) -> Tokens:
    """The same without all other stretches. ``chosen``: bool, one a stretch."""
    counts = tokens.counts.astype(np.int64)
    of_token = np.repeat(chosen, counts)
    kept = {index: position for position, index in enumerate(np.flatnonzero(chosen).tolist())}
    routed_bytes, routed = tokens.routed_bytes, tokens.routed
    if len(routed_bytes):
        routed = np.frombuffer(routed, np.uint8)[np.repeat(chosen, routed_bytes.astype(np.int64))].tobytes()
        routed_bytes = routed_bytes[chosen]
    return Tokens(
        tokens.at,
        tokens.numbers[chosen],
        tokens.first_tokens[chosen],
        tokens.counts[chosen],
        tokens.ends[chosen] if len(tokens.ends) else tokens.ends,
        tokens.token_ids[of_token],
        tokens.logprobs[of_token],
        [[kept[index], *segment_start] for index, *segment_start in tokens.segment_starts if index in kept],
        [[kept[index], stop] for index, stop in tokens.stops if index in kept],
        routed_bytes,
        routed,
        tokens.ats[chosen] if len(tokens.ats) else tokens.ats,
    )


def joined(parts: list[Tokens]) -> Tokens:
    """Several as one; not empty."""

    def filled(part: Tokens, name: str, value: float) -> Column:
        column: Column = getattr(part, name)
        return column if len(column) else np.full(len(part.numbers), value, _DTYPES[name])

    begins = np.cumsum([0, *(len(part.numbers) for part in parts)]).tolist()
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("numbers", "first_tokens", "counts", "token_ids", "logprobs")
    }
    return Tokens(
        at=parts[-1].at,
        **columns,
        ends=np.concatenate([filled(part, "ends", 0) for part in parts]),
        segment_starts=[
            [begin + index, *segment_start]
            for begin, p in zip(begins, parts, strict=False)
            for index, *segment_start in p.segment_starts
        ],
        stops=[[begin + index, stop] for begin, p in zip(begins, parts, strict=False) for index, stop in p.stops],
        routed_bytes=np.concatenate([filled(part, "routed_bytes", 0) for part in parts]),
        routed=b"".join(part.routed for part in parts),
        ats=np.concatenate([filled(part, "ats", part.at) for part in parts]),
    )
