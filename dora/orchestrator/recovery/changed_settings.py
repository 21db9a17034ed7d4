"""The settings that a start on a state folder may change, and those that it may not.

Window, groups per step, sizes of groups, prompts, and the lengths of responses and contexts may change. Admitted groups
keep their deadlines, their window and their sampling (``pinned``); new ones get the new settings. A change that
admitted groups do not allow is refused by name. Every other setting in ``FIXED`` would break a promise or mean another
run.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from dora.config import Config, validated, value_at
from dora.data.types import Prompt
from dora.errors import InvalidValue
from dora.journal.content import LiveGroup
from dora.journal.durable import OPEN
from dora.journal.finding import Found
from dora.orchestrator.recovery.recovery_state import restored_window
from dora.orchestrator.rollout.responses.buffer import sampling_of

FIXED: Final = (
    "model",
    "rollout",
    "reward.function",
    "selection",
    "workers.batch_invariant",
    "workers.dtype",
    "workers.engine_args",
    "workers.kv_dtype",
    "workers.quantisation",
    "workers.router_replay",
)
CHANGES: Final = frozenset(  # may change although their section is fixed
    {"rollout.group_size", "rollout.group_size_min", "rollout.max_tokens"}
)


def check_changes(before: Config, now: Config, found: Found, folder: str) -> None:
    """Raises InvalidValue for the first setting that may not change. ``before`` is the last incarnation's."""
    old, new = before.model_dump(), now.model_dump()
    for name in FIXED:
        for setting, was, becomes in _different(name, value_at(old, name), value_at(new, name)):
            allowed = f"{was!r}, with which {folder} was begun; begin in a new folder to change it"
            raise InvalidValue(setting, becomes, allowed, why="has changed")
    _check_window(now, found)
    _check_context(before, now, found)


def settings_before(found: Found) -> Config:
    return validated(json.loads(found.durable.config))


def pinned(groups: Sequence[LiveGroup], before: Config, now: Config) -> list[LiveGroup]:
    """Returns the groups whose response length would have changed, with that of their admission in the prompt."""
    was, becomes = before.rollout, now.rollout
    if was.max_tokens == becomes.max_tokens:
        return []
    return [
        replace(group, prompt=replace(group.prompt, sampling={**group.prompt.sampling, "max_tokens": was.max_tokens}))
        for group in groups
        if "max_tokens" not in group.prompt.sampling
    ]


def _check_window(now: Config, found: Found) -> None:
    """Raises InvalidValue if admitted groups do not fit into steps of this size by their deadlines."""
    durable = found.durable
    stands = restored_window(durable, now.window)
    now.check_groups_per_step(stands.groups_per_step, "window.groups_per_step")
    if not stands.groups_per_step:
        return
    newest, is_short = durable.newest, durable.short_step == durable.newest
    taken = sum(group.step != OPEN for group in found.groups)
    # the open step's groups count as due in it; a step that ended short takes no more
    first, due = (newest + 1, 0) if is_short else (newest, taken)
    least, why = due, f"step {newest} has taken {taken} groups; commit it with the old value first"
    deadlines = Counter(group.deadline for group in found.groups if group.step == OPEN)
    for deadline, groups in sorted(deadlines.items()):
        due += groups
        needed = -(-due // (deadline - first + 1))
        if needed > least:
            least, why = needed, f"{due} admitted groups are due by step {deadline}, and keep that deadline"
    if stands.groups_per_step < least:
        raise InvalidValue("window.groups_per_step", stands.groups_per_step, f"at least {least}: {why}")


def _check_context(before: Config, now: Config, found: Found) -> None:
    """Raises InvalidValue if an admitted or queued prompt's response might not fit into a context."""
    limit = now.workers.context_tokens
    if limit >= before.workers.context_tokens and now.rollout.max_tokens <= before.rollout.max_tokens:
        return
    for what, settings, prompts in (
        ("admitted", before, [group.prompt for group in found.groups]),
        ("queued", now, [prompt for _, prompt in found.queued]),
    ):
        longest, prompt = max(((_tokens(settings, each), each) for each in prompts), default=(0, None), key=_first)
        if longest > limit and prompt is not None:
            allowed = f"at least {longest}: prompt {prompt.prompt_id} is {what}, and its response may need as many"
            raise InvalidValue("workers.max_model_len_tokens", limit, allowed)


def _first(pair: tuple[int, Prompt | None]) -> int:
    return pair[0]


def _tokens(config: Config, prompt: Prompt) -> int:
    return len(prompt.token_ids) + sampling_of(config.rollout, prompt).max_tokens


def _different(name: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields the settings of this name, or in the section of this name, that differ and may not."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            yield from _different(f"{name}.{key}", old.get(key), new.get(key))
    elif old != new and name not in CHANGES:
        yield name, old, new
