"""Workers on the agenda: they execute commands, decode until something ends, call environments and report."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from dora.core import commands as do
from dora.core import events as on
from dora.core.rules.selection import spare_groups
from dora.lab.sim.agenda import Agenda, Links
from dora.lab.sim.ledger import SimLedger
from dora.lab.sim.partial import window_steps
from dora.lab.sim.pool import SimPool
from dora.lab.sim.scenario import EngineKind, Scenario
from dora.lab.sim.worker import SimSnapshot, SimWorker
from dora.lab.sim_engine.engine import EnginePhase, SimRequest

Order = tuple[do.WorkerCommand, SimRequest | None]  # a start or extension comes with the service's part of the response

REPORTS_A_PERIOD = 2  # full reports of every running request between two periodic plans


def number_of(name: str) -> int:
    """The number in the name of a worker or pool."""
    return int("".join(filter(str.isdigit, name)))


class WorkerDriver(Agenda, ABC):
    """Runs workers at their times. Their messages go through ``to_core``."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.scenario = scenario
        batch = scenario.trainer.groups_per_step
        spare, window = spare_groups(scenario.redundant_fraction, batch), scenario.window
        if window.is_adaptive:
            self.ledger = SimLedger(window.least, batch, spare, (window.least, window.most))
        else:
            self.ledger = SimLedger(window_steps(scenario), batch, spare)
        self.workers: dict[str, SimWorker] = {}  # connected, by id
        self.pools: dict[str, SimPool] = {}  # connected pools, by id
        self.snapshots: dict[str, SimSnapshot] = {}
        self.bad_weights: set[int] = set()  # versions whose present weights no worker can reproduce
        self._links = Links(scenario.cluster.link_bytes_per_s, scenario.cluster.link_latency_s)
        self._pool_links = Links(scenario.cluster.pool_bytes_per_s, scenario.cluster.link_latency_s)
        cluster = scenario.cluster
        between_bytes_per_s = cluster.zone_link_bytes_per_s or cluster.link_bytes_per_s
        self._zone_links = Links(between_bytes_per_s, cluster.link_latency_s + cluster.zone_link_latency_s)
        self.crossed_bytes = 0.0  # KV from one zone to another
        self._kinds: dict[str, EngineKind] = {}  # by name

    @abstractmethod
    def to_core(self, worker: SimWorker, event: on.Event) -> None:
        """Sends a worker's message to the core."""

    @abstractmethod
    def target_of(self, command: do.CopyOut) -> str:
        """The worker or pool that receives the copy."""

    def copy_s(self, source: str, target: str, tokens: int, *, is_last: bool = False) -> float:
        """Seconds to copy the KV of ``tokens`` between two engines, or into or out of a pool. A request's state goes
        with the last of its KV.
        """
        cluster = self.scenario.cluster
        links = self._pool_links if source in self.pools or target in self.pools else self._links
        size_bytes = tokens * cluster.kv_token_bytes + is_last * cluster.state_bytes
        here, there = (self.kind_of(end).zone for end in (source, target))
        if here != there:
            self.crossed_bytes += size_bytes
            return self._zone_links.copy_s(here, there, size_bytes, self.now_s)
        return links.copy_s(source, target, size_bytes, self.now_s)

    def kind_of(self, name: str) -> EngineKind:
        """The kind of a worker, or of the worker beside a pool."""
        if (kind := self._kinds.get(name)) is None:
            kind = self._kinds[name] = self.scenario.cluster.kind_of(number_of(name))
        return kind

    def load_s(self) -> float:
        return self.scenario.cluster.load_s

    def _obey(self, worker: SimWorker, orders: Iterable[Order]) -> None:
        if not worker.alive:
            return
        worker.engine.advance(self.now_s)
        for command, request in orders:
            outcome = worker.obey(self, command, request)
            if isinstance(outcome, on.CommandDone):
                self.to_core(worker, outcome)
                continue
            if outcome.began is not None:
                self.to_core(worker, outcome.began)
            if outcome.after_s:
                self.after(outcome.after_s, self._obeyed, worker, outcome.finish)
            else:
                self.to_core(worker, outcome.finish())
        self.wake_later(worker)

    def _obeyed(self, worker: SimWorker, finish: Callable[[], on.CommandDone]) -> None:
        if worker.alive:
            worker.engine.advance(self.now_s)
            self.to_core(worker, finish())
            self.wake_later(worker)

    def wake_later(self, worker: SimWorker) -> None:
        """Schedules the engine's next event. A worker needs one wake-up only, unless that is too late."""
        worker.due_s = max(self.now_s, worker.engine.next_s())
        if worker.due_s < worker.wakes_s:
            self._wake_at(worker, worker.due_s)

    def _wake_at(self, worker: SimWorker, at_s: float) -> None:
        worker.wakes_s = at_s
        self.at(at_s, self._wake, worker, at_s)

    def _wake(self, worker: SimWorker, at_s: float) -> None:
        if not worker.alive or worker.wakes_s != at_s:
            return
        worker.wakes_s = inf
        if worker.due_s > at_s:  # the event was postponed
            if worker.due_s < inf:
                self._wake_at(worker, worker.due_s)
            return
        engine = worker.engine
        engine.advance(self.now_s)
        ended = engine.happened()
        if ended:
            self._ended(worker, ended)
        self.wake_later(worker)

    def _ended(self, worker: SimWorker, ended: list[SimRequest]) -> None:
        tokens = {request.request_id: request.tokens for request in ended}
        finished: dict[str, Any] = {}
        for request in ended:
            if request.keeps:
                finished[request.request_id] = "stop"
            elif request.phase is EnginePhase.AWAY and request.tokens < request.length:
                answer_s = self.ledger.answer_s(request.request_id, request.turn, self.now_s)
                self.after(max(0.0, answer_s - self.now_s), self._answered, worker, request)
            else:
                finished[request.request_id] = "stop"
        self.to_core(worker, self._progress(worker, tokens, finished))

    def _answered(self, worker: SimWorker, request: SimRequest) -> None:
        if worker.alive:
            worker.engine.advance(self.now_s)
            worker.engine.resume(request)
            self.wake_later(worker)

    def _progress(self, worker: SimWorker, tokens: dict[str, int], finished: dict[str, Any]) -> on.Progress:
        engine = worker.engine
        return on.Progress(
            worker.worker_id, worker.epoch, worker.version, tokens, finished, len(engine.waiting), int(engine.kv)
        )

    @property
    def report_period_s(self) -> float:
        return self.scenario.balance.period_s / REPORTS_A_PERIOD

    def _report(self, worker: SimWorker) -> None:
        if not worker.alive:
            return
        engine = worker.engine
        if engine.requests:
            engine.advance(self.now_s)
            tokens = {request.request_id: engine.tokens_of(request) for request in engine.requests.values()}
            self.to_core(worker, self._progress(worker, tokens, {}))
        self.after(self.report_period_s, self._report, worker)

    def renew(self) -> None:
        """Continues every engine (partial rollout) with the newly published version, and recomputes its KV."""
        for worker in self.workers.values():
            worker.engine.advance(self.now_s)
            worker.engine.renew(self.scenario.cluster.load_s)
            self.wake_later(worker)

    def pause(self, paused: bool) -> None:
        """Pauses the engines while colocated training uses the accelerators, or resumes them."""
        for worker in self.workers.values():
            worker.engine.advance(self.now_s)
            worker.engine.paused = paused
            self.wake_later(worker)
