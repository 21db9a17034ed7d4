"""The other papers' strategies on small hand-made views."""

from typing import Any

import numpy as np
import pytest

from dora.config import BalanceConfig, WindowConfig, WindowSize
from dora.core import events as on
from dora.core.dispatcher import Dispatcher
from dora.core.fleet.worker import Worker
from dora.core.forecast.cost import CostModel
from dora.core.plan import Move, Trigger
from dora.core.policies import POLICIES, check_live, nearest_window, policy_of
from dora.core.policies.batch import OneStepPolicy, SyncPolicy
from dora.core.policies.dora import DoraPolicy
from dora.core.policies.laminar import Idle, LaminarPolicy, consolidate, roofline_requests
from dora.core.policies.levelling import plan_moves
from dora.core.policies.staleflow import StaleFlowPolicy, migrate
from dora.core.policies.streamrl import dedicated_groups, latency_s
from dora.core.policies.targets import cover
from dora.core.policies.throughput import MU, Load, RoutingBoard, load_of, relative_gain
from dora.errors import InvalidValue, NotFound
from tests.refusals import data_words, refused
from tests.unit.test_machine import Bench
from tests.unit.views import KV_TOKENS, SLOTS, make_view

COST = CostModel(kv_token_s=1e-7, weights_s=4e-3, request_s=1e-4, step_s=6e-3)  # computing binds from 40 requests on


# ------------------------------------------------------------------------------------------------------------ by name


def test_a_policy_is_found_by_name_and_refused_with_the_reason() -> None:
    assert all(type(policy_of(BalanceConfig(policy=name))).__name__.endswith("Policy") for name in POLICIES)
    with refused(NotFound, field="balance.policy", value="laminer"):
        policy_of(BalanceConfig(policy="laminer"))
    assert isinstance(policy_of(BalanceConfig(policy="one_step"), WindowConfig(size=2)), OneStepPolicy)


def live(policy: str, window: WindowSize) -> None:
    check_live(BalanceConfig(policy=policy), WindowConfig(size=window))


@pytest.mark.parametrize(
    ("policy", "window", "allowed"),
    [
        ("sync", 4, "1, by"),
        ("one_step", 1, "2, by"),
        ("stream", 3, "2, by"),
        ("streamrl", 3, "1 to 2, by"),
        ("streamrl", "auto", "1 to 2, by"),
    ],
)
def test_a_window_that_a_strategy_is_not_defined_for_is_refused(policy: str, window: WindowSize, allowed: str) -> None:
    """By the core and before a service starts: it would run as in another window, or stall."""
    message = rf"window.size = '?{window}'? .* {allowed} the definition of {policy}"
    sizes = WindowConfig(size=window)
    for refuse in (lambda: policy_of(BalanceConfig(policy=policy), sizes), lambda: live(policy, window)):
        with refused(InvalidValue, field="window.size", names=data_words(message)):
            refuse()
    live(policy, nearest_window(policy, 3))


def test_a_service_refuses_what_it_does_not_know_and_lengths_that_no_prompt_brings() -> None:
    """Partial rollout breaks C1: it is the simulator's alone, under no name of a service."""
    for name in POLICIES:
        live(name, nearest_window(name, 2))
    with refused(InvalidValue, field="balance.policy", value="lamniar"):
        live("lamniar", 2)
    with refused(InvalidValue, field="balance.policy", value="partial"):
        live("partial", 64)
    with refused(InvalidValue, field="balance.predictor", value="oracle"):
        check_live(BalanceConfig(predictor="oracle"), WindowConfig())


# -------------------------------------------------------------------------------------------------------- whole batches


@pytest.mark.parametrize("policy", [SyncPolicy, OneStepPolicy])
def test_the_whole_pool_changes_version_when_the_old_batch_has_ended(policy: type[SyncPolicy]) -> None:
    plan = policy(BalanceConfig()).plan
    step = 4 if policy is SyncPolicy else 5  # one_step: the batch of step 4 was taken, that of step 5 is next
    workers = [{"loaded": 3}, {"loaded": 3}, {"loaded": 3, "draining": 1}, {"loaded": 3, "alive": 0}]
    shown = make_view(workers, [(3, 1, 90)], newest=4, step=4)
    assert plan(shown, Trigger.UPDATE).targets == {0: 3, 1: 3}
    shown = make_view(workers, [], newest=4, step=step)
    assert plan(shown, Trigger.UPDATE).targets == {0: 4, 1: 4}


def test_one_step_keeps_the_old_version_until_the_batch_was_taken() -> None:
    """Published, but the trainer has not taken the batch of step 4 yet: that of step 5 is the new version's."""
    shown = make_view([{"loaded": 3}], [], newest=4, step=4)
    assert OneStepPolicy(BalanceConfig()).plan(shown, Trigger.UPDATE).targets == {0: 3}


# -------------------------------------------------------------------------------------------------------------- hosts


def test_a_version_that_requests_wait_for_gets_a_dp_group() -> None:
    workers = [{"loaded": 5}, {"loaded": 5}, {"loaded": 4}]
    targets = {0: 5, 1: 5, 2: 5}
    cover(make_view(workers, [(4, -1, 30), (5, 0, 80)]), targets)
    assert targets == {0: 5, 1: 5, 2: 4}  # the one that has its weights
    targets = {0: 5, 1: 5, 2: 4}
    cover(make_view(workers, [(3, -1, 30), (4, -1, 30), (5, 0, 80)]), targets)
    assert targets == {0: 5, 1: 3, 2: 4}  # the emptiest, and not the last of another version that waits
    targets = {0: 5}
    cover(make_view(workers[:1], [(3, -1, 30), (4, -1, 30)]), targets)
    assert targets == {0: 3}  # too few: the earliest deadline first


# --------------------------------------------------------------------------------------------------------------- dora


def levelling(requests: int, cost: CostModel | None, kv_tokens: int = 10_000) -> int:
    """Returns how many of so many requests on one DP group move to an empty one."""
    workers = [{"loaded": 0, "kv_tokens": kv_tokens}, {"loaded": 0, "kv_tokens": 10_000}]
    shown = make_view(workers, [(0, 0, 20)] * requests, cost=cost)
    return len(plan_moves(shown, {0: 0, 1: 0}, BalanceConfig()))


def test_levelling_stops_where_it_gains_nothing() -> None:
    assert levelling(8, None) == 4, "without a cost model: as many here as there"
    assert levelling(8, COST) == 0, "a step reads the weights for one request as for eight"
    assert levelling(60, COST) == 16, "a step of 44 requests takes hardly longer than the shortest"


def test_levelling_goes_on_where_kv_would_run_out() -> None:
    assert levelling(8, COST, kv_tokens=140) == 2, "160 tokens are held, 126 are the pressure"
    assert levelling(8, COST, kv_tokens=180) == 0


def test_an_older_version_keeps_what_its_kv_fills_and_gives_up_what_it_does_not() -> None:
    policy = DoraPolicy(BalanceConfig())
    supply = {"newest": 1, "admissible": {1: 100}}
    workers = [{"loaded": 0, "kv_tokens": 100} for _ in range(4)]
    full = make_view(workers, [(0, index, 80) for index in range(4)], **supply)
    assert policy.plan(full, Trigger.UPDATE).targets == dict.fromkeys(range(4), 0), "nowhere to go to"
    emptier = make_view(workers, [(0, index, 30 + index) for index in range(4)], **supply)
    plan = policy.plan(emptier, Trigger.UPDATE)
    assert plan.targets == {0: 1, 1: 1, 2: 0, 3: 0}, "126 tokens of 360"
    assert {(move.row, move.target) for move in plan.moves} == {(0, 2), (1, 3)}


def test_an_older_version_begins_nothing_while_it_shrinks_and_then_only_what_ends_in_time() -> None:
    bench = Bench(window=2, groups=2, policy="dora", predictor="oracle")
    bench.start("w0")
    bench.offer(2)
    bench.post(on.StepRequested(1, 0))
    for group in range(2):
        bench.complete(f"g{group}.0")
    bench.post(on.StepCommitted(1, 0))
    bench.post(on.WorkerLost("w0", 1, "killed"))
    offered = (on.OfferedPrompt(f"q{n}", "task", 5, 1, 60, known_tokens=(n,)) for n in (50, 20, 30))
    bench.post(on.PromptsOffered(tuple(offered)))
    state, policy, dispatcher = bench.state, bench.machine.policy, Dispatcher(bench.state)
    state.rates.step_s, state.rates.pace_s, state.rates.tail_s = 30.0, 1.0, 2.0

    def chosen(version: int) -> str | None:
        entry = policy.choose(dispatcher, version)
        return entry.prompt.prompt_id if entry is not None else None

    assert chosen(1) == "q50", "the newest: as they came"
    assert chosen(0) == "q20", "the step that must take it is full in 28 s, less a margin"
    full = make_view([{"loaded": 0, "kv_tokens": 100}] * 2, [(0, 0, 80), (0, 1, 80)], newest=1, admissible={1: 9})
    assert policy.plan(full, Trigger.UPDATE).targets == {0: 0, 1: 0}
    assert chosen(0) is None and chosen(1) == "q50"


# ------------------------------------------------------------------------------------------------------------ Laminar


def idle(index: int, kv_used: int, requests: int = 1) -> Idle:
    return Idle(index, kv_used, kv_max=100, requests=requests, requests_max=8)


def test_best_fit_consolidation() -> None:
    """Algorithm 1: smallest source first, fullest destination that fits, released ones are no destinations."""
    # 10 -> 60 (70); 20 -> 60 (90); 30 fits with neither 60 (90) nor a released one; 60 has become a destination
    assert consolidate([idle(0, 30), idle(1, 60), idle(2, 10), idle(3, 20)]) == [(2, 1), (3, 1)]
    assert consolidate([idle(0, 55), idle(1, 50)]) == []  # 105 > C_max
    assert consolidate([idle(0, 50), idle(1, 50)]) == [(0, 1)]
    assert consolidate([idle(0, 10, 5), idle(1, 20, 4), idle(2, 15, 3)]) == [(0, 2)]  # B: 5 + 4 > 8


def test_a_destination_is_not_released_under_what_it_was_given() -> None:
    """As printed, 55 would go on to 50 although 10 was sent to it, and 50 would hold 115 of 110."""
    workers = [Idle(index, kv, 110, 1, 8) for index, kv in enumerate((10, 50, 55))]
    assert consolidate(workers) == [(0, 2)]


def test_idle_workers_are_packed_and_released_to_the_newest_version() -> None:
    policy = LaminarPolicy(BalanceConfig())
    workers = [{"loaded": 1}, {"loaded": 1}, {"loaded": 1}, {"loaded": 2}]
    full = [(1, 0, 400), (1, 0, 200), (1, 1, 500), (1, 2, 995), (2, 3, 300)]
    first = policy.plan(make_view(workers, full), Trigger.TIME)
    assert first.targets == {0: 1, 1: 1, 2: 1, 3: 2} and not first.moves  # nothing has fallen yet
    falls = [(1, 0, 405), (1, 1, 450), (1, 2, 996), (2, 3, 310)]
    second = policy.plan(make_view(workers, falls), Trigger.TIME)
    assert second.targets == {0: 2, 1: 1, 2: 1, 3: 2} and second.moves == (Move(0, 1),)
    third = policy.plan(make_view(workers, [(1, 1, 450), (1, 2, 996), (2, 3, 310)]), Trigger.STARVED)
    assert third.targets[0] == 2  # empty: fetches the newest version, without a look


def test_what_is_left_on_a_released_worker_goes_to_the_fullest_host() -> None:
    workers = [{"loaded": 1, "target": 2}, {"loaded": 1}, {"loaded": 1}, {"loaded": 2}]
    shown = make_view(workers, [(1, 0, 100), (1, 1, 300), (1, 2, 600), (2, 3, 700)])
    assert LaminarPolicy(BalanceConfig()).relieve(shown) == (Move(0, 2),)


def test_the_roofline_batch_is_where_computing_binds() -> None:
    assert roofline_requests(COST, 256) == 40
    assert roofline_requests(COST, 16) == roofline_requests(None, 16) == 16
    for request_s in (0.0, 5e-324):  # the ratio is more than a float can hold
        assert roofline_requests(CostModel(0.0, 4e-3, request_s, 6e-3), 16) == 16
    assert roofline_requests(CostModel(0.0, 0.0, 1e-4, 6e-3), 16) == 1


# ---------------------------------------------------------------------------------------------------------- StaleFlow


def load(running: int = 0, kv_tokens: int = 0, waiting: int = 0) -> Load:
    return Load(running, waiting, kv_tokens, SLOTS, KV_TOKENS)


def test_marginal_gain() -> None:
    assert relative_gain(load(), 100, COST) == pytest.approx(1.0)
    step_s = [1e-7 * 100 * n + max(4e-3, 1e-4 * n) + 6e-3 for n in (10, 11)]
    gain = (11 / step_s[1] - 10 / step_s[0]) * (1e-5 + 1e-2)
    big = Load(10, 0, 1000, SLOTS, 100_000)
    assert relative_gain(big, 100, COST) == pytest.approx(gain)
    assert relative_gain(load(5, 950), 100, COST) == 0.0  # its KV does not fit: it would wait
    assert relative_gain(load(5, 100, waiting=1), 100, COST) == 0.0
    assert relative_gain(load(SLOTS, 100), 100, COST) == 0.0
    assert relative_gain(load(), 5000, COST) == pytest.approx(1.0)  # an empty group takes anything
    assert MU < relative_gain(load(60, 900), 50, None) < relative_gain(load(6, 100), 50, None) < 1.0


def test_routing_goes_to_the_largest_gain_above_the_threshold() -> None:
    heavy = CostModel(kv_token_s=1e-5, weights_s=1e-2, request_s=1e-3, step_s=0.0)
    workers = [{"loaded": 2}, {"loaded": 2}, {"loaded": 2}]
    board = RoutingBoard(make_view(workers, [(2, 0, 500), (2, 1, 300), (2, -1, 20)], cost=heavy), {})
    assert board.route(2, [0, 1]) and board.moves() == (Move(2, 1),)
    assert board.load(1) == load(2, 320)
    board.take_off(2)
    assert board.load(1) == load(1, 300)
    board.assigned[:], board.waiting[:], board.kv[:] = (20, 20, 3), (0, 0, 2), (900, 900, 100)
    assert relative_gain(load(20, 900), 20, heavy) < MU
    assert not board.route(2, [0, 1, 2])  # withheld


def test_an_old_report_does_not_bar_an_empty_dp_group() -> None:
    """Fault seed 71339: the last request left, and no report followed."""
    empty = load_of(Worker("w0", 1, 0, SLOTS, KV_TOKENS, kv_used=KV_TOKENS, waiting=1))
    assert empty.takes(500) and relative_gain(empty, 500, COST) >= MU
    seen = RoutingBoard(make_view([{"loaded": 1, "waiting": 2}, {"loaded": 1}], [(1, 1, 500)]), {})
    assert [seen.load(index) for index in (0, 1)] == [load(), load(1, 500)] and seen.route(0, [0])


def staleflow_plan(admissible: dict[int, int], requests: list[tuple[int, int, int]], backlog: int = 1) -> Any:
    workers = [{"loaded": 1}, {"loaded": 1}, {"loaded": 2}]
    shown = make_view(workers, requests, admissible=admissible, backlog_longest=np.ones(backlog), cost=COST)
    return StaleFlowPolicy(BalanceConfig()).plan(shown, Trigger.TIME)


def test_selective_synchronisation() -> None:
    """Algorithm 4, with C1: what runs on the group that changes version moves to another host of its version."""
    running = [(1, 0, 300), (1, 0, 100), (1, 1, 200), (2, 2, 50)]
    assert staleflow_plan({1: 1, 2: 5}, running).targets == {0: 1, 1: 1, 2: 2}  # still takes new groups
    assert staleflow_plan({1: 0, 2: 5}, [*running, (1, -1, 9)]).targets == {0: 1, 1: 1, 2: 2}  # one waits for it
    assert staleflow_plan({1: 0, 2: 0}, running).targets == {0: 1, 1: 1, 2: 2}  # would get nothing from a change
    assert staleflow_plan({1: 0, 2: 5}, running, backlog=0).targets == {0: 1, 1: 1, 2: 2}
    plan = staleflow_plan({1: 0, 2: 5}, running)
    assert plan.targets == {0: 1, 1: 2, 2: 2} and plan.moves == (Move(2, 0),)  # the emptiest one
    crowded = [(1, 0, 600), (1, 1, 500), (2, 2, 50)]
    assert staleflow_plan({1: 0, 2: 5}, crowded).targets == {0: 1, 1: 1, 2: 2}  # no other host has room
    assert staleflow_plan({1: 0, 2: 0}, running[2:]).targets == {0: 2, 1: 1, 2: 2}  # an empty one loses nothing


def test_what_is_moved_to_a_dp_group_that_is_then_cleared_moves_on() -> None:
    """Else the move would be void, and the first DP group could not change version: in a window of 2 for minutes."""
    workers = [{"loaded": 1}, {"loaded": 1}, {"loaded": 1}, {"loaded": 2}]
    running = [(1, 0, 100), (1, 1, 150), (1, 2, 200), (1, 2, 200)]
    shown = make_view(workers, running, admissible={2: 5}, backlog_longest=np.ones(1), cost=COST)
    plan = StaleFlowPolicy(BalanceConfig()).plan(shown, Trigger.TIME)
    assert plan.targets == {0: 2, 1: 2, 2: 1, 3: 2}
    assert {move.row: move.target for move in plan.moves} == {0: 2, 1: 2} and len(plan.moves) == 2


def test_a_dp_group_goes_to_the_oldest_version_that_is_short_of_room() -> None:
    """Version 1 is due and engines queue it, version 2 takes no more, version 3 would begin new groups."""
    workers = [{"loaded": 1, "waiting": 5}, {"loaded": 2}, {"loaded": 2}, {"loaded": 3}]
    running = [*[(1, 0, 150) for _ in range(6)], (2, 1, 100), (2, 2, 150), (3, 3, 50)]

    def targets(**more: Any) -> Any:
        queued = [*[worker | more for worker in workers[:1]], *workers[1:]]
        shown = make_view(queued, running, admissible={3: 5}, backlog_longest=np.ones(1), cost=COST)
        return StaleFlowPolicy(BalanceConfig()).plan(shown, Trigger.TIME).targets

    assert targets() == {0: 1, 1: 1, 2: 2, 3: 3}
    assert targets(waiting=3)[1] == 3  # phi_wait are left to the engine: the newest version gets the DP group
    on_its_way = [*workers, {"loaded": -1, "target": 1}]
    shown = make_view(on_its_way, running, newest=3, admissible={3: 5}, backlog_longest=np.ones(1), cost=COST)
    assert StaleFlowPolicy(BalanceConfig()).plan(shown, Trigger.TIME).targets == {0: 1, 1: 3, 2: 2, 3: 3, 4: 1}


def test_what_an_engine_queues_beyond_the_limit_migrates() -> None:
    """Algorithm 5, first case: two above phi_wait, those with the fewest tokens; a host of another version is none."""
    requests = [(1, 0, 10 + row) for row in range(8)] + [(1, 1, 100)]
    workers = [{"loaded": 1, "waiting": 5}, {"loaded": 1}, {"loaded": 2}]
    board = RoutingBoard(make_view(workers, requests, cost=COST), {})
    migrate(board)
    assert board.moves() == (Move(0, 1), Move(1, 1))


def test_the_fastest_group_is_redistributed_where_the_slowest_is_far_behind() -> None:
    """Algorithm 5, second case, within a version."""
    requests = [(1, 0, 20) for _ in range(12)] + [(1, 1, 20)] + [(2, 2, 20)]
    workers = [{"loaded": 1}, {"loaded": 1}, {"loaded": 2}]
    board = RoutingBoard(make_view(workers, requests, cost=COST), {})
    migrate(board)
    assert len(board.moves()) == 5 and {move.target for move in board.moves()} == {1}  # 7 and 6: evened out
    near = RoutingBoard(make_view(workers, requests[:5] + requests[12:], cost=COST), {})
    migrate(near)
    assert near.moves() == ()  # a ratio of 5 is not above it


# ----------------------------------------------------------------------------------------------------------- StreamRL


def test_the_split_that_takes_the_least_time() -> None:
    """Algorithm 2 by hand: of 10 samples the 2 longest are the tail, P90 is 100 and P50 10 tokens."""
    lengths = [10.0] * 8 + [100.0] * 2

    def one_at_a_time(samples: int, mean_tokens: float) -> float:
        return samples * mean_tokens

    # (long, regular) groups of 4: (1, 3) 2 x 100 + 3 x 10 = 230; (2, 2) 100 + 40 = 140; (3, 1) 100 + 80 = 180
    assert dedicated_groups(lengths, 4, one_at_a_time) == 2
    assert dedicated_groups(lengths, 2, one_at_a_time) == 1
    assert dedicated_groups(lengths, 1, one_at_a_time) == 0  # nothing to divide


def test_latency_of_one_group() -> None:
    worker = Worker("w0", 1, 0, slots=8, kv_tokens=1000)
    batch_s = COST.decode_step_s(5, 5 * (20 + 90))  # 1,000 / (20 + 180): KV admits five at once
    assert latency_s(12, 180.0, 20.0, worker, COST) == pytest.approx(batch_s * 180 * 3)
    assert latency_s(12, 5.0, 20.0, worker, None) == 5 * 2  # eight slots
    assert latency_s(3, 5000.0, 20.0, worker, None) == 5000 * 3  # longer than the KV: one at a time
