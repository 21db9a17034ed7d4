"""The trainer's lease: one that is connected and makes no progress keeps no other out; nothing else ends a lease."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from dora.core import commands as do
from dora.core import events as on
from dora.core.rules.lease import TURNS
from dora.core.rules.stalls import STALLED
from dora.errors import Conflict
from dora.rpc import dora_pb2 as pb
from tests.refusals import refused
from tests.unit.test_evaluation import Evaluating
from tests.unit.test_runtime import Shell, shell
from tests.unit.test_take_over import attaching, living

__all__ = ["shell"]
TICK_S = 1.0
LIMIT_S = 60.0  # service.trainer_stall_timeout_s


class Training(Evaluating):
    """A trainer of steps of one group. Time passes in ticks."""

    def __init__(self, steps: int = 2) -> None:
        super().__init__(window=2, groups=1)
        self.limit(LIMIT_S)
        self.start("w0")
        self.epoch, self.steps = 1, 0
        for _ in range(steps):
            self.takes()
            self.commits()

    def limit(self, limit_s: float) -> None:
        service = self.state.config.service.model_copy(update={"trainer_stall_timeout_s": limit_s})
        self.state.config = self.state.config.model_copy(update={"service": service})

    def takes(self) -> None:
        """The step becomes full."""
        self.offer(1)
        self.obey(do.StartRequest)
        self.requests()
        self.complete(f"g{self.prompts - 1}.0")

    def requests(self) -> None:
        self.post(on.StepRequested(self.epoch, self.steps))

    def commits(self) -> None:
        self.post(on.StepCommitted(self.epoch, self.steps))
        self.steps += 1
        self.load_all()

    def passes(self, for_s: float) -> float:
        """So much time, or less if a lease lapses meanwhile. Returns the time."""
        began_s = self.now_s
        while self.now_s - began_s < for_s and not self.state.lease.lapsed:
            self.now_s += TICK_S
            self.post(on.Tick())
        return self.now_s - began_s

    @property
    def lapsed(self) -> list[str]:
        return [command.reason for command in self.given(do.LapseLease)]


def test_a_trainer_that_holds_a_full_step_and_commits_nothing_is_reported_once() -> None:
    bench = Training()
    bench.takes()
    took_s = bench.passes(10 * LIMIT_S)
    assert took_s == pytest.approx(LIMIT_S, abs=2 * TICK_S)
    bench.state.lease.lapsed, reason = "", bench.state.lease.lapsed
    assert bench.lapsed == [reason] and reason.startswith(STALLED) and f"step {bench.steps}" in reason
    assert bench.machine.counters.leases_lapsed == 1


def test_the_next_trainer_gets_the_same_groups_and_the_loser_is_refused() -> None:
    bench = Training()
    bench.takes()
    bench.passes(10 * LIMIT_S)
    leased = list(bench.state.leased)
    loser, bench.epoch = bench.epoch, bench.epoch + 1
    bench.post(on.TrainerAttached(bench.epoch, 1))
    assert not bench.state.lease.lapsed and bench.state.leased == leased
    commands = bench.post(on.StepRequested(bench.epoch, bench.steps))
    delivered = [command for command in commands if isinstance(command, do.DeliverGroup)]
    assert [each.group_id for each in delivered] == [f"g{bench.prompts - 1}"] and delivered[0].again
    with refused(Conflict, field="trainer_epoch", value=loser):
        bench.post(on.StepCommitted(loser, bench.steps))
    bench.commits()
    assert bench.machine.counters.groups_trained == bench.prompts


def test_a_slow_trainer_still_commits_and_renews_its_lease() -> None:
    bench = Training()
    bench.takes()
    bench.passes(10 * LIMIT_S)
    bench.commits()
    assert not bench.state.lease.lapsed
    bench.takes()
    assert bench.passes(LIMIT_S + TICK_S) > LIMIT_S and not bench.state.lease.lapsed, "its own pace is now the limit"


def test_the_limit_follows_from_the_longest_turn() -> None:
    bench = Training()
    bench.takes()
    bench.passes(LIMIT_S / 2)
    bench.commits()
    bench.takes()
    took_s = bench.passes(2 * TURNS * LIMIT_S)
    assert took_s == pytest.approx(TURNS * LIMIT_S / 2, rel=0.05)


def first_step(bench: Training) -> None:
    bench.epoch += 1
    bench.post(on.TrainerAttached(bench.epoch, 1))
    bench.takes()


def second_step(bench: Training) -> None:
    first_step(bench)
    bench.commits()
    bench.takes()


def waits_for_groups(bench: Training) -> None:
    bench.offer(1)
    bench.obey(do.StartRequest)
    bench.requests()


def evaluates(bench: Training) -> None:
    bench.takes()
    bench.ask()


def cannot_be_written(bench: Training) -> None:
    bench.takes()
    bench.post(on.StorageChanged("record: no room"))


def has_nothing_to_take(bench: Training) -> None:
    """Its last step was the last one, and it writes its own files."""
    bench.post(on.PromptsOffered((), True))


def is_off(bench: Training) -> None:
    bench.limit(0.0)
    bench.takes()


@pytest.mark.parametrize(
    "begin",
    [first_step, second_step, waits_for_groups, evaluates, cannot_be_written, has_nothing_to_take, is_off],
    ids=lambda begin: begin.__name__,
)
def test_no_lease_lapses_where_no_commit_may_be_expected(begin: Callable[[Training], None]) -> None:
    bench = Training()
    begin(bench)
    bench.passes(4 * LIMIT_S)
    assert not bench.lapsed


def test_a_stopped_service_blames_nobody() -> None:
    bench = Training()
    bench.takes()
    for _ in range(10):
        bench.now_s += LIMIT_S
        bench.post(on.Tick())
    assert not bench.lapsed


def test_a_trainer_between_two_steps_holds_what_is_finished() -> None:
    bench = Training()
    bench.offer(1)
    bench.obey(do.StartRequest)
    bench.complete(f"g{bench.prompts - 1}.0")
    assert bench.passes(10 * LIMIT_S) == pytest.approx(LIMIT_S, abs=2 * TICK_S)


# ----------------------------------------------------------------------------------------------------------- the shell


async def test_another_attaches_unasked_once_the_lease_has_lapsed_and_the_loser_hears_why(
    shell: Shell, caplog: pytest.LogCaptureFixture
) -> None:
    reason = f"{STALLED}no commit of step 0"
    async with living(shell, "first", client_id=b"1") as first:
        with refused(Conflict, field="trainer", value="first"):
            await shell.trainer.Attach(attaching("second", client_id=b"2"), None)
        shell.state.lease.lapsed = reason
        with caplog.at_level(logging.WARNING, "dora.service"):
            shell.runtime.core.executor.carry_out(do.LapseLease(first.trainer_epoch, reason))
        assert "first" in caplog.text and reason in caplog.text
        assert status_of(shell).trainer_stalled == reason
        second = await shell.trainer.Attach(attaching("second", client_id=b"2"), None)
        assert second.trainer_epoch == first.trainer_epoch + 1 and not status_of(shell).trainer_stalled
        request = pb.StreamStepRequest(trainer_epoch=first.trainer_epoch, step=0)
        with pytest.raises(Conflict) as caught:
            await anext(shell.trainer.StreamStep(request, None))
        assert "second" in caught.value.why and reason in caught.value.why


async def test_of_a_trainer_that_has_left_nothing_is_told(shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    async with living(shell, "first", client_id=b"1") as first:
        pass
    shell.state.lease.lapsed = STALLED
    shell.runtime.core.executor.carry_out(do.LapseLease(first.trainer_epoch, STALLED))
    assert "first" not in caplog.text and not status_of(shell).trainer_stalled


def status_of(shell: Shell) -> Any:
    return shell.runtime.status.of_service("model")
