"""Turns the journal's content into the event that restores a core. The simulator uses the same code."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dora.config import WindowConfig
from dora.core import events as on
from dora.core.commands import RejectVersion
from dora.core.rules import learning
from dora.core.table import Column
from dora.data.types import Prompt
from dora.journal.content import LiveGroup, Requests, started
from dora.journal.durable import OPEN, Durable
from dora.journal.records import CLOSED
from dora.orchestrator.rollout.responses.session_paths import prompt_of, runs_of, shift_of

COMMANDS_A_LIFE: Final = 1 << 32  # command ids of one incarnation
GROUPS_A_LIFE: Final = 1_000_000  # group ids skipped at each incarnation: more than a window holds
UNFINISHED, FINISHED, SCORED, IDLE, DORMANT, SKIPPED = range(6)  # stages of a request, as in the core


@dataclass(frozen=True, slots=True)
class RestoredWindow:
    """Holds the window's step and size at a start, with the settings of that start."""

    step: int
    left: int  # groups that this step still takes; below 0: it has taken more than the new size
    groups_per_step: int
    size: int
    left_behind: int
    is_resized: bool  # the size in force is not the one before the start


def restored_window(durable: Durable, window: WindowConfig) -> RestoredWindow:
    """Returns the window at a start.

    A configured number of groups per step replaces the one before, also for the open step. The size in force becomes
    the nearest that ``window`` allows, for groups admitted from now on (invariants.md, C3).
    """
    newest, groups = durable.newest, window.groups_per_step or durable.groups_per_step
    taken = sum(group.step != OPEN for group in durable.groups.values())
    before = durable.window_size or window.least
    size = min(max(before, window.least), window.most)
    is_filled = taken == groups > 0 or durable.short_step == newest
    step, left_behind = newest + is_filled, durable.left_behind
    if size != before:
        left_behind = max(left_behind, step - before + 1)
    return RestoredWindow(step, groups if is_filled else groups - taken, groups, size, left_behind, size != before)


def restored(
    durable: Durable,
    groups: Sequence[LiveGroup],
    requests: Requests,
    offer: Callable[[Prompt], on.OfferedPrompt],
    window: WindowConfig,
    now: float,
    incarnation: int,
) -> on.Restored:
    """Returns the core's first event, without reattached workers. ``offer`` converts a prompt for the core, ``window``
    is this start's, ``now`` is in seconds on the journal's clock, and ``incarnation`` is the one that begins.
    """
    taken = sorted((group for group in groups if group.step != OPEN), key=lambda group: group.taken)
    stands = restored_window(durable, window)
    stages = np.where(requests.ends > 0, FINISHED, UNFINISHED).astype(np.uint8)
    sizes = [len(group.rows) for group in groups]
    of_session = np.repeat([bool(group.prompt.environment) for group in groups], sizes)
    tokens = requests.counts.astype(np.int32)
    input_tokens, own_prompts = np.zeros(len(requests), np.int32), np.zeros(len(requests), np.int32)
    if of_session.any():
        is_idle = (requests.ends > 0) & (requests.ends < CLOSED)
        has_prompt = np.repeat([bool(group.prompt.token_ids) for group in groups], sizes)
        stages[of_session & (is_idle | (~has_prompt & (requests.counts == 0)))] = IDLE
        for position, turns in requests.turns.items():
            runs = runs_of(turns)
            tokens[position] -= shift_of(runs)
            if (prompt := prompt_of(runs, len(runs))) is not None:
                own_prompts[position] = prompt.tokens
            waits = runs[-1].buffer_end == requests.counts[position] and not runs[-1].is_prompt
            input_tokens[position] = runs[-1].tokens if waits else 0
    stages[list(requests.verdicts)] = SCORED
    rewards = _rest(groups, requests, stages)
    return on.Restored(
        newest=durable.newest,
        step=stands.step,
        left=stands.left,
        groups_per_step=stands.groups_per_step,
        window_versions=stands.size,
        retired=durable.retired,
        trainer_epoch=durable.trainer_epoch,
        groups_named=_next_name(durable.groups_named, incarnation),
        commands_sent=incarnation * COMMANDS_A_LIFE,
        groups=tuple(
            on.RestoredGroup(
                group.group_id,
                offer(group.prompt),
                group.version,
                group.deadline,
                max(0.0, now - group.at),
                rewards.get(index, ()),
            )
            for index, group in enumerate(groups)
        ),
        requests=on.RestoredRequests(
            np.array([row for group in groups for row in group.rows], np.int32),
            tokens,
            stages,
            requests.attempts,
            input_tokens,
            own_prompts,
        ),
        leased=tuple(group.group_id for group in taken),
        finished=_finished(groups, requests, stages),
        left_behind=stands.left_behind,
        short_step=durable.short_step,
        rejected=tuple(
            RejectVersion(each.version, tuple(each.worker_ids), each.reason, each.canary_difference)
            for each in durable.rejections()
        ),
        learnt=learning.without_window(durable.learnt) if stands.is_resized else durable.learnt,
        counters=_counters(durable.counters, len(groups), len(taken)),
    )


def _counters(kept: Mapping[str, int], held: int, taken: int) -> dict[str, int]:
    """Returns the counters at the last commit, with later admissions and deliveries derived from the groups held."""
    trained = kept.get("groups_trained", 0)
    admitted = trained + kept.get("groups_cancelled", 0) + held
    return {**kept, "groups_admitted": admitted, "groups_taken": max(kept.get("groups_taken", 0), trained + taken)}


def _next_name(named: int, incarnation: int) -> int:
    """Returns the number in the next group's id. Workers may know of groups that were not yet durable, from any earlier
    incarnation: at most as many from each as a window holds, because making room waits for the disk.
    """
    return (-(-named // GROUPS_A_LIFE) + incarnation) * GROUPS_A_LIFE


def _rest(groups: Sequence[LiveGroup], requests: Requests, stages: Column) -> dict[int, tuple[float, ...]]:
    """Sets the stages of members that have not started. Returns the valid rewards of groups with dormant members, by
    index.
    """
    found: dict[int, tuple[float, ...]] = {}
    first = 0
    for index, group in enumerate(groups):
        late, end = first + started(requests, group, first), first + len(group.rows)
        if late < end and (stages[first:late] == SCORED).all():
            stages[late:end] = SKIPPED
        elif late < end:
            stages[late:end] = DORMANT
            verdicts = (requests.verdicts.get(position) for position in range(first, late))
            found[index] = tuple({each.value for each in verdicts if each is not None and each.valid})
        first = end
    return found


def _finished(groups: Sequence[LiveGroup], requests: Requests, stages: Column) -> tuple[str, ...]:
    """Returns the groups that wait for a step, in the order of their last verdicts."""
    last: dict[int, float] = {}
    starts = np.cumsum([0, *(len(group.rows) for group in groups)])
    scored = np.concatenate(([0], np.cumsum((stages == SCORED) | (stages == SKIPPED))))
    for position, verdict in requests.verdicts.items():
        index = int(np.searchsorted(starts, position, "right")) - 1
        last[index] = max(last.get(index, 0.0), verdict.at)
    whole = np.flatnonzero(scored[starts[1:]] - scored[starts[:-1]] == np.diff(starts)).tolist()
    waiting = [index for index in whole if groups[index].step == OPEN]
    return tuple(groups[index].group_id for index in sorted(waiting, key=lambda index: (last[index], index)))
