"""``simulate``: one scenario, some steps, one Report."""

import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from dora.core import commands as do
from dora.core import events as on
from dora.core.forecast.adjustment import groups_to_add
from dora.core.rules.selection import spare_groups
from dora.errors import DoraError, InvalidValue
from dora.lab.sim.extent import bound_of_s, check_extent, expected_bound_s, limit_s, standstill
from dora.lab.sim.figures.meter import Meter, Reading
from dora.lab.sim.figures.report import BrokenReport, Report, Timeline
from dora.lab.sim.invariants import check_state
from dora.lab.sim.ledger import Failure, Stalled, Violation, failure_of
from dora.lab.sim.partial import has_versions
from dora.lab.sim.scenario import Scenario
from dora.lab.sim.watch import Watch
from dora.lab.sim.workload import longest_context_tokens
from dora.lab.sim.world import Observer, World
from dora.system.memory import collecting_rarely

# The ledger and the watch check every event. The core's whole state is checked once per this many events times its
# number of requests: such a check reads all requests, and should cost at most a few percent.
WHOLE_CHECK = 1.0
PROGRESS_EVENTS = 256  # between two progress reports: a step of a large cluster has many thousands


class BrokenRun(Violation):
    """A run that ended early: a promise was broken, it stalled, or a strategy raised. ``report`` has what there is."""

    def __init__(self, report: BrokenReport) -> None:
        super().__init__(report.violation)
        self.report = report


def simulate(
    scenario: Scenario,
    *,
    steps: int,
    warmup: int,
    seed: int,
    timeline: Timeline | None = None,
    progress: Callable[[float], None] | None = None,
) -> Report:
    """Runs ``warmup + steps`` training steps and reports on the last ``steps``. ``progress`` receives the completed
    share.

    Raises InvalidValue for an impossible scenario, and BrokenRun if a promise is broken, the run stalls or a strategy
    raises.
    """
    check_cluster(scenario)
    began_s = time.perf_counter()
    with collecting_rarely():
        world = _world(scenario, seed)
        world.observers += [Watch(lambda: world.machine).saw, _checks(world)]
        meter = Meter(world, warmup, timeline)
        goal, patience_s = warmup + steps, limit_s(scenario)
        if progress is not None:
            world.observers.append(_tells(world, meter, goal, progress))
        try:
            for step in range(goal):
                _run_step(world, meter, step, patience_s)
                if progress is not None:
                    progress(meter.steps / goal)
            check_state(world.machine.state)
        except Exception as error:  # including a refusal by the core, which its own commands caused
            raise BrokenRun(_broken(scenario, seed, failure_of(error, world.now_s), world.events)) from error
    meter.finish()
    return _report(scenario, world, meter, steps, seed, time.perf_counter() - began_s)


def _run_step(world: World, meter: Meter, step: int, patience_s: float) -> None:
    try:
        world.run_until(lambda: meter.steps > step, world.now_s + patience_s)
    except Stalled as error:
        raise Stalled(standstill(world, patience_s)) from error


def check_cluster(scenario: Scenario) -> None:
    """Raises InvalidValue for a scenario that cannot run: no engine, a response that fits into none, too few groups in
    flight, none to spare, steps of weeks.
    """
    cluster = scenario.cluster
    if cluster.engines < 1:
        gpus = cluster.gpus if cluster.colocated else cluster.rollout_gpus
        raise InvalidValue("cluster.gpus_per_engine", cluster.gpus_per_engine, f"at most the {gpus} accelerators there")
    limit, batch = scenario.in_flight_groups, scenario.trainer.groups_per_step
    if 0 < limit < batch:
        raise InvalidValue("in_flight_groups", limit, f"0 or at least trainer.groups_per_step, {batch}")
    if not cluster.colocated and cluster.rollout_gpus >= cluster.gpus:
        raise InvalidValue("cluster.rollout_gpus", cluster.rollout_gpus, f"less than cluster.gpus, {cluster.gpus}")
    longest, prompt_tokens = longest_context_tokens(scenario.workload)
    least = min(cluster.engines_by_kind, key=lambda kind: kind.kv_tokens)
    if least.kv_tokens < longest:
        allowed = f"at least the {longest} of the longest response, with a prompt of {prompt_tokens} tokens"
        raise InvalidValue("cluster.kv_tokens", least.kv_tokens, allowed)
    if scenario.redundant_fraction > 0.0 and not spare_groups(scenario.redundant_fraction, batch):
        allowed = f"0, or at least 1/{batch}, one group of trainer.groups_per_step"
        raise InvalidValue("redundant_fraction", scenario.redundant_fraction, allowed)
    check_extent(scenario)


def _world(scenario: Scenario, seed: int) -> World:
    """Makes the world. The core takes its first decisions meanwhile, so this may raise."""
    try:
        return World(scenario, seed)
    except DoraError:
        raise
    except Exception as error:
        raise BrokenRun(_broken(scenario, seed, failure_of(error, 0.0), events=0)) from error


def _checks(world: World) -> Observer:
    due = 0

    def observe(_now_s: float, _event: on.Event, _commands: list[do.Command]) -> None:
        nonlocal due
        if world.events >= due:
            state = world.machine.state
            check_state(state)
            due = world.events + int(WHOLE_CHECK * state.requests.used)

    return observe


def _tells(world: World, meter: Meter, goal: int, progress: Callable[[float], None]) -> Observer:
    def observe(_now_s: float, _event: on.Event, _commands: list[do.Command]) -> None:
        if world.events % PROGRESS_EVENTS == 0:
            progress((meter.steps + len(world.ledger.received) / world.ledger.groups_per_step) / goal)

    return observe


def _report(scenario: Scenario, world: World, meter: Meter, steps: int, seed: int, wall_s: float) -> Report:
    cluster, consumed, counters = scenario.cluster, meter.consumed, world.machine.counters
    first, last = meter.begin, meter.end
    took_s = last.at_s - first.at_s
    engine_s = took_s * cluster.engines
    steps_done = last.steps - first.steps
    context = last.context_token_steps - first.context_token_steps
    of_consumed = bound_of_s(scenario, consumed.response_tokens, consumed.context_tokens)
    staleness = consumed.staleness if has_versions(scenario.balance.policy) else None
    lost = len(world.ledger.groups.keys() - world.machine.state.group_row.keys())
    return Report(
        preset=scenario.name,
        policy=scenario.balance.policy,
        window=scenario.window.size,
        window_last=world.ledger.window if has_versions(scenario.balance.policy) else None,
        window_changes=tuple(meter.resizes),
        predictor=scenario.balance.predictor,
        seed=seed,
        steps=steps,
        engines=cluster.engines,
        step_time_min=took_s / steps / 60,
        rollout_only_fraction=1 - consumed.busy_s / took_s,
        dp_groups_to_add=_groups_to_add(scenario, took_s, consumed.busy_s),
        tokens_per_s=(consumed.response_tokens + consumed.prompt_tokens) / took_s,
        generated_tokens_per_s=(last.generated_tokens - first.generated_tokens) / took_s,
        staleness_max=max(staleness) if staleness else None,
        staleness_mean=sum(staleness) / len(staleness) if staleness else None,
        staleness_groups=None if staleness is None else tuple(np.bincount(staleness).tolist()),
        step_staleness=None if staleness is None else tuple(consumed.step_staleness),
        step_took_min=tuple(each / 60 for each in consumed.took_s),
        step_waited_min=tuple(each / 60 for each in consumed.waited_s),
        bound_min=expected_bound_s(scenario) / 60,
        bound_consumed_min=of_consumed / steps / 60,
        work_done_over_consumed=_work_done_s(scenario, first, last) / of_consumed,
        kv_utilisation=context / steps_done / cluster.mean_kv_tokens if steps_done else 0.0,
        violations=counters.c1_violations + consumed.out_of_window,
        lost=lost,
        duplicated=world.ledger.duplicated(),
        filter_fraction=scenario.filter_fraction,
        redundant_fraction=scenario.redundant_fraction,
        groups_filtered=last.filtered - first.filtered,
        groups_dropped=last.dropped - first.dropped,
        tokens_wasted_fraction=(last.wasted_tokens - first.wasted_tokens)
        / max(1.0, last.generated_tokens - first.generated_tokens),
        migrations_kv=counters.migrations_kv,
        migrations_reprefill=counters.migrations_reprefill,
        preemptions=last.preemptions - first.preemptions,
        overhead_balancing=(last.loads - first.loads) * cluster.load_s / engine_s,
        overhead_transfer=(last.still_s - first.still_s) / max(1e-9, last.resident_s - first.resident_s),
        overhead_reprefill=(last.reprefill_s - first.reprefill_s) / engine_s,
        recall_longest_20=meter.recall.longest(),
        events=world.events,
        simulated_s=world.now_s,
        wall_s=wall_s,
        sim_speedup=world.now_s / wall_s,
    )


def _groups_to_add(scenario: Scenario, took_s: float, busy_s: float) -> int | None:
    """Returns None if no number of workers lets generation keep up: the trainer alternates with it or takes no time."""
    if scenario.cluster.colocated or busy_s <= 0.0:
        return None
    return groups_to_add(took_s, busy_s, scenario.cluster.engines)


def _broken(scenario: Scenario, seed: int, failure: Failure, events: int) -> BrokenReport:
    kinds = Counter([failure.kind])
    return BrokenReport(
        preset=scenario.name,
        policy=scenario.balance.policy,
        window=scenario.window.size,
        predictor=scenario.balance.predictor,
        seed=seed,
        violations=kinds.total(),
        lost=kinds["lost"],
        duplicated=kinds["duplicated"],
        stalled=kinds["stalled"],
        violation=failure.message,
        at_s=failure.at_s,
        events=events,
        raised=failure.raised,
    )


def _work_done_s(scenario: Scenario, first: Reading, last: Reading) -> float:
    return bound_of_s(
        scenario,
        last.generated_tokens - first.generated_tokens,
        last.context_token_steps - first.context_token_steps,
    )
