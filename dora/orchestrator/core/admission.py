"""Prompts are drawn, wait in the backlog, and become groups of a version, as far as window and policy let them."""

from collections.abc import Callable
from functools import lru_cache
from math import exp
from statistics import NormalDist
from typing import Any

import numpy as np

from dora.errors import InvalidValue, NotFound
from dora.orchestrator.core import commands as do
from dora.orchestrator.core import events as on
from dora.orchestrator.core.line import Entry, Line
from dora.orchestrator.core.lognormal import Estimate, longest_quantile
from dora.orchestrator.core.prediction import PromptTraits
from dora.orchestrator.core.state import GroupStatus, RequestStatus, State

BACKLOG_MIN_GROUPS = 16
BACKLOG_STEPS = 2  # steps' worth of prompts that the backlog holds
DRAWN_STEP = 0.125  # of a step's worth is drawn at once. Were it more, the long prompts would come long after a publish
LOG_TOKENS_MAX = 40.0
LONGEST_QUANTILE = 0.5  # a group's predicted longest response is the median of its longest


def offered(state: State, event: on.PromptsOffered) -> None:
    """Raises InvalidValue, and takes none, where more prompts come than were drawn."""
    if len(event.prompts) > state.drawing:
        raise InvalidValue("prompts", len(event.prompts), f"at most the {state.drawing} that were drawn")
    state.drawing = 0
    state.worklist.wake()
    if state.exhausted:
        return
    for prompt in event.prompts:
        estimate = state.predictor.predict(traits_of(prompt))
        longest = longest_quantile(estimate, prompt.group_size, LONGEST_QUANTILE, prompt.max_tokens)
        entry = state.backlog.add(prompt, longest, siblings(estimate, prompt))
        if estimate.known_tokens or state.predictor.seen >= state.window.groups_per_step * prompt.group_size:
            # before, beliefs are a guess far too long
            state.rhythm.mix.add(entry.lengths, prompt.prompt_tokens)
    state.exhausted = event.exhausted


def storage_changed(state: State, event: on.StorageChanged) -> None:
    """Closes admission while something cannot be stored, and opens it again."""
    state.window.closed = bool(event.fault)
    state.worklist.wake()


def take_back(state: State, event: on.PromptCancelled) -> None:
    """A prompt leaves the backlog. Raises NotFound for one that is not in it, or is admitted already."""
    entry = state.backlog.find(event.prompt_id)
    if entry is None:
        raise NotFound("prompt_id", event.prompt_id, "a prompt on offer that is not admitted")
    state.backlog.remove(entry)
    state.counters.prompts_cancelled += 1
    state.out.append(do.DropPrompt(event.prompt_id))
    state.worklist.wake()


def siblings(estimate: Estimate, prompt: on.OfferedPrompt) -> tuple[float, ...]:
    """Predicted lengths of a prompt's responses: known, or spread evenly over the belief's quantiles."""
    if estimate.known_tokens:
        return tuple(float(min(tokens, prompt.max_tokens)) for tokens in estimate.known_tokens)
    return tuple(
        min(exp(min(estimate.log_mean + estimate.log_sd * score, LOG_TOKENS_MAX)), float(prompt.max_tokens))
        for score in _scores(prompt.group_size)
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
    """Keeps a bounded backlog full, so that the longest prompts are there when a version begins."""
    if state.exhausted or state.drawing or not state.window.groups_per_step:
        return
    step = max(BACKLOG_MIN_GROUPS, state.window.groups_per_step)
    lacking = BACKLOG_STEPS * step - len(state.backlog)
    if lacking >= DRAWN_STEP * step:
        state.drawing = lacking
        state.out.append(do.DrawPrompts(state.drawing))


def admit(state: State, entry: Entry, version: int, rank: Callable[[Entry, float], float] | None = None) -> None:
    """A prompt on offer becomes a group of ``version``, which the window has counted; its requests stand in line.

    ``rank`` of the entry and a request's expected tokens orders the line (``Line.push``).
    """
    prompt, size = entry.prompt, entry.prompt.group_size
    (group,) = state.groups.allocate(1)
    group_id = f"g{state.groups_named}"
    state.groups_named += 1
    for name, value in (("status", GroupStatus.OPEN), ("version", version), ("unfinished", size), ("unscored", size)):
        state.groups[name][group] = value
    state.group_id[group], state.group_row[group_id] = group_id, group
    state.traits[group] = traits_of(prompt)
    estimate = state.predictor.predict(state.traits[group])
    log_means, log_sd = estimate.of_siblings(size)
    expected = _expected_tokens(estimate, prompt)
    rows = state.requests.allocate(size)
    columns: tuple[tuple[str, Any], ...] = (
        ("status", RequestStatus.WAITING),
        ("group", group),
        ("version", version),
        ("prompt_tokens", prompt.prompt_tokens),
        ("max_tokens", prompt.max_tokens),
        ("log_mean", log_means),
        ("log_sd", log_sd),
        ("expected", expected),
    )
    places = np.array(rows)
    for name, values in columns:
        state.requests[name][places] = values
    ids = tuple(f"{group_id}.{index}" for index in range(size))
    line = state.waiting.setdefault(version, Line())
    for row, request_id, tokens in zip(rows, ids, expected, strict=True):
        state.request_id[row], state.request_row[request_id] = request_id, row
        line.push(row, rank(entry, float(tokens)) if rank is not None else 0.0)
    state.members[group] = rows
    state.counters.groups_admitted += 1
    state.out.append(do.AdmitGroup(group_id, prompt.prompt_id, version, ids))


def _expected_tokens(estimate: Estimate, prompt: on.OfferedPrompt) -> list[int]:
    """Of each sibling."""
    if estimate.known_tokens:
        return [min(tokens, prompt.max_tokens) for tokens in estimate.known_tokens]
    return [_mean_tokens(estimate.log_mean, estimate.log_sd, prompt.max_tokens)] * prompt.group_size


def _mean_tokens(log_mean: float, log_sd: float, max_tokens: int) -> int:
    """Mean of a lognormal belief, at least one token and at most the response's limit."""
    return max(1, round(min(exp(min(log_mean + log_sd * log_sd / 2, LOG_TOKENS_MAX)), max_tokens)))
