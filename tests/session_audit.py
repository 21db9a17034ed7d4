"""Audits the record of sessions that ``tests.tools`` drove: each turn that was lost, came twice or is another's."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np

from dora.data.trajectory import Trajectory
from dora.data.types import RequestSpec
from tests.session_script import asked_of, stretches, turns_of

MUST_BE_0: Final = ("sessions_wrong", "sessions_replaced", "sessions_broken_off")
Tokens = list[int]


def digest(token_ids: Iterable[int]) -> str:
    return hashlib.blake2s(json.dumps([*map(int, token_ids)]).encode()).hexdigest()


def audited(
    sessions: Sequence[Sequence[Trajectory]], counters: Mapping[str, float], sentences: Sequence[str]
) -> dict[str, int]:
    """A report's fields. ``counters``: the service's, or none. ``sentences``: of what is wrong with sessions."""
    replaced, broken_off, *turns = (
        int(counters.get(name, 0)) for name in (*MUST_BE_0[1:], "turns_resumed", "turns_reprefilled")
    )
    return {
        "sessions": len(sessions),
        "branches": sum(map(len, sessions)),
        "turns": sum(len(spans(each)) for branches in sessions for each in branches),
        "turns_resumed": turns[0],
        "turns_reprefilled": turns[1],
        "sessions_wrong": len(sentences),
        "sessions_replaced": replaced,
        "sessions_broken_off": broken_off,
    }


def sessions_of(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """Returns the branches of each session, in their order."""
    found: dict[str, list[Trajectory]] = defaultdict(list)
    for each in trajectories:
        found[each.trajectory_id.partition("/")[0]].append(each)
    branches = (sorted(each, key=lambda branch: branch.branch_index) for each in found.values())
    return [each for each in branches if any(branch.events for branch in each)]


def spans(branch: Trajectory) -> list[tuple[int, int]]:
    """The sampled tokens of each turn that counts in this branch: the first, and one after the last."""
    edges = np.flatnonzero(np.diff(branch.loss_mask.astype(np.int8), prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def all_wrong(sessions: Iterable[Sequence[Trajectory]]) -> list[str]:
    """What is wrong with sessions, in sentences."""
    return [sentence for branches in sessions if (sentence := wrong(branches))]


def wrong(branches: Sequence[Trajectory]) -> str:
    """What this session's record says that its environment did not do; empty: nothing."""
    name, prompt_id, last = branches[0].trajectory_id, branches[0].prompt_id, branches[-1]
    expected, paths = [*stretches(prompt_id)], dict[int, tuple[Tokens, Tokens]]()
    if [each.branch_index for each in branches] != [*range(len(expected))]:
        return f"{name} has {len(branches)} branches of {len(expected)}"
    for turns, branch in zip(expected, branches, strict=True):
        if complaint := _wrong_branch(turns, branch, paths):
            return f"{branch.trajectory_id} has {complaint}"
        if not branch.reward_valid or branch.reward != turns_of(prompt_id):
            return f"{branch.trajectory_id} has reward {branch.reward} of {turns_of(prompt_id)}"
    if last.verifier_log != digest(last.response_token_ids):
        return f"{name} has other tokens than its environment saw"
    return ""


def _wrong_branch(turns: list[int], branch: Trajectory, paths: dict[int, tuple[Tokens, Tokens]]) -> str:
    """What is wrong with one branch; empty: nothing. ``paths``: prompt and response tokens up to the end of each
    turn of the branches before, to which those of this branch are added.
    """
    found, tokens = spans(branch), branch.response_token_ids.tolist()
    asked, prompt = asked_of(branch.prompt_id), branch.prompt_token_ids.tolist()
    if len(found) != len(turns) or found[-1][1] != len(tokens):
        return f"{len(found)} turns of {len(turns)}"
    begin = asked.get(turns[0])
    shared, given, before = 0, [], prompt
    if begin is not None and begin.is_prompt:
        before = [*begin.given]
    elif begin is not None:
        assert begin.after_turn is not None
        before, earlier = paths[begin.after_turn]
        shared = len(earlier) if begin.first_token is None else begin.first_token
        given = [*earlier[:shared], *begin.given]
    if prompt != before or (not prompt) or tokens[: found[0][0]] != given or branch.shared_prefix_tokens != shared:
        return f"other tokens before turn {turns[0]} than it was given"
    for turn, ((_, end), (first, _)) in zip(turns[1:], pairwise(found), strict=True):
        if tokens[end:first] != [*asked[turn].given]:
            return f"other given tokens in turn {turn} than it was given"
    paths.update({turn: (prompt, tokens[:end]) for turn, (_, end) in zip(turns, found, strict=True)})
    return ""


def requests_of(branch: Trajectory, max_tokens: int = 0) -> Sequence[tuple[RequestSpec, int, int]]:
    """Each turn that counts in this branch as a request of its own that has everything before it, with its span.
    ``max_tokens``: of each turn, if its caller has set it.
    """
    sampling = replace(branch.sampling, max_tokens=max_tokens or branch.sampling.max_tokens)
    found, shared = spans(branch), branch.shared_prefix_tokens
    begins_given = bool(found) and found[0][0] > 0
    edges = [(shared, found[0][0])] if begins_given else []
    given = (*edges, *((end, begin) for (_, end), (begin, _) in pairwise(found)))
    token_ids, logprobs = branch.response_token_ids.tolist(), branch.logprobs.tolist()
    return [
        (
            RequestSpec(
                f"{branch.trajectory_id}/{turn}",
                branch.behaviour_version,
                tuple(branch.prompt_token_ids.tolist()),
                sampling,
                tuple(token_ids[:begin]),
                tuple(logprobs[:begin]),
                inputs=given[: turn + begins_given],
            ),
            begin,
            end,
        )
        for turn, (begin, end) in enumerate(found)
    ]
