"""Redundant rollout, event by event: what is due is dropped once as many finished groups can take its place."""

import pytest

from dora.core import commands as do
from dora.core import events as on
from dora.core.rules.selection import REDUNDANT, spare_groups
from tests.unit.test_machine import Bench


def due_and_later(redundant: float, *, later: int = 4) -> Bench:
    """Step 1 is open, of four groups: g4 and g5 of version 0 are due and run, and so do ``later`` of version 1."""
    bench = Bench(window=2, groups=4, redundant=redundant, policy="dora")
    bench.start("w0", "w1")
    bench.offer(6)
    bench.post(on.StepRequested(1, 0))
    for group in range(4):
        bench.complete(f"g{group}.0")
    bench.post(on.StepCommitted(1, 0))
    obey_all(bench)  # one of the two goes over to version 1
    bench.offer(later)
    obey_all(bench)
    assert versions(bench) == [0, 0, *[1] * later]
    bench.post(on.StepRequested(1, 1))
    return bench


def obey_all(bench: Bench) -> None:
    """Workers do all that they are told."""
    while bench.state.pending:
        command = next(iter(bench.state.pending.values())).command
        copied = {"locator": "snapshot", "tokens": 0} if isinstance(command, do.CopyOut) else {}
        bench.answer(command, **copied)


def dropped(bench: Bench) -> list[str]:
    drops = bench.given(do.DropGroup)
    assert all(drop.reason == REDUNDANT for drop in drops)
    return [drop.group_id for drop in drops]


def versions(bench: Bench) -> list[int]:
    state = bench.state
    return [int(state.groups["version"][row]) for _, row in sorted(state.group_row.items())]


def test_the_last_due_groups_make_way_and_the_step_is_complete() -> None:
    bench = due_and_later(0.5)
    for group in (6, 7, 8):
        bench.complete(f"g{group}.0")
        assert not dropped(bench)
    bench.complete("g9.0")
    assert dropped(bench) == ["g4", "g5"]
    assert len(bench.given(do.CloseStep)) == 2
    assert [d.group_id for d in bench.given(do.DeliverGroup)[4:]] == ["g6", "g7", "g8", "g9"]
    assert bench.machine.counters.groups_redundant == bench.machine.counters.groups_cancelled == 2


@pytest.mark.parametrize(("redundant", "later"), [(0.0, 4), (0.25, 4), (0.5, 3)])
def test_nothing_is_dropped_beyond_the_share_or_without_others_in_its_place(redundant: float, later: int) -> None:
    bench = due_and_later(redundant, later=later)
    for group in range(6, 6 + later):
        bench.complete(f"g{group}.0")
    assert not dropped(bench) and len(bench.given(do.CloseStep)) == 1


def test_a_group_that_wants_only_its_verdict_is_waited_for() -> None:
    bench = due_and_later(0.5)
    bench.report("g4.0", 7, end=True)
    for group in (6, 7, 8, 9):
        bench.complete(f"g{group}.0")
    assert not dropped(bench), "its work is done"
    bench.post(on.RequestScored("g4.0"))
    assert dropped(bench) == ["g5"]
    assert len(bench.given(do.CloseStep)) == 2


def test_nothing_is_dropped_while_no_trainer_waits() -> None:
    bench = due_and_later(0.5)
    bench.post(on.TrainerAttached(2, 4))
    for group in (6, 7, 8, 9):
        bench.complete(f"g{group}.0")
    assert not dropped(bench)
    bench.post(on.StepRequested(2, 1))
    assert dropped(bench) == ["g4", "g5"]


@pytest.mark.parametrize(("fraction", "groups", "spare"), [(0.0, 512, 0), (0.0625, 512, 32), (0.1, 10, 1), (1.0, 8, 8)])
def test_a_share_of_a_step_in_groups(fraction: float, groups: int, spare: int) -> None:
    assert spare_groups(fraction, groups) == spare
