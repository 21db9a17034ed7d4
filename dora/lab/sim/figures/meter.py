"""Measures one run: work done and consumed, time per step, blackouts. It also fills the timeline."""

from dataclasses import dataclass, field

from dora.core import commands as do
from dora.core import events as on
from dora.core.forecast.prediction import Recall
from dora.core.rules.selection import REDUNDANT
from dora.lab.sim.figures.report import Arrow, Span, StepSpan, Timeline
from dora.lab.sim.ledger import SimGroup
from dora.lab.sim.workload import FILTERED
from dora.lab.sim.world import World

KV_SAMPLE_S = 10.0  # least time between two samples of a worker's KV use in the timeline


@dataclass(frozen=True, slots=True)
class Reading:
    """Sums from the start to one publish."""

    at_s: float = 0.0
    generated_tokens: float = 0.0
    context_token_steps: float = 0.0
    steps: float = 0.0
    reprefill_s: float = 0.0
    preemptions: int = 0
    loads: int = 0
    still_s: float = 0.0  # time without a token during handoffs, summed over requests
    resident_s: float = 0.0  # time on workers, summed over requests and their segments
    filtered: int = 0  # groups
    dropped: int = 0
    wasted_tokens: int = 0


@dataclass(slots=True)
class Consumed:
    responses: int = 0
    response_tokens: float = 0.0
    prompt_tokens: float = 0.0
    context_tokens: float = 0.0  # the C of the bound: SimPrompt.context_work
    busy_s: float = 0.0
    staleness: list[int] = field(default_factory=list)  # of each group
    out_of_window: int = 0  # trained before their version existed or after their deadline (C3)
    step_staleness: list[float] = field(default_factory=list)  # mean of each step
    took_s: list[float] = field(default_factory=list)  # of each step
    waited_s: list[float] = field(default_factory=list)

    def add(self, step: int, took_s: float, groups: list[SimGroup], busy: list[tuple[float, float]]) -> None:
        busy_s = sum(end_s - begin_s for begin_s, end_s in busy)
        self.busy_s += busy_s
        self.took_s.append(took_s)
        self.waited_s.append(took_s - busy_s)
        staleness = [step - group.version for group in groups]
        self.step_staleness.append(sum(staleness) / max(1, len(staleness)))
        self.staleness += staleness
        for group in groups:
            self.out_of_window += not 0 <= step - group.version < group.window
            for length in group.prompt.lengths:
                self.responses += 1
                self.response_tokens += length
                self.prompt_tokens += group.prompt.prompt_tokens
            self.context_tokens += group.prompt.context_work()


class Meter:
    """Observes a World. The first ``warmup`` steps are not measured."""

    def __init__(self, world: World, warmup: int, timeline: Timeline | None) -> None:
        self.world, self.warmup, self.timeline = world, warmup, timeline
        self.begin = Reading()
        self.end = Reading()
        self.consumed = Consumed()
        self.steps = 0  # committed
        self.recall = Recall()
        self.resizes: list[str] = []  # of an adaptive window
        self._loads = 0
        self._still_s = 0.0
        self._resident_s = 0.0
        self._resident_until_s = world.now_s  # end of the time that ``_resident_s`` includes
        self._held = {worker.worker_id: len(worker.rows) for worker in world.machine.state.workers.values()}
        self._on_workers = sum(self._held.values())  # requests
        self._frozen: dict[str, float] = {}  # request -> start of its freeze
        self._hosting: dict[str, tuple[int, float]] = {}  # worker -> version and its start
        self._sampled_s: dict[str, float] = {}
        world.trainer.on_step = self._step
        world.observers.append(self._saw)

    # ----------------------------------------------------------------------------------------------------------- steps

    def _step(
        self, step: int, began_s: float, ended_s: float, groups: list[SimGroup], busy: list[tuple[float, float]]
    ) -> None:
        self.steps += 1
        self.end = self._read()
        if self.steps <= self.warmup:
            self.begin = self.end
        else:
            self.consumed.add(step, ended_s - began_s, groups, busy)
        if self.timeline is not None:
            ages = [step - group.version for group in groups]
            mix = tuple(ages.count(age) for age in range(max(ages, default=0) + 1))
            self.timeline.steps.append(StepSpan(step, began_s, ended_s, tuple(busy), mix))

    def _read(self) -> Reading:
        world = self.world
        self._reside(world.now_s)
        for worker in world.workers.values():
            worker.engine.advance(world.now_s)
        engines = [*world.ended, *(worker.engine for worker in world.workers.values())]
        totals = [engine.totals for engine in engines]
        # generated_tokens includes requests only when they stop, so running ones are added
        running = sum(
            engine.tokens_of(request) - request.tokens for engine in engines for request in engine.requests.values()
        )
        return Reading(
            world.now_s,
            running + sum(total.generated_tokens for total in totals),
            sum(total.context_token_steps for total in totals),
            sum(total.steps for total in totals),
            sum(total.reprefill_s for total in totals),
            sum(total.preemptions for total in totals),
            self._loads,
            self._still_s,
            self._resident_s,
            world.ledger.cancel_reasons[FILTERED],
            world.ledger.cancel_reasons[REDUNDANT],
            world.ledger.cancelled_tokens,
        )

    # ---------------------------------------------------------------------------------------------------------- events

    def _saw(self, now_s: float, event: on.Event, commands: list[do.Command]) -> None:
        self._reside(now_s)
        if isinstance(event, (on.Progress, on.CommandDone, on.WorkerLost)):
            self._count(event.worker_id)
        if isinstance(event, on.Progress) and event.finished:
            self._finished(event, now_s)
        for command in commands:
            if isinstance(command, do.WorkerCommand):
                self._count(command.worker_id)
                self._sent(command, now_s)
            elif isinstance(command, do.ResizeWindow):
                self.resizes.append(f"after step {self.steps - 1}: {command.size}, as {command.reason}")
        if self.timeline is not None:
            self._draw(event, now_s)

    def _reside(self, now_s: float) -> None:
        self._resident_s += self._on_workers * (now_s - self._resident_until_s)
        self._resident_until_s = now_s

    def _count(self, worker_id: str) -> None:
        """Updates a worker's request count. Only workers that an event or a command names can change theirs."""
        worker = self.world.machine.state.workers.get(worker_id)
        held = 0 if worker is None else len(worker.rows)
        self._on_workers += held - self._held.get(worker_id, 0)
        self._held[worker_id] = held

    def _sent(self, command: do.WorkerCommand, now_s: float) -> None:
        if isinstance(command, do.CopyIn):  # it decodes until then
            self._frozen[command.request_id] = now_s
        elif isinstance(command, (do.RemoveRequest, do.Thaw)):
            self._still_s += now_s - self._frozen.pop(command.request_id, now_s)
            if isinstance(command, do.RemoveRequest) and self.timeline is not None:
                self._moved(command, now_s)
        elif isinstance(command, do.LoadVersion):
            self._loads += 1
            self._hosts(command.worker_id, -1, now_s)

    def _finished(self, event: on.Progress, now_s: float) -> None:
        state = self.world.machine.state
        for request_id in event.finished:
            row = state.request_row.get(request_id)
            if row is None:
                continue
            self._still_s += now_s - self._frozen.pop(request_id, now_s)
            self.recall.add(float(state.requests["log_mean"][row]), float(event.tokens[request_id]))

    # -------------------------------------------------------------------------------------------------------- timeline

    def _hosts(self, worker_id: str, version: int, now_s: float) -> None:
        if self.timeline is None:
            return
        was, since_s = self._hosting.get(worker_id, (version, now_s))
        if was != version:
            self.timeline.spans.append(Span(_number(worker_id), was, since_s, now_s))
        if was != version or worker_id not in self._hosting:
            self._hosting[worker_id] = (version, now_s)

    def _moved(self, command: do.RemoveRequest, now_s: float) -> None:
        state = self.world.machine.state
        row = state.request_row.get(command.request_id)
        owner = state.owner(row) if row is not None else None
        from_worker = command.worker_id in state.workers  # otherwise it is resumed from a pool
        if from_worker and row is not None and owner is not None and self.timeline is not None:
            source, target = _number(command.worker_id), _number(owner.worker_id)
            self.timeline.arrows.append(Arrow(now_s, source, target, int(state.requests["version"][row])))

    def _draw(self, event: on.Event, now_s: float) -> None:
        assert self.timeline is not None
        if isinstance(event, on.CommandDone):
            worker = self.world.workers.get(event.worker_id)
            if worker is not None and worker.version >= 0:
                self._hosts(worker.worker_id, worker.version, now_s)
        elif isinstance(event, on.Progress) and now_s - self._sampled_s.get(event.worker_id, -1e9) >= KV_SAMPLE_S:
            self._sampled_s[event.worker_id] = now_s
            share = event.kv_used_tokens / self.world.kind_of(event.worker_id).kv_tokens
            self.timeline.kv.append((now_s, _number(event.worker_id), share))
        elif isinstance(event, on.WorkerLost):
            version, since_s = self._hosting.pop(event.worker_id, (-1, now_s))
            self.timeline.spans.append(Span(_number(event.worker_id), version, since_s, now_s))

    def finish(self) -> None:
        if self.timeline is not None:
            for worker_id, (version, since_s) in sorted(self._hosting.items()):
                self.timeline.spans.append(Span(_number(worker_id), version, since_s, self.world.now_s))
            self.timeline.spans.sort(key=lambda span: (span.begin_s, span.worker))


def _number(worker_id: str) -> int:
    return int(worker_id.lstrip("w"))
