"""Groups that grow: members beyond the least size start once rewards differ, and are skipped if they do not."""

from dataclasses import replace

import numpy as np
import pytest

from dora.core import commands as do
from dora.core import events as on
from dora.core.rules import restoring
from dora.core.state import DORMANT, IDLE, SCORED, SKIPPED, WAITING
from dora.errors import Conflict, InvalidValue
from tests.refusals import refused
from tests.unit.test_machine import Bench


class GrowingBench(Bench):
    """One worker, and groups of 5 of which 2 start at once."""

    def __init__(self, slots: int = 8, sessions: bool = False, prompt_tokens: int = 5) -> None:
        super().__init__()
        self.join("w0", slots)
        self.load_all()
        self.post(on.TrainerAttached(1, self.groups))
        self.sessions, self.prompt_tokens = sessions, prompt_tokens
        self.draw(1)

    def draw(self, count: int) -> None:
        first, self.prompts = self.prompts, self.prompts + count
        prompts = (
            on.OfferedPrompt(f"p{i}", "task", self.prompt_tokens, 5, 60, sessions=self.sessions, group_size_min=2)
            for i in range(first, first + count)
        )
        self.post(on.PromptsOffered(tuple(prompts)))

    def score(self, request_id: str, reward: float | None) -> None:
        self.report(request_id, 7, end=True)
        self.post(on.RequestScored(request_id, reward or 0.0, reward is not None))

    def statuses(self, group_id: str = "g0") -> list[int]:
        rows = self.state.members[self.state.group_row[group_id]]
        return [int(self.state.requests["status"][row]) for row in rows]

    def started(self) -> list[str]:
        return [command.request_id for command in self.given(do.StartRequest)]


def test_only_the_least_members_start() -> None:
    bench = GrowingBench()
    assert bench.started() == ["g0.0", "g0.1"]
    assert bench.statuses()[2:] == [DORMANT] * 3
    (admitted,) = bench.given(do.AdmitGroup)
    assert len(admitted.request_ids) == 5


def test_a_group_whose_rewards_differ_grows() -> None:
    bench = GrowingBench()
    bench.score("g0.0", 1.0)
    assert bench.started() == ["g0.0", "g0.1"]
    bench.score("g0.1", 0.0)
    assert bench.started() == ["g0.0", "g0.1", "g0.2", "g0.3", "g0.4"]
    bench.post(on.StepRequested(1, 0))
    for index in (2, 3):
        bench.score(f"g0.{index}", 1.0)
    assert not bench.given(do.DeliverGroup)
    bench.score("g0.4", 1.0)
    assert [command.group_id for command in bench.given(do.DeliverGroup)] == ["g0"]
    counters = bench.machine.counters
    assert (counters.members_started_late, counters.members_skipped) == (3, 0)


def test_a_settled_group_skips_the_rest() -> None:
    bench = GrowingBench()
    bench.post(on.StepRequested(1, 0))
    bench.score("g0.0", 1.0)
    bench.score("g0.1", 1.0)
    assert bench.statuses() == [SCORED, SCORED, SKIPPED, SKIPPED, SKIPPED]
    assert [command.group_id for command in bench.given(do.DeliverGroup)] == ["g0"]
    counters = bench.machine.counters
    assert (counters.members_started_late, counters.members_skipped) == (0, 3)
    assert not bench.state.undecided


@pytest.mark.parametrize("rewards", [(None, None), (None, 0.5), (0.5, None)])
def test_an_invalid_reward_differs_from_no_other(rewards: tuple[float | None, float | None]) -> None:
    bench = GrowingBench()
    for index, reward in enumerate(rewards):
        bench.score(f"g0.{index}", reward)
    assert SKIPPED in bench.statuses() and len(bench.started()) == 2


def test_late_members_start_before_groups_that_have_not_begun() -> None:
    bench = GrowingBench(slots=2)
    bench.draw(2)
    bench.score("g0.0", 1.0)
    bench.score("g0.1", 0.0)  # g1 has both slots by now
    assert bench.started() == ["g0.0", "g0.1", "g1.0", "g1.1"]
    bench.score("g1.0", 1.0)
    bench.score("g1.1", 1.0)
    assert bench.started()[4:] == ["g0.2", "g0.3"]


def test_a_group_with_dormant_members_may_be_cancelled() -> None:
    bench = GrowingBench()
    bench.score("g0.0", 1.0)
    bench.post(on.GroupCancelled("g0", "on request"))
    assert not bench.state.undecided and not bench.state.requests.used


def test_a_dormant_session_has_not_begun() -> None:
    bench = GrowingBench(sessions=True)
    with refused(Conflict, field="session", names=("has not begun",)):
        bench.post(on.SessionFailed("g0.2", "its environment died"))


def test_late_sessions_without_a_prompt_wait_for_their_environment() -> None:
    bench = GrowingBench(sessions=True, prompt_tokens=0)
    assert bench.statuses() == [IDLE, IDLE, DORMANT, DORMANT, DORMANT]
    for index, reward in enumerate((1.0, 0.0)):
        request_id = f"g0.{index}"
        bench.post(on.TurnRequested(request_id, 5, is_prompt=True))
        bench.report(request_id, 7, end=True)
        bench.post(on.SessionEnded(request_id))
        bench.post(on.RequestScored(request_id, reward, True))
    assert bench.statuses()[2:] == [IDLE] * 3
    assert [command.request_ids for command in bench.given(do.GrowGroup)] == [("g0.2", "g0.3", "g0.4")]


def restored(bench: Bench) -> Bench:
    again = Bench()
    again.post(restoring.durable(bench.state))
    return again


@pytest.mark.parametrize("scores", [(), (("g0.0", 1.0),), (("g0.1", None),)])
def test_a_restart_keeps_members_dormant(scores: tuple[tuple[str, float | None], ...]) -> None:
    bench = GrowingBench()
    for request_id, reward in scores:
        bench.score(request_id, reward)
    again = restored(bench)
    assert [status == DORMANT for status in GrowingBench.statuses(again)] == [False, False, True, True, True]  # type: ignore[arg-type]
    assert list(again.state.undecided.values()) == list(bench.state.undecided.values())
    assert restoring.durable(again.state).requests == restoring.durable(bench.state).requests


def test_a_restart_keeps_late_and_skipped_members() -> None:
    grown, settled = GrowingBench(slots=1), GrowingBench()
    for bench, rewards in ((grown, (0.0, 1.0)), (settled, (1.0, 1.0))):
        for index, reward in enumerate(rewards):
            bench.score(f"g0.{index}", reward)
    assert GrowingBench.statuses(restored(grown))[2:] == [WAITING] * 3  # type: ignore[arg-type]
    assert GrowingBench.statuses(restored(settled))[2:] == [SKIPPED] * 3  # type: ignore[arg-type]


def test_no_restart_leaves_a_group_that_nothing_can_finish() -> None:
    bench = GrowingBench()
    durable = restoring.durable(bench.state)
    durable.requests.stages[:2] = restoring.STAGES.index(SCORED)
    assert np.count_nonzero(durable.requests.stages == restoring.STAGES.index(DORMANT)) == 3
    with refused(InvalidValue, field="requests.stages", names=("g0",)):
        Bench().post(durable)


def test_a_worker_drops_a_member_that_is_dormant_again() -> None:
    """The verdict that started it was not on disk as the service died."""
    bench = GrowingBench()
    worker = on.WorkerJoined("w0", 9, 8, 100_000, version=0, requests={"g0.0": 3, "g0.2": 3})
    again = Bench()
    commands = again.post(replace(restoring.durable(bench.state), workers=(worker,)))
    assert [each.request_id for each in commands if isinstance(each, do.RemoveRequest)] == ["g0.2"]
    assert again.owner("g0.0") == "w0" and not again.owner("g0.2")
