"""Replays an event log through a fresh core: the state before each event, and the decisions.

The core is deterministic, so the same log gives the same commands in the service and in every replay. Times, ids and
outcomes are all in the events.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Annotated, Any, Final, get_args

from dora.config import Config
from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.fleet.worker import Worker
from dora.core.state import State
from dora.errors import InvalidValue, described
from dora.orchestrator.recording.event_fields import EVENT_KINDS
from dora.orchestrator.recording.eventlog import Record

# tokens that were reported by row are shown by name
KINDS: Final = (
    *(kind for kind in EVENT_KINDS if kind != on.TokensReported.__name__),
    *(kind.__name__ for kind in get_args(do.Command)),
)
SHOWN_ITEMS: Final = 3  # items of a collection shown to people

# Commands that follow from the event alone, whatever the policy: bookkeeping, and the next step of a successful
# handoff.
ACKNOWLEDGEMENTS: Final = frozenset(
    {
        do.DrawPrompts,
        do.ScoreRequest,
        do.GrowGroup,
        do.DropGroup,
        do.DropPrompt,
        do.CloseStep,
        do.ScoreEvaluated,
        do.EndEvaluationGroup,
        do.EndEvaluation,
        do.ForgetGroup,
        do.RetireVersion,
        do.PinVersion,
        do.ReleaseSnapshot,
        do.RemoveRequest,
        do.CopyOut,
        do.Park,
        do.Resume,
        do.CopyIn,
    }
)


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """Describes one worker as the core saw it. Versions are -1 if there is none."""

    worker_id: Annotated[str, "its id"]
    hosts: Annotated[int, "version of which it accepts requests, -1: none"]
    loaded: Annotated[int, "version that it has loaded, -1: none"]
    target: Annotated[int, "version that it will host, -1: none"]
    draining: Annotated[bool, "whether it will end once it is empty"]
    slots: Annotated[int, "maximum number of requests decoded at once"]
    held: Annotated[int, "requests that it has or that are on their way to it"]
    queued: Annotated[int, "of these, not in a slot, as last reported"]
    kv_tokens: Annotated[int, "size of its KV-cache"]
    kv_used_tokens: Annotated[int, "KV-cache in use, as last reported"]
    kv_claimed_tokens: Annotated[int, "prompts and expected lengths of the requests held"]


@dataclass(frozen=True, slots=True)
class Known:
    """Holds the part of the core's state on which its decisions rest, before an event. Groups are prompt groups."""

    step: Annotated[int, "the step that is being filled"]
    left: Annotated[int, "groups that this step still takes"]
    newest: Annotated[int, "newest version"]
    rejected: Annotated[tuple[int, ...], "versions that workers refuse, until they are published again"]
    slack: Annotated[
        tuple[int, ...], "groups to spare up to the deadline step, the next step, ...: never negative (C3)"
    ]
    admissible: Annotated[Mapping[int, int], "groups that may still be admitted, by live version"]
    backlog: Annotated[int, "prompts drawn and not admitted"]
    waiting: Annotated[Mapping[int, int], "requests on no worker, by version"]
    finished: Annotated[Mapping[int, int], "groups that wait for a step, by version"]
    leased: Annotated[int, "groups with the trainer"]
    handoffs: Annotated[int, "handoffs in flight"]
    workers: Annotated[tuple[KnownWorker, ...], "the workers"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Holds one event and its consequences.

    ``refusal`` is the core's error if it refused the event, else empty. ``failure`` is the bug that ended the service
    here, with its place in the code, else empty.
    """

    number: int
    now_s: float
    event: on.Event
    known: Known
    commands: tuple[do.Command, ...]
    refusal: str = ""
    failure: str = ""

    @property
    def chose(self) -> bool:
        """Returns whether the core decided something: a command that is no acknowledgement, a refusal, or the service's
        end.
        """
        return bool(self.refusal or self.failure) or any(
            type(command) not in ACKNOWLEDGEMENTS for command in self.commands
        )

    def kinds(self) -> frozenset[str]:
        return frozenset(type(message).__name__ for message in (self.event, *self.commands))


@dataclass(frozen=True, slots=True)
class Summary:
    """Sums up a replay so far."""

    events: Annotated[Mapping[str, int], "events by kind"]
    commands: Annotated[Mapping[str, int], "commands by kind"]
    refused: Annotated[int, "events that the core refused"]
    counters: Annotated[Mapping[str, int], "the core's counters at the end"]
    step: Annotated[int, "the step that was being filled at the end"]
    newest: Annotated[int, "newest version at the end"]
    failed: Annotated[str | None, "the event that ended the service and the error at which the core failed, or null"]


class Replay:
    """Replays a log through a fresh core for each incarnation of its service. Iterate it once; ``machine``, of the last
    incarnation, and ``summary`` then have the final state.
    """

    def __init__(self, config: Config, records: Iterable[Record]) -> None:
        self.machine = Machine(config)
        self._config = config
        self._records = records
        self._events: Counter[str] = Counter()
        self._commands: Counter[str] = Counter()
        self._refused = 0
        self._failed: str | None = None

    def __iter__(self) -> Iterator[Decision]:
        """Yields decisions until the log ends, or the event that ended the service in the middle of a change."""
        for record in self._records:
            if isinstance(record.event, on.Restored):
                self.machine = Machine(record.config or self._config)
            decision = self._decide(record, known_of(self.machine.state))
            self._events[type(decision.event).__name__] += 1
            self._commands.update(type(command).__name__ for command in decision.commands)
            self._refused += bool(decision.refusal)
            if decision.failure:
                self._failed = f"event {decision.number}, {type(decision.event).__name__}: {decision.failure}"
            yield decision
            if decision.failure:
                return

    def _decide(self, record: Record, known: Known) -> Decision:
        """Handles the event like the service's shell: an exception is a refusal or the service's end."""
        number, now_s, event = record.number, record.now_s, record.event
        original = event
        if isinstance(event, on.TokensReported):
            event = event.by_name(self.machine.state.names())
        try:
            return Decision(number, now_s, event, known, tuple(self.machine.handle(original, now_s)))
        except InvalidValue as error:
            return Decision(number, now_s, event, known, (), str(error))
        except Exception as error:
            return Decision(number, now_s, event, known, (), failure=described(error))

    def summary(self) -> Summary:
        window = self.machine.state.window
        counters = asdict(self.machine.counters)
        counts = dict(self._events), dict(self._commands), self._refused
        return Summary(*counts, counters, window.step, window.newest, self._failed)


def known_of(state: State) -> Known:
    window = state.window
    return Known(
        step=window.step,
        left=window.left,
        newest=window.newest,
        rejected=tuple(sorted(window.rejected)),
        slack=tuple(window.slack()),
        admissible={v: window.admissible(v) for v in range(window.oldest_live, window.newest + 1)},
        backlog=len(state.backlog),
        waiting=_sizes(state.waiting),
        finished=dict(sorted(Counter(_finished_versions(state)).items())),
        leased=len(state.leased),
        handoffs=len(state.handoffs),
        workers=tuple(_known_worker(worker) for worker in state.worker_list if worker is not None),
    )


def _finished_versions(state: State) -> Iterator[int]:
    return (int(state.groups["version"][group]) for groups in state.finished.values() for group in groups)


def _sizes(by_version: Mapping[int, Any]) -> dict[int, int]:
    return {version: len(by_version[version]) for version in sorted(by_version) if by_version[version]}


def _known_worker(worker: Worker) -> KnownWorker:
    return KnownWorker(
        worker.worker_id,
        hosts=worker.hosts,
        loaded=worker.loaded,
        target=worker.target,
        draining=worker.draining,
        slots=worker.slots,
        held=worker.assigned,
        queued=worker.waiting,
        kv_tokens=worker.kv_tokens,
        kv_used_tokens=worker.kv_used,
        kv_claimed_tokens=worker.kv_claimed,
    )


def line_of(message: on.Event | do.Command) -> str:
    """Formats an event or a command as one line for people: its kind, then its fields, with long collections cut."""
    shown = (f"{field.name}={_brief(getattr(message, field.name))}" for field in fields(message))
    return " ".join((type(message).__name__, *shown))


def _brief(value: Any) -> str:
    if is_dataclass(value):
        return "(" + ", ".join(_brief(getattr(value, field.name)) for field in fields(value)) + ")"
    if isinstance(value, dict):
        value = tuple(f"{key}: {_brief(part)}" for key, part in value.items())
    if isinstance(value, tuple):
        items = [_brief(part) for part in value[:SHOWN_ITEMS]]
        more = [f"{len(value) - SHOWN_ITEMS} more"] if len(value) > SHOWN_ITEMS else []
        return "[" + ", ".join(items + more) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) or "-"
