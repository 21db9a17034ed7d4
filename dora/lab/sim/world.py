"""Virtual time around one Machine: the core of the service, with simulated workers, links and trainer.

    agenda (heap by time) ──▶ wake-ups of engines, messages, trainer ──▶ post(event) ──▶ machine.handle
                 ▲                                                                         │
                 └──────────────── latencies, copies, loads, micro-batches ◀── commands ───┘

Everything is a function of the scenario and the seed. Ties in time are broken by the order of scheduling.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Final
from zlib import crc32

from dora.config import Config, SelectionConfig, ServiceConfig, SessionsConfig, WorkersConfig
from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.forecast.cost import CostModel
from dora.lab.sim import partial
from dora.lab.sim.driver import Order, WorkerDriver, number_of
from dora.lab.sim.ledger import SimResponse, Violation
from dora.lab.sim.pool import SimPool, lost
from dora.lab.sim.scenario import Scenario
from dora.lab.sim.trainer import SimTrainer
from dora.lab.sim.worker import Parcel, SimWorker, resumed
from dora.lab.sim.workload import FILTERED, Filter, SimPrompt, SimVerifier, WorkloadStream
from dora.lab.sim_engine.engine import SimEngine

TICK_S = 5.0
ENGINE_START_S: Final = 30.0  # of a worker that changes its precision
LOAD_TIMES: Final = 10.0  # timeout of a load, as a multiple of its normal time

Observer = Callable[[float, on.Event, list[do.Command]], None]  # now_s, the event, the core's commands


def core_config(scenario: Scenario, stall_timeout_s: float = 0.0, trainer_stall_timeout_s: float = 0.0) -> Config:
    cluster = scenario.cluster
    copies = {"copy_token_s": cluster.kv_token_bytes, "copy_state_s": cluster.state_bytes}
    seconds = {name: size / cluster.pool_bytes_per_s for name, size in copies.items()}
    known = cluster.cost.model_copy(update=seconds)
    balance = scenario.balance.model_copy(update={"cost": scenario.balance.cost or known})
    # an endless window exceeds the limit of a service
    freshness = scenario.window.freshness if partial.has_versions(scenario.balance.policy) else 0.0
    window = scenario.window.model_copy(update={"freshness": freshness})
    if not window.is_adaptive:
        window = window.model_copy(update={"size": partial.window_steps(scenario)})
    selection = SelectionConfig(redundant_fraction=scenario.redundant_fraction)
    workers = WorkersConfig()
    limit_s = max(workers.load_timeout_s, LOAD_TIMES * scenario.cluster.load_s)
    workers = workers.model_copy(update={"load_timeout_s": limit_s, "stall_timeout_s": stall_timeout_s})
    service = ServiceConfig(trainer_stall_timeout_s=trainer_stall_timeout_s)
    settings = {"balance": balance, "window": window, "workers": workers, "service": service}
    return Config(selection=selection).model_copy(update=settings)


class World(WorkerDriver):
    """One run. ``after`` schedules; ``run_until`` drives. Observers are called with (now_s, event, commands)."""

    stall_timeout_s: ClassVar[float] = 0.0  # no worker stalls, and an environment may take its time
    trainer_stall_timeout_s: ClassVar[float] = 0.0  # nor does the trainer
    session_limits: SessionsConfig = SessionsConfig(idle_timeout_s=0.0, total_timeout_s=0.0)  # nor any environment

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__(scenario)
        self.config = core_config(scenario, self.stall_timeout_s, self.trainer_stall_timeout_s).model_copy(
            update={"sessions": self.session_limits}
        )
        policy = partial.policy_of(scenario, self.config.balance)
        self.machine = Machine(self.config) if policy is None else Machine(self.config, policy)
        self.prompts = WorkloadStream(scenario.workload, seed, scenario.trainer.groups_per_step)
        self.filter = Filter(scenario.filter_fraction, seed)
        self.verifier = SimVerifier(scenario.workload.settled_fraction, seed)
        self.cost = CostModel.of(scenario.cluster.cost)
        self.events = 0
        self._seed = seed
        self.retired = 0
        self.in_full_precision: set[str] = set()  # workers whose next processes have full precision
        self.pinned: set[int] = set()  # retired versions whose weights stay
        self._latency_s = scenario.cluster.link_latency_s
        self.observers: list[Observer] = []
        self.ended: list[SimEngine] = []  # engines of lost workers, whose work still counts
        self.trainer = SimTrainer(self, scenario.trainer)
        if policy is not None:
            self.trainer.after_commit = self.renew
        self._now: deque[on.Event] = deque()  # events of the present time
        self._posting = False
        self._epochs = 0
        self._owed = 0  # drawn prompts that were not offered yet, as too much was in flight
        self._books: dict[type, Callable[[Any], None]] = {  # commands that are only recorded and checked
            do.AdmitGroup: self._admit,
            do.GrowGroup: self._grow,
            do.ReplaceRequest: self._replace,
            do.DropPrompt: self.ledger.take_back,
            do.DropGroup: self.ledger.drop,
            do.ForgetGroup: self.ledger.forget,
            do.BeginEvaluationGroup: self._begin_evaluation_group,
            do.EndEvaluationGroup: self.ledger.end_evaluation_group,
            do.EndEvaluation: self.ledger.end_evaluation,
            do.RetireVersion: self.retire,
            do.PinVersion: self.pin,
            do.ResizeWindow: self.ledger.resize,
            do.RejectVersion: self.reject,
            do.LapseLease: self.lapse,
        }
        self._carry_out: dict[type, Callable[[Any], None]] = {
            **self._books,
            do.DrawPrompts: self.draw,
            do.ScoreRequest: self.score,
            do.BreakOffSession: self.break_off,
            do.ScoreEvaluated: self.score,
            do.DeliverGroup: self._deliver,
            do.CloseStep: self._close,
            do.ReleaseSnapshot: self.release,
            do.EvictWorker: self.evict,
            do.StopWorker: self.stop,
            do.RestartWorker: self.restart,
            do.FallBack: lambda command: None,
        }
        self.trainer.attach()
        for index in range(scenario.cluster.engines):
            if scenario.cluster.kinds:
                self.post(self._described(f"w{index}"))
            self.join(f"w{index}")
        for index in range(scenario.cluster.pools if scenario.cluster.pool_tokens else 0):
            self.join_pool(f"pool-{index}")
        self.after(TICK_S, self._tick)

    def _tick(self) -> None:
        self.post(on.Tick())
        if self._owed:
            self._draw()
        self.after(TICK_S, self._tick)

    # --------------------------------------------------------------------------------------------------------- events

    def post(self, event: on.Event) -> None:
        """Gives the core an event and carries out its commands, then the events that follow at the same time."""
        self._now.append(event)
        if self._posting:
            return
        self._posting = True
        try:
            while self._now:
                self._handle(self._now.popleft())
        finally:
            self._posting = False

    def _handle(self, event: on.Event) -> None:
        self.events += 1
        if isinstance(event, on.Progress):
            self.take_over(event)
        commands = self.machine.handle(event, self.now_s)
        if isinstance(event, on.Progress):
            self.turns_ended(event)
        if isinstance(event, on.VersionRepublished):
            self.ledger.republished(event.version)
        self.carry_out(event, commands)
        self.handled(event, commands)

    def carry_out(self, event: on.Event, commands: list[do.Command]) -> None:
        for command in commands:
            if isinstance(command, do.WorkerCommand):
                self.to_worker(command)
            else:
                self._carry_out[type(command)](command)

    def handled(self, event: on.Event, commands: list[do.Command]) -> None:
        """Called after the core has handled an event and its commands were carried out."""
        for observer in self.observers:
            observer(self.now_s, event, commands)

    def take_over(self, event: on.Progress) -> None:
        """Records tokens of requests that the worker owns, and removes others from the event."""
        state = self.machine.state
        known, names = event.in_rows(state.rows()), state.names()
        rows = known.rows[self.machine.owned(event.worker_id, event.epoch, known.rows)].tolist()
        owned = {names[row] for row in rows}
        for request_id in event.tokens.keys() - owned:
            del event.tokens[request_id]
            event.finished.pop(request_id, None)
        for request_id in event.tokens:
            self.ledger.take_over(event, request_id)

    # -------------------------------------------------------------------------------------------------------- workers

    def join(self, worker_id: str) -> SimWorker:
        """A new epoch of a worker, empty and without weights."""
        self._epochs += 1
        kind = self.kind_of(worker_id)
        engine = SimEngine(self.cost.scaled(kind.step_scale), kind.slots, kind.kv_tokens)
        worker = SimWorker(worker_id, self._epochs, engine)
        worker.full_precision = worker_id in self.in_full_precision
        worker.engine.clock_s = self.now_s
        worker.engine.paused = self.trainer.holds_gpus
        self.workers[worker_id] = worker
        joined = on.WorkerJoined(worker_id, worker.epoch, kind.slots, kind.kv_tokens, self.host_of(worker_id))
        self.post(replace(joined, full_precision=worker.full_precision))
        self.after(self.report_period_s * (0.5 + 0.5 * (self._epochs % 16) / 16), self._report, worker)
        return worker

    def join_pool(self, pool_id: str) -> SimPool:
        self._epochs += 1
        pool = SimPool.of(pool_id, self._epochs, self.cost, self.scenario.cluster)
        pool.engine.clock_s = self.now_s
        self.pools[pool_id] = pool
        self.post(on.PoolJoined(pool_id, pool.epoch, pool.kv_tokens, self.host_of(pool_id)))
        return pool

    def host_of(self, name: str) -> str:
        """The machine of a worker or pool; empty without machines."""
        hosts, kinds = self.scenario.cluster.hosts, self.scenario.cluster.kinds
        number = number_of(name)
        return f"h{number % hosts}" if hosts else f"{self.kind_of(name).name}-{number}" if kinds else ""

    def _described(self, name: str) -> on.HostDescribed:
        cluster, kind = self.scenario.cluster, self.kind_of(name)
        token_s = cluster.kv_token_bytes / cluster.zone_link_bytes_per_s if cluster.zone_link_bytes_per_s else 0.0
        return on.HostDescribed(self.host_of(name), kind.name, kind.zone, token_s, cluster.zone_link_latency_s)

    def notice(self, host: str, within_s: float, away_s: float) -> None:
        """Takes a machine: its workers and pools end ``within_s`` from now, and come again after ``away_s``."""
        self.post(on.HostNoticed(host, within_s, f"preempted by notice, {within_s:g} s"))
        self.after(within_s, self._taken, host, away_s)

    def _taken(self, host: str, away_s: float) -> None:
        there = [name for name in (*self.workers, *self.pools) if self.host_of(name) == host]
        for name in there:
            if (member := self.end(name)) is not None:
                self.take(member)
        self.post(on.HostLost(host))
        self.after(away_s, self._given_back, host)

    def _given_back(self, host: str) -> None:
        cluster = self.scenario.cluster
        workers = [f"w{index}" for index in range(cluster.engines)]
        pools = [f"pool-{index}" for index in range(cluster.pools if cluster.pool_tokens else 0)]
        for name in (*workers, *pools):
            if self.host_of(name) == host:
                self.start_again(name)

    def start_again(self, name: str) -> None:
        """Starts a worker or pool that is not connected."""
        if name.startswith("pool-"):
            if name not in self.pools:
                self.join_pool(name)
        elif name not in self.workers:
            self.join(name)

    def take(self, member: SimWorker) -> None:
        """Ends a worker or pool with its machine."""
        self.lose(member, "its machine was taken")

    def end(self, name: str) -> SimWorker | None:
        """The connected worker or pool with this id."""
        return self.workers.get(name) or self.pools.get(name)

    def lose(self, worker: SimWorker, reason: str) -> None:
        if not worker.alive:
            return
        worker.alive = False
        worker.engine.advance(self.now_s)
        self.ended.append(worker.engine)
        members: dict[str, Any] = self.pools if isinstance(worker, SimPool) else self.workers
        if members.get(worker.worker_id) is worker:
            del members[worker.worker_id]
        self.post(lost(worker, reason))

    def addressed(
        self, command: do.WorkerCommand | do.EvictWorker | do.StopWorker | do.RestartWorker
    ) -> SimWorker | None:
        """The worker or pool that a command addresses; None if that epoch has ended."""
        worker = self.end(command.worker_id)
        return worker if worker is not None and worker.epoch == command.epoch else None

    def to_worker(self, command: do.WorkerCommand) -> None:
        worker = self.addressed(command)
        if worker is None:
            return
        request = None
        if isinstance(command, do.ExtendRequest):
            request = resumed(self.ledger.responses[command.request_id], command.request_id)
        elif isinstance(command, do.StartRequest):
            self.ledger.check_started(command.request_id)
            response = self.ledger.responses[command.request_id]
            if (command.arrival == "new") != (response.tokens == 0):
                raise Violation(
                    f"{command.request_id} is started as {command.arrival} at {response.tokens} tokens (C2)"
                )
            request = resumed(response, command.request_id)
        elif isinstance(command, do.LoadVersion) and self._is_retired(command.version):
            raise Violation(f"{worker.worker_id} is to load version {command.version}, whose weights were retired")
        if getattr(command, "version", -1) in self.ledger.rejected:
            raise Violation(f"{command} is of a version that is rejected (C1)")
        self.send(worker, (command, request))

    def _is_retired(self, version: int) -> bool:
        return version < self.retired and version not in self.pinned

    def target_of(self, command: do.CopyOut) -> str:
        """The worker or pool that receives the copy; the source itself if its handoff has ended."""
        pending = self.machine.state.pending.get(command.command_id)
        handoff = pending.handoff if pending is not None else None
        return command.worker_id if handoff is None else handoff.target

    def send(self, worker: SimWorker, order: Order) -> None:
        self._add(worker.orders, order, self._obey, worker)

    def to_core(self, worker: SimWorker, event: on.Event) -> None:
        self._add(worker.words, event, self._from_worker, worker)

    def _add(self, parcel: Parcel, message: Any, deliver: Callable[[SimWorker, Any], None], worker: SimWorker) -> None:
        """Messages that a stream sends at one time arrive at one time, with one entry on the agenda."""
        if parcel.sent_s == self.now_s:
            parcel.messages.append(message)
            return
        messages = parcel.messages = [message]
        if self.now_s + self._latency_s > self.now_s:  # otherwise it has arrived before the next one is sent
            parcel.sent_s = self.now_s
        self.after(self._latency_s, deliver, worker, messages)

    def _from_worker(self, worker: SimWorker, events: list[on.Event]) -> None:
        for event in events:
            if worker.alive:
                self.post(event)

    # ------------------------------------------------------------------------------------------------------- commands

    def draw(self, command: do.DrawPrompts) -> None:
        self._owed = command.count
        self._draw()

    def _draw(self) -> None:
        limit, state = self.scenario.in_flight_groups, self.machine.state
        in_flight = len(state.backlog) + state.window.open_groups + len(state.leased)
        count = min(self._owed, limit - in_flight) if limit else self._owed
        if count > 0:
            self._owed = 0  # the core asks again for missing prompts
            self.offer(self.prompts.take(count))

    def offer(self, drawn: list[SimPrompt], exhausted: bool = False) -> None:
        self.ledger.offer(drawn)
        self.post(on.PromptsOffered(self._offered(drawn), exhausted))

    @cached_property
    def evaluated(self) -> WorkloadStream:
        return WorkloadStream(self.scenario.workload, self._seed + 1, self.scenario.trainer.groups_per_step)

    def evaluate(self, evaluation_id: str, count: int, version: int = -1, share: float = 0.0) -> on.EvaluationRequested:
        """The event that asks for an evaluation of ``count`` prompts from their own stream. The ledger records them."""
        taken = [replace(each, prompt_id=f"{evaluation_id}/{each.prompt_id}") for each in self.evaluated.take(count)]
        self.ledger.ask_evaluation(evaluation_id, taken)
        return on.EvaluationRequested(evaluation_id, self._offered(taken), version, share)

    def _offered(self, drawn: list[SimPrompt]) -> tuple[on.OfferedPrompt, ...]:
        known = self.scenario.balance.predictor == "oracle"
        return tuple(
            on.OfferedPrompt(
                prompt.prompt_id,
                prompt.task_id,
                0 if prompt.is_from_environment else prompt.prompt_tokens,
                prompt.group_size,
                prompt.max_tokens + self._most_environment_tokens,
                key=prompt.key,
                features=prompt.features,
                known_tokens=tuple(map(prompt.response_tokens, range(prompt.group_size))) if known else (),
                priority=self.priority(prompt.prompt_id),
                sessions=prompt.sessions,
                group_size_min=prompt.group_size_min,
            )
            for prompt in drawn
        )

    @cached_property
    def _most_environment_tokens(self) -> int:
        workload = self.scenario.workload
        turns = [workload.turns, *(task.turns for task in workload.tasks if task.turns is not None)]
        return max((each.most - 1) * max(1, each.answer_tokens) for each in turns) if workload.sessions else 0

    def priority(self, prompt_id: str) -> int:
        return 0

    # ------------------------------------------------------------------------------------------------------- sessions

    def _admit(self, command: do.AdmitGroup) -> None:
        self.ledger.admit(command)
        for request_id in command.request_ids[: self.ledger.groups[command.group_id].prompt.at_once]:
            self._begins_idle(request_id)

    def _grow(self, command: do.GrowGroup) -> None:
        self.ledger.check_grown(command)
        for request_id in command.request_ids:
            self._begins_idle(request_id)

    def _begin_evaluation_group(self, command: do.BeginEvaluationGroup) -> None:
        self.ledger.begin_evaluation_group(command)
        for request_id in command.request_ids:
            self._begins_idle(request_id)

    def _replace(self, command: do.ReplaceRequest) -> None:
        self.ledger.replace(command)
        self._begins_idle(command.replacement_id)

    def _begins_idle(self, request_id: str) -> None:
        response = self.ledger.responses[request_id]
        if response.idle:
            self.call_environment(request_id, response)

    def turns_ended(self, event: on.Progress) -> None:
        for request_id in event.finished:
            response = self.ledger.responses.get(request_id)
            if response is not None and response.prompt.sessions:
                self.call_environment(request_id, response)

    def call_environment(self, request_id: str, response: SimResponse) -> None:
        """An environment answers after a time that its turn determines, however often it is called."""
        answer_s = self.ledger.answer_s(request_id, response.turn, self.now_s)
        self.after(max(0.0, answer_s - self.now_s), self._environment, request_id, response, response.turn)

    def _environment(self, request_id: str, response: SimResponse, turn: int) -> None:
        if self.ledger.responses.get(request_id) is not response or response.finished or response.troubled:
            return
        if response.turn != turn or not response.idle:
            return  # it was asked already
        if turn + 1 == len(response.prompt.turns_of(response.index)):
            response.ended = True
            self.post(on.SessionEnded(request_id))
        else:
            self.post(self.ledger.ask(request_id))

    def score(self, command: do.ScoreRequest | do.ScoreEvaluated) -> None:
        self.ledger.check_finished(command.request_id)
        response = self.ledger.responses[command.request_id]
        draw = crc32(command.request_id.encode())
        self.judged(command.request_id, self.verifier.reward(response.prompt.prompt_id, draw))

    def break_off(self, command: do.BreakOffSession) -> None:
        self.ledger.break_off(command)
        self.judged(command.request_id, None)

    def judged(self, request_id: str, reward: float | None) -> None:
        """Delivers a verdict; ``reward`` None is an invalid one. If it is a group's last, the user's filter runs before
        any step may take the group.
        """
        group_id = self.ledger.scored(request_id, reward)
        if group_id is not None and self.filter.lets_go(self.ledger.groups[group_id].prompt.prompt_id):
            self.post(on.GroupCancelled(group_id, FILTERED))
        else:
            self.post(on.RequestScored(request_id, reward or 0.0, reward is not None))

    def _deliver(self, command: do.DeliverGroup) -> None:
        if command.trainer_epoch == self.trainer.epoch:
            self.ledger.deliver(command)
            self.trainer.received()

    def _close(self, command: do.CloseStep) -> None:
        if command.trainer_epoch == self.trainer.epoch:
            self.ledger.closed(command)
            self.trainer.closed(command.exhausted)
        if self._owed:
            self._draw()

    def retire(self, command: do.RetireVersion) -> None:
        self.ledger.check_retired(command.version)
        self.pinned.discard(command.version)
        self.retired = max(self.retired, command.version + 1)

    def pin(self, command: do.PinVersion) -> None:
        self.pinned.add(command.version)
        self.retired = command.version + 1

    def reject(self, command: do.RejectVersion) -> None:
        self.ledger.reject(command)
        self.trainer.rejected()

    def lapse(self, command: do.LapseLease) -> None:
        raise Violation(f"the trainer works, and its lease lapses: {command.reason}")

    def release(self, command: do.ReleaseSnapshot) -> None:
        if self.snapshots.pop(command.locator, None) is None:
            raise Violation(f"the snapshot {command.locator} is released twice, or never was")

    def evict(self, command: do.EvictWorker) -> None:
        worker = self.addressed(command)
        if worker is not None:
            self.lose(worker, command.reason)

    def stop(self, command: do.StopWorker) -> None:
        worker = self.addressed(command)
        if worker is not None:
            self.lose(worker, "drained")

    def restart(self, command: do.RestartWorker) -> None:
        """Ends the worker; ``in_full_precision`` tells how its next process starts."""
        worker = self.addressed(command)
        if worker is not None:
            change = self.in_full_precision.add if command.full_precision else self.in_full_precision.discard
            change(command.worker_id)
            self.lose(worker, "it starts again in another precision")
            self.after(ENGINE_START_S, self._start_again, command.worker_id)

    def _start_again(self, worker_id: str) -> None:
        if worker_id not in self.workers:
            self.join(worker_id)
