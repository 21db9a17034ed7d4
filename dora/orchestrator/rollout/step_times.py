"""Divides a step's time by what it went to. A view of the core's events and commands that decides nothing.

    commit ──asking──▶ stream opened ──groups──▶ last group ──training──▶ upload or commit ──publishing──▶ commit

The time of *groups* ends in pieces, one at each delivered group. A piece belongs to what the group's last response did
meanwhile. A trainer may train on earlier groups at the same time: its own ``waited_s`` says how long it did not.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal

from dora.core import commands as do
from dora.core import events as on
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import ResponseState, started

TAIL_SHARE: Final = 10  # one in so many groups of a step, the last ones, is its tail
Phase = Literal["asking", "groups", "training", "publishing"]
Span = tuple[str, float, float]  # part, begin, end


class StepTimes:
    """Times the step that is being filled. Times are monotonic, but for ``at``, the same moment's wall-clock time."""

    def __init__(self) -> None:
        self._phase: Phase = "asking"
        self._since_s: float | None = None  # up to here the time is divided; None: before the first request
        self._delivered = 0
        self._parts: defaultdict[str, float] = defaultdict(float)

    def came(
        self,
        event: on.Event,
        commands: Sequence[do.Command],
        buffer: ResponseBuffer,
        groups_per_step: int,
        now_s: float,
        at: float,
    ) -> None:
        """Follows an event that the core has handled, and its commands."""
        if isinstance(event, on.StepRequested) and self._phase in ("asking", "groups"):
            self._add("asking", now_s)  # a stream that is opened again: the trainer was away
            self._phase = "groups"
        if self._phase != "groups":
            return
        for command in commands:
            if isinstance(command, do.DeliverGroup) and not command.again:
                self._deliver(started(buffer.members(command.group_id)), groups_per_step, now_s, at)
            elif isinstance(command, do.CloseStep):
                self._add("admission", now_s)  # a step that ends short: nothing more could begin
                self._phase = "training"

    def uploads(self, now_s: float) -> None:
        """Notes that the trainer has begun to send a version, or to commit."""
        if self._phase == "training":
            self._add("training", now_s)
            self._phase = "publishing"

    def committed(self, began_s: float, now_s: float) -> dict[str, float]:
        """Ends the step, whose commit came at ``began_s``. Returns its parts in seconds, without those of no time."""
        self.uploads(began_s)
        self._add("publishing", now_s)
        parts = {name: time_s for name, time_s in self._parts.items() if time_s > 0.0}
        self._phase, self._delivered = "asking", 0
        self._parts.clear()
        return parts

    def answered(self, now_s: float) -> None:
        """Notes the reply to a commit, which the log has made durable."""
        if self._phase == "asking":
            self._add("publishing", now_s)

    def _add(self, part: str, now_s: float) -> None:
        if self._since_s is not None:
            self._parts[part] += max(0.0, now_s - self._since_s)
        self._since_s = now_s

    def _deliver(self, responses: Sequence[ResponseState], groups_per_step: int, now_s: float, at: float) -> None:
        since_s = now_s if self._since_s is None else self._since_s
        if responses and now_s > since_s:
            last = max(responses, key=lambda response: response.finished_at)
            for part, time_s in divided(spans_of(last, at), at - (now_s - since_s), at).items():
                self._parts[self._sampling(groups_per_step) if part == "sampling" else part] += time_s
        self._since_s = now_s
        self._delivered += 1

    def _sampling(self, groups_per_step: int) -> str:
        if not self._delivered:
            return "first"
        return "tail" if self._delivered >= groups_per_step - max(1, groups_per_step // TAIL_SHARE) else "sampling"


def spans_of(response: ResponseState, now: float) -> Iterator[Span]:
    """Yields what a finished response did, in wall-clock time. If two begin at one moment, the later one holds."""
    starts = response.segment_starts
    yield "admission", 0.0, response.started_at
    yield "sampling", response.started_at, response.finished_at
    if starts and starts[0].at and not response.is_session:
        yield "queue", response.started_at, starts[0].at
    if response.is_session:
        begins = response.turn_begins or {}
        yield from (("queue", run.at, begins[turn]) for turn, run in enumerate(response.inputs, 1) if turn in begins)
        if 0 in begins:
            yield "queue", response.started_at, begins[0]
    yield from (("moves", start.left_at, start.at) for start in starts[1:] if start.left_at)
    if not response.is_session:
        yield "rewards", response.finished_at, now
        return
    ends = response.turn_ends or {}
    if response.inputs and not response.prompt.token_ids:
        yield "tools", response.started_at, response.inputs[0].at
    yield from (("tools", ends[turn], run.at) for turn, run in enumerate(response.inputs) if turn in ends)
    yield "tools", ends.get(len(response.inputs), response.finished_at), now


def divided(spans: Iterable[Span], begin: float, end: float) -> Mapping[str, float]:
    """Returns each part's time between two moments. Time without a span counts as sampling."""
    within = [(part, max(begin, first), min(end, last)) for part, first, last in spans if last > begin and first < end]
    within = [span for span in within if span[2] > span[1]]
    cuts = sorted({begin, end, *(span[1] for span in within), *(span[2] for span in within)})
    found: defaultdict[str, float] = defaultdict(float)
    for first, last in pairwise(cuts):
        part = next((name for name, from_, to in reversed(within) if from_ <= first and last <= to), "sampling")
        found[part] += last - first
    return found
