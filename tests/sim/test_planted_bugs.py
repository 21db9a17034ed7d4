"""The checks can fail: each bug planted here, as peers have had it, must be caught within a few seeds."""

from collections.abc import Callable

import pytest

from dora.errors import DoraError
from dora.orchestrator.core import fleet, handoff, lifecycle
from dora.orchestrator.core.handoff import Action, Phase, Signal
from dora.orchestrator.core.state import State, Worker
from dora.orchestrator.core.window import Window
from tests.sim.test_core_seeds import SHAPES
from tests.sim.world import World

SEEDS = 60


def count_based_admission(patch: pytest.MonkeyPatch) -> None:
    """A cap of W * B groups in flight instead of deadlines."""

    def admissible(self: Window, version: int) -> int:
        live = self.deadline(version) >= self.step and version <= self.newest
        return self.size * self.groups_per_step - self.open_groups if live and self.groups_per_step else 0

    patch.setattr(Window, "admissible", admissible)


def take_ignores_deadlines(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Window, "takeable", lambda self, version: self.left > 0 and self.newest == self.step)


def free_before_commit(patch: pytest.MonkeyPatch) -> None:
    """The source frees as soon as it has copied."""
    key = (Phase.COPYING, Signal.FROZEN)
    patch.setitem(handoff.TABLE, key, (Phase.FROZEN, (Action.FREE_SOURCE, Action.COPY_IN)))


def dead_worker_keeps_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fleet, "orphan", lambda state, row: None)


def failed_handoff_is_not_thawed(patch: pytest.MonkeyPatch) -> None:
    for key, (phase, actions) in list(handoff.TABLE.items()):
        kept = tuple(action for action in actions if action is not Action.THAW_SOURCE)
        patch.setitem(handoff.TABLE, key, (phase, kept))


def lease_is_dropped_with_its_trainer(patch: pytest.MonkeyPatch) -> None:
    attached = lifecycle.attached

    def attach(state: State, event: lifecycle.on.TrainerAttached) -> None:
        attached(state, event)
        state.leased.clear()

    from dora.orchestrator.core import machine

    patch.setitem(machine._HANDLERS, lifecycle.on.TrainerAttached, attach)


def load_under_live_requests(patch: pytest.MonkeyPatch) -> None:
    """A worker changes version at once, instead of when it is empty."""
    patch.setattr(Worker, "held", property(lambda self: 0))


def version_read_at_start(patch: pytest.MonkeyPatch) -> None:
    """The version is read a second time, when the request starts."""
    hosts_of = State.hosts_of
    patch.setattr(State, "hosts_of", lambda self, version: hosts_of(self, self.window.newest))


BUGS = [
    count_based_admission,
    take_ignores_deadlines,
    free_before_commit,
    dead_worker_keeps_requests,
    failed_handoff_is_not_thawed,
    lease_is_dropped_with_its_trainer,
    load_under_live_requests,
    version_read_at_start,
]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_planted_bug_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(SEEDS):
        try:
            world = World(seed, **SHAPES[seed % len(SHAPES)])
            world.run(events=300)
            world.settle(steps=2)
        except (AssertionError, DoraError, KeyError, IndexError):
            return
    raise AssertionError(f"{plant.__name__} went unseen for {SEEDS} seeds")
