"""The simulated world with faults of workers, messages, trainer, prompts and storage. The faults and their times are
data.

Two views differ here. The orchestrator sees a session, which ends with its stream or by silence. The worker is a
process: it may die while its messages are in transit, hang, or continue decoding after its epoch has ended.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from dora.config import SessionsConfig
from dora.core import commands as do
from dora.core import events as on
from dora.core.rules.lease import COMMITS_FIRST
from dora.core.rules.stalls import STALLED
from dora.errors import DoraError
from dora.lab.sim.driver import Order
from dora.lab.sim.faults.served import ServedWorld
from dora.lab.sim.faults.wire import EpochStream, Wire
from dora.lab.sim.invariants import check_state, fingerprint
from dora.lab.sim.ledger import SimGroup, SimResponse, Violation
from dora.lab.sim.pool import SimPool, lost
from dora.lab.sim.scenario import Scenario
from dora.lab.sim.worker import SimWorker
from dora.lab.sim.world import TICK_S
from dora.lab.sim_engine.request import SimRequest

SILENCE_LIMIT_S = 8.0  # a worker that is silent for this long is lost (workers.silence_timeout_s)
STALL_LIMIT_S = 120.0  # a worker that reports and yields no token for so long is replaced (workers.stall_timeout_s)
TRAINER_LIMIT_S = 40.0  # a trainer that commits nothing for so long may be replaced (service.trainer_stall_timeout_s)
OPERATOR_PATIENCE_S = 900.0  # then an operator replaces a stalled trainer, whatever its lease
IDLE_LIMIT_S = 100.0  # a session whose environment asks nothing for so long is replaced or ended
RESTART_MOST_S = 6.0  # until a lost worker or trainer is restarted


@dataclass(slots=True)
class Process:
    """State of a worker's or pool's process in one epoch."""

    incarnation: int  # of the orchestrator that it is connected to; -1: none
    publication: int = 0  # of its hosted version: the number of earlier republications
    ended: dict[str, SimRequest] = field(default_factory=dict)  # responses that ended here and are not settled
    loads: dict[int, int] = field(default_factory=dict)  # command -> publication that it must load

    @property
    def is_away(self) -> bool:
        return self.incarnation < 0


Handled = tuple[float, on.Event, list[do.Command] | str]  # time, event, and the commands or the reason of its refusal


class UnsteadyWorld(ServedWorld):
    """A ServedWorld with message delays and faults of its members. Its core is checked after every event."""

    stall_timeout_s = STALL_LIMIT_S
    trainer_stall_timeout_s = TRAINER_LIMIT_S

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.session_limits = _session_limits(Random(f"session limits {seed}"))
        self.log: list[Handled] = []  # events that the orchestrators have handled
        self.traps: list[Callable[[do.WorkerCommand], bool]] = []  # called with every command; True: the trap is done
        self.sessions: dict[int, EpochStream] = {}  # by worker epoch
        self.ending = False  # admission has ended, or will end with the prompts
        self.dies_committing = False  # the trainer is lost at its next commit
        self.storage_faults = 0  # active now
        self.stalled: set[int] = set()  # epochs of workers that have stalled, now or before
        self.bad_commits = 0  # number of next commits that publish weights which no worker can reproduce
        self.bad_again = 0  # the same for the next republications
        self.loads: dict[int, int] = {}  # command -> version to load
        self.archive: dict[str, tuple[SimGroup, list[SimResponse]]] = {}  # every group ever admitted
        self.dropped: dict[str, str] = {}  # group -> reason of its cancellation
        self._away: set[str] = set()  # ids of processes that survived an orchestrator and have not reconnected
        self._incarnation = 0  # of the orchestrator
        self._began = 0  # position in the log at which this incarnation began
        self._processes: dict[int, Process] = {}  # by worker epoch
        self._names = 0
        super().__init__(scenario, seed)
        self._names = scenario.cluster.engines
        self.trainer.rest_s = self._rest_s
        if scenario.window.is_adaptive:
            self._signals = Random(f"signals {seed}")
            self.trainer.tells = self._tells

    def _rest_s(self) -> float:
        return self.random.random() * self.habits.trainer_rests_most_s

    def _tells(self, _groups: list[SimGroup]) -> tuple[float, float]:
        """Returns random signals that change an adaptive window often. It must keep every promise with any signals."""
        return self._signals.random() * self.scenario.trainer.step_s, self._signals.choice((0.0, 0.0, 0.5))

    def _tick(self) -> None:
        self.post(on.Tick())
        self._sweep_snapshots()
        self.after(2.0 * TICK_S * self.random.random(), self._tick)

    def _sweep_snapshots(self) -> None:
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
        self._archive(commands)
        self.check(event, commands)
        if self.traps:
            self._show_traps(commands)
        if self.dies_committing and isinstance(event, on.StepCommitted):
            self.dies_committing = False
            self.lose_trainer()

    def _published(self, version: int, bad: bool) -> bool:
        if bad:
            self.bad_weights.add(version)
        else:
            self.bad_weights.discard(version)
        return bad

    def _archive(self, commands: list[do.Command]) -> None:
        groups, responses = self.ledger.groups, self.ledger.responses
        for command in commands:
            group_id = ""
            if isinstance(command, do.AdmitGroup):
                group_id = command.group_id
            elif isinstance(command, do.ReplaceRequest) and command.replacement_id in responses:
                group_id = responses[command.replacement_id].group_id
            if (group := groups.get(group_id)) is not None:
                self.archive[group_id] = group, [responses[name] for name in group.request_ids]
            elif isinstance(command, do.DropGroup):
                self.dropped[command.group_id] = command.reason

    def check(self, event: on.Event, commands: list[do.Command]) -> None:
        """Checks the core's whole state after every event, its commands while storage is full, and that no worker is
        evicted because of weights that its trainer published.
        """
        check_state(self.machine.state)
        if self.storage_faults and any(isinstance(command, do.AdmitGroup) for command in commands):
            raise Violation(f"{event} admits a group while storage is full")
        if isinstance(event, on.CommandDone) and event.error_kind == "weights":
            version = self.loads.get(event.command_id)
            if version in self.bad_weights and any(isinstance(command, do.EvictWorker) for command in commands):
                raise Violation(f"{event.worker_id} is replaced, as it cannot load version {version}: nobody can")

        for command in commands:
            if not isinstance(command, do.EvictWorker) or not command.reason.startswith(STALLED):
                continue
            if command.epoch not in self.stalled:
                raise Violation(f"{command.worker_id} works, and is replaced: {command.reason}")

    def _show_traps(self, commands: Iterable[do.Command]) -> None:
        for command in commands:
            if isinstance(command, do.WorkerCommand):
                self.traps = [trap for trap in self.traps if not trap(command)]

    # ------------------------------------------------------------------------------------------------------- messages

    def session(self, worker: SimWorker) -> EpochStream:
        found = self.sessions.get(worker.epoch)
        if found is None:
            latency_s, broke = self.scenario.cluster.link_latency_s, partial(self.lose, worker, "its stream broke")
            found = self.sessions[worker.epoch] = EpochStream(
                Wire(self, latency_s, self.random, partial(self._read, worker), broke),
                Wire(self, latency_s, self.random, partial(self._hear, worker), broke),
            )
        return found

    def send(self, worker: SimWorker, order: Order) -> None:
        if isinstance(order[0], do.LoadVersion):
            self.loads[order[0].command_id] = order[0].version
            self.process(worker).loads[order[0].command_id] = self.ledger.publications[order[0].version]
        self.session(worker).to_worker.send(order)

    def to_core(self, worker: SimWorker, event: on.Event) -> None:
        process = self.process(worker)
        if isinstance(event, on.CommandDone) and event.ok and event.command_id in process.loads:
            process.publication = process.loads[event.command_id]
        if process.is_away:
            return
        self.session(worker).to_core.send(event)

    def _read(self, worker: SimWorker, order: Order) -> None:
        session = self.session(worker)
        if session.hung_until_s > self.now_s:
            session.unread.append(order)
        else:
            self._obey(worker, (order,))

    def _hear(self, worker: SimWorker, event: on.Event) -> None:
        """Passes a worker's message to the core, also after the end of its epoch: the core must distinguish these.
        Messages to an earlier incarnation of the orchestrator are dropped.
        """
        if self.process(worker).incarnation != self._incarnation:
            return
        if isinstance(event, on.WorkerLost | on.PoolLost):
            self.fence(worker, event.reason)
        else:
            self.post(event)

    def ask(self, event: on.Event, *, refused: bool = False) -> bool:
        """Posts an event that the core may, or if ``refused`` must, refuse unchanged. Returns whether it took it."""
        before = fingerprint(self.machine.state)
        try:
            self.post(event)
        except DoraError as error:
            self.log.append((self.now_s, event, str(error)))
            after = fingerprint(self.machine.state)
            if after != before:
                changed = ", ".join(name for name in before if before[name] != after[name])
                raise Violation(f"{event} was refused, yet changed {changed}") from error
            return False
        if refused:
            raise Violation(f"{event} was not refused")
        return True

    # -------------------------------------------------------------------------------------------------------- workers

    def running(self) -> list[SimWorker]:
        """Connected workers whose process is alive, by id."""
        return [worker for _, worker in sorted(self.workers.items()) if worker.alive]

    def kill(self, worker: SimWorker, share: float) -> None:
        """Kills the process. ``share`` of its messages in transit still arrive, then the end of its stream."""
        self._bury(worker)
        self.session(worker).to_core.end(lost(worker, "killed"), share)

    def lose(self, worker: SimWorker, reason: str) -> None:
        """Ends process and session together: the stream broke, or the orchestrator ended the worker."""
        self._bury(worker)
        self.fence(worker, reason)

    def fence(self, worker: SimWorker, reason: str, starts_again: bool = True) -> None:
        """Ends the epoch in the orchestrator, whatever the process does."""
        members: dict[str, Any] = self.pools if isinstance(worker, SimPool) else self.workers
        if members.get(worker.worker_id) is worker:
            del members[worker.worker_id]
            self.post(lost(worker, reason))
            if starts_again:
                self.after(self.random.random() * RESTART_MOST_S, self.start_again, worker.worker_id)

    def stop(self, command: do.StopWorker) -> None:
        worker = self.addressed(command)
        if worker is not None:
            self._bury(worker)
            self.fence(worker, "drained", starts_again=False)

    def take(self, member: SimWorker) -> None:
        self._bury(member)
        self.fence(member, "its machine was taken", starts_again=False)

    def join_new(self) -> None:
        self._names += 1
        self.join(f"w{self._names - 1}")

    def hang(self, worker: SimWorker, for_s: float) -> None:
        """The process hangs: it neither decodes nor reads nor answers. If it is silent too long, it is replaced."""
        session, until_s = self.session(worker), self.now_s + for_s
        session.hung_until_s = max(session.hung_until_s, until_s)
        worker.engine.advance(self.now_s)
        worker.engine.paused = True
        self.wake_later(worker)
        self.after(for_s, self._continue, worker)
        if for_s > SILENCE_LIMIT_S:
            self.after(SILENCE_LIMIT_S, self.lose, worker, "silent")

    def partition(self, worker: SimWorker, for_s: float, to_core: bool) -> None:
        """Silences one direction. If it lasts too long, the epoch ends. The worker continues until it learns that."""
        session = self.session(worker)
        wire = session.to_core if to_core else session.to_worker
        wire.silent_until_s = max(wire.silent_until_s, self.now_s + for_s)
        if for_s > SILENCE_LIMIT_S:
            self.after(SILENCE_LIMIT_S, self.fence, worker, "silent")
            self.after(for_s + 1.0, self._bury, worker)

    def stall(self, worker: SimWorker, for_s: float) -> None:
        """The engine yields no token for a while, or for ever; the process obeys and reports."""
        self.stalled.add(worker.epoch)
        worker.engine.advance(self.now_s)
        worker.engine.paused = True
        self.wake_later(worker)
        self.after(for_s, self._continue, worker)

    def slow_down(self, worker: SimWorker, times: float) -> None:
        if worker.alive:
            worker.engine.advance(self.now_s)
            worker.engine.slowness = times
            self.wake_later(worker)

    def start_again(self, name: str) -> None:
        if name not in self._away:
            super().start_again(name)

    def _bury(self, worker: SimWorker) -> None:
        if worker.alive:
            worker.alive = False
            worker.engine.advance(self.now_s)
            self.ended.append(worker.engine)

    def _continue(self, worker: SimWorker) -> None:
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

    # ------------------------------------------------------------------------------------------------ trainer, prompts

    def lose_trainer(self) -> None:
        """The trainer is lost. It restarts after a while and gets its uncommitted groups again."""
        if self.trainer.alive:
            self.trainer.die()
            self.after(self.random.random() * RESTART_MOST_S, self.trainer.attach)

    def stall_trainer(self, for_s: float) -> None:
        """The trainer keeps its connection and does nothing, for a while or for ever.

        Another one attaches once the lease has lapsed, or when an operator has lost patience: in a first step, and
        while the service waits for no trainer, no lease lapses.
        """
        trainer = self.trainer
        if trainer.alive and not trainer.stalled:
            trainer.stall()
            epoch = trainer.epoch
            self.after(for_s, self._trainer_goes_on, epoch)
            self.after(OPERATOR_PATIENCE_S, self._lose_patience, epoch)

    def lapse(self, command: do.LapseLease) -> None:
        if command.trainer_epoch != self.trainer.epoch or not self.trainer.has_stalled:
            super().lapse(command)
        self.after(self.random.random() * RESTART_MOST_S, self._replace_trainer, command.trainer_epoch)

    def _lose_patience(self, epoch: int) -> None:
        """Raises Violation if the lease of a trainer that has held a full step for so long should have lapsed."""
        state, trainer = self.machine.state, self.trainer
        if trainer.stalled and trainer.epoch == epoch:
            holds = state.window.step > state.window.newest and not self.ledger.evaluations
            if holds and state.lease.commits >= COMMITS_FIRST:
                raise Violation(f"the trainer holds step {state.window.newest} for ever, and its lease does not lapse")
            self._replace_trainer(epoch)

    def _replace_trainer(self, epoch: int) -> None:
        trainer = self.trainer
        if trainer.stalled and trainer.epoch == epoch:
            step = trainer.step
            trainer.attach()
            self.ask(on.StepCommitted(epoch, step), refused=True)

    def _trainer_goes_on(self, epoch: int) -> None:
        if self.trainer.stalled and self.trainer.epoch == epoch:
            self.trainer.go_on()

    def fill_storage(self, for_s: float) -> None:
        """Fills the storage for a while. Another such fault meanwhile extends the time."""
        self.storage_faults += 1
        self.post(on.StorageChanged("record: no room"))
        self.after(for_s, self._empty_storage)

    def _empty_storage(self) -> None:
        self.storage_faults -= 1
        if not self.storage_faults:
            self.post(on.StorageChanged(""))

    def end_prompts(self, left: int | None) -> None:
        """Limits the source to ``left`` more prompts. If it is None, the service ends admission now."""
        self.ending = True
        if left is None:
            self.post(on.AdmissionEnded())
        else:
            self.prompts_left = left

    def _ended(self, worker: SimWorker, ended: list[SimRequest]) -> None:
        whole = [request for request in ended if request.tokens >= request.length and not request.keeps]
        self.process(worker).ended.update((request.request_id, request) for request in whole)
        super()._ended(worker, ended)

    def _obey(self, worker: SimWorker, orders: Iterable[Order]) -> None:
        listed, process = list(orders), self.process(worker)
        for command, _ in listed:
            if isinstance(command, do.LoadVersion):
                process.ended.clear()
            elif isinstance(command, do.RemoveRequest):
                process.ended.pop(command.request_id, None)
        super()._obey(worker, listed)

    # -------------------------------------------------------------------------------------------------- processes

    def process(self, worker: SimWorker) -> "Process":
        found = self._processes.get(worker.epoch)
        if found is None:
            found = self._processes[worker.epoch] = Process(self._incarnation)
        return found


def _session_limits(random: Random) -> SessionsConfig:
    return SessionsConfig(
        idle_timeout_s=IDLE_LIMIT_S,
        total_timeout_s=random.choice((0.0, 300.0)),
        on_timeout=random.choice(("replace", "end")),
        replacements=random.choice((0, 1, 2)),
    )
