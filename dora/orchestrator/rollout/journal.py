"""Writes the shell's actions to the journal. Without a state folder nothing is written."""

from dora.core import events as on
from dora.core.state import State
from dora.journal import records
from dora.journal.log import Log
from dora.orchestrator.recording.event_fields import event_to_fields
from dora.orchestrator.rollout.responses.accepted import Accepted
from dora.orchestrator.rollout.responses.state import ResponseState


class Journal:
    """Writes to the log, if there is one; with ``keeps_events`` also the core's events."""

    def __init__(self, log: Log | None = None, *, keeps_events: bool = False) -> None:
        self.log = log
        self.writes = log is not None
        self.keeps_events = keeps_events and self.writes
        self._window: tuple[int, ...] = ()  # as logged last
        self._trainer: tuple[int, ...] = ()

    def note(self, record: records.LogRecord) -> None:
        if self.log is not None:
            self.log.append(record)

    @property
    def appended(self) -> int:
        return self.log.appended if self.log is not None else 0

    @property
    def durable(self) -> int:
        """Returns the number of durable log records, or all of them without a log."""
        return self.log.durable if self.log is not None else 0

    async def settled(self, appended: int | None = None) -> None:
        """Returns once all log records so far, or the first ``appended``, are durable."""
        if self.log is not None:
            await self.log.settled(appended)

    async def flush(self) -> None:
        """Tries once to make all log records durable; ``durable`` has the result."""
        if self.log is not None:
            await self.log.flush()

    async def close(self) -> None:
        if self.log is not None:
            await self.log.close()

    def event(self, event: on.Event, now_s: float) -> None:
        """Logs an event before the core handles it."""
        if self.keeps_events:
            self.note(records.Event(now_s, *event_to_fields(event)))

    def window(self, state: State) -> None:
        """Logs window changes that no other record implies, after the event's effects on the groups of a step."""
        stands = (state.window.size, state.window.left_behind, state.short_step)
        if self.writes and stands != self._window:
            self.note(records.WindowStands(*stands))
            self._window = stands

    def trainer(self, state: State) -> None:
        """Logs a change of trainer, after the groups that its attach made the core drop."""
        stands = (state.trainer_epoch, state.window.groups_per_step)
        if self.writes and stands != self._trainer:
            self.note(records.Attached(*stands))
            self._trainer = stands

    def report(self, accepted: Accepted) -> None:
        if self.writes and (record := accepted.record()) is not None:
            self.note(record)

    def session(self, response: ResponseState, record: records.Tokens) -> None:
        """Writes a change of a session that no worker has reported. Evaluations do not outlive the service."""
        if not response.is_evaluation:
            self.note(record)

    def verdict(self, response: ResponseState, at: float) -> None:
        reward = response.reward
        if self.writes and reward is not None and response.number >= 0:
            components = {name: float(value) for name, value in reward.components.items()}
            turns = dict(reward.turns)
            self.note(
                records.Verdict(response.number, at, float(reward.value), reward.valid, reward.log, components, turns)
            )
