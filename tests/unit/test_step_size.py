"""The first trainer sets the number of groups a step; another may change it until a step was trained."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.core import commands as do
from dora.core import events as on
from dora.core.groups.window import Window
from dora.core.policies import POLICIES, nearest_window
from dora.errors import Conflict, IllegalTransition
from tests.refusals import refused
from tests.sweeps import examples
from tests.unit.test_machine import Bench


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("first", "then"), [(1 << 16, 3), (5, 3), (2, 5), (3, 3), (8, 1)])
@pytest.mark.parametrize("taken", [0, 2])
def test_a_size_that_was_never_trained_with_may_be_replaced(policy: str, first: int, then: int, taken: int) -> None:
    """Admitted groups continue as far as they fit; the others are cancelled with a reason. Two steps are trained."""
    bench = Bench(window=nearest_window(policy, 2), groups=first, policy=policy)
    bench.start("w0", "w1")
    bench.offer(12)
    bench.post(on.StepRequested(1, 0))
    for group_id in list(bench.state.group_row)[:taken]:
        bench.complete(f"{group_id}.0")
    admitted = {command.group_id for command in bench.given(do.AdmitGroup)}
    bench.post(on.TrainerAttached(2, then))
    assert bench.state.window.groups_per_step == then
    dropped = {command.group_id for command in bench.given(do.DropGroup)}
    assert dropped <= admitted
    assert all("groups_per_step" in command.reason for command in bench.given(do.DropGroup))
    trained: list[str] = []
    for step in range(2):
        bench.commands.clear()
        bench.post(on.StepRequested(2, step))
        for _ in range(40):
            if bench.given(do.CloseStep):
                break
            bench.load_all()
            if bench.state.drawing:
                bench.offer(min(2, bench.state.drawing))
            running = [request_id for request_id in bench.state.request_row if bench.owner(request_id)]
            if running:
                bench.complete(running[0])
        delivered = [command.group_id for command in bench.given(do.DeliverGroup)]
        assert len(delivered) == then
        trained += delivered
        bench.post(on.StepCommitted(2, step))
    assert not dropped & set(trained) and len(set(trained)) == len(trained)
    with refused(Conflict, field="groups_per_step", value=9, names=(then,)):
        bench.post(on.TrainerAttached(3, 9))


def test_a_configured_size_stays() -> None:
    bench = Bench(groups=4)
    bench.machine = type(bench.machine)(
        bench.state.config.model_copy(
            update={"window": bench.state.config.window.model_copy(update={"groups_per_step": 4})}
        )
    )
    bench.state = bench.machine.state
    with refused(Conflict, field="groups_per_step", value=3, names=("4",)):
        bench.post(on.TrainerAttached(1, 3))
    bench.post(on.TrainerAttached(1, 0))


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.integers(0, 6), st.integers(0, 30))
@settings(max_examples=examples(300))
def test_a_window_of_another_size_is_feasible_or_refused(
    size: int, old: int, new: int, taken: int, opened: int
) -> None:
    window = Window(size, old)
    for _ in range(min(opened, window.admissible(0))):
        window.admit(0)
    for _ in range(taken):
        if window.open_groups and window.takeable(window.deadline(0)):
            window.take(0, window.deadline(0))
    fits = window.open_groups <= window.places(new, taken) and taken <= new
    if not fits:
        with pytest.raises(IllegalTransition):
            window.resize(new, taken)
        return
    window.resize(new, taken)
    assert min(window.slack()) >= 0 and window.step == (taken == new)
