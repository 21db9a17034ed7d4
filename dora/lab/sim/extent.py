"""The duration of a scenario's step: the bubble-free bound, the time without overlap, and the time limit.

A scenario is refused before it runs if a step would take weeks, or if a periodic action would run too often within one.
A step that takes a hundred times its duration without overlap is ended. ``standstill`` then reports whether the run is
stuck or only much slower than its parts explain.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, exp, floor, log10
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from dora.core.forecast.cost import CostModel, context_work
from dora.errors import InvalidValue
from dora.lab.planning.generation import bound_s
from dora.lab.sim.scenario import Cluster, Scenario, SimTurns, Workload
from dora.lab.sim.tasks import TaskShape, mixed_tokens, shapes_of
from dora.lab.sim.workload import Moments, moments
from dora.lab.sim.world import World
from dora.lab.sim_engine.engine import EnginePhase

DAY_S: Final = 86_400.0
STEP_MOST_S: Final = 14 * DAY_S
PERIODS_MAX: Final = 100_000  # in one step
PATIENCE: Final = 100  # factor on a step's duration without overlap
MESSAGES: Final = 10  # sequential messages of a step: commands, outcomes, moves
# messages until a request's slot is free for the next one: its start, its end, the next start
MESSAGES_OF_ONE: Final = 3


def expected_bound_s(scenario: Scenario) -> float:
    """Bubble-free time of the expected batch."""
    expected, responses = moments(scenario.workload), scenario.trainer.groups_per_step * scenario.workload.group_size
    return bound_of_s(scenario, expected.generated_tokens(responses), expected.context_tokens(responses))


def bound_of_s(scenario: Scenario, tokens: float, context_tokens: float) -> float:
    """Bubble-free time of this work on the scenario's cluster (engine time >= k1 C + k3 N + k4 S). Each kind of engines
    does an equal share of it for its capacity.
    """
    return _shared_s(scenario.cluster, CostModel.of(scenario.cluster.cost), tokens, context_tokens)


def _shared_s(cluster: Cluster, cost: CostModel, tokens: float, context_tokens: float) -> float:
    alone = [
        bound_s(cost.scaled(kind.step_scale), kind.slots, kind.kv_tokens, tokens, context_tokens, kind.engines)
        for kind in cluster.engines_by_kind
    ]
    return 1.0 / sum(1.0 / each for each in alone) if all(alone) else 0.0


def check_extent(scenario: Scenario) -> None:
    """Raises InvalidValue if a step takes longer than STEP_MOST_S or contains more than PERIODS_MAX periods."""
    parts = dict(_parts_s(scenario))
    step_s = sum(parts.values())
    if step_s > STEP_MOST_S:
        field = max(parts, key=lambda name: parts[name])
        days, most = parts[field] / DAY_S, STEP_MOST_S / DAY_S
        allowed = (
            f"such that a step takes {most:g} days at most: {_logged(scenario)}, and this alone takes {days:,.4g} days"
        )
        raise InvalidValue(field, _value_at(scenario, field), allowed)
    least_s = step_s / PERIODS_MAX
    if scenario.balance.period_s < least_s:
        allowed = (
            f"at least {_rounded_up(least_s):g}: of a step, which may take {step_s:,.4g} s, at most {PERIODS_MAX:,}"
        )
        raise InvalidValue("balance.period_s", scenario.balance.period_s, allowed)


def limit_s(scenario: Scenario) -> float:
    """The time limit of a step. Lengths that drift upward may reach the maximum."""
    grows = scenario.workload.lengths.drift_per_step > 0.0
    return PATIENCE * sum(part_s for _, part_s in _parts_s(scenario, longest=grows))


def standstill(world: World, waited_s: float) -> str:
    """The reason why the present step is not complete after this time."""
    engines = [worker.engine for worker in world.workers.values()]
    state = world.machine.state
    going_on = {
        "responses being generated": sum(engine.running for engine in engines if not engine.paused),
        "waiting for their environment": sum(
            request.phase is EnginePhase.AWAY for engine in engines for request in engine.requests.values()
        ),
        "workers loading weights": sum(worker.loading >= 0 for worker in state.workers.values()),
        "handoffs": len(state.handoffs),
        "batches in training": int(world.trainer.at_work),
    }
    after = f"after {waited_s:,.0f} s, {PATIENCE} times what a step takes where nothing overlaps"
    has = f"the trainer has {len(world.ledger.received)} of {world.ledger.groups_per_step} groups"
    logged = ", ".join(f"{what}: {count:,}" for what, count in going_on.items() if count)
    if logged:
        return f"step {world.trainer.step} is slow: it is not done {after}, but goes on ({logged}; {has})"
    return f"step {world.trainer.step} stands still: it is not done {after}, and nothing goes on any more ({has})"


def _parts_s(scenario: Scenario, *, longest: bool = False) -> Iterator[tuple[str, float]]:
    """Yields the parts of a step's duration without overlap, by the field that determines each.

    ``longest`` assumes that every response has the maximum length.
    """
    cluster, trainer, workload = scenario.cluster, scenario.trainer, scenario.workload
    yield "balance.period_s", scenario.balance.period_s
    yield "trainer.step_s", trainer.step_s
    yield "trainer.publish_s", trainer.publish_s
    yield "cluster.load_s", cluster.load_s
    responses = trainer.groups_per_step * workload.group_size / (1.0 - scenario.filter_fraction)
    rounds = max(1.0, responses / (cluster.slots * cluster.engines))  # each of as many responses as run at once
    yield "cluster.link_latency_s", (MESSAGES + MESSAGES_OF_ONE * rounds) * cluster.link_latency_s
    shapes = shapes_of(workload)
    of_one, tail_tokens = moments(workload, shapes), _tail_tokens(workload, shapes, responses)
    if longest:
        tail_tokens = cap_tokens = float(workload.lengths.cap_tokens)
        of_one = replace(of_one, mean_tokens=cap_tokens, mean_square_tokens=cap_tokens**2)
    for name, cost in _alone(CostModel.of(cluster.cost)):
        yield f"cluster.cost.{name}", _generated_s(scenario, cost, of_one, responses, tail_tokens)
    prompt_tokens = of_one.prompt_tokens
    prefilled_tokens = responses / workload.group_size * prompt_tokens / cluster.engines + prompt_tokens + tail_tokens
    yield "cluster.cost.prefill_token_s", cluster.cost.prefill_token_s * prefilled_tokens
    if any(task.turns is None for task in workload.tasks) or not workload.tasks:
        yield "workload.turns.environment_mean_s", _answered_s(workload.turns, responses, rounds)
    for index, task in enumerate(workload.tasks):
        if task.turns is not None:
            field = f"workload.tasks.{index}.turns.environment_mean_s"
            yield field, _answered_s(task.turns, task.share * responses, task.share * rounds)


def _tail_tokens(workload: Workload, shapes: Sequence[TaskShape], responses: float) -> float:
    score = NormalDist().inv_cdf(1.0 - 0.5 / max(1.0, responses))
    tokens = mixed_tokens(shapes)(np.array([score]))
    return float(np.clip(tokens, 1.0, workload.lengths.cap_tokens)[0])


def _alone(cost: CostModel) -> Iterator[tuple[str, CostModel]]:
    names = ("kv_token_s", "weights_s", "request_s", "state_s", "step_s")
    free = replace(cost, **dict.fromkeys(names, 0.0))
    for name in names:
        yield name, replace(free, **{name: getattr(cost, name)})


def _generated_s(scenario: Scenario, cost: CostModel, of_one: Moments, responses: float, tail_tokens: float) -> float:
    cluster, before_tokens = scenario.cluster, of_one.prompt_tokens + of_one.answer_tokens
    n_tokens, c_tokens = of_one.generated_tokens(responses), of_one.context_tokens(responses)
    batch_s = _shared_s(cluster, cost, n_tokens, c_tokens)
    return batch_s + tail_tokens * cost.matmul_s(1) + cost.kv_token_s * context_work(tail_tokens, round(before_tokens))


def _answered_s(turns: SimTurns, responses: float, rounds: float) -> float:
    if turns.most == 1 or not turns.environment_mean_s:
        return 0.0
    score = NormalDist().inv_cdf(1.0 - 0.5 / max(1.0, responses * (turns.most - 1) / 2))
    longest = exp(turns.environment_sigma * score - turns.environment_sigma**2 / 2)
    return turns.environment_mean_s * (rounds * (turns.most - 1) / 2 + turns.most - 1 + longest)


def _rounded_up(value: float) -> float:
    """Rounds up to three digits, so that the reported minimum is sufficient."""
    unit = 10.0 ** (floor(log10(value)) - 2)
    return ceil(value / unit) * unit


def _logged(scenario: Scenario) -> str:
    of_one, batch = moments(scenario.workload), scenario.trainer.groups_per_step * scenario.workload.group_size
    return f"it has {batch:,} responses of {of_one.mean_tokens:,.4g} tokens on average"


def _value_at(scenario: Scenario, field: str) -> Any:
    value: Any = scenario
    for name in field.split("."):
        value = value[int(name)] if name.isdecimal() else getattr(value, name)
    return value
