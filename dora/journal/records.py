"""The records of the log. Each is plain data; ``encoded`` and ``decoded`` convert it to and from its form on disk.

A change of the records, or of the checkpoint, is another schema (frames.SCHEMA_VERSION).

A *number* identifies a request in the log and is never reused, while ids of undurable requests may be lost and rows are
reused. A group has as many numbers as requests, from ``number`` on.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Final, get_args

import msgpack
import numpy as np
import numpy.typing as npt

from dora.data.types import Prompt
from dora.errors import InvalidValue

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
    "attempts": np.dtype("u1"),
}
CLOSED: Final = 0x80  # in ``ends``: the environment has ended the session; the other bits are its last turn's end


@dataclass(frozen=True, slots=True)
class Begun:
    """An incarnation starts. ``life`` counts from 0; times are in the events' clock and the Unix epoch."""

    incarnation: int
    started_at: float
    now_s: float
    config: str  # as JSON, without its token


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the core, as the event log has it; written only if all events are kept."""

    now_s: float
    kind: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Submitted:
    """Queued prompts, each with its number of arrival."""

    arrivals: list[int]
    prompts: list[list[Any]]  # prompt_values


@dataclass(frozen=True, slots=True)
class PromptsWithdrawn:
    """Prompts that were cancelled before they had a group: submitted ones by arrival, the source's by position. A user
    cancelled them by ``names``.
    """

    arrivals: list[int]
    positions: list[int]
    names: list[str]


@dataclass(frozen=True, slots=True)
class PromptsEnded:
    """``end()`` was called: nothing more is submitted."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A group. ``position`` is its prompt's in the source, or -1 if that was submitted, with number ``arrival``.

    A later record of the group has another prompt, or ``replaces`` its former number: its tokens are lost and it
    restarts.
    """

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
    replaces: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The part of a worker's report about admitted requests: columns of token spans, and of their tokens.

    Spans of a request never overlap. ``segment_starts`` has [span, worker, first token, arrival] for each span that
    begins a segment, and ``stops`` [span, stop string]. ``ends`` and ``routed_bytes`` are empty if all are 0, ``ats``
    (one a span) if all came at ``at``.

    ``turns`` has, for each span of tokens that an environment gave, which begin a turn: [span, max_tokens, name, finish
    reason and stop string of the turn before]; of a fork also the turn whose path it continues, and the first position
    there; then, of a turn with sampling of its own, these parameters by name; last, of one with prompt logprobs, True.
    ``first_tokens`` count all tokens of a session, those of other branches included. ``prompt_logprobs`` has [span,
    float32 as bytes] of spans that begin such a turn. ``attempts`` has the number of replacements before each session;
    only spans of the latest count. It is empty if all are 0.
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
    turns: list[list[Any]] = field(default_factory=list)
    attempts: Column = field(default_factory=lambda: np.zeros(0, "u1"))
    prompt_logprobs: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reward of a finished request."""

    number: int
    at: float
    value: float
    valid: bool
    log: str
    components: dict[str, float]
    turns: dict[int, float] = field(default_factory=dict)  # of a session: rewards of single turns, by number


@dataclass(frozen=True, slots=True)
class Leased:
    """A step has taken the group."""

    number: int
    step: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group was cancelled. ``line`` is the run's record of that, as JSON. It may be looked up by ``names``."""

    number: int
    names: list[str]
    line: str


@dataclass(frozen=True, slots=True)
class Committed:
    """A step was trained, so its groups are removed. ``learned`` has forecasts of the core that no count implies."""

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
    """A version must be published again."""

    version: int
    reason: str
    worker_ids: list[str]
    canary_difference: float


@dataclass(frozen=True, slots=True)
class Retired:
    """A version has left the window. If ``keeps``, its weights are kept."""

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
    """Window state that no group implies."""

    size: int
    left_behind: int
    short_step: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The durable state after all records before it (durable.py). It begins each segment.

    ``ends`` has [number, end position] of each earlier segment that exists.
    """

    durable: bytes
    ends: list[list[int]]


@dataclass(frozen=True, slots=True)
class HostStands:
    """A joined host and its epoch. ``marks`` are digests of the tokens of its workers and pool, by name, or None if the
    epoch is over and none of its processes may return.
    """

    name: str
    epoch: int
    marks: dict[str, str] | None


LogRecord = (
    Begun
    | Event
    | Submitted
    | PromptsWithdrawn
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
    | Checkpoint
    | HostStands
)
KINDS: Final[tuple[type, ...]] = get_args(LogRecord)
CODE: Final = {kind: code for code, kind in enumerate(KINDS)}  # on disk, in the record's head
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
    packed: bytes = msgpack.packb(values, unicode_errors=_TEXT_ERRORS)
    return packed


def decoded(code: int, body: bytes | memoryview) -> LogRecord:
    """Decodes a record. ``code`` is that of its kind. Raises InvalidValue for malformed bytes."""
    try:
        kind, values = KINDS[code], msgpack.unpackb(body, strict_map_key=False, unicode_errors=_TEXT_ERRORS)
        names = _NAMES[kind]
        if len(values) != len(names):
            raise InvalidValue(f"log record {kind.__name__}", f"{len(values)} fields", f"{len(names)}")
        if kind is Tokens:
            values = [
                np.frombuffer(value, _DTYPES[name]) if name in _DTYPES else value
                for name, value in zip(names, values, strict=True)
            ]
        record: LogRecord = kind(*values)
    except (ValueError, TypeError, IndexError) as error:
        raise InvalidValue("log record", repr(error), "one that this DORA knows") from error
    return record


def prompt_values(prompt: Prompt) -> list[Any]:
    sampling = {name: list(value) if isinstance(value, tuple) else value for name, value in prompt.sampling.items()}
    token_ids = np.array(prompt.token_ids, "<i8").tobytes()
    named = (prompt.prompt_id, prompt.task_id, token_ids, prompt.text, prompt.group_size, sampling)
    return [*named, prompt.verifier_json, prompt.priority, prompt.environment, prompt.group_size_min]


def prompt_of(values: list[Any]) -> Prompt:
    prompt_id, task_id, token_ids, text, group_size, sampling, *others = values
    sampling = {name: tuple(value) if isinstance(value, list) else value for name, value in sampling.items()}
    ids = tuple(np.frombuffer(token_ids, "<i8").tolist())
    return Prompt(prompt_id, task_id, ids, text, group_size, sampling, *others)


def only(tokens: Tokens, chosen: Column) -> Tokens:
    """Returns only the chosen spans. ``chosen`` has a bool for each span."""
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
        [[kept[index], *turn] for index, *turn in tokens.turns if index in kept],
        tokens.attempts[chosen] if len(tokens.attempts) else tokens.attempts,
        [[kept[index], raw] for index, raw in tokens.prompt_logprobs if index in kept],
    )


def joined(parts: list[Tokens]) -> Tokens:
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
        turns=[[begin + index, *turn] for begin, p in zip(begins, parts, strict=False) for index, *turn in p.turns],
        attempts=np.concatenate([filled(part, "attempts", 0) for part in parts]),
        prompt_logprobs=[
            [begin + index, raw] for begin, p in zip(begins, parts, strict=False) for index, raw in p.prompt_logprobs
        ],
    )
