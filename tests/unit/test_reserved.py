"""Workers reserved for hurried responses, and the outlook that decides whether there is a hurry."""

from dataclasses import replace

import numpy as np
import pytest

from dora.config import validated
from dora.core import Machine
from dora.core import events as on
from dora.core.dispatcher import Dispatcher
from dora.core.forecast.cost import CostModel
from dora.core.policies.laxity.allocation import Allocation, Last
from dora.core.policies.laxity.reserved import ReservedWorkers, reserve
from dora.core.policies.laxity.schedule import Schedule, schedule_of
from dora.core.policies.laxity.tuning import TUNING
from dora.core.view import View
from tests.unit.views import make_view

KV_TOKENS, SLOTS = 100_000, 64
COST = CostModel(kv_token_s=4e-7, weights_s=5e-3, request_s=5e-5, step_s=15e-3)  # 20 ms when empty, 60 ms when full


def snapshot_with(requests: list[tuple[int, int, int]], indexes: int = 4, cost: CostModel | None = COST) -> View:
    """All of version 0, the only one: (index, tokens, tokens to come), prompts of 100 tokens."""
    workers = [{"loaded": 0, "kv_tokens": KV_TOKENS, "slots": SLOTS}] * indexes
    placed = [(0, index, tokens + 100) for index, tokens, _ in requests]
    more = {"window": 1, "cost": cost, "admissible": {0: 8}, "backlog_longest": np.array([500.0])}  # may begin more
    return make_view(workers, placed, remaining_tokens=[left for *_, left in requests], **more)


def hurried_until(end_s: float, hurried: bool = True) -> Schedule:
    times = {"published_s": 0.0, "next_s": 0.0, "step_s": 1.0}
    return Schedule(4, 1, 0, 0, 1, **times, hurried=hurried, reserved_fill=0.5, least_end_s={0: end_s})


def found(view: View, schedule: Schedule) -> ReservedWorkers:
    stays = np.ones(len(view.workers.alive), dtype=bool)
    return reserve(view, stays, schedule.end_s, schedule.reserved_fill)


# 10,000 tokens in 400 s: 40 ms a token, which a worker of 50,000 tokens of KV has; full ones have 59 ms
HURRIED = [(0, 1000, 10_000), (1, 1000, 10_000), (2, 1000, 10_000)]
EASY = [(index, 9_000, 2_000) for index in range(4) for _ in range(8)]


def share_of_mean_fill(context: int, remaining: int) -> float:
    """Returns the present load of a reserved worker as a share of its mean load."""
    ahead = np.linspace(context, context + remaining, 100_001)
    return float(context**TUNING.haste / (ahead**TUNING.haste).mean())


def test_hurried_responses_share_one_reserved_worker_that_is_as_fast_as_they_need() -> None:
    plan = found(snapshot_with(HURRIED + EASY), hurried_until(400.0))
    assert plan.hurried.tolist() == [True] * 3 + [False] * len(EASY)
    ((index, worker),) = plan.by_index.items()
    assert worker.pace_s == pytest.approx(0.020 + 0.020 * share_of_mean_fill(1_100, 10_000), rel=1e-4)
    assert COST.decode_step_s(9, plan.cap[index]) == pytest.approx(worker.pace_s)
    assert plan.to == {row: index for row, (at, *_) in enumerate(HURRIED) if at != index}
    others = [place for place in range(4) if place != index]
    assert (plan.cap[others] == TUNING.fill * KV_TOKENS).all()


def test_who_keeps_to_a_reserved_worker_ends_in_time_and_hurries_while_young() -> None:
    now_s, paces, step = 0.0, [], 100
    for tokens in range(1_000, 11_000, step):
        view = replace(snapshot_with([(0, tokens, 11_000 - tokens)]), now_s=now_s)
        worker = found(view, hurried_until(400.0)).by_index[0]
        paces.append(worker.pace_s)
        now_s += step * worker.pace_s
    assert now_s == pytest.approx(400.0, rel=0.01)
    assert paces == sorted(paces)
    assert paces[0] < 0.035 < 0.043 < paces[-1]


def test_where_kv_costs_no_time_a_reserved_worker_may_be_full() -> None:
    """A fitted cost may have it so: an engine then is as fast as it has few requests."""
    cost = CostModel(kv_token_s=0.0, weights_s=0.0, request_s=1e-3, step_s=15e-3)
    hurried = [
        (0, 1000, 10_000)
    ] * 3  # 30 ms a token, between what three requests take, 18, and what most indexes do, 45
    crowded = [(index, 9_000, 2_000) for index in (1, 2, 3) for _ in range(30)]
    plan = found(snapshot_with(hurried + crowded, cost=cost), hurried_until(300.0))
    assert list(plan.by_index) == [0] and plan.cap[0] == TUNING.fill * KV_TOKENS


def test_a_response_near_its_end_needs_no_reserved_worker() -> None:
    plan = found(snapshot_with([*HURRIED, (3, 9_000, 250)]), hurried_until(10.0))  # all of them are late
    assert plan.hurried.tolist() == [True, True, True, False]


def test_more_hurried_responses_than_one_reserved_worker_holds_open_a_second_and_slower_one() -> None:
    sooner = [(0, 20_000, 10_000)] * 2  # 43,000 tokens of KV soon: a worker is full with them
    later = [(1, 20_000, 8_500)] * 2
    plan = found(snapshot_with(sooner + later), hurried_until(400.0))
    assert set(plan.by_index) == {0, 1}
    assert plan.to == {}  # each is where it should be
    assert plan.by_index[0].pace_s < plan.by_index[1].pace_s
    assert plan.cap[0] < plan.cap[1]


def test_the_fastest_reserved_worker_is_where_its_own_responses_are_not_where_most_of_all_are() -> None:
    """Two in a hurry stand on worker 1, and six less so on 0, which would have to be emptied as the faster."""
    sooner, later = [(1, 20_000, 10_000)] * 2, [(0, 7_000, 8_500)] * 6
    plan = found(snapshot_with(sooner + later), hurried_until(400.0))
    assert plan.by_index[1].pace_s < plan.by_index[0].pace_s
    assert not plan.to.keys() & {0, 1}


def test_nobody_who_is_well_placed_makes_way_for_one_who_comes() -> None:
    """Both reserved workers that are fast enough for it are full: it waits, where else two more would have moved on."""
    there = [(0, 20_000, 10_000)] * 2 + [(1, 20_000, 9_900)] * 2
    plan = found(snapshot_with([*there, (3, 20_000, 10_400)]), hurried_until(400.0))
    assert list(plan.by_index) == [0, 1, 2]
    assert plan.to == {}


def test_a_reserved_worker_is_not_kept_emptier_than_is_worth_while() -> None:
    plan = found(snapshot_with(HURRIED), hurried_until(100.0))  # 10 ms a token: no worker is as fast
    assert [worker.kv_tokens for worker in plan.by_index.values()] == [
        pytest.approx(TUNING.least_fill * 0.5 * KV_TOKENS * share_of_mean_fill(1_100, 10_000), rel=1e-4)
    ]


@pytest.mark.parametrize(
    ("view", "schedule"),
    [
        (snapshot_with(HURRIED, cost=None), hurried_until(400.0)),
        (snapshot_with(HURRIED), hurried_until(400.0, hurried=False)),
        (snapshot_with(HURRIED), None),
        (snapshot_with(EASY), hurried_until(400.0)),
    ],
    ids=["cost unknown", "window wide enough", "no schedule", "nothing hurried"],
)
def test_without_hurry_or_cost_there_are_no_reserved_workers(view: View, schedule: Schedule | None) -> None:
    _, plan = Allocation(view, schedule, Last()).moves(dict.fromkeys(range(4), 0))
    assert not plan.by_index
    assert not plan.to
    assert (plan.cap == TUNING.fill * KV_TOKENS).all()


def test_a_reserved_worker_takes_the_hurried_and_gives_the_others_away() -> None:
    view = snapshot_with([(0, 1000, 10_000), (1, 1000, 10_000)] + [(0, 9_000, 2_000)] * 8)
    moves, plan = Allocation(view, hurried_until(400.0), Last()).moves(dict.fromkeys(range(4), 0))
    (worker,) = plan.by_index
    assert worker == 0
    assert {move.row for move in moves if move.target == worker} == {1}
    given = [move.row for move in moves if move.target != worker]
    assert given
    assert min(given) > 1  # nobody in a hurry
    kv = 1_100 * 2 + 9_100 * (8 - len(given))
    assert kv <= plan.cap[worker] < kv + 9_100 * len(given)


# ------------------------------------------------------------------------------------------------------------ outlook


def machine_of(window: int, longest: int, groups: int = 4) -> Machine:
    """Six workers between steps of 300 s, each token 50 ms, with one response of ``longest`` tokens drawn."""
    machine = Machine(validated({"window": {"size": window}, "balance": {"policy": "laxity", "predictor": "oracle"}}))
    machine.state.cost = COST
    machine.handle(on.TrainerAttached(1, groups), 0.0)
    machine.handle(on.StepRequested(1, 0), 0.0)
    for index in range(6):
        machine.handle(on.WorkerJoined(f"w{index}", 1, SLOTS, KV_TOKENS), 0.0)
    rates = machine.state.rates
    rates.step_s, rates.pace_s = 300.0, 0.05
    rates.mix.add([float(longest)], 0)
    return machine


def outlook(machine: Machine, now_s: float = 0.0) -> Schedule:
    machine.state.now_s = now_s
    return schedule_of(Dispatcher(machine.state))


def test_there_is_a_hurry_where_the_longest_response_outlasts_the_window_on_a_full_dp_group() -> None:
    full_s = COST.decode_step_s(SLOTS // 2, TUNING.fill * KV_TOKENS)
    lifetime_s = 300.0 * 0.8 * 1.92  # two steps, but for the margin, as short as they may be expected
    assert not outlook(machine_of(2, int(0.98 * lifetime_s / full_s))).hurried
    assert outlook(machine_of(2, int(1.02 * lifetime_s / full_s))).hurried
    assert not outlook(machine_of(4, int(1.02 * lifetime_s / full_s))).hurried


def test_there_is_no_hurry_where_a_half_empty_dp_group_is_no_faster() -> None:
    machine = machine_of(2, 100_000)
    assert outlook(machine).hurried
    for kv_token_s in (1e-9, 0.0):
        machine.state.cost = replace(COST, kv_token_s=kv_token_s, request_s=1e-3)
        assert not outlook(machine).hurried


def test_steps_are_never_reckoned_shorter_than_the_longest_response_allows() -> None:
    schedule = outlook(machine_of(2, 100_000, groups=1))
    pace_s = COST.decode_step_s(1, schedule.reserved_fill * KV_TOKENS)
    assert 100_000 * pace_s <= 1.92 * schedule.step_s
    assert schedule.reserved_fill < 0.5  # one group leaves six workers time to hurry
    assert outlook(machine_of(2, 100)).step_s == pytest.approx(0.8 * 300.0)


def test_a_step_whose_groups_are_all_there_ends_as_soon_as_the_trainer_can() -> None:
    machine = machine_of(2, 100)
    machine.state.rates.took_s.extend([300.0, 120.0, 310.0])
    assert outlook(machine, 10.0).next_s == pytest.approx(10.0 + 1.0 + 240.0)  # it lacks all of its groups
    machine.state.window.left = 0
    assert outlook(machine, 10.0).next_s == pytest.approx(120.0)
    assert outlook(machine, 200.0).next_s == pytest.approx(201.0)


def test_a_step_is_published_when_what_came_last_is_trained_on() -> None:
    machine = machine_of(2, 100)
    rates, window = machine.state.rates, machine.state.window
    rates.took_s.append(120.0)
    rates.tail_s = 20.0
    window.left = 0
    assert outlook(machine, 150.0).next_s == pytest.approx(150.0 + 1.0 + 20.0)
    rates.tail_s = 200.0  # a trainer that was behind: its last groups waited for it
    assert outlook(machine, 150.0).next_s == pytest.approx(150.0 + 1.0 + TUNING.tail_step * 240.0)
    window.step += 1  # it is full
    rates.filled(140.0)
    assert outlook(machine, 150.0).next_s == pytest.approx(140.0 + 200.0)
    assert outlook(machine, 350.0).next_s == pytest.approx(351.0)


def test_a_version_does_not_end_before_its_longest_response_can() -> None:
    machine = machine_of(1, 100)
    prompt = on.OfferedPrompt("p0", "task", 10, 1, 50_000, known_tokens=(40_000,))
    machine.handle(on.PromptsOffered((prompt,), True), 0.0)
    commands = machine.state.pending.values()
    for pending in list(commands):
        machine.handle(on.CommandDone(pending.command.worker_id, 1, pending.command.command_id), 0.0)
    schedule = outlook(machine, 100.0)
    token_s = COST.decode_step_s(1, schedule.reserved_fill * KV_TOKENS)
    assert schedule.least_end_s == {0: pytest.approx(100.0 + TUNING.safety * 40_000 * token_s)}
    assert schedule.end_s(0) == schedule.least_end_s[0] <= schedule.next_s
    assert replace(schedule, least_end_s={}).end_s(0) < schedule.end_s(0)
