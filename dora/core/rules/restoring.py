"""Converts between a core's state and the durable state of a service that starts again.

Durable are: the admitted groups with their deadlines, the length of each response, the groups of the open step, and the
ids given so far. Offered prompts are drawn again; handoffs, reservations and running loads are void. Learnt lengths and
times are stored as of some earlier moment (learning.py), because admission by freshness uses them: without them it
would admit all that the window allows at once.
"""

from collections import deque
from dataclasses import fields

import numpy as np

from dora.core import commands as do
from dora.core import events as on
from dora.core.groups.queues import WaitingRequests
from dora.core.groups.window import Window
from dora.core.rules import arrival, learning, membership, parking
from dora.core.rules.admission import attempt_id, enter
from dora.core.state import (
    DORMANT,
    FINISHED,
    GROUP_FINISHED,
    IDLE,
    LEASED,
    SCORED,
    SKIPPED,
    WAITING,
    Counters,
    State,
)
from dora.core.table import Column
from dora.errors import Conflict, IllegalTransition, InvalidValue

STAGES = (WAITING, FINISHED, SCORED, IDLE, DORMANT, SKIPPED)  # by the values of RestoredRequests.stages


def restored(state: State, event: on.Restored) -> None:
    """Puts a fresh core into an earlier one's state. Raises Conflict if the core is not fresh, InvalidValue for a state
    that no core can leave behind; then nothing has changed.
    """
    window = _checked(state, event)
    state.window = window
    state.trainer_epoch, state.short_step, state.retired = event.trainer_epoch, event.short_step, event.retired
    state.groups_named, state.commands_sent = event.groups_named, event.commands_sent
    state.step_disturbed = True
    for name in event.counters.keys() & {field.name for field in fields(Counters)}:
        setattr(state.counters, name, event.counters[name])
    if state.adaptive is not None:
        state.adaptive.size = event.window_versions
    if event.learnt:
        learning.restore(state, event.learnt)
    rows = _enter_all(state, event)
    for rejection in event.rejected:
        state.rejected[rejection.version] = rejection
        state.to_republish.add(rejection.version)
        window.reject(rejection.version)
    begun = np.unique(state.requests["version"][rows[state.requests["tokens"][rows] > 0]])
    state.proven.update(version for version in begun.tolist() if version >= event.retired)
    for host in event.hosts:  # before their workers, which could otherwise load any version
        arrival.joined(state, host)
    for worker in event.workers:
        membership.joined(state, worker)
    waiting = rows[state.requests["status"][rows] == WAITING]
    _line_up(state, waiting)
    for pool in event.pools:
        parking.joined(state, pool)
    for row in rows[state.requests["status"][rows] == FINISHED].tolist():
        state.out.append(do.ScoreRequest(state.request_id[row]))
    state.worklist.wake()


def _checked(state: State, event: on.Restored) -> Window:
    is_fresh = not (state.commands_sent or state.groups_named or state.trainer_epoch or state.workers or state.pools)
    if not is_fresh:
        raise Conflict("restored", "a core that has handled events", "a core's first event", why="comes too late")
    names = [*(each.worker_id for each in event.workers), *(each.pool_id for each in event.pools)]
    if len(set(names)) < len(names):
        raise InvalidValue("workers, pools", sorted(names), "each once")
    requests, count = event.requests, sum(group.prompt.group_size for group in event.groups)
    optional = ("attempts", "given", "own_prompts")
    for name in ("rows", "tokens", "stages", *optional):
        column = getattr(requests, name)
        if len(column) != count and (len(column) or name not in optional):
            raise InvalidValue(f"requests.{name}", len(column), f"{count}, as many as the groups have responses")
    if len(np.unique(requests.rows)) < count or (count and int(requests.rows.min()) < 0):
        raise InvalidValue("requests.rows", "a row twice, or below 0", "a row of its own for each request")
    if count and int(requests.stages.max()) >= len(STAGES):
        raise InvalidValue("requests.stages", int(requests.stages.max()), f"0 to {len(STAGES) - 1}")
    sizes = state.config.window
    if not sizes.least <= event.window_versions <= sizes.most:
        allowed = f"{sizes.least} to {sizes.most}, as configured"
        raise InvalidValue("window_versions", event.window_versions, allowed)
    done = _done(event)
    for name in (*event.leased, *event.finished):
        if name not in done:
            raise InvalidValue("leased, finished", name, "groups whose responses are all scored, each once")
        done.remove(name)
    if done:
        raise InvalidValue("finished", "without " + ", ".join(sorted(done)[:9]), "every group that is scored whole")
    leased, groups_per_step = set(event.leased), event.groups_per_step
    window = Window(event.window_versions, groups_per_step)
    is_open = [(group.version, group.deadline) for group in event.groups if group.group_id not in leased]
    try:
        window.restore(event.newest, event.step, event.left, max(event.left_behind, event.retired), is_open)
    except IllegalTransition as error:
        raise InvalidValue("groups", f"{len(is_open)} open", f"what a window can hold ({error})") from error
    if event.retired > window.oldest_kept:
        raise InvalidValue("retired", event.retired, f"at most {window.oldest_kept}, whose weights may be needed")
    if any(not max(1, window.oldest_kept) <= rejection.version <= window.newest for rejection in event.rejected):
        raise InvalidValue(
            "rejected", [rejection.version for rejection in event.rejected], "published versions that are stored"
        )
    return window


def _done(event: on.Restored) -> set[str]:
    """The groups whose responses are all scored, but for skipped ones. Raises InvalidValue for a group of which all
    are but its dormant ones, which nothing could start.
    """
    sizes = np.array([group.prompt.group_size for group in event.groups], np.int64)
    ends = np.cumsum(sizes)

    def count(*statuses: int) -> Column:
        chosen = np.isin(event.requests.stages, [STAGES.index(status) for status in statuses])
        before: Column = np.concatenate(([0], np.cumsum(chosen)))
        return before[ends] - before[ends - sizes]

    whole = count(SCORED, SKIPPED) == sizes
    stuck = ~whole & (count(SCORED, SKIPPED, DORMANT) == sizes)
    if stuck.any():
        name = event.groups[int(stuck.argmax())].group_id
        raise InvalidValue("requests.stages", f"{name}: dormant requests beside scored ones", "started or skipped ones")
    return {group.group_id for group, is_whole in zip(event.groups, whole.tolist(), strict=True) if is_whole}


def _enter_all(state: State, event: on.Restored) -> Column:
    requests, groups, restored = state.requests, state.groups, event.requests
    requests.take(restored.rows)
    rows: Column = restored.rows.astype(np.int64)
    if not event.groups:
        return rows
    enter(
        state,
        [each.group_id for each in event.groups],
        [each.prompt for each in event.groups],
        [each.version for each in event.groups],
        [each.deadline for each in event.groups],
        rows.tolist(),
    )
    requests["tokens"][rows] = restored.tokens
    requests["status"][rows] = np.array(STAGES, np.int8)[restored.stages]
    _enter_sessions(state, rows, restored)
    places = np.array([state.group_row[each.group_id] for each in event.groups], np.int64)
    groups["admitted_s"][places] = state.now_s - np.array([each.age_s for each in event.groups])
    of_group = requests["group"][rows]
    unfinished = (restored.stages == STAGES.index(WAITING)) | (restored.stages == STAGES.index(IDLE))
    unscored = unfinished | (restored.stages == STAGES.index(FINISHED))
    for name, stages in (("unfinished", unfinished), ("unscored", unscored)):
        groups[name][places] = np.bincount(of_group[stages], minlength=groups.capacity)[places]
    for group in np.unique(of_group[restored.stages == STAGES.index(DORMANT)]).tolist():
        state.undecided[group] = ()
    for each in event.groups:
        if each.rewards:
            state.undecided[state.group_row[each.group_id]] = each.rewards
    for group_id in event.finished:
        group = state.group_row[group_id]
        groups["status"][group] = GROUP_FINISHED
        state.finished.setdefault(int(groups["deadline"][group]), deque()).append(group)
    state.leased = [state.group_row[group_id] for group_id in event.leased]
    groups["status"][state.leased] = LEASED
    return rows


def _enter_sessions(state: State, rows: Column, restored: on.RestoredRequests) -> None:
    """Fills the cells of sessions. Their time limits start again."""
    requests = state.requests
    requests["began_s"][rows] = np.where(restored.tokens > 0, state.now_s, 0.0)
    if len(restored.given):
        requests["input_tokens"][rows] = restored.given
    own = np.flatnonzero(restored.own_prompts)
    requests["prompt_tokens"][rows[own]] = restored.own_prompts[own]
    for row in rows[requests["status"][rows] == IDLE].tolist():
        state.idles(row)
    for row, attempt in zip(rows.tolist(), restored.attempts.tolist(), strict=False):
        if attempt:
            requests["attempt"][row] = attempt
            state.rename(row, attempt_id(state.request_id[row], attempt))


def _line_up(state: State, rows: Column) -> None:
    """Queues these requests: those that have begun first, otherwise in the order of admission."""
    of_version, begun = state.requests["version"][rows], state.requests["tokens"][rows] > 0
    for version in np.unique(of_version).tolist():
        waiting_requests = state.waiting.setdefault(version, WaitingRequests())
        waiting_requests.extend(
            rows[(of_version == version) & begun].tolist(), rows[(of_version == version) & ~begun].tolist()
        )


def durable(state: State) -> on.Restored:
    """The part of this state that outlives a crash. No worker has reattached yet."""
    requests, window = state.requests, state.window
    ordered = sorted(state.group_id, key=lambda group: int(state.group_id[group].removeprefix("g")))
    rows = np.array([row for group in ordered for row in state.members[group]], np.int64)
    of_groups = np.array([state.traits[group].prompt_tokens for group in ordered for _ in state.members[group]])
    stages = np.select([requests["status"][rows] == each for each in STAGES], range(len(STAGES)), 0)
    names = state.group_id
    return on.Restored(
        newest=window.newest,
        step=window.step,
        left=window.left,
        groups_per_step=window.groups_per_step,
        window_versions=window.size,
        retired=state.retired,
        trainer_epoch=state.trainer_epoch,
        groups_named=state.groups_named,
        commands_sent=state.commands_sent,
        groups=tuple(_group(state, group) for group in ordered),
        requests=on.RestoredRequests(
            rows.astype(np.int32),
            requests["tokens"][rows].astype(np.int32),
            stages.astype(np.uint8),
            requests["attempt"][rows].astype(np.uint8),
            requests["input_tokens"][rows].astype(np.int32),
            np.where(requests["prompt_tokens"][rows] != of_groups, requests["prompt_tokens"][rows], 0).astype(np.int32),
        ),
        leased=tuple(names[group] for group in state.leased),
        finished=tuple(names[group] for _, waiting in sorted(state.finished.items()) for group in waiting),
        left_behind=window.left_behind,
        short_step=state.short_step,
        rejected=tuple(rejection for _, rejection in sorted(state.rejected.items())),
        learnt=learning.snapshot(state),
        counters={field.name: getattr(state.counters, field.name) for field in fields(Counters)},
    )


def _group(state: State, group: int) -> on.RestoredGroup:
    traits, groups = state.traits[group], state.groups
    prompt = on.OfferedPrompt(
        "",
        traits.task_id,
        traits.prompt_tokens,
        traits.group_size,
        traits.max_tokens,
        traits.key,
        traits.features,
        traits.known_tokens,
        sessions=bool(state.requests["session"][state.members[group][0]]),
        group_size_min=int(groups["at_once"][group]),
    )
    version, deadline = int(groups["version"][group]), int(groups["deadline"][group])
    age_s = state.now_s - float(groups["admitted_s"][group])
    rewards = state.undecided.get(group, ())
    return on.RestoredGroup(state.group_id[group], prompt, version, deadline, age_s, rewards)
