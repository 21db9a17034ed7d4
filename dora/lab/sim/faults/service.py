"""The service around a simulated core: the real response buffer, executor and journal, without event loop, disk or
socket.

    commands ──▶ executor ──▶ buffer, journal ──▶ records, of which a crash keeps a prefix
                    ▲ reports of simulated workers, as the token columns that real ones would send

Each token is computed from its request, version and position. So any error in a delivery is detected: a gap, a
duplicate, another request's token, or a token of another version.
"""

import math
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol, cast
from zlib import crc32

import numpy as np

from dora.config import Config, RolloutConfig
from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.handoff.table import FROM_POOL
from dora.core.rules import learning
from dora.core.state import State
from dora.data.token_spans import Column, TokenColumns
from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.data.types import FINISH_REASONS, Prompt, Reward
from dora.errors import DoraError
from dora.journal import records
from dora.journal.content import Content, LiveGroup, Requests
from dora.journal.durable import Durable
from dora.journal.log import Log
from dora.lab.sim.ledger import SimLedger as Books
from dora.lab.sim.ledger import Violation
from dora.lab.sim.scenario import Scenario
from dora.lab.sim.trainer import SimTrainer
from dora.lab.sim.worker import SimWorker
from dora.lab.sim.workload import FILTERED, Filter, SimPrompt
from dora.lab.sim.workload import SimVerifier as Rewards
from dora.orchestrator.executor import Executor
from dora.orchestrator.recovery import recovery_state, resume
from dora.orchestrator.rollout.core import Handlers
from dora.orchestrator.rollout.environments import Environments
from dora.orchestrator.rollout.evaluations import Evaluations, EvaluationStream
from dora.orchestrator.rollout.feed import PromptFeed
from dora.orchestrator.rollout.groups import Groups
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.orders import worker_message
from dora.orchestrator.rollout.prompt_ledger import SUBMITTED, PromptLedger
from dora.orchestrator.rollout.prompts import Prompts
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.turn_order import TurnOrder
from dora.orchestrator.rollout.streams import StepStream
from dora.orchestrator.rollout.telemetry import Telemetry
from dora.orchestrator.rollout.trainers import Trainers
from dora.orchestrator.rollout.verdicts import Verdicts
from dora.orchestrator.rollout.versions import Versions
from dora.orchestrator.rollout.workers import SENT

REPEATED_MAX: Final = 4  # accepted tokens that a report may repeat, plus one
TOKENS_MAX: Final = 4096  # of a response
TOKEN_IDS: Final = 50_000
INVALID: Final = 11  # one verdict in so many is not valid, in groups that may grow
ENVIRONMENT: Final = "simulated"
_STRIDE: Final = 7919  # difference of consecutive token ids of a request


def sampled(names: Sequence[tuple[str, int]], firsts: Column, counts: Column) -> tuple[Column, Column]:
    """Returns token ids and logprobs of token spans. ``names`` has the request and version of each."""
    origins = np.array([crc32(f"{request_id}/{version}".encode()) for request_id, version in names], np.int64)
    positions = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts - firsts, counts)
    token_ids = ((np.repeat(origins, counts) + positions * _STRIDE) % TOKEN_IDS).astype(np.int32)
    return token_ids, (-(token_ids + 1) / TOKEN_IDS).astype(np.float32)


class ServiceWorld(Protocol):
    config: Config
    scenario: Scenario
    machine: Machine
    trainer: SimTrainer
    filter: Filter
    verifier: Rewards
    ledger: Books
    now_s: float

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None: ...
    def posted(self, event: on.Event) -> None: ...
    def prompts_s(self) -> float: ...
    def drawn(self, most: int) -> list[SimPrompt]: ...
    def verdict_s(self) -> float: ...
    def known_prompt(self, prompt_id: str) -> on.OfferedPrompt: ...
    def addressed(
        self, command: do.WorkerCommand | do.EvictWorker | do.StopWorker | do.RestartWorker
    ) -> SimWorker | None: ...
    def to_worker(self, command: do.WorkerCommand) -> None: ...
    def release(self, command: do.ReleaseSnapshot) -> None: ...
    def evict(self, command: do.EvictWorker) -> None: ...
    def stop(self, command: do.StopWorker) -> None: ...
    def restart(self, command: do.RestartWorker) -> None: ...


@dataclass(frozen=True, slots=True)
class PersistedState:
    """The state that a prefix of the records restores."""

    groups: list[LiveGroup]
    requests: Requests
    restored: on.Restored
    next_number: int


class SimLog:
    """The log, in memory. Records become durable when another party relies on them."""

    def __init__(self) -> None:
        self.records: list[records.LogRecord] = [records.Begun(0, 0.0, 0.0, "")]
        self.relied_on = 1  # number of records that no crash loses

    @property
    def appended(self) -> int:
        return len(self.records)

    @property
    def durable(self) -> int:
        return len(self.records)

    def append(self, record: records.LogRecord) -> int:
        self.records.append(record)
        return len(self.records)

    def rely(self) -> None:
        """Makes all present records durable, as another party has seen their result."""
        self.relied_on = len(self.records)

    async def settled(self, records: int | None = None) -> None: ...
    async def close(self) -> None: ...


class _Delay:
    """An awaitable that takes simulated seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __await__(self) -> Generator[float, None, None]:
        yield self._seconds


class SimService:
    """One incarnation of the service, and the core of its parts. ``world`` receives its events and commands."""

    def __init__(self, world: ServiceWorld, log: SimLog) -> None:
        self._world = world
        self.log = log
        self._ended = False
        state = world.machine.state
        self.journal = Journal(cast(Log, log))  # SimLog has the methods that a journal needs
        self.buffer = ResponseBuffer(RolloutConfig(max_tokens=TOKENS_MAX), None, state.window.size)
        environments = Environments(self.buffer, state)
        self.evaluations = Evaluations(self, self.buffer, environments)
        self.prompts = PromptLedger(self.journal, 0)
        group_filter = _Filter(world) if world.scenario.filter_fraction else None
        nothing, rollout = cast(Any, _Stub()), world.config.rollout
        self.executor = Executor()
        for handlers in (
            Prompts(self, cast(PromptFeed, _Feed(world, self.prompts)), self.buffer).handlers,
            Groups(self, self.buffer, self.prompts, self.journal, nothing, environments, self.evaluations).handlers,
            Verdicts(
                self, self.buffer, self.journal, Telemetry(), environments, _Verifier(world), group_filter
            ).handlers,
            self.evaluations.handlers,
            _Trainers(world, self, nothing).handlers,
            Versions(self, nothing, None, nothing, self.journal, nothing, rollout).handlers,
            self._orders(),
        ):
            self.executor.register(handlers)

    def _orders(self) -> Handlers:
        world = self._world
        return {
            **dict.fromkeys(SENT, self._to_worker),
            do.ReleaseSnapshot: world.release,
            do.EvictWorker: world.evict,
            do.StopWorker: world.stop,
            do.RestartWorker: world.restart,
        }

    def _to_worker(self, command: do.WorkerCommand) -> None:
        if self._world.addressed(command) is not None:
            pending = self.state.pending.get(command.command_id)
            handoff = pending.handoff if pending is not None else None
            was_parked = handoff is not None and handoff.kind in FROM_POOL
            if not isinstance(command, do.LoadVersion):
                worker_message(command, self.buffer, cast(Any, None), was_parked=was_parked)
            self._world.to_worker(command)

    # ------------------------------------------------------------------------------------------ the core of the parts

    @property
    def state(self) -> State:
        return self._world.machine.state

    def post(self, event: on.Event) -> None:
        self._world.posted(event)

    def now(self) -> float:
        return self._world.now_s

    def soon(self, action: Callable[[], None]) -> None:
        raise Violation("the results of an evaluation are not read")

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine until its next delay."""
        if self._ended:
            coroutine.close()
            return
        try:
            seconds = coroutine.send(None)
        except StopIteration:
            return
        self._world.after(seconds, self.spawn, coroutine)

    def end(self) -> None:
        """Ends the incarnation. Its waiting coroutines never continue."""
        self._ended = True

    # --------------------------------------------------------------------------------------------------------- events

    def taken_over(self, machine: Machine, event: on.Progress) -> None:
        """Passes a worker's report to the buffer as columns. Removes tokens from it that the worker does not own."""
        names = [name for name in event.tokens if name in machine.state.rows()]
        rows = np.array([machine.state.rows()[name] for name in names], np.int64)
        owned = machine.owned(event.worker_id, event.epoch, rows)
        mine = [name for name, is_owned in zip(names, owned.tolist(), strict=True) if is_owned]
        for name in event.tokens.keys() - set(mine):
            del event.tokens[name]
            event.finished.pop(name, None)
        columns = self._columns(event, mine, rows[owned])
        self.journal.report(self.buffer.accept(event.worker_id, event.version, columns, self._world.now_s))

    def _columns(self, event: on.Progress, names: list[str], rows: Column) -> TokenColumns:
        """The report's columns. They repeat some accepted tokens, as those of a worker that restarted a request do."""
        buffered = self.buffer.buffered(rows)
        reached = np.array([event.tokens[name] for name in names], np.int64)
        firsts = np.maximum(0, np.minimum(buffered, reached) - (reached + rows) % REPEATED_MAX)
        counts = reached - firsts
        token_ids, logprobs = sampled([(name, event.version) for name in names], firsts, counts)
        ends = np.array([FINISH_REASONS.index(event.finished.get(name)) for name in names], np.uint8)
        nothing = np.zeros(len(names), np.int64)
        return TokenColumns(
            rows, firsts, counts, ends, np.cumsum(counts) - counts, token_ids, logprobs, {}, nothing, nothing,
            memoryview(b""),
        )  # fmt: skip

    def handled(self, machine: Machine, event: on.Event) -> None:
        """Writes the journal records that precede the commands of this event."""
        state = machine.state
        if isinstance(event, on.TurnRequested):
            self._give(event)
        elif isinstance(event, on.StepCommitted):
            counters = {"groups_trained": state.counters.groups_trained}
            learnt = learning.snapshot(state)
            self.journal.note(records.Committed(event.step, b"", self._world.now_s, counters, learnt))
            self.log.rely()
        elif isinstance(event, on.VersionRepublished):
            self.journal.note(records.Republished(event.version, b""))
            self.log.rely()

    def _give(self, event: on.TurnRequested) -> None:
        response = self.buffer[event.request_id]
        after, is_fork = event.after_tokens, event.is_prompt or event.after_tokens != on.NO_FORK
        first = -event.tokens if event.is_prompt else after if is_fork else len(response)
        origin, count = (event.request_id, response.version), np.array([event.tokens])
        token_ids, _ = sampled([origin], np.array([max(0, first)]), count)
        order = TurnOrder(response, tuple(token_ids.tolist()), TOKENS_MAX, "", len(response.inputs), first, is_fork)
        record = self.buffer.give(order, self._world.now_s)
        self.journal.session(response, record)

    def carried_out(self, event: on.Event) -> None:
        """Writes the journal records that follow the commands of this event."""
        self.journal.window(self._world.machine.state)
        self.journal.trainer(self._world.machine.state)
        was_requested = isinstance(event, on.GroupCancelled) and event.reason == "asked for"
        if was_requested or isinstance(event, on.TrainerAttached):
            self.log.rely()

    def read(self, prompt: SimPrompt) -> None:
        """Reads a prompt that the core gets otherwise than by asking for some."""
        self.prompts.read(SUBMITTED, prompt_of(prompt))

    def ask_evaluation(self, evaluation_id: str, prompts: Sequence[SimPrompt]) -> None:
        wanted = {each.prompt_id: prompt_of(each) for each in prompts}
        self.evaluations.running[evaluation_id] = EvaluationStream(evaluation_id, "", wanted)

    # -------------------------------------------------------------------------------------------------------- crashes

    def persisted(self, count: int) -> PersistedState:
        """The state that the first ``count`` records restore."""
        durable = Durable()
        for record in self.log.records[:count]:
            durable.apply(record)
        durable = Durable.from_checkpoint(durable.checkpoint())
        content = Content(durable)
        content.add(self.log.records[:count])
        groups = content.groups()
        requests = content.requests(groups)
        if requests.damaged:
            raise Violation(f"a prefix of the log lacks tokens or verdicts of {requests.damaged} (C2)")
        window, now_s = self._world.config.window, self._world.now_s
        incarnation = durable.incarnation + 1
        restored = recovery_state.restored(durable, groups, requests, self._offered, window, now_s, incarnation)
        return PersistedState(groups, requests, restored, durable.next_number)

    def _offered(self, prompt: Prompt) -> on.OfferedPrompt:
        return self._world.known_prompt(prompt.prompt_id)

    def restore(self, persisted: PersistedState) -> None:
        self.prompts.restore((group.prompt, group.position, group.arrival) for group in persisted.groups)
        resume.restore_buffer(self.buffer, persisted.groups, persisted.requests, persisted.next_number)
        self.buffer.window_versions = persisted.restored.window_versions


def cut(log: SimLog, count: int, incarnation: int) -> None:
    """Removes all records after the first ``count``, and begins another incarnation."""
    del log.records[count:]
    log.append(records.Begun(incarnation, 0.0, 0.0, ""))
    log.rely()


def prompt_of(prompt: SimPrompt) -> Prompt:
    environment = ENVIRONMENT if prompt.sessions else ""
    size, size_min, name = prompt.group_size, prompt.group_size_min, prompt.prompt_id
    tokens = () if prompt.is_from_environment else (0,)
    return Prompt(name, prompt.task_id, tokens, name, size, {}, "{}", 0, environment, size_min)


class _Feed:
    def __init__(self, world: ServiceWorld, ledger: PromptLedger) -> None:
        self._world = world
        self.ledger = ledger

    async def take(self, count: int) -> tuple[list[Prompt], bool]:
        """Returns prompts without a position in a source: the world repeats them itself after a crash."""
        await _Delay(self._world.prompts_s())
        prompts = [prompt_of(prompt) for prompt in self._world.drawn(count)]
        for prompt in prompts:
            self.ledger.read(SUBMITTED, prompt)
        return prompts, not prompts


class _Verifier:
    def __init__(self, world: ServiceWorld) -> None:
        self._world = world

    async def score(
        self, prompt_text: str, response_text: str | None, token_ids: Any, verifier_json: str, name: str
    ) -> Reward:
        await _Delay(self._world.verdict_s())
        last = int(token_ids[-1])
        if self._world.scenario.workload.group_size_min and last % INVALID == 0:
            return Reward(math.nan, log="no number", valid=False)
        return Reward(self._world.verifier.reward(prompt_text, last))


class _Filter:
    name = FILTERED.removeprefix("filtered: ")

    def __init__(self, world: ServiceWorld) -> None:
        self._world = world

    async def keeps(self, prompt_text: str, rewards: Sequence[float], verifier_json: str) -> bool:
        return not self._world.filter.lets_go(prompt_text)


class _Trainers(Trainers):
    def __init__(self, world: ServiceWorld, service: SimService, recorder: Any) -> None:
        super().__init__(service, service.buffer, service.journal, recorder)
        self._world = world
        self._service = service

    def stream_of(self, trainer_epoch: int, step: int) -> StepStream | None:
        trainer = self._world.trainer
        stream = _Stream(self._world, self._service) if trainer_epoch == trainer.epoch else None
        self.stream = cast(StepStream | None, stream)
        return self.stream

    def fail(self, error: DoraError) -> None:
        super().fail(error)
        self._service.log.rely()  # the trainer learns it from its stream or its next request


class _Stream:
    def __init__(self, world: ServiceWorld, service: SimService) -> None:
        self._world = world
        self._service = service

    def put(self, group: TrajectoryGroup) -> None:
        self._relied_on()
        self._world.ledger.check_members(group)
        for each in group.trajectories:
            names = [(each.trajectory_id.partition("/")[0], each.behaviour_version)]
            counts = np.array([each.length_tokens])
            token_ids, logprobs = sampled(names, np.zeros(1, np.int64), counts)
            logprobs *= self._check_mask(each)
            if not (np.array_equal(each.response_token_ids, token_ids) and np.array_equal(each.logprobs, logprobs)):
                raise Violation(f"{each.trajectory_id} is delivered with tokens that were not sampled for it (C1)")
        self._world.trainer.received()

    def _check_mask(self, trajectory: Trajectory) -> Column:
        """Marks the sampled tokens; those that no earlier branch has must be the loss mask."""
        response = self._world.ledger.responses[trajectory.trajectory_id.partition("/")[0]]
        is_sampled, shared = np.ones(trajectory.length_tokens, np.uint8), 0
        if response.prompt.sessions:
            spans = response.prompt.spans(response.index)[: response.turn + 1]
            left = [response.prompt.tokens_left(response.index, turn) for turn in range(response.turn)]
            leaves = [turn for turn, tokens in enumerate(left) if tokens]
            branch = trajectory.branch_index
            shared = spans[leaves[branch - 1]][1] - left[leaves[branch - 1]] if branch else 0
            for turn, ((_, end), (begin, _)) in enumerate(pairwise(spans)):
                if turn < (leaves[branch] if branch < len(leaves) else response.turn):
                    is_sampled[end - left[turn] : begin] = 0
        mask = is_sampled.copy()
        mask[:shared] = 0
        if not np.array_equal(trajectory.loss_mask, mask) or trajectory.shared_prefix_tokens != shared:
            raise Violation(f"{trajectory.trajectory_id}: its loss mask is not that of its turns")
        return is_sampled

    def close(self, *, exhausted: bool = False, error: Exception | None = None) -> None:
        self._relied_on()
        if error is None:
            self._world.trainer.closed(exhausted)

    def _relied_on(self) -> None:
        if self._world.trainer.alive:
            self._service.log.rely()


class _Stub:
    def delivered(self, group: object) -> None: ...
    def cancelled(self, group: object) -> None: ...
    def withdrawn(self, version: int) -> None: ...
    def set_aside(self, version: int) -> None: ...
    def retired(self, version: int) -> None: ...

    def tidying(self, position: str) -> nullcontext[None]:
        return nullcontext()
