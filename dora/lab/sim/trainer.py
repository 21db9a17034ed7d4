"""The simulated trainer: it collects a step, trains it in micro-batches as they fill, commits and begins the next."""

from collections.abc import Callable
from typing import Any, Final, Protocol

from dora.core import Machine
from dora.core import events as on
from dora.lab.sim.ledger import SimGroup, SimLedger
from dora.lab.sim.scenario import Scenario, TrainerPace

REJECTION_NOTED_S: Final = 0.01  # until the trainer has read the end of its stream


class TrainerWorld(Protocol):
    scenario: Scenario
    machine: Machine
    ledger: SimLedger
    now_s: float

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None: ...
    def post(self, event: on.Event) -> None: ...
    def pause(self, paused: bool) -> None: ...


class SimTrainer:
    """One trainer. ``busy`` collects its computing intervals. ``on_step`` is called for each committed step."""

    def __init__(self, world: TrainerWorld, pace: TrainerPace) -> None:
        self.world, self.pace = world, pace
        self.epoch = 0
        self.step = 0
        self.committed = 0  # in steps
        self.alive = True
        self.stalled = False  # it keeps its connection and does nothing
        self.has_stalled = False  # since its last commit
        self.ended = False  # prompts have run out
        self.holds_gpus = False
        self.busy: list[tuple[float, float]] = []
        self.rest_s: Callable[[], float] = lambda: 0.0  # from a commit to the next request
        self.after_commit: Callable[[], None] = lambda: None  # called at each commit, before accelerators are released
        # signals of a step, sent with its commit
        self.tells: Callable[[list[SimGroup]], tuple[float, ...]] = self._measured
        self.on_step: Callable[[int, float, float, list[SimGroup], list[tuple[float, float]]], None] | None = None
        self.began_s = 0.0
        self._requested_s = 0.0  # time of the step's request
        self._groups = 0
        self._full = False
        self._trained = 0  # trained micro-batches of this step
        self._computing = False
        self._streams = 0  # number of streams; results from an earlier one are void

    @property
    def at_work(self) -> bool:
        return self._computing or self._trained == self.pace.micro_batches

    def attach(self) -> None:
        """Attaches a new trainer, or the same one after a restart. Uncommitted groups are delivered again."""
        self.epoch += 1
        self.alive, self.stalled = True, False
        self.world.post(on.TrainerAttached(self.epoch, self.pace.groups_per_step))
        self.request()

    def die(self) -> None:
        """Ends the trainer and its uncommitted work. The service is not informed."""
        self.alive = self.stalled = False
        self._streams += 1
        self._let_gpus_go()

    def stall(self) -> None:
        """Stops the trainer's own work. Its connection and its stream stay open."""
        self.stalled = self.has_stalled = True
        self._streams += 1
        self._let_gpus_go()

    def go_on(self) -> None:
        self.stalled = False
        self.request()

    def request(self) -> None:
        """Opens the stream of the first uncommitted step. Rejected versions are published again first."""
        self._streams += 1
        if self.world.machine.state.rejected:
            self.world.after(self.pace.publish_s + self.rest_s(), self._republish, self._streams)
            return
        self.ended = False
        self.step = self.world.machine.state.window.newest
        self._groups = self._trained = 0
        self._full = self._computing = False
        self.busy = []
        self._requested_s = self.world.now_s
        self.world.ledger.stream_began()
        self.world.post(on.StepRequested(self.epoch, self.step))

    def rejected(self) -> None:
        """Ends the stream because workers have rejected a version. The step's computation begins again."""
        self._streams += 1
        if self.alive and not self.stalled:
            self._let_gpus_go()
            self.world.after(REJECTION_NOTED_S, self._continue, self._streams)

    def _republish(self, stream: int) -> None:
        if stream == self._streams:  # otherwise the trainer was lost meanwhile or has begun already
            self.world.post(on.VersionRepublished(self.epoch, min(self.world.machine.state.rejected)))
            self.request()

    def received(self) -> None:
        self._groups += 1
        self._compute()

    def closed(self, exhausted: bool) -> None:
        """Ends the stream. Without any group, the training is complete."""
        self.ended = exhausted and not self._groups
        if self.ended or not self.alive or self.stalled:
            return
        self._full = True
        if self.world.scenario.cluster.colocated:
            self.holds_gpus = True
            self.world.pause(True)
        self._compute()

    def _compute(self) -> None:
        pace = self.pace
        needed = -(-pace.groups_per_step * (self._trained + 1) // pace.micro_batches)
        ready = self._full or (pace.streams and self._groups >= needed)
        if self._computing or not ready or self._trained == pace.micro_batches or not self.alive or self.stalled:
            return
        self._computing = True
        self.world.after(pace.step_s / pace.micro_batches, self._computed, self._streams, self.world.now_s)

    def _computed(self, stream: int, began_s: float) -> None:
        if stream != self._streams:
            return
        self.busy.append((began_s, self.world.now_s))
        self._computing = False
        self._trained += 1
        if self._trained == self.pace.micro_batches:
            self.world.after(self.pace.publish_s, self._commit, stream)
        else:
            self._compute()

    def _commit(self, stream: int) -> None:
        if stream != self._streams:
            return
        world = self.world
        groups = world.ledger.train()
        if self.on_step is not None:
            self.on_step(self.step, self.began_s, world.now_s, groups, self.busy)
        self.began_s = world.now_s
        self.committed += 1
        self.has_stalled = False
        world.post(on.StepCommitted(self.epoch, self.step, *self.tells(groups)))
        self.after_commit()
        self._let_gpus_go()
        if self.alive:  # otherwise it was lost just after the commit
            self._rest()

    def _measured(self, groups: list[SimGroup]) -> tuple[float, float]:
        """Returns the seconds that the trainer waited for these groups, and the share of tokens that an objective would
        clip, which grows with their mean staleness.
        """
        busy_s = sum(ended_s - began_s for began_s, ended_s in self.busy)
        waited_s = max(0.0, self.world.now_s - self._requested_s - busy_s - self.pace.publish_s)
        staleness = sum(self.step - group.version for group in groups) / max(1, len(groups))
        return waited_s, min(1.0, self.pace.clip_per_step * staleness)

    def _rest(self) -> None:
        seconds = self.rest_s()
        if seconds:
            self.world.after(seconds, self._continue, self._streams)
        else:
            self.request()

    def _continue(self, stream: int) -> None:
        if stream == self._streams:  # otherwise it was lost meanwhile or has requested already
            self.request()

    def _let_gpus_go(self) -> None:
        if self.holds_gpus:
            self.holds_gpus = False
            self.world.pause(False)
