"""Faults as data: a schedule is drawn from a seed, printed, shrunk and replayed with the same effect."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from dora.core import commands as do
from dora.core import events as on
from dora.core.rules.lease import COMMITS_FIRST
from dora.errors import InvalidValue, one_of
from dora.lab.sim.faults.crash import crash
from dora.lab.sim.faults.fault import Fault, pick
from dora.lab.sim.faults.handoff_faults import kill_in_handoff, migrate, strand
from dora.lab.sim.faults.pool_faults import inject_into_pool
from dora.lab.sim.faults.session_faults import inject_into_session
from dora.lab.sim.faults.unreliable import UnreliableWorld
from dora.lab.sim.faults.unsteady import SILENCE_LIMIT_S, STALL_LIMIT_S, TRAINER_LIMIT_S
from dora.lab.sim.faults.wire import GAP_LIMIT_S, Trouble
from dora.lab.sim.worker import FOREVER_S, STUCK, SimWorker
from dora.lab.sim.world import TICK_S

SLOWEST: Final = 20.0
SUBJECTS: Final = 1 << 16
FULL_MOST_S: Final = 30.0
NOTICE: Final = "notice"  # if the kinds include this, workers and pools may share machines
NOTICE_MOST_S: Final = 20.0
POOL: Final = "pool"  # if the kinds include this, clusters may have pools
SESSION: Final = "session"  # if the kinds include this, responses may be sessions, and groups may grow
# Commands that fail, with the error kinds that workers report (dora/worker/loop.py).
REFUSALS: Final[tuple[tuple[type[do.WorkerCommand], str], ...]] = (
    (do.CopyOut, "refused"),
    (do.CopyOut, "not_movable"),
    (do.CopyIn, "refused"),
    (do.ReserveSlot, "refused"),
    (do.LoadVersion, "refused"),
    (do.StartRequest, "refused"),
    (do.StartRequest, "invalid"),
    (do.CopyIn, "not_movable"),
)


@dataclass(frozen=True, slots=True)
class FaultKind:
    meaning: str
    strike: Callable[[UnreliableWorld, Fault], None]
    weight: float = 1.0


def draw_faults(seed: int, kinds: Sequence[str], horizon_s: float, mean_count: float) -> tuple[Fault, ...]:
    """Draws 0 to twice ``mean_count`` faults of these kinds (at least one) before ``horizon_s``, in time order."""
    random = Random(f"faults {seed}")
    count = random.randint(0, round(2 * mean_count))
    chosen = random.choices(kinds, [KINDS[kind].weight for kind in kinds], k=count)
    times = sorted(random.random() * horizon_s for _ in range(count))
    return tuple(
        Fault(round(at_s, 3), kind, random.randrange(SUBJECTS), round(random.random(), 3))
        for at_s, kind in zip(times, chosen, strict=True)
    )


def kinds_of(names: str) -> tuple[str, ...]:
    """Parses ``all`` or names of kinds separated by commas. Raises InvalidValue with the nearest name."""
    if names == "all":
        return tuple(KINDS)
    for name in names.split(","):
        if name not in KINDS:
            raise InvalidValue("--faults", name, one_of(name, ("all", *KINDS)))
    return tuple(dict.fromkeys(names.split(",")))


def strike(world: UnreliableWorld, fault: Fault) -> None:
    KINDS[fault.kind].strike(world, fault)


# ------------------------------------------------------------------------------------------------------------ workers


def _on_worker(strike: Callable[[UnreliableWorld, Fault, SimWorker], None]) -> Callable[[UnreliableWorld, Fault], None]:
    def struck(world: UnreliableWorld, fault: Fault) -> None:
        worker = pick(world.running(), fault.subject)
        if worker is not None:
            strike(world, fault, worker)

    return struck


def _kill(world: UnreliableWorld, fault: Fault, worker: SimWorker) -> None:
    world.kill(worker, fault.amount)


def _slow(world: UnreliableWorld, fault: Fault, worker: SimWorker) -> None:
    world.slow_down(worker, 1.0 + fault.amount * (SLOWEST - 1.0))
    world.after((1.0 - fault.amount) * 30.0, world.slow_down, worker, 1.0)


def _hang(world: UnreliableWorld, fault: Fault, worker: SimWorker) -> None:
    world.hang(worker, 2.0 * fault.amount * SILENCE_LIMIT_S)


def _stall(world: UnreliableWorld, fault: Fault, worker: SimWorker) -> None:
    world.stall(worker, 2.0 * fault.amount * STALL_LIMIT_S if fault.subject // 64 % 2 else FOREVER_S)


def _partition(world: UnreliableWorld, fault: Fault, worker: SimWorker) -> None:
    world.partition(worker, 2.0 * fault.amount * SILENCE_LIMIT_S, to_core=fault.subject // 64 % 2 == 0)


def _refuse(world: UnreliableWorld, fault: Fault, worker: SimWorker) -> None:
    command, error_kind = REFUSALS[fault.subject // 64 % len(REFUSALS)]
    worker.refusals[command] = [error_kind] * (1 + int(fault.amount * 2.99))
    migrate(world, fault)


def _trouble(trouble: Trouble) -> Callable[[UnreliableWorld, Fault], None]:
    """Applies the trouble to the next message of one direction. A late one is delayed up to twice a stream's limit."""

    def meet(world: UnreliableWorld, fault: Fault, worker: SimWorker) -> None:
        session = world.session(worker)
        wire = session.to_core if fault.subject // 64 % 2 == 0 else session.to_worker
        wire.troubles.append((trouble, 2.0 * fault.amount * GAP_LIMIT_S))

    return _on_worker(meet)


def _join(world: UnreliableWorld, fault: Fault) -> None:
    world.join_new()


def _leave(world: UnreliableWorld, fault: Fault, worker: SimWorker) -> None:
    world.ask(on.DrainRequested(worker.worker_id))


def _notice(world: UnreliableWorld, fault: Fault) -> None:
    if hosts := world.scenario.cluster.hosts:
        host, within_s = f"h{fault.subject % hosts}", max(0.1, NOTICE_MOST_S * fault.amount)
        world.notice(host, within_s, away_s=fault.subject // hosts % 8)


# ------------------------------------------------------------------------------------------- trainer and orchestrator


def _trainer(world: UnreliableWorld, fault: Fault) -> None:
    """The trainer is lost now or with its next commit; it opens its stream again; or it repeats a commit."""
    trainer = world.trainer
    match fault.subject % 4:
        case 0:
            world.lose_trainer()
        case 1:
            world.dies_committing = True
        case 2 if trainer.alive and not trainer.stalled:
            trainer.request()
        case 3 if trainer.committed:
            world.ask(on.StepCommitted(trainer.epoch, world.machine.state.window.newest - 1), refused=True)


def _stall_trainer(world: UnreliableWorld, fault: Fault) -> None:
    """Half of the cases never end; three of four begin only once the trainer's pace is known."""
    trainer, lease = world.trainer, world.machine.state.lease
    if fault.subject // 128 % 4 and lease.commits < COMMITS_FIRST and not trainer.ended:
        world.after(TICK_S, _stall_trainer, world, fault)
        return
    world.stall_trainer(4.0 * fault.amount * TRAINER_LIMIT_S if fault.subject // 64 % 2 else FOREVER_S)


def _publish(world: UnreliableWorld, fault: Fault) -> None:
    """The next commits publish weights that no worker can reproduce, or one does, and so do its next republications.

    Other variants: a worker refuses good weights; a load never ends; a client asks for what a rejection forbids, or
    republishes a version that was not rejected.
    """
    state, times, newest = world.machine.state, 1 + int(fault.amount * 2.99), world.machine.state.window.newest
    worker, epoch = pick(world.running(), fault.subject // 64), world.trainer.epoch
    match fault.subject % 8:
        case 0 | 1:
            world.bad_commits += times
        case 2 | 3:
            world.bad_commits, world.bad_again = world.bad_commits + 1, world.bad_again + times
        case 4 | 5 if worker is not None:
            worker.refusals[do.LoadVersion] = ["weights"] * times
        case 6 if worker is not None:
            worker.refusals[do.LoadVersion] = [STUCK]
        case 7 if state.rejected:
            world.ask(on.StepRequested(epoch, newest), refused=True)
            world.ask(on.StepCommitted(epoch, newest), refused=True)
            world.ask(on.VersionRepublished(epoch - 1, min(state.rejected)), refused=True)
        case 7:
            world.ask(on.VersionRepublished(epoch, newest), refused=True)


def _storage(world: UnreliableWorld, fault: Fault) -> None:
    world.fill_storage(fault.amount * FULL_MOST_S)


def _end(world: UnreliableWorld, fault: Fault) -> None:
    world.end_prompts(int(fault.amount * 40.0) if fault.subject % 2 else None)


# ----------------------------------------------------------------------------------------------------------- operator


def _evaluate(world: UnreliableWorld, fault: Fault) -> None:
    running, subject, newest = world.machine.state.evaluations.running, fault.subject, world.machine.state.window.newest
    if running and subject % 4 == 0:
        world.ask(on.EvaluationCancelled(pick(list(running), subject // 4) or "", "asked for"))
        return
    evaluation_id, version = f"e{len(world.ledger.evaluations)}", (-1, newest, newest - 1, newest - 3)[subject // 4 % 4]
    share = (0.0, 0.0, 0.2, 0.4)[subject // 16 % 4]
    event = world.evaluate(evaluation_id, 1 + int(fault.amount * 7.99), version, share)
    if not world.ask(event):
        world.ledger.evaluations[evaluation_id].ended = True


def _rebalance(world: UnreliableWorld, fault: Fault) -> None:
    world.ask(on.RebalanceRequested())


def _open(world: UnreliableWorld, fault: Fault) -> None:
    state = world.machine.state
    version = state.window.newest - fault.subject % 4
    if state.exhausted or state.window.admissible(version) < 1:
        world.ask(on.GroupRequested(on.OfferedPrompt("p-none", "task", 5, 1, 60), version), refused=True)
        return
    for prompt in world.drawn(1):
        world.service.read(prompt)
        world.post(on.GroupRequested(world.known_prompt(prompt.prompt_id), version))


def _cancel(world: UnreliableWorld, fault: Fault) -> None:
    state = world.machine.state
    waiting = pick(list(state.backlog), fault.subject) if fault.subject % 3 == 0 else None
    if waiting is not None:
        world.ask(on.PromptCancelled(waiting.prompt.prompt_id))
        return
    group_id = pick(sorted(state.group_row), fault.subject)
    if group_id is not None:
        world.ask(on.GroupCancelled(group_id, "asked for"))


def _stale(world: UnreliableWorld, fault: Fault) -> None:
    """Sends invalid messages, or messages of an ended epoch, which the core must ignore or refuse."""
    state, trainer, worker = world.machine.state, world.trainer, pick(world.running(), fault.subject)
    newest, epoch, name = state.window.newest, trainer.epoch, worker.worker_id if worker is not None else "w0"
    request_id = pick(sorted(state.request_row), fault.subject) or "g0.0"
    refused: tuple[on.Event, ...] = (
        on.StepRequested(epoch - 1, newest),
        on.StepRequested(epoch, newest + 1),
        on.StepCommitted(epoch, newest + 1),
        *((on.StepCommitted(epoch, newest),) if state.window.step <= newest else ()),
        on.StepCommitted(epoch - 1, newest),
        on.TrainerAttached(epoch, trainer.pace.groups_per_step),
        *((on.TrainerAttached(epoch + 1, trainer.pace.groups_per_step + 1),) if newest else ()),
        on.PromptsOffered((on.OfferedPrompt("p", "task", 5, 1, 60),) * 999),
        on.GroupCancelled("g-none", "asked for"),
        on.PromptCancelled("p-none"),
        on.MigrationRequested("g-none.0", name),
        on.DrainRequested("w-none"),
        *((on.WorkerJoined(name, 1_000_000, 6, 400),) if name in state.workers else ()),
    )
    ignored: tuple[on.Event, ...] = (
        on.Progress(name, 0, 0, {request_id: 7}, {request_id: "stop"}),
        on.CommandDone(name, 0, state.commands_sent),
        on.CommandDone(name, worker.epoch if worker is not None else 0, 0),
        on.WorkerLost(name, 0, "of an epoch that is over"),
        on.RequestScored("g-none.0"),
    )
    chosen = fault.subject // 64 % (len(refused) + len(ignored))
    world.ask((*refused, *ignored)[chosen], refused=chosen < len(refused))


KINDS: Final[dict[str, FaultKind]] = {
    "kill": FaultKind("a worker dies, at any point of its life", _on_worker(_kill)),
    "handoff": FaultKind("source or target die when a handoff comes to a phase", kill_in_handoff, 2.0),
    "slow": FaultKind("a worker takes up to 20 times longer for a while", _on_worker(_slow)),
    "hang": FaultKind("a worker stands still for a while, or for too long", _on_worker(_hang)),
    "partition": FaultKind("one direction between a worker and the orchestrator is silent", _on_worker(_partition)),
    "lose": FaultKind("a message never arrives", _trouble(Trouble.LOST), 0.5),
    "delay": FaultKind("a message arrives late", _trouble(Trouble.LATE)),
    "duplicate": FaultKind("a message arrives twice", _trouble(Trouble.DUPLICATED), 0.5),
    "reorder": FaultKind("a message is overtaken by later ones", _trouble(Trouble.OVERTAKEN), 0.5),
    "copy": FaultKind("copies, reservations, loads or starts fail", _on_worker(_refuse), 2.0),
    "trainer": FaultKind("the trainer is lost before or after a commit, or asks twice", _trainer),
    "crash": FaultKind("the orchestrator dies, and starts again with what its journal has kept", crash, 0.3),
    "join": FaultKind("a worker joins", _join, 0.5),
    "leave": FaultKind("a worker is drained and leaves", _on_worker(_leave), 0.5),
    "migrate": FaultKind("an operator moves a request", migrate),
    "rebalance": FaultKind("an operator asks for a re-balancing", _rebalance, 0.5),
    "cancel": FaultKind("a group is cancelled, with a reason, or a prompt taken back", _cancel),
    "stale": FaultKind("an event that is wrong or too late", _stale),
    "end": FaultKind("prompts run out, or the service drains", _end, 0.2),
    # last, so that the seeds of the other kinds stay the same
    "strand": FaultKind("a source dies in a handoff, and then something happens to what is left of it", strand),
    "storage": FaultKind("storage is full for a while: nothing may be admitted", _storage, 0.5),
    "publish": FaultKind("the trainer publishes what no worker can reproduce, and then publishes it anew", _publish),
    POOL: FaultKind(
        "requests are parked, and a pool is lost, silent, refuses or drops what it holds", inject_into_pool, 2.0
    ),
    "evaluate": FaultKind("an evaluation is asked for, or ends early", _evaluate),
    "stall": FaultKind("a worker reports and yields no token, for a while or for ever", _on_worker(_stall), 0.5),
    "lease": FaultKind(
        "the trainer keeps its connection and commits nothing, for a while or for ever", _stall_trainer, 0.5
    ),
    SESSION: FaultKind(
        "an environment fails, stands still, ends early or asks what it must not", inject_into_session, 2.0
    ),
    "open": FaultKind("a caller opens a group of a version of its choice, which the window may forbid", _open, 0.5),
    NOTICE: FaultKind("a machine is taken by notice, with its workers and pool, and comes again", _notice),
}
