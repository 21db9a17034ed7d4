"""Restores response buffer, prompt ledger and core from the journal."""

import json
import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from dora.config import WindowConfig, validated
from dora.core import events as on
from dora.data.run_record import CancelledGroup
from dora.data.trajectory import TrajectoryGroup
from dora.journal import records
from dora.journal.content import LiveGroup, Requests
from dora.journal.durable import OPEN
from dora.journal.finding import Found
from dora.orchestrator.recovery import recovery_state
from dora.orchestrator.recovery.changed_settings import pinned, settings_before
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.prompt_ledger import PromptLedger
from dora.orchestrator.rollout.prompts import offer
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.system.awake import awake_s

log = logging.getLogger("dora.service")


def begin_incarnation(journal: Journal, found: Found, config: str, incarnation: int) -> list[LiveGroup]:
    """Logs the begin of an incarnation. Returns its groups. Groups that lost tokens are generated again."""
    groups = list(found.groups)
    if not found.is_new:
        groups = _pinned(journal, found, config)
    journal.note(records.Begun(incarnation, time.time(), awake_s(), config))
    number, first = found.durable.next_number, 0
    damaged = set(found.requests.damaged)
    for index, group in enumerate(groups):
        size = len(group.rows)
        if index in damaged:
            log.error("%s is generated again: tokens of it were lost", group.group_id)
            groups[index] = replace(group, number=number, step=OPEN, taken=0)
            journal.note(groups[index].admitted(replaces=group.number))
            _begin_anew(found.requests, range(first, first + size))
            number += size
        first += size
    return groups


def _pinned(journal: Journal, found: Found, config: str) -> list[LiveGroup]:
    """Returns the groups with the sampling of their admission in their prompts, and logs those in which it was not.

    That precedes the new configuration in the log, so no prefix of the log lacks it.
    """
    now = validated(json.loads(config))
    changed = {group.number: group for group in pinned(found.groups, settings_before(found), now)}
    for group in changed.values():
        journal.note(group.admitted())
    return [changed.get(group.number, group) for group in found.groups]


def _begin_anew(requests: Requests, positions: range) -> None:
    span = slice(positions.start, positions.stop)
    requests.counts[span], requests.ends[span], requests.heard_at[span] = 0, 0, 0
    requests.attempts[span] = 0
    for by_place in (requests.stops, requests.segment_starts, requests.routed, requests.verdicts, requests.turns):
        for position in positions:
            by_place.pop(position, None)


def restore_buffer(
    buffer: ResponseBuffer, groups: list[LiveGroup], requests: Requests, next_number: int
) -> list[TrajectoryGroup]:
    """Returns the leased groups as they were delivered."""
    first = 0
    for group in groups:
        buffer.restore(group, first, requests)
        first += len(group.rows)
    buffer.next_number = max(buffer.next_number, next_number)
    leased = sorted((group for group in groups if group.step != OPEN), key=lambda group: group.taken)
    return [buffer.deliver(group.group_id, group.step)[0] for group in leased]


def restore_prompts(ledger: PromptLedger, found: Found, groups: list[LiveGroup]) -> None:
    durable = found.durable
    ledger.restore(
        ((group.prompt, group.position, group.arrival) for group in groups),
        found.queued,
        list(durable.cancelled),
        next_arrival=durable.next_arrival,
        next_position=durable.next_position,
        passed=set(durable.passed),
        ended=durable.prompts_ended,
    )


def restored(
    buffer: ResponseBuffer, found: Found, groups: list[LiveGroup], window: WindowConfig, now: float, incarnation: int
) -> on.Restored:
    """Returns the core's first event. ``now`` is in seconds since the Unix epoch. ``incarnation`` is the one that
    begins.
    """
    return recovery_state.restored(
        found.durable, groups, found.requests, partial(offer, buffer), window, now, incarnation
    )


def ran_on(requests: Requests) -> set[str]:
    """Returns the workers of unfinished requests, by their last tokens."""
    return {
        segment_starts[-1][0]
        for position, segment_starts in requests.segment_starts.items()
        if segment_starts and not requests.ends[position]
    }


def cancelled_of(lines: Iterable[str]) -> list[CancelledGroup]:
    """Returns cancelled groups, from their lines in the journal."""
    found = []
    for line in lines:
        tree = json.loads(line)
        tree |= {name: tuple(tree[name]) for name in ("length_tokens", "rewards")}
        found.append(CancelledGroup(**tree))
    return found
