"""Where lengths are only believed: a version begins its prompts by falling length, along its life."""

from math import exp, inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.orchestrator.core import Machine
from dora.orchestrator.core import commands as do
from dora.orchestrator.core import events as on
from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.policies.descent import AT_ONCE, BEGUN, limit_tokens
from dora.orchestrator.core.policies.reservations import AMPLE, OUTMOST_SD, Reservations
from dora.orchestrator.core.rhythm import CLASSES_AN_OCTAVE, LengthMix
from tests.unit.test_laxity import machine_of, prompts_of, started

A_CLASS = 2.0 ** (1 / CLASSES_AN_OCTAVE)  # lengths are known so well
LENGTHS = [100 * 2**octave for octave in range(8)]  # 100 to 12,800


def mix_of(longest: list[int]) -> LengthMix:
    mix = LengthMix()
    for tokens in longest:
        mix.add([float(tokens)], 10, float(tokens))
    return mix


@given(longest=st.lists(st.integers(1, 50_000), min_size=1, max_size=60), share=st.floats(0.01, 0.99))
def test_a_quantile_splits_the_groups(longest: list[int], share: float) -> None:
    tokens = mix_of(longest).longest_quantile(share)
    shorter = sum(each <= tokens * A_CLASS for each in longest) / len(longest)
    longer = sum(each >= tokens / A_CLASS for each in longest) / len(longest)
    assert shorter >= share - 1e-6 and longer >= 1.0 - share - 1e-6


def test_of_a_mix_the_newest_prompts_count_like_the_oldest_until_they_are_many() -> None:
    mix = mix_of([100] * 300 + [10_000] * 100)
    assert mix.longest_quantile(0.7) <= 100 * A_CLASS
    assert mix.longest_quantile(0.8) >= 10_000 / A_CLASS


@given(window=st.integers(1, 8), age=st.floats(0.0, 8.0), later=st.floats(0.0, 8.0))
def test_the_longest_that_begins_falls_over_a_versions_life(window: int, age: float, later: float) -> None:
    mix = mix_of(LENGTHS)
    assert limit_tokens(mix, age + later, window) <= limit_tokens(mix, age, window)
    assert limit_tokens(mix, AT_ONCE * window, window) == inf
    assert limit_tokens(mix, BEGUN * window, window) == 0.0
    halfway = limit_tokens(mix, (AT_ONCE + BEGUN) / 2 * window, window)
    assert sum(length <= halfway for length in LENGTHS) == len(LENGTHS) / 2


def test_nothing_is_held_back_while_no_length_is_known() -> None:
    assert limit_tokens(LengthMix(), 1.0, 3) == inf


# ------------------------------------------------------------------------------------------------- on a small machine


NOW_S = 120.0


def later_on(log_sd: float, max_tokens: int = 50_000, tokens: float = 1_000.0) -> Machine:
    """Four DP groups at window 2, a third of version 0's life over; what runs is believed to be so many tokens long."""
    machine = machine_of(64, LENGTHS, exhausted=False)
    assert len(started(machine)) == len(LENGTHS)
    requests = machine.state.requests
    rows = Floor(machine.state).unfinished()
    requests["log_mean"][rows], requests["log_sd"][rows] = log(tokens), log_sd
    requests["max_tokens"][rows] = max_tokens
    machine.handle(on.Tick(), NOW_S)
    return machine


def begun(machine: Machine, lengths: list[int]) -> list[int]:
    """Lengths of the prompts that begin when these are offered, in order."""
    prompts = prompts_of(lengths, "later")
    commands = machine.handle(on.PromptsOffered(prompts, False), NOW_S)
    known = {prompt.prompt_id: prompt.known_tokens[0] for prompt in prompts}
    return [known[command.prompt_id] for command in commands if isinstance(command, do.AdmitGroup)]


def limit_of(machine: Machine) -> tuple[float, float]:
    """The longest that may begin, and the longest that can end in time."""
    reservations, floor = Reservations(), Floor(machine.state)
    assert reservations.refresh(floor)
    return reservations.limit_tokens(floor, 0), reservations.reach_tokens(floor, 0)


def test_what_may_turn_out_long_waits_for_the_next_publish() -> None:
    limit, reach = limit_of(later_on(log_sd=1.0))
    assert LENGTHS[4] < limit < LENGTHS[7] < reach


@pytest.mark.parametrize(("log_sd", "most_tokens"), [(0.0, 50_000), (1.0, 4_000)])
def test_what_ends_in_time_however_long_it_becomes_does_not_wait(log_sd: float, most_tokens: int) -> None:
    """Known lengths, and limits that are short beside the time there is."""
    limit, reach = limit_of(later_on(log_sd, most_tokens))
    assert limit == reach >= AMPLE * 4_000


def test_nearly_known_lengths_hardly_wait() -> None:
    limit, reach = limit_of(later_on(log_sd=0.05, tokens=16_000.0))
    assert limit == pytest.approx(reach / exp(OUTMOST_SD * 0.05))


def test_those_whose_turn_it_is_begin_first_and_rather_than_nothing_the_shortest() -> None:
    machine = later_on(log_sd=1.0)
    limit, _ = limit_of(machine)
    assert 1_500 < limit < 9_000
    assert begun(machine, [200, 12_000, 9_000, 1_500]) == [200, 1_500, 9_000, 12_000]


def test_where_versions_are_passed_over_what_may_turn_out_long_waits_though_nothing_else_begins() -> None:
    """Four DP groups at window 3: the next version that is taken up is a step away."""
    machine = machine_of(64, LENGTHS, window=3, exhausted=False)
    started(machine)
    requests, rows = machine.state.requests, Floor(machine.state).unfinished()
    requests["log_mean"][rows], requests["log_sd"][rows] = log(10_000.0), 1.0
    machine.handle(on.Tick(), NOW_S)
    limit, reach = limit_of(machine)
    assert limit < reach / 2
    assert begun(machine, [int(1.1 * limit)]) == []
    assert begun(machine, [int(0.9 * limit)]) == [int(0.9 * limit)]
