"""The size of an adaptive window: within its bounds whatever it is told, slow, and settled where it should be."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.config import WindowConfig
from dora.core import commands as do
from dora.core import events as on
from dora.core.forecast.adaptive import AdaptiveSize, StepSignals
from dora.core.forecast.staleness import price_of, samples_factor
from dora.errors import InvalidValue
from tests.refusals import refused
from tests.sweeps import examples
from tests.unit.test_machine import Bench

SHARE = st.none() | st.floats(0.0, 1.0)
SIGNALS = st.none() | st.builds(StepSignals, st.floats(0.5, 2.0), SHARE, SHARE, SHARE, SHARE)
LOOK = 4
COST = 2.5  # of staleness


def adaptive(least: int = 1, most: int = 4, look_steps: int = LOOK) -> AdaptiveSize:
    return AdaptiveSize(WindowConfig(size="auto", min=least, max=most, look_steps=look_steps, staleness_cost=COST))


def run(window: AdaptiveSize, steps: int, signals: Callable[[int], StepSignals], first: int = 0) -> list[int]:
    """The sizes in force at each of so many steps, where each step's signals follow from its size."""
    sizes = []
    for step in range(first, first + steps):
        sizes.append(window.size)
        window.saw(step, signals(window.size))
    return sizes


def waiting(share: float, **signals: float) -> StepSignals:
    """A step that trains for a second, and waits for this share of its time."""
    took_s = 1.0 / (1.0 - share)
    return StepSignals(took_s, took_s - 1.0, **signals)


def waits(shares: Sequence[float]) -> Callable[[int], StepSignals]:
    """A trainer that waits for these shares of a step in windows of 1, 2, ..."""
    return lambda size: waiting(shares[size - 1])


def unsteady(shares: Sequence[float], spread: float, seed: int) -> Callable[[int], StepSignals]:
    """The same on average, and another share in each step."""
    random = Random(seed)

    def signals(size: int) -> StepSignals:
        took_s = max(1.01, random.gauss(1.0, spread) / (1.0 - shares[size - 1]))
        return StepSignals(took_s, took_s - 1.0)

    return signals


@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 6), st.lists(SIGNALS, max_size=200))
@settings(max_examples=examples(300))
def test_it_stays_within_bounds_and_changes_slowly(
    least: int, more: int, look_steps: int, seen: list[StepSignals | None]
) -> None:
    """By one at a time, with a reason, and only after as many steps as are passed over and looked at."""
    window, since = adaptive(least, least + more, look_steps), 0
    assert window.size == least
    passed_over = 0
    for step, signals in enumerate(seen):
        before = window.size
        resize = window.saw(step, signals)
        since += 1
        assert least <= window.size <= least + more
        if resize is None:
            assert window.size == before
            continue
        assert (resize.step, resize.before, resize.size) == (step, before, window.size) and resize.reason
        assert window.last == resize and abs(window.size - before) == 1
        assert since >= passed_over + look_steps
        passed_over, since = max(before, window.size), 0


@given(st.lists(SIGNALS, max_size=120))
def test_the_same_signals_give_the_same_sizes(seen: list[StepSignals | None]) -> None:
    one, other = adaptive(), adaptive()
    assert [one.saw(step, each) for step, each in enumerate(seen)] == [
        other.saw(step, each) for step, each in enumerate(seen)
    ]


@pytest.mark.parametrize(
    ("shares", "settled"),
    [
        ((0.0, 0.0, 0.0, 0.0), 1),  # it never waits
        ((0.3, 0.01, 0.0, 0.0), 2),  # a wait that nobody sees is no reason
        ((0.38, 0.21, 0.10, 0.16), 3),  # dora-64
        ((0.5, 0.4, 0.3, 0.2), 4),
        ((0.5, 0.5, 0.5, 0.5), 1),  # generation is too slow in any window
        ((0.5, 0.4, 0.396, 0.395), 2),
    ],
)
def test_it_settles_at_the_narrowest_window_with_the_shortest_steps(shares: Sequence[float], settled: int) -> None:
    """Within about a window.wait_share of them; and it spends nearly all later steps there."""
    sizes = run(adaptive(), 400, waits(shares))
    assert sizes[60:].count(settled) > 0.8 * len(sizes[60:])
    took = [1.0 / (1.0 - share) for share in shares]
    assert took[settled - 1] <= 1.02 * min(took)
    assert sum(one != other for one, other in pairwise(sizes[200:])) <= 8


@pytest.mark.parametrize(("spread", "least"), [(0.02, 0.75), (0.05, 0.7), (0.15, 0.5)])
def test_steps_that_differ_much_among_themselves_are_looked_at_for_longer(spread: float, least: float) -> None:
    """It takes longer until it settles, and most runs settle where they would have anyway."""
    shares = []
    for seed in range(11):
        sizes = run(adaptive(), 300, unsteady((0.38, 0.21, 0.10, 0.16), spread, seed))
        shares.append(sizes[60:].count(3) / len(sizes[60:]))
    assert sorted(shares)[5] > least


def test_it_gets_narrower_again_when_a_narrower_one_will_do() -> None:
    window = adaptive()
    assert run(window, 50, waits((0.5, 0.3, 0.1, 0.0)))[-1] == 4
    sizes = run(window, 400, waits((0.0, 0.0, 0.0, 0.0)), first=50)  # more workers came
    assert sizes[-1] == 1 and sizes.count(1) > 200


def test_a_signal_past_its_limit_makes_it_narrower_and_holds_it_there() -> None:
    def stale(size: int) -> StepSignals:
        return waiting(0.5 / size, clip_fraction=0.12 * (size - 1))

    sizes = run(adaptive(), 300, stale)
    assert max(sizes) == 3, "0.24 is above the limit, and is found out"
    assert sizes[40:].count(2) > 0.8 * len(sizes[40:])
    few = run(adaptive(), 300, lambda size: waiting(0.5 / size, effective_sample=1.0 - 0.2 * (size - 1)))
    assert max(few) == 3 and sorted(few[40:])[len(few[40:]) // 2] == 3, "a window of 4 would spend 0.6 of the sample"


def test_a_wider_window_is_not_tried_near_a_limit() -> None:
    sizes = run(adaptive(), 200, lambda size: StepSignals(1.0, 0.5, clip_fraction=0.15))
    assert set(sizes) == {1}


def moving(movement: Callable[[int], float], shares: Sequence[float] = (0.38, 0.21, 0.10, 0.095)) -> list[int]:
    """The sizes at each of 300 steps, whose movement is given by step; every group is as stale as the window allows."""
    window, sizes = adaptive(), []
    for step in range(300):
        sizes.append(window.size)
        window.saw(step, waiting(shares[window.size - 1], movement=movement(step), staleness=window.size - 1))
    return sizes


def test_it_stays_narrow_while_the_policy_moves_fast_and_widens_as_it_settles() -> None:
    sizes = moving(lambda step: 0.1 * 0.5 ** (step / 20))
    assert set(sizes[:12]) == {1}, (
        "a version of staleness costs 64% of the samples or more, and no wait would save as much"
    )
    assert sizes[-1] == 3, "staleness costs next to nothing, and a window of 4 saves less than 1% of a step"


def test_a_policy_that_moves_faster_than_before_makes_it_narrower_again() -> None:
    sizes = moving(lambda step: 1e-6 if step < 100 else 0.1)
    assert sizes[40:100].count(1) == 0 and sizes[40:100].count(3) > 30
    assert sizes[150:].count(1) > 0.8 * len(sizes[150:])


@pytest.mark.parametrize("movement", [0.0, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 0.1])
def test_it_settles_where_time_to_learn_is_shortest(movement: float) -> None:
    """Length of a step times the samples that staleness costs, within 3% of the best window's."""
    shares = (0.38, 0.21, 0.10, 0.095)
    cost = [samples_factor(size - 1, movement, COST) / (1.0 - share) for size, share in enumerate(shares, start=1)]
    sizes = moving(lambda step: movement, shares)[60:]
    usual = max(set(sizes), key=sizes.count)
    assert cost[usual - 1] <= 1.03 * min(cost)
    assert sizes.count(usual) > 0.75 * len(sizes)


SAVINGS = st.lists(st.floats(0.4, 0.9), min_size=3, max_size=3)


def shrinking(wait: float, savings: Sequence[float]) -> list[float]:
    """Waits as shares of a step in windows of 1, 2, ..., of which each saves such a share of the previous one's."""
    lengths = [1.0 / (1.0 - wait)]
    for saved in savings:
        lengths.append(1.0 + (1.0 - saved) * (lengths[-1] - 1.0))
    return [1.0 - 1.0 / length for length in lengths]


@given(st.floats(0.1, 0.8), SAVINGS)
@settings(max_examples=examples(50))
def test_staleness_that_costs_nothing_leaves_the_widest_window_that_saves_time(
    wait: float, savings: list[float]
) -> None:
    shares = shrinking(wait, savings)
    sizes = moving(lambda step: 0.0, shares)[80:]
    usual = max(set(sizes), key=sizes.count)
    lengths = [1.0 / (1.0 - share) for share in shares]
    assert lengths[usual - 1] <= (1.0 + WindowConfig().wait_share) * lengths[-1]


@given(st.floats(0.0, 0.95), SAVINGS, st.floats(0.2, 5.0))
@settings(max_examples=examples(50))
def test_a_policy_that_moves_fast_has_one_version_at_a_time(wait: float, savings: list[float], movement: float) -> None:
    assert set(moving(lambda step: movement, shrinking(wait, savings))) == {1}


@pytest.mark.parametrize("spread", [0.0, 0.25])
def test_a_wait_that_training_beside_generation_takes_up_is_not_saved(spread: float) -> None:
    """Engines and trainer share cores: in a window of 2 the trainer waits no longer, and trains twice as slowly."""
    random, window, sizes = Random(3), adaptive(), []
    for step in range(60):
        sizes.append(window.size)
        took_s, waited_s = (2.5, 1.5) if window.size == 1 else (2.3, 0.1)
        factor = random.lognormvariate(0.0, spread)
        signals = StepSignals(factor * took_s, factor * waited_s, movement=0.01, staleness=window.size - 1)
        window.saw(step, signals)
    assert max(sizes) == 2 and sizes.count(2) < 25, "a version of staleness costs 25% of the samples, and saves 8%"


def test_the_tiny_demo_leaves_a_second_version_that_costs_more_than_it_saves() -> None:
    """Recorded on two cores, at a large learning rate: time and wait in seconds, movement, staleness, tokens."""
    window = AdaptiveSize(WindowConfig(size="auto"))
    steps = [
        (2.52, 1.41, 0.223, 0.0, 9696),
        (1.53, 0.79, 0.103, 0.0, 5896),
        (1.56, 1.02, 0.149, 0.0, 4352),
        (4.6, 2.98, 0.122, 0.0, 11296),
        (1.94, 0.68, 0.165, 0.0, 3072),
        (1.74, 0.02, 0.199, 1.0, 4808),
        (2.38, 0.19, 0.109, 1.0, 4800),
        (2.98, 1.92, 0.106, 1.0, 5456),
        (5.89, 3.03, 0.024, 1.0, 8368),
        (2.14, 0.1, 0.111, 1.0, 6160),
        (2.68, 1.01, 0.353, 1.0, 9528),
        (3.55, 1.53, 0.37, 1.0, 11376),
    ]
    resizes = []
    for step, (took_s, waited_s, movement, staleness, tokens) in enumerate(steps, start=1):
        signals = StepSignals(took_s, waited_s, movement=movement, staleness=staleness, tokens=tokens)
        resizes.append(window.saw(step, signals))
    assert [each.size for each in resizes if each is not None] == [2, 1], "a step took 2.6 s before, and 3.3 s since"


def test_steps_that_train_on_fewer_groups_are_not_longer_ones() -> None:
    """Groups whose rewards are equal are left out, so the training time falls while generation takes as long."""
    window, sizes = adaptive(), []
    for step in range(120):
        sizes.append(window.size)
        took_s = 1.0 if window.size == 1 else 0.9
        trained_s = 0.4 * 0.9 ** max(0, step - 30)
        movement = 1e-6 if step < 30 else 0.1
        window.saw(step, StepSignals(took_s, took_s - trained_s, movement=movement, staleness=window.size - 1))
    assert sizes[20:30].count(2) == 10, "it saves a tenth of the time"
    assert sizes[50:].count(1) > 60, "a version of staleness costs 79% of the samples"


def test_long_responses_are_told_from_slow_steps() -> None:
    """Lengths differ threefold from step to step; a window of 2 saves a fifth of the time of each token."""
    random, window, sizes = Random(4), adaptive(), []
    for step in range(60):
        sizes.append(window.size)
        tokens = random.uniform(1.0, 3.0)
        took_s = tokens * (1.0 if window.size == 1 else 0.8)
        waited_s = took_s * (0.4 if window.size == 1 else 0.01)
        window.saw(step, StepSignals(took_s, waited_s, movement=0.0, staleness=window.size - 1, tokens=tokens))
    assert sizes[5:40].count(2) == len(sizes[5:40])


def test_a_narrower_window_that_is_far_dearer_is_tried_rarely() -> None:
    sizes = moving(lambda step: 0.0, (0.5, 0.3, 0.3, 0.3))
    assert sizes[4:].count(1) <= 6, "one trial in 300 steps would cost 1% of them"


def test_a_movement_that_differs_from_step_to_step_does_not_drive_it_to_and_fro() -> None:
    random = Random(5)
    sizes = moving(lambda step: 2e-3 * random.lognormvariate(0.0, 0.5))
    assert sum(one != other for one, other in pairwise(sizes[60:])) <= 12


def test_a_trainer_that_reports_no_movement_has_the_window_of_its_waits_alone() -> None:
    window = adaptive()
    sizes = run(window, 300, lambda size: waiting((0.38, 0.21, 0.10, 0.16)[size - 1], staleness=size - 1.0))
    assert sizes[100:].count(3) > 0.8 * len(sizes[100:])


def test_what_it_has_learnt_of_movement_outlives_a_crash() -> None:
    def signals(size: int) -> StepSignals:
        return waiting((0.38, 0.21, 0.10, 0.095)[size - 1], movement=2e-3, staleness=size - 1.0)

    for steps in range(1, 60):
        one, again = adaptive(), adaptive()
        run(one, steps, signals)
        again.size = one.size
        again.restore(json.loads(json.dumps(one.snapshot())))
        assert run(again, 40, signals, first=steps) == run(one, 40, signals, first=steps)
        assert again.price == one.price > 0.0


def test_staleness_has_a_price_while_the_policy_moves_and_admission_gets_it() -> None:
    assert price_of(0.0, 0.0, 2.5) == 0.0
    assert price_of(0.0, 0.04, 2.5) == pytest.approx(0.5) and price_of(2.0, 0.04, 2.5) == pytest.approx(0.25)
    bench = Bench(window="auto", groups=1)
    bench.start("w0")
    for step, movement in enumerate((0.04, 0.01, 0.01, 0.0001)):
        train(bench, step, waited_s=0.5, movement=movement)
    price = 0.1 * WindowConfig().staleness_cost
    assert bench.state.freshness.price == pytest.approx(price, abs=0.01), "from the median of the last steps"


def test_a_step_that_says_nothing_changes_nothing() -> None:
    window = adaptive()
    for step in range(100):
        assert window.saw(step, None) is None
        assert window.saw(step, StepSignals(1.0)) is None, "its trainer does not say how long it waited"


def train(bench: Bench, step: int, **told: float) -> list[do.Command]:
    """Runs one step of one group, and commits it a second after the one before. Returns what the commit gave."""
    bench.post(on.StepRequested(1, step))
    while bench.state.window.step == step:
        bench.load_all()
        bench.offer(bench.state.drawing)
        bench.complete(next(name for name, row in bench.state.request_row.items() if bench.state.owner(row)))
    bench.now_s = float(step + 1)
    return bench.post(on.StepCommitted(1, step, **told))


def test_the_core_resizes_between_two_steps_and_what_is_open_keeps_its_deadline() -> None:
    """The event has all that the choice follows from, so that a log replays to it."""
    bench = Bench(window="auto", groups=1)
    bench.start("w0", "w1")
    commands: list[do.Command] = []
    for step in range(8):
        commands += train(bench, step, waited_s=0.5)
    for step in range(8, 20):
        commands += train(bench, step, waited_s=0.1, clip_fraction=0.3)
    wider, narrower = [each for each in commands if isinstance(each, do.ResizeWindow)]
    assert wider == do.ResizeWindow(2, "the trainer waited 50% of a step")
    assert narrower == do.ResizeWindow(1, "clipped fraction 30.0% is above 20.0%")
    assert bench.state.window.size == 1


def test_a_step_in_which_a_trainer_began_anew_is_not_looked_at() -> None:
    bench = Bench(window="auto", groups=1)
    bench.start("w0")
    for step in range(20):
        train(bench, step, waited_s=0.9)
        bench.post(on.TrainerAttached(step + 2, 1))
        bench.state.trainer_epoch = 1  # so that ``train`` may go on as the first
    assert bench.state.window.size == 1


def test_bounds_are_checked() -> None:
    with refused(InvalidValue, field="window.max", value=2, names=("3",)):
        WindowConfig(size="auto", min=3, max=2)
