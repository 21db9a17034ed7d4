"""With believed lengths a version begins its prompts by falling length, along its life."""

from math import exp, inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.dispatcher import Dispatcher
from dora.core.groups.queues import Backlog
from dora.core.policies.laxity.reservations import Reservations, longest_first_tokens
from dora.core.policies.laxity.tuning import TUNING
from tests.unit.test_laxity import machine_of, prompts_of, started

LENGTHS = [100 * 2**octave for octave in range(8)]  # 100 to 12,800


def backlog_of(longest: list[int]) -> Backlog:
    backlog = Backlog()
    for prompt, tokens in zip(prompts_of(longest, "waiting"), longest, strict=True):
        backlog.add(prompt, float(tokens), (float(tokens),))
    return backlog


@given(longest=st.lists(st.integers(1, 50_000), max_size=60), count=st.integers(1, 70))
def test_so_many_of_the_shortest_are_within_their_longest(longest: list[int], count: int) -> None:
    limit = backlog_of(longest).longest_of_shortest(count)
    assert (limit == inf) == (len(longest) <= count)
    if limit < inf:
        assert sum(tokens <= limit for tokens in longest) >= count > sum(tokens < limit for tokens in longest)


@given(
    longest=st.lists(st.integers(1, 50_000), max_size=60),
    window=st.integers(1, 8),
    age=st.floats(0.0, 8.0),
    later=st.floats(0.0, 8.0),
)
def test_the_longest_that_begins_falls_over_a_versions_life(
    longest: list[int], window: int, age: float, later: float
) -> None:
    backlog = backlog_of(longest)
    assert longest_first_tokens(backlog, age + later, window) <= longest_first_tokens(backlog, age, window)
    assert longest_first_tokens(backlog, TUNING.at_once * window, window) == inf
    halfway = longest_first_tokens(backlog, (TUNING.at_once + TUNING.begun) / 2 * window, window)
    assert sum(length <= halfway for length in longest) >= len(longest) // 2


@given(longest=st.lists(st.integers(1, 50_000), max_size=60), age=st.floats(0.0, 20.0))
def test_the_shortest_begins_at_any_age(longest: list[int], age: float) -> None:
    limit = longest_first_tokens(backlog_of(longest), age, 3)
    assert sum(length <= limit for length in longest) >= min(1, len(longest))


def test_where_long_prompts_pile_up_longer_ones_begin_at_the_same_age() -> None:
    few, many = backlog_of(LENGTHS * 4), backlog_of(LENGTHS * 4 + [12_800] * 32)
    assert longest_first_tokens(many, 1.2, 3) > longest_first_tokens(few, 1.2, 3)


# ------------------------------------------------------------------------------------------------- on a small machine


NOW_S = 120.0


def later_on(log_sd: float, max_tokens: int = 50_000, tokens: float = 1_000.0, groups: int = 64) -> Machine:
    """Four workers at window 2, a quarter of version 0's life over; what runs is believed to be so many tokens long.

    Of 4 ``groups`` a step, version 0 may begin no more.
    """
    machine = machine_of(groups, LENGTHS, exhausted=False)
    assert len(started(machine)) == len(LENGTHS)
    requests = machine.state.requests
    rows = Dispatcher(machine.state).unfinished()
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
    reservations, dispatcher = Reservations(), Dispatcher(machine.state)
    assert reservations.refresh(dispatcher)
    return reservations.limit_tokens(dispatcher, 0), reservations.reach_tokens(dispatcher, 0)


def test_what_may_turn_out_long_waits_for_the_next_publish() -> None:
    machine = later_on(log_sd=1.0, groups=4)
    assert begun(machine, LENGTHS * 2) == []
    limit, reach = limit_of(machine)
    assert LENGTHS[4] < limit < LENGTHS[7] < reach


@pytest.mark.parametrize(("log_sd", "most_tokens"), [(0.0, 50_000), (1.0, 4_000)])
def test_what_ends_in_time_however_long_it_becomes_does_not_wait(log_sd: float, most_tokens: int) -> None:
    """Known lengths, and limits that are short beside the time there is."""
    machine = later_on(log_sd, most_tokens, groups=4)
    assert begun(machine, LENGTHS * 2) == []
    limit, reach = limit_of(machine)
    assert limit == reach >= TUNING.unhurried * 4_000


def test_nearly_known_lengths_hardly_wait() -> None:
    machine = later_on(log_sd=0.05, tokens=16_000.0, groups=4)
    assert begun(machine, LENGTHS * 2) == []
    limit, reach = limit_of(machine)
    assert limit == pytest.approx(reach / exp(TUNING.outmost_sd * 0.05))


def test_those_whose_turn_it_is_begin_as_they_came_and_the_others_rather_than_nothing() -> None:
    assert begun(later_on(log_sd=1.0), [200, 12_000, 9_000, 1_500]) == [200, 9_000, 1_500, 12_000]


def test_where_versions_are_passed_over_what_may_turn_out_long_waits_though_nothing_else_begins() -> None:
    """Four workers at window 3: the next version that is taken up is a step away."""
    machine = machine_of(64, LENGTHS, window=3, exhausted=False)
    started(machine)
    requests, rows = machine.state.requests, Dispatcher(machine.state).unfinished()
    requests["log_mean"][rows], requests["log_sd"][rows] = log(10_000.0), 1.0
    machine.handle(on.Tick(), NOW_S)
    limit, reach = limit_of(machine)
    assert limit < reach / 2
    assert begun(machine, [int(1.1 * limit)]) == []
    assert begun(machine, [int(0.9 * limit)]) == [int(0.9 * limit)]
