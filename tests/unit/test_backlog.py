"""The backlog: the highest priority first, then as they came; a prompt can be taken back until it is admitted."""

import random

import pytest

from dora.config import validated
from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.groups.queues import Backlog, QueuedPrompt
from dora.errors import Conflict, NotFound
from dora.lab.sim.invariants import check_state
from tests.refusals import refused


def offered(number: int, priority: int = 0) -> on.OfferedPrompt:
    return on.OfferedPrompt(f"p{number}", "task", 10, 1, 500, priority=priority)


def test_it_shows_what_a_plain_list_would() -> None:
    """Whatever comes and goes: those of the highest priority to whoever looks for one, all to whoever counts."""
    draw = random.Random(3)
    backlog, plain = Backlog(), list[QueuedPrompt]()
    for number in range(2000):
        if plain and draw.random() < 0.49:
            backlog.remove(plain.pop(draw.randrange(len(plain))))
        else:
            length = float(draw.randrange(20))
            plain.append(backlog.add(offered(number, draw.choice((-1, 0, 0, 3))), length, (length,)))
        highest = max((entry.prompt.priority for entry in plain), default=0)
        shown = [entry for entry in plain if entry.prompt.priority == highest]
        assert len(backlog) == len(plain) and list(backlog) == shown
        assert backlog.first() == next(iter(shown), None)
        lengths = sorted(entry.longest_tokens for entry in plain)
        assert backlog.lengths().tolist() == lengths
        count, limit = draw.randrange(1, 9), float(draw.randrange(20))
        assert backlog.longest_of_shortest(count) == (lengths[count - 1] if count < len(lengths) else float("inf"))
        within = [entry for entry in shown if entry.longest_tokens <= limit]
        found = backlog.longest_within(limit)
        assert found == max(within, key=lambda entry: (entry.longest_tokens, entry.number), default=None)
        arrivals = draw.randrange(number + 1)
        beyond = [entry for entry in shown if entry.longest_tokens > limit and entry.number <= arrivals]
        found = backlog.longest_beyond(limit, arrivals)
        assert found == max(beyond, key=lambda entry: (entry.longest_tokens, entry.number), default=None)
        if plain:
            assert backlog.find(plain[-1].prompt.prompt_id) == plain[-1]
        assert backlog.find("nobody") is None


def test_it_says_when_more_can_be_looked_up() -> None:
    backlog = Backlog()
    low, high = backlog.add(offered(0), 1.0, (1.0,)), backlog.add(offered(1, 5), 1.0, (1.0,))
    assert (backlog.changes, backlog.arrivals) == (2, 2)
    backlog.remove(high)
    assert (backlog.changes, list(backlog)) == (3, [low])
    backlog.remove(low)
    assert (backlog.changes, list(backlog)) == (3, [])


def machine_with(*prompts: on.OfferedPrompt, exhausted: bool = False) -> Machine:
    machine = Machine(validated({"window": {"size": 2}}))
    machine.handle(on.TrainerAttached(1, 4), 0.0)
    machine.handle(on.PromptsOffered(prompts), 0.0)
    if exhausted:
        machine.handle(on.PromptsOffered((), True), 0.0)
    return machine


def join(machine: Machine) -> list[do.Command]:
    """A worker with two slots comes and loads; what follows."""
    commands = machine.handle(on.WorkerJoined("w0", 1, 2, 10_000), 0.0)
    (load,) = (command for command in commands if isinstance(command, do.LoadVersion))
    return machine.handle(on.CommandDone("w0", 1, load.command_id), 0.0)


def admitted(commands: list[do.Command]) -> list[str]:
    return [command.prompt_id for command in commands if isinstance(command, do.AdmitGroup)]


@pytest.mark.parametrize("policy", ["laxity", "dora", "sync", "one_step", "laminar", "staleflow", "streamrl", "stream"])
def test_every_policy_admits_the_highest_first(policy: str) -> None:
    size = 1 if policy == "sync" else 2
    machine = Machine(validated({"window": {"size": size}, "balance": {"policy": policy}}))
    machine.handle(on.TrainerAttached(1, 4), 0.0)
    machine.handle(on.PromptsOffered((offered(0), offered(1, -1), offered(2, 9), offered(3, 2))), 0.0)
    found = admitted(join(machine))
    assert found[:2] == ["p2", "p3"] and found == ["p2", "p3", "p0", "p1"][: len(found)]


def test_a_prompt_on_offer_is_taken_back_once() -> None:
    machine = machine_with(offered(0), offered(1, 4), offered(2))
    commands = machine.handle(on.PromptCancelled("p1"), 1.0)
    assert do.DropPrompt("p1") in commands
    assert machine.counters.prompts_cancelled == 1 and len(machine.state.backlog) == 2
    for name in ("p1", "nobody"):
        with refused(NotFound, field="prompt_id"):
            machine.handle(on.PromptCancelled(name), 1.0)
    assert admitted(join(machine)) == ["p0", "p2"]
    with refused(NotFound, field="prompt_id", value="p0"):  # admitted: a group is cancelled, with its reason
        machine.handle(on.PromptCancelled("p0"), 1.0)


def test_a_group_of_a_version_is_admitted_at_once_or_refused() -> None:
    """It passes the backlog, where others wait for a worker."""
    machine = machine_with(offered(0))
    for number in range(8):  # a window of two steps of four groups
        commands = machine.handle(on.GroupRequested(offered(10 + number), 0), 1.0)
        assert admitted(commands) == [f"p{10 + number}"] and machine.state.backlog.first() is not None
    with refused(Conflict, field="version", value=1):
        machine.handle(on.GroupRequested(offered(20), 1), 1.0)
    with refused(Conflict, field="version", value=0):
        machine.handle(on.GroupRequested(offered(20), 0), 1.0)
    assert [each.request_id for each in join(machine) if isinstance(each, do.StartRequest)] == ["g0.0", "g1.0"]
    check_state(machine.state)


def test_a_drained_service_admits_no_group_of_a_version() -> None:
    machine = machine_with()
    machine.handle(on.AdmissionEnded(), 1.0)
    with refused(Conflict, field="version", value=0):
        machine.handle(on.GroupRequested(offered(1), 0), 1.0)


def test_taking_the_last_prompt_back_ends_the_last_step() -> None:
    machine = machine_with(offered(0), exhausted=True)
    assert not any(isinstance(each, do.CloseStep) for each in machine.handle(on.StepRequested(1, 0), 1.0))
    closed = [each for each in machine.handle(on.PromptCancelled("p0"), 2.0) if isinstance(each, do.CloseStep)]
    assert closed == [do.CloseStep(0, 1, exhausted=True)]
