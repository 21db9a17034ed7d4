"""Makes spans from what the core has handled: its events and commands, and the state after them.

    step ──▶ publish                      client ──▶ session ──▶ turn, handoff

A response to a prompt without an environment is a session of one turn. Sessions that are not sampled cost no memory.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from opentelemetry import trace as trace_api
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dora.core import commands as do
from dora.core import events as on
from dora.core.handoff.table import LIVE, Handoff, Phase
from dora.core.state import State

SESSION: Final = "session"  # the name of the spans that are sampled; steps are always traced
PARENTS_MAX: Final = 1 << 16  # prompts that wait, whose client's span is known; the oldest is forgotten
_PROPAGATOR: Final = TraceContextTextMapPropagator()
ENDED: Final = "the service has ended"


class Spans:
    """Holds the open spans of one service. ``tracer`` samples them; ``model`` is the name in GenAI attributes."""

    def __init__(self, tracer: Tracer, state: State, model: str) -> None:
        self._tracer = tracer
        self._state = state
        self._model = model
        self._steps: dict[int, Span] = {}
        self._sessions: dict[str, Span] = {}
        self._turns: dict[str, Span] = {}
        self._members: dict[str, tuple[str, ...]] = {}  # group -> its sampled sessions
        self._handoffs: dict[int, tuple[Handoff, Span]] = {}  # by command
        self._parents: dict[str, Context] = {}  # prompt -> the span of its client

    def came(self, event: on.Event, commands: Sequence[do.Command]) -> None:
        """Follows an event that the core has handled, and its commands."""
        if isinstance(event, on.TokensReported):
            self._end_turns(event)
        elif isinstance(event, on.StepRequested):
            self._begin_step(event.step)
        elif isinstance(event, on.StepCommitted) and (span := self._steps.pop(event.step, None)) is not None:
            span.end()
        for command in commands:
            self._follow(command)
        if self._handoffs and not isinstance(event, on.TokensReported):
            self._end_handoffs()

    def submitted(self, prompt_ids: Sequence[str], trace: Mapping[str, str]) -> None:
        """Notes the span of the client that submitted these prompts: their sessions are part of it, and it decides
        whether they are sampled. ``trace`` has W3C's fields.
        """
        context = _PROPAGATOR.extract(trace)
        if trace_api.get_current_span(context).get_span_context().is_valid:
            self._parents.update(dict.fromkeys(prompt_ids, context))
        while len(self._parents) > PARENTS_MAX:
            del self._parents[next(iter(self._parents))]

    def published(self, step: int, version: int, took_s: float) -> None:
        ended_ns = time.time_ns()
        span = self._tracer.start_span(
            "publish",
            trace_api.set_span_in_context(self._steps.get(step, trace_api.INVALID_SPAN)),
            attributes={"dora.step": step, "dora.version": version},
            start_time=ended_ns - int(took_s * 1e9),
        )
        span.end(ended_ns)

    def close(self) -> None:
        handoffs = (span for _, span in self._handoffs.values())
        for span in (*self._turns.values(), *handoffs, *self._sessions.values(), *self._steps.values()):
            _fail(span, ENDED)
        for spans in (self._turns, self._handoffs, self._sessions, self._steps):
            spans.clear()

    # ------------------------------------------------------------------------------------------------------- commands

    def _follow(self, command: do.Command) -> None:
        match command:
            case do.AdmitGroup():
                self._admit(command)
            case do.StartRequest() | do.ExtendRequest():
                self._begin_turn(command)
            case do.ReserveSlot():
                self._begin_handoff(command)
            case do.ScoreRequest(request_id=request_id):
                self._end_session(request_id)
            case do.BreakOffSession(request_id=request_id, reason=reason):
                self._end_session(request_id, reason)
            case do.ReplaceRequest():
                self._replace(command)
            case do.DropGroup(group_id=group_id, reason=reason):
                self._end_all(self._members.pop(group_id, ()), reason)
            case do.ForgetGroup(group_id=group_id):
                self._members.pop(group_id, None)

    def _admit(self, command: do.AdmitGroup) -> None:
        """Begins the group's sessions. The sampler decides for each."""
        parent = self._parents.pop(command.prompt_id, None)
        sampled = [
            request_id
            for request_id in command.request_ids
            if self._begin_session(request_id, command.group_id, command.version, parent)
        ]
        if sampled:
            self._members[command.group_id] = tuple(sampled)

    def _begin_session(self, request_id: str, group_id: str, version: int, parent: Context | None = None) -> bool:
        attributes: dict[str, str | int] = {
            "gen_ai.conversation.id": request_id,
            "dora.group": group_id,
            "dora.version": version,
        }
        span = self._tracer.start_span(SESSION, parent, attributes=attributes)
        if span.is_recording():
            self._sessions[request_id] = span
        return span.is_recording()

    def _begin_turn(self, command: do.StartRequest | do.ExtendRequest) -> None:
        """A request that starts again continues its turn."""
        session, turn = self._sessions.get(command.request_id), self._turns.get(command.request_id)
        if session is None:
            return
        if turn is not None:
            turn.add_event("restarted", {"dora.worker": command.worker_id})
            return
        attributes = {"gen_ai.operation.name": "chat", "gen_ai.request.model": self._model}
        self._turns[command.request_id] = self._tracer.start_span(
            f"chat {self._model}",
            trace_api.set_span_in_context(session),
            attributes={**attributes, "dora.worker": command.worker_id},
        )

    def _begin_handoff(self, command: do.ReserveSlot) -> None:
        session, pending = self._sessions.get(command.request_id), self._state.pending.get(command.command_id)
        if session is None or pending is None or pending.handoff is None:
            return
        handoff = pending.handoff
        attributes = {"dora.source": handoff.source, "dora.target": handoff.target, "dora.reason": handoff.reason}
        span = self._tracer.start_span(
            handoff.kind.name.lower(), trace_api.set_span_in_context(session), attributes=attributes
        )
        self._handoffs[command.command_id] = (handoff, span)

    # ----------------------------------------------------------------------------------------------------------- ends

    def _end_turns(self, event: on.TokensReported) -> None:
        names = self._state.request_id
        for row, tokens in zip(event.rows[event.ends > 0].tolist(), event.tokens[event.ends > 0].tolist(), strict=True):
            span = self._turns.pop(names.get(row, ""), None)
            if span is not None:
                span.set_attribute("dora.response_tokens", tokens)
                span.end()

    def _end_handoffs(self) -> None:
        over = {number: each for number, each in self._handoffs.items() if each[0].phase not in LIVE}
        for number, (handoff, span) in over.items():
            del self._handoffs[number]
            if handoff.phase is Phase.ABORTED:
                _fail(span, handoff.overdue or "undone")
            else:
                span.end()

    def _replace(self, command: do.ReplaceRequest) -> None:
        if command.request_id not in self._sessions:
            return
        group_id, version = command.request_id.partition(".")[0], 0
        row = self._state.request_row.get(command.replacement_id)
        if row is not None:
            group_id = self._state.group_id[int(self._state.requests["group"][row])]
            version = int(self._state.requests["version"][row])
        self._end_session(command.request_id, command.reason)
        if self._begin_session(command.replacement_id, group_id, version):
            self._members[group_id] = (*self._members.get(group_id, ()), command.replacement_id)

    def _end_all(self, request_ids: Iterable[str], reason: str) -> None:
        for request_id in request_ids:
            self._end_session(request_id, reason)

    def _end_session(self, request_id: str, reason: str = "") -> None:
        """Ends a session with its turn. ``reason`` says why it has failed; it is empty if it has not."""
        for spans in (self._turns, self._sessions):
            if (span := spans.pop(request_id, None)) is None:
                continue
            if reason:
                _fail(span, reason)
            else:
                span.end()

    def _begin_step(self, step: int) -> None:
        if step not in self._steps:
            self._steps[step] = self._tracer.start_span("step", attributes={"dora.step": step})


def _fail(span: Span, reason: str) -> None:
    span.set_status(Status(StatusCode.ERROR, reason))
    span.end()
