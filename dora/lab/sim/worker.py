"""A simulated rollout worker. It executes the core's commands on a SimEngine and answers each with one outcome."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Final, Protocol

from dora.core import commands as do
from dora.core import events as on
from dora.lab.sim.ledger import SimLedger, SimResponse, Violation
from dora.lab.sim_engine.engine import SimEngine, SimRequest

STUCK: Final = "stuck"  # a fault: the load never ends
AHEAD_LEAST_TOKENS: Final = 32  # a request with at most this much context is frozen at once
FOREVER_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class SimSnapshot:
    """The content of a handoff, from which the target continues."""

    version: int
    source: str  # worker id and epoch of the source
    epoch: int
    request: SimRequest
    left_tokens: int  # tokens of its context that are copied while it is frozen


class WorkerWorld(Protocol):
    ledger: SimLedger
    snapshots: dict[str, SimSnapshot]
    bad_weights: set[int]

    def target_of(self, command: do.CopyOut) -> str: ...
    def copy_s(self, source: str, target: str, tokens: int, *, is_last: bool = False) -> float: ...
    def load_s(self) -> float: ...


def resumed(response: SimResponse, request_id: str) -> SimRequest:
    """A response as an engine begins it, or continues it after the service's tokens."""
    prompt, index, tokens = response.prompt, response.index, response.tokens
    if prompt.sessions:
        return _session(response, request_id)
    turns = prompt.turns[index] if prompt.turns else ()
    answers, before, turn = 0, 0, 0
    while turns and turn + 1 < len(turns) and before + turns[turn].tokens <= tokens:
        answers, before, turn = answers + turns[turn].answer_tokens, before + turns[turn].tokens, turn + 1
    end = before + turns[turn].tokens if turns else prompt.lengths[index]
    return SimRequest(
        request_id,
        response.group_id,
        response.version,
        prompt.prompt_tokens + answers,
        tokens,
        end - tokens,
        prompt.lengths[index],
        turns,
        turn,
    )


def _session(response: SimResponse, request_id: str) -> SimRequest:
    prompt, index, tokens = response.prompt, response.index, response.tokens
    spans, turns = prompt.spans(index), prompt.turns_of(index)
    turn = next(number for number, (_, end) in enumerate(spans) if tokens <= end)
    end, length = spans[turn][1], spans[-1][1]
    return SimRequest(
        request_id, response.group_id, response.version, prompt.prompt_tokens, tokens, end - tokens, length, turns,
        turn, keeps=True, forked=response.forked, cut_tokens=response.cut_tokens,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Later:
    """A command that takes time. It sends ``began`` at once; ``finish`` returns the outcome ``after_s`` later."""

    after_s: float
    finish: Callable[[], on.CommandDone]
    began: on.CopyBegan | None = None


Outcome = on.CommandDone | Later


@dataclass(slots=True, eq=False)
class Parcel:
    """Messages of one direction that were sent at the same time: they arrive together, in order."""

    sent_s: float = -1.0
    messages: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SimWorker:
    """One epoch of one worker."""

    worker_id: str
    epoch: int
    engine: SimEngine
    version: int = -1
    loading: int = -1
    alive: bool = True
    full_precision: bool = False
    due_s: float = inf  # time of the engine's next event
    wakes_s: float = inf  # the scheduled wake-up, at most ``due_s``; any other is void
    orders: Parcel = field(default_factory=Parcel)  # last messages to it
    words: Parcel = field(default_factory=Parcel)  # last messages from it
    outgoing: dict[str, int] = field(default_factory=dict)  # request that is copied while it decodes -> its CopyOut
    incoming: dict[str, int] = field(default_factory=dict)  # incoming request -> its CopyIn
    refusals: dict[type[do.WorkerCommand], list[str]] = field(default_factory=dict)  # faults: next error kinds

    def obey(self, world: WorkerWorld, command: do.WorkerCommand, request: SimRequest | None) -> Outcome:
        """Begins the command. Returns its outcome or its end. ``request`` is a StartRequest's or ExtendRequest's."""
        refusals = self.refusals.get(type(command))
        bad = refusals.pop() if refusals else ""
        match command:
            case do.LoadVersion():
                return self._load(world, command, bad)
            case do.StartRequest():
                return self._start(world, command, request, bad)
            case do.ExtendRequest():
                return self._extend(command, request, bad)
            case do.RemoveRequest(request_id=request_id) | do.CancelReservation(request_id=request_id):
                self.incoming.pop(request_id, None)
                self.outgoing.pop(request_id, None)
                self.engine.remove(request_id)
            case do.ReserveSlot(version=version):
                if not self.takes(version) or bad:
                    return self._failed(command, "no room", bad or "refused")
            case do.CopyOut():
                return self._copy_out(world, command, bad)
            case do.CopyIn():
                return self._copy_in(world, command, bad)
            case do.Thaw(request_id=request_id):
                self.outgoing.pop(request_id, None)
                self.engine.thaw(request_id)
        return self._done(command)

    def takes(self, version: int) -> bool:
        return version == self.version

    def version_of(self, request: SimRequest) -> int:
        return self.version

    # -------------------------------------------------------------------------------------------------------- details

    def _done(self, command: do.WorkerCommand, locator: str = "", tokens: int = 0) -> on.CommandDone:
        return on.CommandDone(self.worker_id, self.epoch, command.command_id, locator=locator, tokens=tokens)

    def _failed(self, command: do.WorkerCommand, error: str, kind: str) -> on.CommandDone:
        return on.CommandDone(self.worker_id, self.epoch, command.command_id, False, error, kind)

    def _load(self, world: WorkerWorld, command: do.LoadVersion, bad: str) -> Outcome:
        if self.engine.requests:
            raise Violation(f"{self.worker_id} loads {command.version} under {len(self.engine.requests)} requests (C1)")
        self.version = -1
        if bad == STUCK:
            return Later(FOREVER_S, lambda: self._failed(command, "it hung", "refused"))
        bad = "weights" if command.version in world.bad_weights else bad
        if bad:
            failed = self._failed(command, "the weights did not load", bad)
            return Later(world.load_s(), lambda: failed)

        def loaded() -> on.CommandDone:
            self.version = command.version
            return on.CommandDone(self.worker_id, self.epoch, command.command_id)

        return Later(world.load_s(), loaded)

    def _start(self, world: WorkerWorld, command: do.StartRequest, request: SimRequest | None, bad: str) -> Outcome:
        if command.request_id in self.engine.requests:
            raise Violation(f"{command.request_id} is started twice on {self.worker_id} (C2)")
        if command.version != self.version:
            raise Violation(f"{command.request_id} of {command.version} is started under {self.version} (C1)")
        if bad or request is None:
            return self._failed(command, f"{command.request_id} cannot be started", bad or "invalid")
        world.ledger.sampled(command.request_id, self.version)
        self.engine.add(request)
        return self._done(command)

    def _extend(self, command: do.ExtendRequest, request: SimRequest | None, bad: str) -> Outcome:
        kept = self.engine.requests.get(command.request_id)
        if bad == "unknown_request" or kept is None:
            self.engine.remove(command.request_id)
            return self._failed(command, f"{command.request_id} is not here", "unknown_request")
        if request is not None and request.forked and not request.cut_tokens:
            raise Violation(f"{command.request_id} is extended on {self.worker_id}, which has another branch (C1)")
        if bad or request is None or not kept.is_kept or kept.turn + 1 != request.turn:
            return self._failed(command, f"{command.request_id} cannot be extended", bad or "invalid")
        input_tokens = request.tokens - kept.tokens + request.cut_tokens
        self.engine.extend(kept, input_tokens, request.left, request.cut_tokens)
        return self._done(command)

    def _copy_out(self, world: WorkerWorld, command: do.CopyOut, bad: str) -> Outcome:
        request = self.engine.requests.get(command.request_id)
        ahead_tokens = 0 if request is None else request.context
        if request is None or ahead_tokens <= AHEAD_LEAST_TOKENS:
            return self._frozen(world, command, bad, 0)
        self.outgoing[command.request_id] = command.command_id

        def copied_ahead() -> on.CommandDone:
            if self.outgoing.get(command.request_id) != command.command_id:
                return self._failed(command, "cancelled while it was copied", "refused")
            del self.outgoing[command.request_id]
            return self._frozen(world, command, bad, ahead_tokens)

        began = on.CopyBegan(self.worker_id, self.epoch, command.command_id)
        copy_s = world.copy_s(self.worker_id, world.target_of(command), ahead_tokens)
        return Later(copy_s, copied_ahead, began)

    def _frozen(self, world: WorkerWorld, command: do.CopyOut, bad: str, ahead_tokens: int) -> on.CommandDone:
        request = self.engine.freeze(command.request_id)
        if request is None:
            return self._failed(command, f"{command.request_id} cannot be frozen now", "unknown_request")
        if bad:  # it is not movable, or the copy failed
            return self._failed(command, "the copy failed", bad)
        locator = f"{self.worker_id}/{self.epoch}/{command.command_id}"
        left_tokens = max(1, request.context - ahead_tokens)
        version = self.version_of(request)
        world.snapshots[locator] = SimSnapshot(version, self.worker_id, self.epoch, replace(request), left_tokens)
        return self._done(command, locator, request.tokens)

    def _copy_in(self, world: WorkerWorld, command: do.CopyIn, bad: str) -> Outcome:
        snapshot = world.snapshots.get(command.locator)  # an undone handoff may have released it
        if snapshot is None or bad or snapshot.request.request_id != command.request_id:
            return self._failed(command, f"the snapshot {command.locator} is not whole", bad or "refused")
        if command.version != snapshot.version or not self.takes(snapshot.version):
            return self._failed(command, f"version {snapshot.version} under {self.version}", "refused")
        self.incoming[command.request_id] = command.command_id

        def copied() -> on.CommandDone:
            done = on.CommandDone(self.worker_id, self.epoch, command.command_id)
            if self.incoming.get(command.request_id) != command.command_id:
                return replace(done, ok=False, error="cancelled while it was copied", error_kind="refused")
            del self.incoming[command.request_id]
            if command.request_id in self.engine.requests:
                raise Violation(f"{command.request_id} is copied to {self.worker_id}, where it is already (C2)")
            world.ledger.sampled(command.request_id, self.version_of(snapshot.request))
            self.engine.add(replace(snapshot.request, cached=True))
            return done

        return Later(world.copy_s(snapshot.source, self.worker_id, snapshot.left_tokens, is_last=True), copied)
