"""The simulated world with everything that can go wrong in it. What goes wrong, and when, is data: see fault.py.

Two views part here. The orchestrator sees a session: it ends with its stream, or by silence. The worker is a process:
it may die while what it sent is still under way, stand still, or go on decoding although its epoch is over.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any
from zlib import crc32

from dora.errors import DoraError
from dora.orchestrator.core import Machine
from dora.orchestrator.core import commands as do
from dora.orchestrator.core import events as on
from dora.sim.driver import Order
from dora.sim.invariants import check_state, fingerprint
from dora.sim.ledger import Violation
from dora.sim.pool import SimPool
from dora.sim.scenario import Scenario
from dora.sim.wire import Session, Wire
from dora.sim.worker import SimWorker
from dora.sim.workload import SimPrompt
from dora.sim.world import TICK_S, World

SILENCE_LIMIT_S = 8.0  # a worker not heard of for so long is lost (workers.silence_timeout_s)
RESTART_MOST_S = 6.0  # until a lost worker or trainer is started again


@dataclass(frozen=True, slots=True)
class Habits:
    """How those around a core keep it waiting, faults apart: the order of events follows from it."""

    prompts_most_s: float = 1.0  # until prompts are there
    verdict_most_s: float = 1.0  # until the verifier has judged a response
    trainer_rests_most_s: float = 0.0  # from a commit until the trainer asks for the next step
    odd_groups: float = 0.1  # share of prompts that bring a smaller group
    last_prompts: int | None = None  # the run ends with so many more; None: with a service that drains

    @classmethod
    def drawn(cls, random: Random) -> "Habits":
        return cls(
            random.choice((0.1, 1.0, 5.0)),
            random.choice((0.1, 1.0, 5.0)),
            random.choice((0.0, 0.0, 2.0, 8.0)),
            random.choice((0.1, 0.5)),
            random.choice((None, 0, 6)),
        )


Handled = tuple[float, on.Event, list[do.Command] | str]  # when, what, and the commands, or why it was refused


class UnreliableWorld(World):
    """A World whose messages take their time, whose members may fail, and whose core is checked after every event."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.random = Random(f"world {seed}")
        self.habits = Habits.drawn(Random(f"habits {seed}"))
        self.log: list[Handled] = []  # what an orchestrator starts again from
        self.traps: list[Callable[[do.WorkerCommand], bool]] = []  # are shown every command; True: sprung
        self.sessions: dict[int, Session] = {}  # by worker epoch
        self.prompts_left: int | None = None  # None: without end
        self.ending = False  # admission has ended, or will with the prompts
        self.dies_committing = False  # the trainer is lost with its next commit
        self.storage_faults = 0  # under way now
        self.bad_commits = 0  # so many of the next commits publish what no worker can reproduce,
        self.bad_again = 0  # and so many of the next times that something is published anew
        self.loads: dict[int, int] = {}  # command -> version that a worker was told to load
        self._names = 0
        self._priorities = Random(f"priorities {seed}").choice((1, 1, 1, 3))
        super().__init__(scenario, seed)
        self._names = scenario.cluster.engines
        self.trainer.rest_s = self._rest_s

    def _rest_s(self) -> float:
        return self.random.random() * self.habits.trainer_rests_most_s

    def _tick(self) -> None:
        self.post(on.Tick())
        self._sweep_snapshots()
        self.after(2.0 * TICK_S * self.random.random(), self._tick)

    def _sweep_snapshots(self) -> None:
        """As the service does at each tick: what workers that are gone have left, and no handoff knows."""
        epochs = {worker.epoch for worker in (*self.workers.values(), *self.pools.values())}
        kept = {handoff.locator for handoff in self.machine.state.handoffs.values()}
        for locator, snapshot in list(self.snapshots.items()):
            if snapshot.epoch not in epochs and locator not in kept:
                del self.snapshots[locator]

    def handled(self, event: on.Event, commands: list[do.Command]) -> None:
        if isinstance(event, on.StepCommitted):
            self.bad_commits -= self._published(event.step + 1, self.bad_commits > 0)
        elif isinstance(event, on.VersionRepublished):
            self.bad_again -= self._published(event.version, self.bad_again > 0)
        super().handled(event, commands)
        self.log.append((self.now_s, event, commands))
        self.check(event, commands)
        if self.traps:
            self._show_traps(commands)
        if self.dies_committing and isinstance(event, on.StepCommitted):
            self.dies_committing = False
            self.lose_trainer()

    def _published(self, version: int, bad: bool) -> bool:
        """Weights were stored, which workers can reproduce or cannot. Returns ``bad``."""
        if bad:
            self.bad_weights.add(version)
        else:
            self.bad_weights.discard(version)
        return bad

    def check(self, event: on.Event, commands: list[do.Command]) -> None:
        """The core's whole state, after every event; what it answers while storage is full; and that no worker ends for
        what its trainer has published."""
        check_state(self.machine.state)
        if self.storage_faults and any(isinstance(command, do.AdmitGroup) for command in commands):
            raise Violation(f"{event} admits a group while storage is full")
        if isinstance(event, on.CommandDone) and event.error_kind == "weights":
            version = self.loads.get(event.command_id)
            if version in self.bad_weights and any(isinstance(command, do.EvictWorker) for command in commands):
                raise Violation(f"{event.worker_id} is replaced, as it cannot load version {version}: nobody can")

    def _show_traps(self, commands: Iterable[do.Command]) -> None:
        for command in commands:
            if isinstance(command, do.WorkerCommand):
                self.traps = [trap for trap in self.traps if not trap(command)]

    # ------------------------------------------------------------------------------------------------------- messages

    def session(self, worker: SimWorker) -> Session:
        found = self.sessions.get(worker.epoch)
        if found is None:
            latency_s, broke = self.scenario.cluster.link_latency_s, partial(self.lose, worker, "its stream broke")
            found = self.sessions[worker.epoch] = Session(
                Wire(self, latency_s, self.random, partial(self._read, worker), broke),
                Wire(self, latency_s, self.random, partial(self._hear, worker), broke),
            )
        return found

    def send(self, worker: SimWorker, order: Order) -> None:
        if isinstance(order[0], do.LoadVersion):
            self.loads[order[0].command_id] = order[0].version
        self.session(worker).to_worker.send(order)

    def to_core(self, worker: SimWorker, event: on.Event) -> None:
        self.session(worker).to_core.send(event)

    def _read(self, worker: SimWorker, order: Order) -> None:
        session = self.session(worker)
        if session.hung_until_s > self.now_s:
            session.unread.append(order)
        else:
            self._obey(worker, (order,))

    def _hear(self, worker: SimWorker, event: on.Event) -> None:
        """Also from a worker whose epoch is over: it is the core that must tell them apart."""
        if isinstance(event, on.WorkerLost | on.PoolLost):
            self.fence(worker, event.reason)
        else:
            self.post(event)

    def ask(self, event: on.Event, *, refused: bool = False) -> None:
        """What the core may refuse (``refused``: must); then nothing may have changed."""
        before = fingerprint(self.machine.state)
        try:
            self.post(event)
        except DoraError as error:
            self.log.append((self.now_s, event, str(error)))
            after = fingerprint(self.machine.state)
            if after != before:
                changed = ", ".join(name for name in before if before[name] != after[name])
                raise Violation(f"{event} was refused, yet changed {changed}") from error
            return
        if refused:
            raise Violation(f"{event} was not refused")

    # -------------------------------------------------------------------------------------------------------- workers

    def running(self) -> list[SimWorker]:
        """Workers in session whose process lives, by id."""
        return [worker for _, worker in sorted(self.workers.items()) if worker.alive]

    def kill(self, worker: SimWorker, share: float) -> None:
        """The process dies. That ``share`` of what it has sent still arrives, and then the end of its stream."""
        self._bury(worker)
        self.session(worker).to_core.end(_lost(worker, "killed"), share)

    def lose(self, worker: SimWorker, reason: str) -> None:
        """Process and session end together: the stream broke, or the orchestrator ended the worker."""
        self._bury(worker)
        self.fence(worker, reason)

    def fence(self, worker: SimWorker, reason: str, starts_again: bool = True) -> None:
        """To the orchestrator this epoch is over, whatever the process does."""
        members: dict[str, Any] = self.pools if isinstance(worker, SimPool) else self.workers
        if members.get(worker.worker_id) is worker:
            del members[worker.worker_id]
            self.post(_lost(worker, reason))
            if starts_again:
                self.after(self.random.random() * RESTART_MOST_S, self._start_again, worker.worker_id)

    def stop(self, command: do.StopWorker) -> None:
        worker = self.addressed(command)
        if worker is not None:
            self._bury(worker)
            self.fence(worker, "drained", starts_again=False)

    def join_new(self) -> None:
        """A worker of a new name."""
        self._names += 1
        self.join(f"w{self._names - 1}")

    def hang(self, worker: SimWorker, for_s: float) -> None:
        """The process stands still: it neither decodes nor reads nor answers. Silent for too long, it is replaced."""
        session, until_s = self.session(worker), self.now_s + for_s
        session.hung_until_s = max(session.hung_until_s, until_s)
        worker.engine.advance(self.now_s)
        worker.engine.paused = True
        self.wake_later(worker)
        self.after(for_s, self._go_on, worker)
        if for_s > SILENCE_LIMIT_S:
            self.after(SILENCE_LIMIT_S, self.lose, worker, "silent")

    def partition(self, worker: SimWorker, for_s: float, to_core: bool) -> None:
        """One direction is silent. For too long: the epoch is over, while the worker goes on until that reaches it."""
        session = self.session(worker)
        wire = session.to_core if to_core else session.to_worker
        wire.silent_until_s = max(wire.silent_until_s, self.now_s + for_s)
        if for_s > SILENCE_LIMIT_S:
            self.after(SILENCE_LIMIT_S, self.fence, worker, "silent")
            self.after(for_s + 1.0, self._bury, worker)

    def slow_down(self, worker: SimWorker, times: float) -> None:
        if worker.alive:
            worker.engine.advance(self.now_s)
            worker.engine.slowness = times
            self.wake_later(worker)

    def _start_again(self, worker_id: str) -> None:
        if worker_id.startswith("pool-"):
            if worker_id not in self.pools:
                self.join_pool(worker_id)
        elif worker_id not in self.workers:
            self.join(worker_id)

    def _bury(self, worker: SimWorker) -> None:
        if worker.alive:
            worker.alive = False
            worker.engine.advance(self.now_s)
            self.ended.append(worker.engine)

    def _go_on(self, worker: SimWorker) -> None:
        session = self.session(worker)
        if not worker.alive or session.hung_until_s > self.now_s:
            return
        worker.engine.advance(self.now_s)
        worker.engine.paused = False
        unread, session.unread = session.unread, []
        self._obey(worker, unread)

    def _obeyed(self, worker: SimWorker, finish: Callable[[], on.CommandDone]) -> None:
        still_s = self.session(worker).hung_until_s - self.now_s
        if still_s > 0.0:
            self.after(still_s, self._obeyed, worker, finish)
        else:
            super()._obeyed(worker, finish)

    def _report(self, worker: SimWorker) -> None:
        still_s = self.session(worker).hung_until_s - self.now_s
        if still_s > 0.0:
            self.after(still_s, self._report, worker)
        else:
            super()._report(worker)

    # ----------------------------------------------------------------------------------- trainer, prompts, orchestrator

    def lose_trainer(self) -> None:
        """It is started again after a while, and gets what it has not committed once more."""
        if self.trainer.alive:
            self.trainer.die()
            self.after(self.random.random() * RESTART_MOST_S, self.trainer.attach)

    def fill_storage(self, for_s: float) -> None:
        """Nothing can be stored for a while; a fault that strikes meanwhile prolongs it."""
        self.storage_faults += 1
        self.post(on.StorageChanged("record: no room"))
        self.after(for_s, self._empty_storage)

    def _empty_storage(self) -> None:
        self.storage_faults -= 1
        if not self.storage_faults:
            self.post(on.StorageChanged(""))

    def end_prompts(self, left: int | None) -> None:
        """The source has only so many prompts left; None: the service admits nothing more, now."""
        self.ending = True
        if left is None:
            self.post(on.AdmissionEnded())
        else:
            self.prompts_left = left

    def priority(self, prompt_id: str) -> int:
        """In a quarter of the seeds prompts differ in it."""
        return crc32(prompt_id.encode()) % self._priorities

    def draw(self, command: do.DrawPrompts) -> None:
        self.after(self.random.random() * self.habits.prompts_most_s, self._answer, command.count)

    def _answer(self, asked: int) -> None:
        """At least one prompt, as long as there are any; it need not be as many as were asked for."""
        count = self.random.randint(1, asked)
        if self.prompts_left is not None:
            count = min(count, self.prompts_left)
            self.prompts_left -= count
        self.offer([self._sized(prompt) for prompt in self.prompts.take(count)], exhausted=not count)

    def _sized(self, prompt: SimPrompt) -> SimPrompt:
        """Groups have the scenario's size at most; some are smaller."""
        if self.random.random() >= self.habits.odd_groups:
            return prompt
        size = self.random.randint(1, prompt.group_size)
        return replace(prompt, group_size=size, lengths=prompt.lengths[:size], turns=prompt.turns[:size])

    def score(self, command: do.ScoreRequest) -> None:
        self.ledger.check_finished(command.request_id)
        verdict_s = self.random.random() * self.habits.verdict_most_s
        self.after(verdict_s, self.judged, command.request_id)

    def restart(self) -> None:
        """The orchestrator starts again from its log, and must come to where it was. All streams break."""
        machine = Machine(self.config)
        for now_s, event, outcome in self.log:
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
        self.machine = machine
        self.lose_trainer()
        for worker in (*self.workers.values(), *self.pools.values()):
            self.lose(worker, "the orchestrator was lost")


def _lost(worker: SimWorker, reason: str) -> on.WorkerLost | on.PoolLost:
    kind = on.PoolLost if isinstance(worker, SimPool) else on.WorkerLost
    return kind(worker.worker_id, worker.epoch, reason)
