"""Draws prompts, keeps them in the backlog, and admits them as groups of a version, as window and policy allow."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import exp
from statistics import NormalDist
from typing import Any

import numpy as np

from dora.core import commands as do
from dora.core import events as on
from dora.core.forecast.lognormal import Estimate, longest_quantile
from dora.core.forecast.prediction import PromptTraits
from dora.core.groups.freshness import LOSS
from dora.core.groups.queues import QueuedPrompt, WaitingRequests
from dora.core.rules import growth
from dora.core.state import GroupStatus, RequestStatus, State, unfinished
from dora.core.table import Column
from dora.errors import Conflict, InvalidValue, NotFound

BACKLOG_MIN_GROUPS = 16
BACKLOG_STEPS = 2  # steps' worth of prompts that the backlog holds
DRAWN_STEP = 0.125  # of a step's worth per draw: with larger draws, the long prompts would come long after a publish
LOG_TOKENS_MAX = 40.0
LONGEST_QUANTILE = 0.5  # a group's predicted longest response is the median of its longest


def offered(state: State, event: on.PromptsOffered) -> None:
    """Adds drawn prompts to the backlog. Raises InvalidValue, and accepts none, for more than were requested."""
    if len(event.prompts) > state.drawing:
        raise InvalidValue("prompts", len(event.prompts), f"at most the {state.drawing} that were requested")
    state.drawing = 0
    state.worklist.wake()
    if state.exhausted:
        return
    for prompt in event.prompts:
        _enqueue(state, prompt)
    state.exhausted = event.exhausted


def _enqueue(state: State, prompt: on.OfferedPrompt) -> QueuedPrompt:
    estimate = state.predictor.predict(traits_of(prompt))
    members = prompt.at_once + round(state.rates.growth * (prompt.group_size - prompt.at_once))
    longest = longest_quantile(estimate, members, LONGEST_QUANTILE, prompt.max_tokens)
    entry = state.backlog.add(prompt, longest, siblings(estimate, prompt, members))
    if estimate.known_tokens or state.predictor.seen >= state.window.groups_per_step * prompt.group_size:
        # before that, the predicted lengths are far too long
        state.rates.mix.add(entry.lengths, prompt.prompt_tokens)
    return entry


def requested(state: State, event: on.GroupRequested) -> None:
    """Admits a prompt as a group of the version that its caller asks for. Raises Conflict if the window forbids it."""
    if state.exhausted or state.window.admissible(event.version) < 1:
        allowed = f"one of which the window admits a group now: {state.window.summary()}"
        raise Conflict("version", event.version, allowed, why="admits no group now")
    entry = _enqueue(state, event.prompt)
    state.backlog.remove(entry)
    state.window.admit(event.version)
    admit(state, entry, event.version)
    state.worklist.wake()


def storage_changed(state: State, event: on.StorageChanged) -> None:
    """Closes admission while storage is at fault, and opens it again."""
    state.window.closed = bool(event.fault)
    state.worklist.wake()


def take_back(state: State, event: on.PromptCancelled) -> None:
    """Removes a prompt from the backlog. Raises NotFound if it is not there, or is admitted already."""
    entry = state.backlog.find(event.prompt_id)
    if entry is None:
        raise NotFound("prompt_id", event.prompt_id, "a prompt on offer that is not admitted")
    state.backlog.remove(entry)
    state.counters.prompts_cancelled += 1
    state.out.append(do.DropPrompt(event.prompt_id))
    state.worklist.wake()


def siblings(estimate: Estimate, prompt: on.OfferedPrompt, members: int) -> tuple[float, ...]:
    """Predicted lengths of so many of a prompt's responses: known, or the belief's quantiles at equal distances."""
    if estimate.known_tokens:
        return tuple(float(min(tokens, prompt.max_tokens)) for tokens in estimate.known_tokens[:members])
    return tuple(
        min(exp(min(estimate.log_mean + estimate.log_sd * score, LOG_TOKENS_MAX)), float(prompt.max_tokens))
        for score in _scores(members)
    )


@lru_cache(maxsize=64)
def _scores(count: int) -> tuple[float, ...]:
    """Standard normal scores at the middles of ``count`` equal shares."""
    normal = NormalDist()
    return tuple(normal.inv_cdf((index + 0.5) / count) for index in range(count))


def traits_of(prompt: on.OfferedPrompt) -> PromptTraits:
    return PromptTraits(
        prompt.key,
        prompt.task_id,
        prompt.prompt_tokens,
        prompt.max_tokens,
        prompt.group_size,
        prompt.features,
        prompt.known_tokens,
    )


def draw(state: State) -> None:
    """Fills the bounded backlog, so that the longest prompts are known when a version begins."""
    if state.exhausted or state.drawing or not state.window.groups_per_step:
        return
    step = max(BACKLOG_MIN_GROUPS, state.window.groups_per_step)
    lacking = BACKLOG_STEPS * step - len(state.backlog)
    if lacking >= DRAWN_STEP * step:
        state.drawing = lacking
        state.out.append(do.DrawPrompts(state.drawing))


def admissible(state: State, version: int) -> int:
    """The number of groups of ``version`` that should begin now: allowed by the window and needed by a step."""
    most, window, freshness = state.window.admissible(version), state.window, state.freshness
    if most < 1 or window.size == 1 or not freshness.acts:
        return most
    if freshness.is_old(state.now_s, window):
        rows = np.flatnonzero(unfinished(state.requests))
        freshness.look(state.now_s, window, _pace_s(state, rows), state.requests, rows, _steps_per_s(state))
    return max(0, min(most, freshness.needed(newest=version == window.newest_sound)))


def _pace_s(state: State, rows: Column) -> float:
    """The time of one token of these responses: sampled, and its part of the pauses of sessions, or 0 if unknown."""
    pace_s, session = state.rates.pace_s, state.requests["session"][rows]
    return pace_s + state.pauses.token_s() * float(session.mean()) if pace_s and session.any() else pace_s


def _steps_per_s(state: State) -> float:
    """Tokens per second of all staying workers with their KV or slots always in use, or 0 if unknown."""
    slots = sum(worker.slots for worker in state.workers.values() if not worker.draining)
    step_s = state.rates.full_step_s(state.window.groups_per_step, slots, state.hosting.staying()[1])
    return 1.0 / (LOSS * step_s) if step_s else 0.0


def admit(
    state: State, entry: QueuedPrompt, version: int, rank: Callable[[QueuedPrompt, float], float] | None = None
) -> None:
    """Makes an offered prompt a group of ``version``, which the window has counted; its requests wait.

    ``rank`` of the prompt and a request's expected tokens orders the requests (``WaitingRequests.push``).
    """
    prompt, rows = entry.prompt, state.requests.allocate(entry.prompt.group_size)
    group_id = f"g{state.groups_named}"
    state.groups_named += 1
    expected = enter(state, [group_id], [prompt], [version], [state.window.deadline(version)], rows)
    state.freshness.admitted()
    started = growth.begin(state, state.group_row[group_id])
    if prompt.begins_idle:
        for row in started:
            state.idles(row)
    else:
        waiting_requests = state.waiting.setdefault(version, WaitingRequests())
        for row, tokens in zip(started, expected, strict=False):
            waiting_requests.push(row, rank(entry, float(tokens)) if rank is not None else 0.0)
    state.counters.groups_admitted += 1
    state.out.append(do.AdmitGroup(group_id, prompt.prompt_id, version, tuple(request_ids(group_id, len(rows)))))


def enter(
    state: State,
    group_ids: Sequence[str],
    prompts: Sequence[on.OfferedPrompt],
    versions: Sequence[int],
    deadlines: Sequence[int],
    rows: list[int],
) -> list[int]:
    """Fills the cells of newly admitted groups and of their waiting requests. Returns the requests' expected tokens.

    ``rows`` are allocated, one a response, group by group.
    """
    groups, sizes = state.groups.allocate(len(prompts)), [prompt.group_size for prompt in prompts]
    of_group: tuple[tuple[str, Any], ...] = (
        ("status", GroupStatus.OPEN),
        ("version", versions),
        ("deadline", deadlines),
        ("at_once", [prompt.at_once for prompt in prompts]),
        ("unfinished", sizes),
        ("unscored", sizes),
        ("admitted_s", state.now_s),
    )
    for name, values in of_group:
        state.groups[name][groups] = values
    log_means: list[float] = []
    log_sds: list[float] = []
    expected: list[int] = []
    at = 0
    for group, group_id, prompt, size in zip(groups, group_ids, prompts, sizes, strict=True):
        state.group_id[group], state.group_row[group_id] = group_id, group
        traits = state.traits[group] = traits_of(prompt)
        estimate = state.predictor.predict(traits)
        means, log_sd = estimate.of_siblings(size)
        log_means += means
        log_sds.append(log_sd)
        expected += _expected_tokens(estimate, prompt)
        mine = state.members[group] = rows[at : at + size]
        at += size
        names = request_ids(group_id, size)
        state.request_id.update(zip(mine, names, strict=True))
        state.request_row.update(zip(names, mine, strict=True))
    places = np.array(rows)
    of_request: tuple[tuple[str, Any], ...] = (
        ("group", groups),
        ("version", versions),
        ("prompt_tokens", [prompt.prompt_tokens for prompt in prompts]),
        ("max_tokens", [prompt.max_tokens for prompt in prompts]),
        ("session", [prompt.sessions for prompt in prompts]),
        ("log_sd", log_sds),
    )
    for name, values in of_request:
        state.requests[name][places] = np.repeat(values, sizes)
    for name, values in (("status", RequestStatus.WAITING), ("log_mean", log_means), ("expected", expected)):
        state.requests[name][places] = values
    return expected


def request_ids(group_id: str, size: int) -> list[str]:
    return [f"{group_id}.{index}" for index in range(size)]


def attempt_id(request_id: str, attempt: int) -> str:
    """The id of a session that has replaced others ``attempt`` times. ``request_id`` is that of any of them."""
    first = request_id.partition("~")[0]
    return f"{first}~{attempt}" if attempt else first


def _expected_tokens(estimate: Estimate, prompt: on.OfferedPrompt) -> list[int]:
    if estimate.known_tokens:
        return [min(tokens, prompt.max_tokens) for tokens in estimate.known_tokens]
    return [_mean_tokens(estimate.log_mean, estimate.log_sd, prompt.max_tokens)] * prompt.group_size


def _mean_tokens(log_mean: float, log_sd: float, max_tokens: int) -> int:
    return max(1, round(min(exp(min(log_mean + log_sd * log_sd / 2, LOG_TOKENS_MAX)), max_tokens)))
