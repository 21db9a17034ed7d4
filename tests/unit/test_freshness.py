"""Admission by need: what is begun, and when, by what the trainer will want."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.core import commands as do
from dora.core import events as on
from dora.core.forecast.rates import Rates
from dora.core.groups.freshness import Freshness
from dora.core.groups.window import Window
from dora.core.table import Table
from dora.lab.sim.run import simulate
from dora.lab.sim.scenario import Scenario
from tests.sweeps import some_of
from tests.unit.test_machine import Bench

GROUPS, TRAINING_S, GROUP_S = 8, 80.0, 20.0
COLUMNS = {"tokens": np.int64, "expected": np.int64, "max_tokens": np.int64, "group": np.int64}
BELIEF = {"log_mean": np.float64, "log_sd": np.float64}
NO_ROWS = np.zeros(0, dtype=np.int64)


def steady(freshness: float = 0.005, window: int = 3, taken: int = 0, lead: float = 0.25) -> tuple[Freshness, Window]:
    """At 80 s the trainer has asked for step 1, after one of 80 s that it never waited in; a group takes 20 s."""
    freshness, of = Freshness(freshness), Window(window, GROUPS)
    freshness.finished(GROUP_S)
    freshness.opened(0.0)
    for _ in range(GROUPS):
        of.admit(0)
        of.take(0, of.deadline(0))
    freshness.filled((1.0 - lead) * TRAINING_S)
    of.publish()
    freshness.published(TRAINING_S, 0.0)
    freshness.opened(TRAINING_S)
    for _ in range(taken):
        of.admit(1)
        of.take(1, of.deadline(1))
    return freshness, of


def wanted(freshness: Freshness, window: Window, room: float = 10.0, now_s: float = TRAINING_S) -> tuple[int, int]:
    """Groups of the newest and of an older version, where none is in progress."""
    freshness.look(now_s, window, Rates().pace_s, Table(COLUMNS | BELIEF), NO_ROWS, room)
    return freshness.needed(newest=True), freshness.needed(newest=False)


def test_what_is_wanted_until_groups_of_the_next_version_are_ready_begins_at_a_publish() -> None:
    """The step's 8; of the next one a lead of a quarter, and a quarter for the 20 s that its own groups take."""
    assert wanted(*steady())[0] == 8 + 2 + 2


def test_staleness_that_has_a_price_has_fewer_groups_begin_and_the_trainer_wait_more() -> None:
    """An eighth of a step's 8 groups; a waiting trainer asks for more only if it waits for longer than that."""
    freshness, window = steady()
    freshness.price = 2.5
    assert wanted(freshness, window)[0] == 11
    freshness.published(2.1 * TRAINING_S, 0.1 * TRAINING_S)
    freshness.opened(2.1 * TRAINING_S)
    assert wanted(freshness, window, now_s=2.1 * TRAINING_S)[0] <= 11


def test_what_is_open_counts_and_what_was_begun_since_the_forecast() -> None:
    freshness, window = steady()
    for _ in range(5):
        window.admit(1)
    assert wanted(freshness, window)[0] == 12 - 5
    freshness.admitted()
    assert freshness.needed(newest=True) == 6


def test_an_older_version_begins_only_what_the_newest_cannot_have_ready() -> None:
    """In the 20 s that a group takes the trainer wants half of the step's; all later ones the newest has ready."""
    assert wanted(*steady())[1] == 4


def test_nothing_is_held_back_where_generation_does_not_keep_up() -> None:
    freshness, window = steady()
    newest, older = wanted(freshness, window, room=0.5 / TRAINING_S)
    assert newest > 8 + 2 + 2
    assert older > 4
    assert wanted(freshness, window, room=0.0)[0] >= 2 * GROUPS


def test_a_trainer_that_waits_for_its_batch_has_it_when_it_asks() -> None:
    assert wanted(*steady(lead=1.0))[0] == 8 + 8  # and while the first groups of a version run, none is lacked


def test_waits_while_groups_are_held_back_have_more_begun_and_less_and_less_of_it_after() -> None:
    freshness, window = steady()
    usual = wanted(freshness, window)[0]
    for _ in range(usual):
        freshness.admitted()
    assert freshness.needed(newest=True) == 0  # held back
    freshness.published(2 * TRAINING_S, 0.2 * TRAINING_S)
    freshness.opened(2 * TRAINING_S)
    more = wanted(freshness, window, now_s=2 * TRAINING_S)[0]
    assert more > usual
    for step in range(3, 40):
        freshness.filled((step - 0.25) * TRAINING_S)
        freshness.published(step * TRAINING_S, 0.0)
        freshness.opened(step * TRAINING_S)
    assert wanted(freshness, window, now_s=39 * TRAINING_S)[0] < more


def test_waits_that_no_holding_back_has_caused_change_nothing() -> None:
    freshness, window = steady()
    usual = wanted(freshness, window)[0]
    freshness.published(2.25 * TRAINING_S, 0.25 * TRAINING_S)
    freshness.opened(2.25 * TRAINING_S)
    assert wanted(freshness, window, now_s=2.25 * TRAINING_S)[0] == usual


def test_groups_that_a_filter_will_cancel_are_begun_beside_the_others() -> None:
    freshness, window = steady()
    for _ in range(400):
        freshness.finished(GROUP_S)
        freshness.cancelled()
    assert wanted(freshness, window)[0] > 1.5 * 12


@given(
    st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(0, 12), st.integers(0, 7), st.floats(0.0, 1.0),
    st.floats(0.0, 100.0), st.integers(2, 8),
)  # fmt: skip
def test_fresher_groups_are_bought_with_waits_alone(
    less: float, more: float, opened: int, taken: int, room: float, since_s: float, size: int
) -> None:
    """The more may be waited, the fewer are wanted; the newest version never wants fewer than an older one; and a step
    whose groups are neither finished nor in progress always gets them."""
    found = []
    for freshness in sorted((less, more)):
        freshness, window = steady(freshness, size, taken)
        for _ in range(min(opened, window.admissible(1))):
            window.admit(1)
        newest, older = wanted(freshness, window, room, TRAINING_S + since_s)
        assert newest >= older
        assert newest >= window.left - window.open_groups
        found.append(newest)
    assert found[0] >= found[1]


@pytest.mark.parametrize(("freshness", "waited_s"), [(0.0, 0.0), (0.005, -1.0)])
def test_all_that_the_window_allows_begins_where_the_trainer_does_not_say_or_nobody_asks(
    freshness: float, waited_s: float
) -> None:
    freshness = Freshness(freshness)
    freshness.finished(GROUP_S)
    freshness.opened(0.0)
    freshness.published(TRAINING_S, waited_s)
    assert not freshness.acts


def test_the_machine_holds_groups_back_once_it_has_seen_a_step() -> None:
    bench = Bench(window=3, groups=2, policy="dora")
    bench.start("w0", "w1")
    bench.offer(16)
    bench.post(on.StepRequested(1, 0))
    for group in range(2):
        bench.complete(f"g{group}.0")
    begun = len(bench.given(do.AdmitGroup))
    assert begun == 3 * 2
    bench.now_s += 100.0
    bench.post(on.StepCommitted(1, 0, 0.0))
    bench.load_all()
    bench.post(on.StepRequested(1, 1))
    assert len(bench.given(do.AdmitGroup)) == begun
    assert bench.state.window.admissible(1) == 2


@pytest.mark.parametrize("policy", some_of(("laxity", "dora", "staleflow", "laminar"), "dora"))
def test_steps_take_no_longer_and_their_groups_are_fresher(policy: str) -> None:
    tree = {
        "window": {"size": 3},
        "balance": {"policy": policy, "predictor": "ranker"},
        "cluster": {"gpus": 4, "rollout_gpus": 2, "gpus_per_engine": 1, "slots": 32, "kv_tokens": 64_000,
                    "kv_token_bytes": 57344.0, "weights_bytes": 15.24e9},
        "trainer": {"groups_per_step": 8, "step_s": 120.0, "micro_batches": 8},
        "workload": {"group_size": 4, "lengths": {"mu": 5.06, "cap_tokens": 2000}},
    }  # fmt: skip
    early, by_freshness = (
        simulate(
            Scenario.model_validate(tree | {"window": {"size": 3, "freshness": freshness}}),
            steps=12, warmup=6, seed=1,
        )
        for freshness in (0.0, 0.005)
    )  # fmt: skip
    assert by_freshness.staleness_mean < 0.6 * early.staleness_mean
    assert by_freshness.step_time_min <= 1.02 * early.step_time_min
