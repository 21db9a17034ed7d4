"""When the steps to come are expected to end, and how fast a response can be: what laxity plans by."""

import numpy as np

from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.lognormal import expected_remaining
from dora.orchestrator.core.policies.lifespan import MARGIN_STEP, Lifespan
from dora.orchestrator.core.policies.pacing import Engine, Pacing
from dora.orchestrator.core.policies.stride import leading, life_of, stride_of

FILL = 0.97  # share of a DP group's KV that is to be used
SAFETY = 1.04  # a token takes this much longer than of late
LOSS = 1.04  # a step takes this much longer than the work of its responses on KV that is always full
SHORTEST_STEP = 0.8  # of the mean time between publishes: a step is not expected to be shorter
TAIL_STEP = 0.12  # share of a step that training may go on after its last group: longer, the trainer was behind
SKEW = 0.25  # prompts that wait cost this share more than those drawn: from here on steps are expected to be longer
LANE_FILL = 0.55  # share of KV in use at which a DP group is as fast as is worth while, where nothing needs less
WORTH = 0.95  # it is worth while only where a token then takes less than this share of what it takes on a full one


def lifespan_of(floor: Floor) -> Lifespan:
    """The schedule as of now. Only once the times of a step and of a token are known.

    Steps as short as the KV allows, so that stragglers do not set their length; a late publish moves what follows. Nor
    shorter: steps are, while long prompts are left waiting, and would then leave ever more of them. The more those that
    wait cost, the nearer to the steps seen: what sets their length, a trainer perhaps, leaves time for long ones. And
    never so short that the longest responses could not end within their version's life (pacing.py).
    """
    rhythm, window = floor.rhythm, floor.window
    groups = floor.groups()
    life_steps = window.size - MARGIN_STEP
    pacing = _pacing(floor, groups, life_steps)
    left_out = floor.backlog.mean_work / rhythm.group_work - 1.0 if rhythm.group_work else 0.0
    shortest = min(1.0, SHORTEST_STEP + (1.0 - SHORTEST_STEP) * max(0.0, left_out - SKEW) / SKEW)
    step_s = max(
        LOSS * rhythm.kv_step_s(window.groups_per_step, floor.kv_tokens()),
        shortest * rhythm.step_s,
        LOSS * pacing.step_s if pacing is not None else 0.0,
    )
    hurried, lane_fill, lane_s, turn_s = False, LANE_FILL, rhythm.pace_s, 0.0
    if pacing is not None:
        kv_tokens = floor.kv_tokens() / groups
        lane_fill = min(LANE_FILL, pacing.lane_kv(step_s) / kv_tokens)
        lane_s = pacing.pace_s(lane_fill * kv_tokens)
        hurried = pacing.hurries(step_s) and lane_s < WORTH * pacing.full_s
        turn_s = rhythm.group_s if pacing.turns_s(step_s) else 0.0
    longest = _longest_remaining(floor)
    least_end_s = {version: floor.now_s + SAFETY * lane_s * tokens for version, tokens in longest.items()}
    due = floor.newest - window.size + 1
    next_s = _next_s(floor, step_s, longest.get(due, 0.0))
    if due in least_end_s:
        next_s = max(next_s, least_end_s[due] + _tail_s(floor, step_s))
    targets = [worker.target for worker in floor.workers() if not worker.draining]
    return Lifespan(
        groups=groups,
        window=life_of(groups, window.size),
        newest=floor.newest,
        leader=leading(floor.newest, targets, window.size, lambda version: window.admissible(version) >= 1),
        stride=stride_of(groups, window.size),
        published_s=rhythm.published_s,
        next_s=next_s,
        step_s=step_s,
        hurried=hurried,
        lane_fill=lane_fill,
        turn_s=turn_s,
        least_end_s=least_end_s,
    )


def _next_s(floor: Floor, step_s: float, due_tokens: float) -> float:
    """When the next version is published: as planned; earlier, where the due version ends early; or later.

    Earlier matters to a narrow window: what begins now has so much less time. It can be no shorter than what a trainer
    took of late for a step that it had in full. A step cannot be full before the groups that it lacks have finished,
    and they finish at the rate of a step's in a step; then the last of them are trained on.
    ``due_tokens``: of the due version's longest response, still to come.
    """
    rhythm = floor.rhythm
    if floor.window.step > floor.newest:  # the step is full
        return max(rhythm.filled_s + rhythm.tail_s, floor.now_s + 1.0)
    lacking_s, tail_s = floor.lacking() * step_s, _tail_s(floor, step_s)
    full_s = floor.now_s + max(lacking_s, SAFETY * rhythm.pace_s * due_tokens)
    trained_s = rhythm.published_s + min(rhythm.took_s, default=step_s)
    next_s = min(rhythm.published_s + step_s, max(full_s + tail_s, trained_s))
    return max(next_s, floor.now_s + 1.0 + lacking_s + tail_s)


def _tail_s(floor: Floor, step_s: float) -> float:
    """How long training goes on after a step's last group."""
    return min(floor.rhythm.tail_s, TAIL_STEP * step_s)


def _pacing(floor: Floor, groups: int, life_steps: float) -> Pacing | None:
    """None where the cost of an engine or what prompts ask for is not known."""
    worker, mix = next(iter(floor.workers()), None), floor.rhythm.mix
    if floor.cost is None or worker is None or not groups or not len(mix.classes()):
        return None
    engine = Engine(floor.cost, worker.slots, FILL * floor.kv_tokens() / groups)
    return Pacing(mix, engine, groups, floor.window.groups_per_step, life_steps, floor.rhythm.group_s)


def _longest_remaining(floor: Floor) -> dict[int, float]:
    """By version: tokens to come of its longest response."""
    rows, requests = floor.unfinished(), floor.requests
    columns = (requests[name][rows] for name in ("expected", "log_mean", "log_sd", "tokens", "max_tokens"))
    versions, tokens = requests["version"][rows], expected_remaining(*columns)
    return {int(version): float(tokens[versions == version].max()) for version in np.unique(versions)}
