"""Checks the groups that trainers say they trained on once more (docs/training.md, experience replay)."""

from collections.abc import Iterator, Mapping, Sequence


def violations(
    replayed: Mapping[int, Sequence[str]], trained: Mapping[str, int], last_steps: Mapping[str, int]
) -> Iterator[str]:
    """Checks the replays of committed steps, by step: each of an earlier step, once, and within its staleness bound.

    ``trained`` has the step that each group was delivered to, ``last_steps`` the last one that may train on it (C3).
    Each violation is one sentence.
    """
    replayed_in: dict[str, int] = {}
    for step, group_ids in sorted(replayed.items()):
        for group_id in group_ids:
            if trained.get(group_id, step) >= step:
                yield f"step {step} replayed group {group_id}, which no earlier step trained on."
            elif step > last_steps.get(group_id, step):
                last = last_steps[group_id]
                yield f"step {step} replayed group {group_id}, whose staleness bound ended with step {last} (C3)."
            if group_id in replayed_in:
                yield f"group {group_id} was replayed in step {replayed_in[group_id]} and in step {step}."
            replayed_in[group_id] = step
