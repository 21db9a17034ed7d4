"""The prompt ledger: each state, what leads to it, and what the journal has of it."""

from collections.abc import Callable
from typing import Any

import pytest

from dora.config import RolloutConfig
from dora.data.types import Prompt
from dora.errors import Conflict, IllegalTransition
from dora.journal import records
from dora.lab.sim.faults.service import SimLog
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.prompt_ledger import SUBMITTED, PromptLedger, PromptState
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import ResponseState
from tests.unit.journal.contents import content_of, durable_of

PROMPT = Prompt("p", "task", (1, 2), group_size=2)


class Case:
    """A ledger with its journal, and a book that admits PROMPT's group."""

    def __init__(self) -> None:
        self.log = SimLog()
        self.log.records.clear()
        self.prompts = PromptLedger(Journal(self.log), queued_most=8)  # type: ignore[arg-type]
        self.entries = ResponseBuffer(RolloutConfig()).admit("g0", PROMPT, 0, {"g0.0": 0, "g0.1": 1}, 0.0)

    def restored(self) -> PromptLedger:
        """Returns the prompts that a restart recovers from the journal."""
        found = PromptLedger(Journal(), queued_most=8)
        durable = durable_of(self.log.records)
        content = content_of(self.log.records, durable)
        found.restore(
            ((group.prompt, group.position, group.arrival) for group in content.groups()),
            content.queued(),
            list(durable.cancelled),
            next_arrival=durable.next_arrival,
            next_position=durable.next_position,
            passed=set(durable.passed),
            ended=durable.prompts_ended,
        )
        return found


Way = Callable[[PromptLedger, tuple[ResponseState, ...]], Any]
WAYS: dict[str, Way] = {
    "submit": lambda prompts, _: prompts.submit([PROMPT]),
    "read": lambda prompts, _: prompts.read(3, PROMPT),
    "draw": lambda prompts, _: prompts.draw(1),
    "cancel": lambda prompts, _: prompts.cancel("p"),
    "admit": lambda prompts, entries: prompts.admit(entries, 1),
    "drop": lambda prompts, _: prompts.drop("p"),
    "finish": lambda prompts, _: prompts.finish("p"),
    "cancel_group": lambda prompts, entries: prompts.cancel_group(entries, "{}", on_request=True),
}
BEGINNINGS = {
    PromptState.QUEUED: ["submit"],
    PromptState.DRAWN: ["submit", "draw"],
    PromptState.ADMITTED: ["submit", "draw", "admit"],
    PromptState.DONE: [],
}
AFTER = {
    (PromptState.DONE, "submit"): PromptState.QUEUED,
    (PromptState.DONE, "read"): PromptState.DRAWN,
    (PromptState.QUEUED, "draw"): PromptState.DRAWN,
    (PromptState.QUEUED, "cancel"): PromptState.DONE,
    (PromptState.DRAWN, "admit"): PromptState.ADMITTED,
    (PromptState.DRAWN, "drop"): PromptState.DONE,
    (PromptState.ADMITTED, "finish"): PromptState.DONE,
    (PromptState.ADMITTED, "cancel_group"): PromptState.DONE,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", PromptState)
def test_each_change_of_state_is_one_of_the_table(state: PromptState, way: str) -> None:
    """Others raise, or find nothing, and leave the ledger and its journal as they were."""
    case = Case()
    for each in BEGINNINGS[state]:
        WAYS[each](case.prompts, case.entries)
    assert case.prompts.state("p") is state
    told = list(case.log.records)
    if (state, way) in AFTER:
        WAYS[way](case.prompts, case.entries)
        assert case.prompts.state("p") is AFTER[state, way]
        return
    if way in ("draw", "cancel"):
        assert not WAYS[way](case.prompts, case.entries)
    else:
        with pytest.raises(Conflict if way in ("submit", "read") else IllegalTransition):
            WAYS[way](case.prompts, case.entries)
    assert case.prompts.state("p") is state and case.log.records == told


@pytest.mark.parametrize(
    ("ways", "kinds", "state"),
    [
        ("submit", [records.Submitted], PromptState.QUEUED),
        ("submit draw", [records.Submitted], PromptState.QUEUED),
        ("submit draw admit", [records.Submitted, records.Admitted], PromptState.ADMITTED),
        ("submit cancel", [records.Submitted, records.PromptsWithdrawn], PromptState.DONE),
        ("submit draw drop", [records.Submitted, records.PromptsWithdrawn], PromptState.DONE),
        ("read", [], PromptState.DONE),
        ("read admit", [records.Admitted], PromptState.ADMITTED),
        ("read drop", [records.PromptsWithdrawn], PromptState.DONE),
        ("read admit cancel_group", [records.Admitted, records.Dropped], PromptState.DONE),
    ],
)
def test_a_restart_finds_each_prompt_again(ways: str, kinds: list[type], state: PromptState) -> None:
    """A prompt that was drawn waits again: in the queue, or in the source."""
    case = Case()
    for way in ways.split():
        WAYS[way](case.prompts, case.entries)
    assert [type(each) for each in case.log.records] == kinds
    found = case.restored()
    assert found.state("p") is state
    assert (
        found.was_cancelled("p")
        == case.prompts.was_cancelled("p")
        == (records.PromptsWithdrawn in kinds or records.Dropped in kinds)
    )
    assert found.was_cancelled("g0") == case.prompts.was_cancelled("g0") == (records.Dropped in kinds)
    was_read = len(kinds) > 0 and ways.startswith("read")
    assert (found.next_position, found.passed) == (0, {3} if was_read else set())


def test_positions_that_are_refused_or_passed_are_not_drawn_again() -> None:
    case = Case()
    case.prompts.read(1, PROMPT)
    case.prompts.refuse([0])
    case.prompts.admit(case.entries, 1)
    case.prompts.refuse([3])
    found = case.restored()
    assert (found.next_position, found.passed) == (2, {3})
    found.read_up_to(4)
    assert (found.next_position, found.passed) == (4, set())


def test_an_id_that_was_cancelled_may_come_again() -> None:
    case = Case()
    case.prompts.submit([PROMPT])
    assert case.prompts.cancel("p") and case.prompts.was_cancelled("p")
    case.prompts.submit([PROMPT])
    assert not case.prompts.was_cancelled("p") and case.prompts.draw(2) == [PROMPT]
    assert case.prompts.drawn("p") is PROMPT
    assert (case.prompts.queued, case.prompts.queued_bytes) == (0, 0)
    case.prompts.admit(case.entries, 1)
    (admitted,) = [each for each in case.log.records if isinstance(each, records.Admitted)]
    assert (admitted.position, admitted.arrival, admitted.rows) == (SUBMITTED, 2, [0, 1])
