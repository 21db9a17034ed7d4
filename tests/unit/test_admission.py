"""Prompts are drawn, and wait until a version may begin them."""

import pytest

from dora.config import validated
from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.groups.queues import Backlog
from dora.core.rules.admission import BACKLOG_STEPS, DRAWN_STEP

GROUPS = 32  # a step


def drawn(commands: list[do.Command]) -> list[int]:
    return [command.count for command in commands if isinstance(command, do.DrawPrompts)]


def offer(machine: Machine, count: int, first: int = 0) -> list[do.Command]:
    prompts = tuple(on.OfferedPrompt(f"p{first + index}", "task", 10, 1, 100) for index in range(count))
    return machine.handle(on.PromptsOffered(prompts), 0.0)


def machine_with_a_full_backlog() -> Machine:
    machine = Machine(validated({"window": {"size": 2}}))
    assert drawn(machine.handle(on.TrainerAttached(1, GROUPS), 0.0)) == [BACKLOG_STEPS * GROUPS]
    assert drawn(offer(machine, BACKLOG_STEPS * GROUPS)) == []
    return machine


@pytest.mark.parametrize("slots", [1, 3, 4, 9, 2 * GROUPS])
def test_the_backlog_is_filled_again_as_soon_as_an_eighth_of_a_step_is_lacking(slots: int) -> None:
    """Not only once it is half empty: the prompts that wait for a publish would then be whatever was left over."""
    machine = machine_with_a_full_backlog()
    commands = machine.handle(on.WorkerJoined("w0", 1, slots, 10_000), 0.0)
    (load,) = (command for command in commands if isinstance(command, do.LoadVersion))
    commands = machine.handle(on.CommandDone("w0", 1, load.command_id), 0.0)
    admitted = sum(isinstance(command, do.AdmitGroup) for command in commands)
    assert admitted == min(slots, 2 * GROUPS)
    assert drawn(commands) == ([admitted] if admitted >= DRAWN_STEP * GROUPS else [])


def test_prompts_are_drawn_once_at_a_time_and_never_after_the_last() -> None:
    machine = Machine(validated({"window": {"size": 2}}))
    machine.handle(on.TrainerAttached(1, GROUPS), 0.0)
    assert drawn(machine.handle(on.StepRequested(1, 0), 1.0)) == []
    assert drawn(offer(machine, 1)) == [BACKLOG_STEPS * GROUPS - 1]
    assert drawn(machine.handle(on.PromptsOffered((), True), 2.0)) == []


@pytest.mark.parametrize(
    ("limit_tokens", "arrivals", "found"),
    [(0.0, 4, "p1"), (0.0, 1, "p0"), (0.0, 0, None), (300.0, 4, "p1"), (400.0, 4, None), (300.0, 1, None)],
)
def test_the_longest_beyond_a_limit_of_those_that_came_first(
    limit_tokens: float, arrivals: int, found: str | None
) -> None:
    backlog = Backlog()
    for index, longest_tokens in enumerate((100.0, 400.0, 200.0, 300.0)):
        backlog.add(on.OfferedPrompt(f"p{index}", "task", 10, 1, 500), longest_tokens, (longest_tokens,))
    entry = backlog.longest_beyond(limit_tokens, arrivals)
    assert (entry.prompt.prompt_id if entry else None) == found
