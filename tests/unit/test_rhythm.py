"""How fast training and generation go, as the core sees it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.config import validated
from dora.orchestrator.core import Machine
from dora.orchestrator.core import events as on
from dora.orchestrator.core.line import Backlog
from dora.orchestrator.core.prediction import PromptTraits
from dora.orchestrator.core.rhythm import Rhythm


def test_work_of_drawn_prompts_gives_the_shortest_step() -> None:
    backlog, rhythm = Backlog(), Rhythm()
    for number in range(10):
        prompt = on.OfferedPrompt(f"p{number}", "task", 50, 2, 1000)
        rhythm.mix.add(backlog.add(prompt, 300.0, (100.0, 300.0)).lengths, 50)
    rhythm.generated(1000, 20.0)
    work = 100 * (50 + 50) + 300 * (150 + 50)
    assert rhythm.group_work == pytest.approx(work)
    assert rhythm.kv_step_s(groups=8, kv_tokens=10_000) == pytest.approx(8 * work / 10_000 * 0.02)
    costly = backlog.add(on.OfferedPrompt("p10", "task", 50, 1, 5000), 5000.0, (5000.0,))
    assert backlog.mean_work > rhythm.group_work  # long prompts wait
    backlog.remove(costly)
    assert backlog.mean_work == pytest.approx(rhythm.group_work)


def test_a_guess_made_before_anything_was_learnt_does_not_set_the_length_of_steps() -> None:
    """Half the limit for every prompt, at first: it would make steps of an hour of steps of minutes, for many steps."""
    machine = Machine(validated({"balance": {"policy": "laxity", "predictor": "statistics"}}))
    machine.handle(on.TrainerAttached(1, 8), 0.0)
    machine.handle(on.StepRequested(1, 0), 0.0)
    state = machine.state

    def offer(name: str) -> None:
        state.drawing = 1
        machine.handle(on.PromptsOffered((on.OfferedPrompt(name, "task", 10, 2, 50_000),), False), 0.0)

    offer("p0")
    assert state.rhythm.group_work == 0.0
    for _ in range(8 * 2):  # a step's worth
        state.predictor.observe(PromptTraits("p", "task", 10, 50_000, 2), 200)
    offer("p1")
    assert 0.0 < state.rhythm.group_work < 1e6  # the guess: 6e8


def test_a_response_that_stood_still_does_not_set_the_pace() -> None:
    rhythm = Rhythm()
    rhythm.generated(1000, 20.0)
    rhythm.generated(200_000, 200_000.0)  # a second a token
    assert rhythm.pace_s == pytest.approx(1.2 * 0.02)


def test_the_rhythm_keeps_how_long_training_goes_on_after_a_step_is_full() -> None:
    rhythm = Rhythm()
    for published_s, filled_s in ((0.0, 0.0), (100.0, 80.0), (210.0, 200.0)):  # the first holds the start of everything
        rhythm.filled(filled_s)
        rhythm.published(published_s)
    assert rhythm.step_s == pytest.approx(100.0 + 0.3 * 10.0)
    assert rhythm.tail_s == pytest.approx(20.0 - 0.3 * 10.0)


@given(
    gaps_s=st.lists(st.one_of(st.just(0.0), st.floats(0.0, 50.0)), min_size=1, max_size=30),
    group_s=st.floats(0.1, 10.0),
)
def test_the_time_that_training_on_a_group_takes_shows_while_groups_wait_for_it(
    gaps_s: list[float], group_s: float
) -> None:
    rhythm = Rhythm()
    rhythm.published(0.0)  # the first holds the start of everything
    now_s = trained_s = 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        rhythm.taken(now_s)
        trained_s = max(trained_s, now_s) + group_s
    rhythm.published(trained_s)
    assert rhythm.group_s == pytest.approx(group_s)


def test_a_trainer_that_was_slow_once_is_not_taken_for_slow() -> None:
    rhythm = Rhythm()
    for published_s, taken_s in ((0.0, []), (10.0, [4.0, 4.0]), (100.0, [20.0, 21.0]), (110.0, [])):
        for each_s in taken_s:
            rhythm.taken(each_s)
        rhythm.published(published_s)
    assert rhythm.group_s == pytest.approx(3.0)  # the step after took 40 s a group, the last none: it had none
