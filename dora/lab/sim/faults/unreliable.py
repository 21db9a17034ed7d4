"""The simulated world with crashes of the orchestrator, which workers and pools survive. Other faults are in
unsteady.py, and schedules of faults in fault.py.
"""

from dataclasses import replace
from typing import Any

from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.errors import DoraError
from dora.lab.sim.faults.service import PersistedState
from dora.lab.sim.faults.unsteady import RESTART_MOST_S, Process, UnsteadyWorld
from dora.lab.sim.invariants import fingerprint
from dora.lab.sim.ledger import SimResponse, Violation
from dora.lab.sim.pool import SimPool
from dora.lab.sim.worker import SimWorker
from dora.lab.sim_engine.engine import EnginePhase
from dora.lab.sim_engine.request import SimRequest


class UnreliableWorld(UnsteadyWorld):
    """An UnsteadyWorld whose orchestrator may crash (crash.py) while workers and pools survive."""

    def check_replay(self) -> None:
        """Raises Violation if a replay of this incarnation's events gives another result."""
        machine = Machine(self.config)
        for now_s, event, outcome in self.log[self._began :]:
            try:
                again: list[do.Command] | str = machine.handle(event, now_s)
            except DoraError as error:
                again = str(error)
            if again != outcome:
                raise Violation(f"replayed at {now_s:.3f} s, {event} gives {again}, not {outcome}")
        before, after = fingerprint(self.machine.state), fingerprint(machine.state)
        if before != after:
            changed = ", ".join(name for name in before if before[name] != after[name])
            raise Violation(f"replayed, the state differs in {changed}")

    @property
    def incarnation(self) -> int:
        """The orchestrator's incarnation; the first is 0."""
        return self._incarnation

    def begin_incarnation(self, persisted: PersistedState) -> None:
        """Starts another orchestrator with an empty core. All streams have broken."""
        self._incarnation += 1
        self.service.end()
        self._service = None
        self._began = len(self.log)
        self.machine = Machine(self.config)
        self.service.restore(persisted)
        self.retired = persisted.restored.retired
        self.pinned.clear()
        self.snapshots.clear()
        self.traps.clear()
        self._now.clear()
        if self.trainer.alive:
            self.lose_trainer()

    def carry_on(self) -> None:
        """Repeats the reports that a new orchestrator needs. Environments see the turns that have ended again."""
        for request_id, response in list(self.ledger.responses.items()):
            if response.idle and not response.finished and self.ledger.has_started(response):
                self.call_environment(request_id, response)
        if self.storage_faults:
            self.post(on.StorageChanged("record: no room"))
        if self.ending and self.prompts_left is None:
            self.post(on.AdmissionEnded())

    def outlives(self, worker: SimWorker, may: bool) -> bool:
        """Whether the process survives. Otherwise it ends and is restarted after a while."""
        members: dict[str, Any] = self.pools if isinstance(worker, SimPool) else self.workers
        del members[worker.worker_id]
        if worker.alive and may:
            self._away.add(worker.worker_id)
            return True
        self._bury(worker)
        self.after(self.random.random() * RESTART_MOST_S, self.start_again, worker.worker_id)
        return False

    def reborn(self, worker: SimWorker) -> SimWorker:
        """The surviving process, which waits for a service. Its handoffs with other workers are undone."""
        engine, before = worker.engine, self.process(worker)
        engine.advance(self.now_s)
        worker.alive = False
        engine.paused, engine.slowness = False, 1.0
        self._epochs += 1
        if isinstance(worker, SimPool):
            again: SimWorker = SimPool(
                worker.worker_id, self._epochs, engine, kv_tokens=worker.kv_tokens, state_tokens=worker.state_tokens
            )
        else:
            again = SimWorker(worker.worker_id, self._epochs, engine, version=worker.version)
            again.full_precision = worker.full_precision
        self._processes[again.epoch] = Process(-1, before.publication, before.ended)
        for request_id, request in list(engine.requests.items()):
            engine.thaw(request_id)
            if request.phase is EnginePhase.AWAY and request.tokens < request.length and not request.keeps:
                answer_s = self.ledger.answer_s(request_id, request.turn, self.now_s)
                self.after(max(0.0, answer_s - self.now_s), self._answered, again, request)
        self.wake_later(again)
        return again

    def hello(self, worker: SimWorker) -> on.WorkerJoined | on.PoolJoined:
        """The join event of a reconnected process. As in the service, its claims are validated first."""
        worker.engine.advance(self.now_s)
        cluster, engine, process = self.scenario.cluster, worker.engine, self.process(worker)
        host = self.host_of(worker.worker_id)
        has = {request.request_id: engine.tokens_of(request) for request in engine.requests.values()}
        if isinstance(worker, SimPool):
            return on.PoolJoined(worker.worker_id, worker.epoch, worker.kv_tokens, host, has)
        has |= {request_id: request.length for request_id, request in process.ended.items()}
        version = worker.version if process.publication == self.ledger.publications[worker.version] else -1
        known = self.ledger.responses
        claimed = {
            name: tokens
            for name, tokens in has.items()
            if name in known
            and known[name].version == version
            and self._continues(known[name], engine.requests.get(name), tokens)
        }
        joined = on.WorkerJoined(worker.worker_id, worker.epoch, cluster.slots, cluster.kv_tokens, host, version)
        return replace(joined, requests=claimed, full_precision=worker.full_precision)

    def _continues(self, response: SimResponse, request: SimRequest | None, tokens: int) -> bool:
        if not response.prompt.sessions or request is None:
            return tokens >= response.tokens
        lacks_last = request.turn + 1 == response.turn and request.is_kept and not response.forked
        return lacks_last or (request.turn == response.turn and tokens >= response.tokens)

    def enter(self, worker: SimWorker) -> None:
        members: dict[str, Any] = self.pools if isinstance(worker, SimPool) else self.workers
        members[worker.worker_id] = worker
        self._away.discard(worker.worker_id)
        self.process(worker).incarnation = self._incarnation

    def welcome(self, worker: SimWorker) -> None:
        """The worker continues the requests that the core assigned to it again, and reports or removes the others."""
        if isinstance(worker, SimPool):
            return  # the core orders it to remove requests
        state, known = self.machine.state, self.machine.state.worker_at(worker.worker_id, worker.epoch)
        goes_on: set[str] = set()
        if known is not None:
            rows = {row for row in known.rows if not state.requests["starting"][row]} | known.kept
            goes_on = {state.request_id[row] for row in rows}
        for request_id in goes_on:
            self.service.buffer.goes_on(state.rows()[request_id], worker.worker_id)
        process = self.process(worker)
        for request_id in list(worker.engine.requests.keys() - goes_on):
            worker.engine.remove(request_id)
        process.ended = {name: request for name, request in process.ended.items() if name in goes_on}
        tokens = {name: request.length for name, request in process.ended.items()}
        tokens |= {name: request.tokens for name, request in worker.engine.requests.items() if request.is_kept}
        if tokens:
            self.to_core(worker, self._progress(worker, tokens, dict.fromkeys(tokens, "stop")))
        self.wake_later(worker)
        self._report(worker)

    def come_back(self, worker: SimWorker) -> None:
        """Reconnects a process late, unless another crash came first."""
        if worker.worker_id not in self._away or not worker.alive:
            return
        joined = self.hello(worker)
        self.enter(worker)
        self.post(joined)
        self.welcome(worker)
