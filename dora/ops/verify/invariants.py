"""Invariants of the record's lines, independent of the weights. Every violation is one sentence."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from dora.data.trajectory import Trajectory
from dora.data.types import INPUT

_LOGPROB_MAX = 1e-4  # rounding may leave a certain token's logprob just above 0


def violations(trajectories: Sequence[Trajectory], window_versions: int | None = None) -> Iterator[str]:
    """Checks C1 (one version), C2 (complete groups, each trajectory once) and C3 (staleness) over ``trajectories``.

    Staleness is limited by the window in which each was admitted, as its line says, and by ``window_versions`` if
    given.
    """
    yield from _repeats(trajectories)
    yield from _groups(trajectories)
    yield from _routing_shapes(trajectories)
    for trajectory in trajectories:
        yield from _versions(trajectory)
        yield from _segments(trajectory)
        yield from _staleness(trajectory, window_versions)
        yield from _tokens(trajectory)
        yield from _routing(trajectory)


def _repeats(trajectories: Sequence[Trajectory]) -> Iterator[str]:
    for trajectory_id, times in Counter(each.trajectory_id for each in trajectories).items():
        if times > 1:
            yield f"trajectory {trajectory_id} is recorded {times} times."


def _groups(trajectories: Sequence[Trajectory]) -> Iterator[str]:
    members: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        members[trajectory.group_id].append(trajectory)
    for group_id, group in members.items():
        size = group[0].group_size
        missing = sorted(set(range(size)) - {each.sample_index for each in group})
        if missing:
            yield f"group {group_id} of {size} lacks the samples {missing}."
        for name in ("group_size", "prompt_id", "behaviour_version", "trained_step", "window_versions"):
            values = sorted({getattr(each, name) for each in group})
            if len(values) > 1:
                yield f"group {group_id} has several values of {name}: {values}."
        shared = [each for each in group if not _has_own_prompt(each)]
        if any(each.prompt_token_ids.tolist() != shared[0].prompt_token_ids.tolist() for each in shared):
            yield f"group {group_id} has several prompts."
        yield from _branches(group)


def _has_own_prompt(trajectory: Trajectory) -> bool:
    return any(each.kind == INPUT and not each.position_token for each in trajectory.events)


def _branches(group: Sequence[Trajectory]) -> Iterator[str]:
    sessions: dict[int, list[Trajectory]] = defaultdict(list)
    for each in group:
        sessions[each.sample_index].append(each)
    for branches in sessions.values():
        branches.sort(key=lambda each: each.branch_index)
        name = branches[0].trajectory_id
        if [each.branch_index for each in branches] != list(range(len(branches))):
            yield f"session {name} has the branches {[each.branch_index for each in branches]}."
        if len({(each.reward_valid, each.reward if each.reward_valid else 0.0) for each in branches}) > 1:
            yield f"session {name} has branches with different rewards."
        for index, each in enumerate(branches):
            shared = each.shared_prefix_tokens
            if each.loss_mask[:shared].any():
                yield f"trajectory {each.trajectory_id} counts tokens for the loss that an earlier branch has."
            whole = [*each.prompt_token_ids.tolist(), *each.response_token_ids[:shared].tolist()]
            earlier = ([*one.prompt_token_ids.tolist(), *one.response_token_ids.tolist()] for one in branches[:index])
            if shared and not any(one[: len(whole)] == whole for one in earlier):
                yield f"trajectory {each.trajectory_id} shares {shared} tokens with no earlier branch."


def _versions(trajectory: Trajectory) -> Iterator[str]:
    others = sorted({segment.version for segment in trajectory.worker_history} - {trajectory.behaviour_version})
    if others:
        yield (
            f"trajectory {trajectory.trajectory_id} of version {trajectory.behaviour_version} has tokens of versions"
            f" {others} (C1)."
        )


def _segments(trajectory: Trajectory) -> Iterator[str]:
    expected = 0
    for index, segment in enumerate(trajectory.worker_history):
        if segment.first_token != expected or segment.last_token < segment.first_token:
            yield (
                f"trajectory {trajectory.trajectory_id}: segment {index} holds tokens {segment.first_token} to"
                f" {segment.last_token}, expected to begin at {expected}."
            )
            return
        if (segment.arrival == "new") != (index == 0):
            yield f"trajectory {trajectory.trajectory_id}: segment {index} arrived {segment.arrival!r}."
        expected = segment.last_token + 1
    if expected != trajectory.length_tokens:
        yield (
            f"trajectory {trajectory.trajectory_id}: its segments hold {expected} tokens, its response"
            f" {trajectory.length_tokens}."
        )


def _staleness(trajectory: Trajectory, window_versions: int | None) -> Iterator[str]:
    true = trajectory.trained_step - trajectory.behaviour_version
    name = f"trajectory {trajectory.trajectory_id}"
    if trajectory.staleness != true:
        yield f"{name} states a staleness of {trajectory.staleness}; trained step less version is {true}."
    if true < 0:
        yield f"{name} was trained in step {trajectory.trained_step}, before its version was published."
    own = trajectory.window_versions
    if own and true >= own:
        yield f"{name} has a staleness of {true}, over the {own - 1} of the window that it was admitted in (C3)."
    if window_versions is not None and max(true, own - 1) >= window_versions:
        allowed = f"a staleness of {true}" if true >= window_versions else f"been admitted in a window of {own}"
        yield f"{name} has {allowed}, over the window's {window_versions - 1} (C3)."


def _tokens(trajectory: Trajectory) -> Iterator[str]:
    # The reader of the record already checks that each token has one logprob and one mask byte.
    name = f"trajectory {trajectory.trajectory_id}"
    if not trajectory.length_tokens:
        yield f"{name} has no token."
    wrong = [value for value in trajectory.logprobs.tolist() if not (math.isfinite(value) and value <= _LOGPROB_MAX)]
    if wrong:
        yield f"{name} has logprobs that are none: {wrong[:3]}."
    prefix = trajectory.shared_prefix_tokens  # the loss mask of earlier tokens is another branch's
    if not set(trajectory.loss_mask.tolist()) <= {0, 1}:
        yield f"{name} has a loss mask of other values than 0 and 1."
    if trajectory.logprobs[prefix:][trajectory.loss_mask[prefix:] == 0].any():
        yield f"{name} has logprobs of tokens that the policy has not sampled."
    begins = np.flatnonzero(np.diff(trajectory.loss_mask.astype(np.int8)) > 0) + 1
    turns = [each.position_token for each in trajectory.events if each.kind == INPUT and each.position_token > prefix]
    if turns and turns[-1] == trajectory.length_tokens:  # it was broken off before anything of the turn was sampled
        turns.pop()
    if turns != [begin for begin in begins.tolist() if begin > prefix]:
        yield f"{name} has turns that begin at {turns}, and its loss mask at {begins.tolist()}."
    if trajectory.finished_at < trajectory.started_at:
        yield f"{name} finished before it started."


def _routing_shapes(trajectories: Sequence[Trajectory]) -> Iterator[str]:
    shapes = Counter(None if each.routed_experts is None else each.routed_experts.shape[1:] for each in trajectories)
    if len(shapes) > 1:
        named = [f"{count} with {shape or 'none'}" for shape, count in shapes.items()]
        yield f"routed experts differ in (layers, top_k) between trajectories: {', '.join(named)}."


def _routing(trajectory: Trajectory) -> Iterator[str]:
    # The reader of the record already checks that each input token has a row.
    rows = trajectory.routed_experts
    if rows is None or rows.shape[2] < 2:
        return
    ordered = np.sort(rows, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
    if twice.any():
        token, layer = (int(place) for place in np.argwhere(twice)[0])
        yield (
            f"trajectory {trajectory.trajectory_id}: the token at position {token} was sent to"
            f" {rows[token, layer].tolist()} in layer {layer}, one of them twice."
        )
