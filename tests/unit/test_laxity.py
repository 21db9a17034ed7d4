"""DORA's own strategy: reservations along a version's life, and the choice of prompts."""

from typing import Any

import numpy as np
import pytest

from dora.config import BalanceConfig, validated
from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.dispatcher import Dispatcher
from dora.core.plan import Plan, Trigger
from dora.core.policies import POLICIES, Strategy
from dora.core.policies.laxity import LaxityPolicy
from dora.core.policies.laxity.reservations import GRID, Reservations, rows_forecast
from dora.core.policies.laxity.tuning import TUNING
from dora.core.view import View
from dora.lab.sim.presets import composed
from dora.lab.sim.run import simulate
from dora.lab.sim.world import World

KV_TOKENS = 20_000


def prompts_of(lengths: list[int], name: str = "p") -> tuple[on.OfferedPrompt, ...]:
    return tuple(
        on.OfferedPrompt(f"{name}{index}", "task", 10, 1, 50_000, known_tokens=(length,))
        for index, length in enumerate(lengths)
    )


def machine_of(groups: int, lengths: list[int], window: int = 2, exhausted: bool = True) -> Machine:
    """Four workers that know how fast steps (100 s) and tokens (0.01 s) are; prompts of one response each wait."""
    config = validated({"window": {"size": window}, "balance": {"policy": "laxity", "predictor": "oracle"}})
    machine = Machine(config)
    machine.handle(on.TrainerAttached(1, groups), 0.0)
    machine.handle(on.StepRequested(1, 0), 0.0)
    rates = machine.state.rates
    rates.step_s, rates.pace_s = 100.0, 0.01
    machine.handle(on.PromptsOffered(prompts_of(lengths), exhausted), 0.0)
    return machine


def started(machine: Machine, workers: int = 4) -> list[str]:
    """Prompts that are admitted once workers have joined and loaded version 0, in order."""
    prompts: list[str] = []

    def handle(event: Any) -> list[do.Command]:
        commands = machine.handle(event, 1.0)
        prompts.extend(command.prompt_id for command in commands if isinstance(command, do.AdmitGroup))
        return commands

    loads = [
        command
        for index in range(workers)
        for command in handle(on.WorkerJoined(f"w{index}", 1, 64, KV_TOKENS))
        if isinstance(command, do.LoadVersion)
    ]
    for command in loads:
        handle(on.CommandDone(command.worker_id, 1, command.command_id))
    return prompts


def test_what_cannot_end_in_time_begins_first_after_a_publish() -> None:
    """Two steps of 100 s at 0.01 s a token: 19,000 tokens at most can end before the deadline, and 30,000 never."""
    assert started(machine_of(8, [100, 200, 19_500, 100]))[0] == "p2"


def test_what_cannot_end_in_time_and_came_after_the_version_began_lets_all_others_begin_first() -> None:
    """It would hold the version's last step up for as much longer as it came later."""
    machine = machine_of(8, [100], exhausted=False)
    assert started(machine) == ["p0"]
    commands = machine.handle(on.PromptsOffered(prompts_of([19_500, 300], "q"), False), 2.0)
    assert [command.prompt_id for command in commands if isinstance(command, do.AdmitGroup)] == ["q1", "q0"]


def test_prompts_of_middling_length_begin_in_order() -> None:
    assert started(machine_of(8, [100, 900, 300, 500])) == ["p0", "p1", "p2", "p3"]


def test_no_more_kv_is_reserved_than_the_version_will_have() -> None:
    """Responses of 9,000 tokens: KV of four workers holds eight of them at their end, the schedule fewer."""
    assert 0 < len(started(machine_of(64, [9_000] * 40))) <= 8


def test_an_idle_version_begins_something_whatever_the_forecast_says() -> None:
    assert started(machine_of(4, [49_000, 49_000]))


def test_believed_lengths_count_with_the_chance_that_they_still_run() -> None:
    """Around 1,000 tokens: what they hold falls smoothly, where known lengths would end at once."""
    machine = machine_of(8, [1_000] * 8)
    started(machine)
    requests = machine.state.requests
    rows = np.flatnonzero(requests["status"] > 0)
    requests["log_mean"][rows], requests["log_sd"][rows] = np.log(1_000.0), 1.0
    grid = np.array([0.0, 500.0, 1_000.0, 2_000.0, 8_000.0])
    held, context = rows_forecast(Dispatcher(machine.state), rows, grid)
    assert held[0] == context
    share = held / ((context / len(rows) + grid) * len(rows))
    assert (np.diff(share) < 0).all()
    assert share[2] == pytest.approx(0.5, abs=0.01)  # the median


def test_what_may_turn_out_long_waits_for_the_next_version_that_is_taken_up() -> None:
    """Four workers, window 3: every second version is. Responses are cut at 50,000 tokens, beyond any deadline."""
    machine = machine_of(8, [100], window=3)
    started(machine)
    requests = machine.state.requests
    rows = np.flatnonzero(requests["status"] > 0)

    def limit(log_sd: float, max_tokens: int = 50_000) -> float:
        requests["log_mean"][rows], requests["log_sd"][rows] = np.log(10_000.0), log_sd
        requests["max_tokens"][rows] = max_tokens
        reservations, dispatcher = Reservations(), Dispatcher(machine.state)
        assert reservations.refresh(dispatcher)
        assert reservations.limit_tokens(dispatcher, 0) <= reservations.reach_tokens(dispatcher, 0)
        return reservations.limit_tokens(dispatcher, 0)

    known = limit(0.0)
    assert limit(0.5) == pytest.approx(known / np.exp(TUNING.risk_sd * 0.5))
    assert limit(2.0) == pytest.approx(known / TUNING.risk)
    assert limit(0.1) == pytest.approx(known)  # all that begins now ends in time, however long it becomes
    assert limit(0.5, 15_000) == pytest.approx(known)


def test_few_workers_take_up_fewer_versions_unless_the_trainer_is_behind() -> None:
    """Two at window 3, a trainer of 1 s and one of 60 s a step: versions that groups were begun with, of ten."""
    taken: dict[float, set[int]] = {1.0: set(), 60.0: set()}
    for step_s, versions in taken.items():
        settings = {"trainer": {"step_s": step_s}, "window": {"freshness": 0.0}}
        world = World(composed(settings, "small", "laxity", 3), 0)

        def see(now_s: float, event: on.Event, commands: list[do.Command], seen: set[int] = versions) -> None:
            seen.update(command.version for command in commands if isinstance(command, do.AdmitGroup))

        world.observers.append(see)
        world.run_until(lambda world=world: world.machine.state.window.newest >= 10, 1e5)
    assert taken == {1.0: {0, 2, 4, 6, 8}, 60.0: set(range(10))}


def test_the_forecast_is_made_anew_as_a_worker_joins_or_is_to_leave() -> None:
    machine = machine_of(8, [1_000] * 4)
    started(machine)
    reservations, dispatcher = Reservations(), Dispatcher(machine.state)

    def remade(event: on.Event | None) -> bool:
        if event is not None:
            machine.handle(event, 1.0)
        return reservations.refresh(dispatcher)

    events = (None, None, on.WorkerJoined("w4", 1, 64, KV_TOKENS), None, on.DrainRequested("w1"), None)
    assert [remade(event) for event in events] == [True, False, True, False, True, False]


def test_reservations_know_nothing_before_the_first_steps() -> None:
    machine = Machine(validated({"balance": {"policy": "laxity"}}))
    reservations = Reservations()
    reservations.refresh(Dispatcher(machine.state))
    assert reservations.schedule is None
    assert (np.diff(GRID) > 0).all()


def test_a_plan_at_a_publish_goes_by_the_step_that_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the last one's schedule workers would be handed on half a minute later, and long responses begin then."""
    planned_by: list[tuple[int, int]] = []

    class Watched(LaxityPolicy):
        def plan(self, view: View, trigger: Trigger) -> Plan:
            schedule = self._reservations.schedule
            if trigger is Trigger.UPDATE and schedule is not None:
                planned_by.append((view.newest, schedule.newest))
            return super().plan(view, trigger)

    monkeypatch.setitem(POLICIES, "watched", Strategy(Watched))
    simulate(composed({}, "small", "watched", 2), steps=4, warmup=2, seed=0)
    assert len(planned_by) >= 4
    assert all(newest == by for newest, by in planned_by)


def test_laxity_keeps_kv_fuller_than_the_papers_strategy() -> None:
    """The reason for its being; a few steps of the smallest preset suffice to see it."""
    tokens_per_s = {
        policy: simulate(composed({}, "small", policy, 3), steps=8, warmup=3, seed=0).tokens_per_s
        for policy in ("laxity", "dora")
    }
    assert tokens_per_s["laxity"] > tokens_per_s["dora"]
    assert LaxityPolicy(BalanceConfig(policy="laxity")).config.policy == "laxity"


def test_an_old_report_does_not_bar_an_empty_worker() -> None:
    """Fault seeds 51505 and 52153: the last request left, and no report followed."""
    machine = machine_of(8, [100, 200])
    machine.handle(on.WorkerJoined("w0", 1, 64, KV_TOKENS), 1.0)
    machine.state.workers["w0"].waiting = 1
    machine.state.uses(machine.state.workers["w0"], KV_TOKENS)
    loads = [pending.command for pending in machine.state.pending.values()]
    commands = [machine.handle(on.CommandDone("w0", 1, load.command_id), 1.0) for load in loads]
    assert any(isinstance(command, do.StartRequest) for command in commands[0])
