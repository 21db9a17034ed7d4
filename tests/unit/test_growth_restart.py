"""A restart derives from the log which members of a group have started, in each state of the group."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dora.config import RolloutConfig, WindowConfig, validated
from dora.core import Machine
from dora.core import events as on
from dora.core.rules import restoring
from dora.data.types import Prompt
from dora.errors import InvalidValue
from dora.journal import records
from dora.lab.sim.invariants import check_state
from dora.orchestrator.recovery import recovery_state, resume
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.orchestrator.rollout.prompts import offer
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from tests.refusals import refused
from tests.unit.journal.contents import content_of, durable_of

SIZE, LEAST = 4, 2
UNFINISHED, FINISHED, SCORED, DORMANT, SKIPPED = 0, 1, 2, 4, 5
PROMPT = Prompt("p0", "task", (1, 2), "t", SIZE, group_size_min=LEAST)


def ended(*indexes: int) -> list[records.LogRecord]:
    """Responses of two tokens that have ended."""
    return [
        records.Tokens(
            2.0, np.array([index]), np.array([0]), np.array([2]), np.array([1], np.uint8), np.array([5, 6]),
            np.zeros(2), [[0, "w0", 0, "new"]],
        )
        for index in indexes
    ]  # fmt: skip


def verdicts(*rewards: float | None) -> list[records.LogRecord]:
    return [records.Verdict(n, 3.0 + n, reward or 0.0, reward is not None, "", {}) for n, reward in enumerate(rewards)]


def begun(prompt: Prompt = PROMPT) -> list[records.LogRecord]:
    values = records.prompt_values(prompt)
    return [
        records.Begun(0, 1.0, 1.0, ""),
        records.WindowStands(2, 0, -1),
        records.Attached(7, 4),
        records.Admitted(0, "g0", values, 0, 1, 2, 1.0, list(range(SIZE)), -1, 1),
    ]


def restarted(log: Sequence[records.LogRecord]) -> tuple[on.Restored, ResponseBuffer, list[int]]:
    """The event that restores a core, the buffer, and the damaged groups."""
    durable = durable_of(log)
    content = content_of(log, durable)
    groups = content.groups()
    requests = content.requests(groups)
    buffer = ResponseBuffer(RolloutConfig())
    window = WindowConfig(size=2)
    event = recovery_state.restored(durable, groups, requests, lambda each: offer(buffer, each), window, 9.0, 1)
    if not requests.damaged:
        resume.restore_buffer(buffer, groups, requests, SIZE)
        machine = Machine(validated({"window": {"size": 2}}))
        machine.handle(event, 9.0)
        check_state(machine.state)
        again = restoring.durable(machine.state)
        assert (again.requests, again.groups[0].rewards) == (event.requests, event.groups[0].rewards)
    return event, buffer, requests.damaged


@pytest.mark.parametrize(
    ("log", "stages", "rewards"),
    [
        ([], [UNFINISHED, UNFINISHED, DORMANT, DORMANT], ()),
        ([*ended(0), *verdicts(1.0)], [SCORED, UNFINISHED, DORMANT, DORMANT], (1.0,)),
        ([*ended(0, 1), *verdicts(None)], [SCORED, FINISHED, DORMANT, DORMANT], ()),
        ([*ended(0, 1), *verdicts(1.0, 1.0)], [SCORED, SCORED, SKIPPED, SKIPPED], ()),
        ([*ended(0, 1), *verdicts(1.0, None)], [SCORED, SCORED, SKIPPED, SKIPPED], ()),
        ([*ended(0, 1), *verdicts(1.0, 0.0)], [SCORED, SCORED, UNFINISHED, UNFINISHED], ()),
        ([*ended(0, 1, 2), *verdicts(1.0, 0.0, 1.0)], [SCORED, SCORED, SCORED, UNFINISHED], ()),
        ([*ended(0, 1, 3), *verdicts(1.0)], [SCORED, FINISHED, UNFINISHED, FINISHED], ()),  # the verdict was lost
    ],
)
def test_each_state_of_a_group(log: list[records.LogRecord], stages: list[int], rewards: tuple[float, ...]) -> None:
    event, buffer, damaged = restarted([*begun(), *log])
    assert event.requests.stages.tolist() == stages and event.groups[0].rewards == rewards
    assert event.finished == (("g0",) if {SCORED, SKIPPED} >= set(stages) else ()) and not damaged
    assert (buffer.rewards("g0") is None) == (event.finished == ())


def test_a_leased_group_is_delivered_again_with_the_members_that_started() -> None:
    _, buffer, damaged = restarted([*begun(), *ended(0, 1), *verdicts(1.0, 1.0), records.Leased(0, 0)])
    (group,) = buffer.leased()
    assert not damaged
    assert [(each.sample_index, each.group_size) for each in group.trajectories] == [(0, 2), (1, 2)]


def test_a_leased_group_without_the_verdict_that_decided_is_damaged() -> None:
    log = [*ended(0, 1, 2, 3), *verdicts(1.0, 0.0, 1.0, 1.0), records.Leased(0, 0)]
    del log[5]  # on g0.1
    assert restarted([*begun(), *log])[2] == [0]


def test_a_group_of_an_older_log_starts_whole() -> None:
    older = begun()
    admitted = older[-1]
    assert isinstance(admitted, records.Admitted)
    older[-1] = replace(admitted, prompt=admitted.prompt[:-1])
    event, _, _ = restarted(older)
    assert event.requests.stages.tolist() == [UNFINISHED] * SIZE


@pytest.mark.parametrize(
    ("service", "size", "size_min", "expected"),
    [(0, 4, 0, 4), (0, 4, 3, 3), (2, 4, 0, 2), (3, 2, 0, 2), (3, 1, 0, 1), (2, 8, 8, 8)],
)
def test_a_prompt_goes_before_the_service(service: int, size: int, size_min: int, expected: int) -> None:
    check = PromptCheck(validated({"rollout": {"group_size_min": service}}))
    assert check.checked(replace(PROMPT, group_size=size, group_size_min=size_min)).group_size_min == expected


@pytest.mark.parametrize("size_min", [1, 5, -1, 2.0])
def test_a_size_that_cannot_decide_is_refused(size_min: int) -> None:
    with refused(InvalidValue, field="group_size_min", value=size_min):
        PromptCheck(validated({})).checked(replace(PROMPT, group_size_min=size_min))
    if size_min != 2.0:
        with refused(InvalidValue, field="rollout.group_size_min", value=size_min):
            validated({"rollout": {"group_size": SIZE, "group_size_min": size_min}})
