"""The core's rates of training and generation."""

import pytest

from dora.config import validated
from dora.core import Machine
from dora.core import events as on
from dora.core.forecast.prediction import PromptTraits
from dora.core.forecast.rates import Rates
from dora.core.groups.queues import Backlog


def test_work_of_drawn_prompts_gives_the_shortest_step() -> None:
    backlog, rates = Backlog(), Rates()
    for number in range(10):
        prompt = on.OfferedPrompt(f"p{number}", "task", 50, 2, 1000)
        rates.mix.add(backlog.add(prompt, 300.0, (100.0, 300.0)).lengths, 50)
    rates.generated(1000, 20.0)
    work = 100 * (50 + 50) + 300 * (150 + 50)
    assert rates.group_work == pytest.approx(work)
    assert rates.kv_step_s(groups=8, kv_tokens=10_000) == pytest.approx(8 * work / 10_000 * 0.02)


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
    assert state.rates.group_work == 0.0
    for _ in range(8 * 2):  # a step's worth
        state.predictor.observe(PromptTraits("p", "task", 10, 50_000, 2), 200)
    offer("p1")
    assert 0.0 < state.rates.group_work < 1e6  # the guess: 6e8


def test_a_response_that_stood_still_does_not_set_the_pace() -> None:
    rates = Rates()
    rates.generated(1000, 20.0)
    rates.generated(200_000, 200_000.0)  # a second a token
    assert rates.pace_s == pytest.approx(1.2 * 0.02)


def test_the_rhythm_keeps_how_long_training_goes_on_after_a_step_is_full() -> None:
    rates = Rates()
    for published_s, filled_s in ((0.0, 0.0), (100.0, 80.0), (210.0, 200.0)):  # the first holds the start of everything
        rates.filled(filled_s)
        rates.published(published_s)
    assert rates.step_s == pytest.approx(100.0 + 0.3 * 10.0)
    assert rates.tail_s == pytest.approx(20.0 - 0.3 * 10.0)
