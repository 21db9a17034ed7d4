"""Bugs of groups that grow to plant into the core and the shell, each a patch of one function."""

from collections.abc import Sequence
from typing import Any

import pytest

from dora.core.rules import growth, restoring
from dora.core.state import SKIPPED, WAITING, State
from dora.journal import content
from dora.journal.content import LiveGroup, Requests
from dora.orchestrator.recovery import recovery_state
from dora.orchestrator.rollout.responses import buffer as response_buffer
from dora.orchestrator.rollout.responses import delivery
from dora.orchestrator.rollout.responses.state import ResponseState

Patch = pytest.MonkeyPatch


def all_members_start(patch: Patch) -> None:
    patch.setattr(growth, "begin", lambda state, group: state.members[group])


def settled_group_grows(patch: Patch) -> None:
    """Any two verdicts decide, as rewards are counted and not compared."""

    def scored(state: State, group: int, event: Any) -> None:
        if event.valid:
            state.undecided[group] = (*state.undecided[group], event.reward)
            if len(state.undecided[group]) > 1:
                growth._start(state, group)
                return
        if not state.groups["unscored"][group]:
            growth._skip(state, group)

    patch.setattr(growth, "scored", scored)


def invalid_reward_decides(patch: Patch) -> None:
    """A verdict that has failed counts as a reward of 0."""
    scored = growth.scored

    def counts(state: State, group: int, event: Any) -> None:
        scored(state, group, type(event)(event.request_id, event.reward, True))

    patch.setattr(growth, "scored", counts)


def late_members_stand_in_no_queue(patch: Patch) -> None:
    def start(state: State, group: int) -> None:
        late = growth._dormant(state, group)
        state.requests["status"][late] = WAITING
        for name in ("unfinished", "unscored"):
            state.groups[name][group] += len(late)

    patch.setattr(growth, "_start", start)


def late_members_are_not_counted(patch: Patch) -> None:
    """The group is finished while they run."""

    def start(state: State, group: int) -> None:
        for row in growth._dormant(state, group):
            state.wait_first(row)

    patch.setattr(growth, "_start", start)


def settled_group_waits_for_its_rest(patch: Patch) -> None:
    def skip(state: State, group: int) -> None:
        late = growth._dormant(state, group)
        state.requests["status"][late] = SKIPPED
        state.groups["unscored"][group] += len(late)

    patch.setattr(growth, "_skip", skip)


def group_is_delivered_as_it_began(patch: Patch) -> None:
    def at_once(entries: Sequence[ResponseState]) -> Sequence[ResponseState]:
        return entries[: entries[0].prompt.at_once]

    patch.setattr(response_buffer, "started", at_once)


def trainer_is_told_the_full_size(patch: Patch) -> None:
    readers = delivery.readers

    def full(step: int, reference_version: int, group_size: int) -> Any:
        read = readers(step, reference_version, group_size)
        return {**read, "group_size": lambda entry: entry.prompt.group_size}

    patch.setattr(delivery, "readers", full)


def restart_wakes_dormant_members(patch: Patch) -> None:
    patch.setattr(recovery_state, "_rest", lambda groups, requests, stages: {})


def restart_forgets_what_rewards_were(patch: Patch) -> None:
    """A group of which one verdict is given and one is due."""
    enter_all = restoring._enter_all

    def forgets(state: State, event: Any) -> Any:
        rows = enter_all(state, event)
        state.undecided = dict.fromkeys(state.undecided, ())
        return rows

    patch.setattr(restoring, "_enter_all", forgets)


def restart_misses_the_verdict_that_decides(patch: Patch) -> None:
    """The crash came between the verdict that decides and the start of the others, which are then skipped."""

    def at_once(requests: Requests, group: LiveGroup, first: int) -> int:
        late = slice(first + group.prompt.at_once, first + len(group.rows))
        return len(group.rows) if requests.counts[late].any() else group.prompt.at_once

    patch.setattr(recovery_state, "started", at_once)


def log_of_a_settled_group_looks_damaged(patch: Patch) -> None:
    """A leased group lacks verdicts on members that have never started."""
    patch.setattr(content, "started", lambda requests, group, first: len(group.rows))
