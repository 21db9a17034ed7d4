"""Each strategy's own promise, in the simulator. (That all of them keep C1-C3 under faults: test_fault_seeds.py.)"""

from collections import Counter

import pytest

from dora.config import WindowConfig
from dora.errors import InvalidValue
from dora.lab.sim.invariants import check_state
from dora.lab.sim.presets import composed, scenario_for
from dora.lab.sim.run import check_cluster, simulate
from dora.lab.sim.world import World
from tests.refusals import refused


def staleness(policy: str, window: int, steps: int = 6) -> list[Counter[int]]:
    """Staleness of the groups that each step trained on, in the simulator's ``small`` scenario."""
    scenario = scenario_for("small", policy).model_copy(update={"window": WindowConfig(size=window)})
    world = World(scenario, seed=0)
    trained: list[Counter[int]] = []
    world.trainer.on_step = lambda step, _began, _ended, groups, _busy: trained.append(
        Counter(step - group.version for group in groups)
    )
    world.run_until(lambda: len(trained) == steps, limit_s=20_000.0)
    check_state(world.machine.state)
    return trained


@pytest.mark.parametrize("policy", ["sync", "streamrl"])
def test_a_batch_is_on_policy_in_a_window_of_one(policy: str) -> None:
    assert staleness(policy, window=1) == [Counter({0: 8})] * 6


@pytest.mark.parametrize(("environment_mean_s", "answer_tokens"), [(0.0, 0), (30.0, 0), (3.0, 50)])
def test_sync_does_the_work_that_it_consumes_however_long_environments_take(
    environment_mean_s: float, answer_tokens: int
) -> None:
    """KV that waits for an environment is read by no step; what the environment answered is read by the later ones."""
    turns = {"most": 4, "environment_mean_s": environment_mean_s, "answer_tokens": answer_tokens}
    scenario = composed({"workload": {"turns": turns}}, "small", "sync", 1)
    report = simulate(scenario, steps=4, warmup=0, seed=0)
    assert report.preemptions == 0
    assert report.work_done_over_consumed == pytest.approx(1.0, abs=1e-9)


def test_what_no_step_reads_is_what_waits_for_an_environment_though_it_is_moved() -> None:
    """A request that is moved between two turns brings its KV, and the next step there reads it."""
    turns = {"most": 4, "environment_mean_s": 3.0, "answer_tokens": 50}
    world = World(composed({"workload": {"turns": turns}}, "small", "laxity", 3), seed=0)

    def unread(_now_s: float, _event: object, _commands: object) -> None:
        for worker in world.workers.values():
            engine = worker.engine
            assert engine.unread == sum(request.context for request in engine.requests.values() if request.unread)

    world.observers.append(unread)
    world.run_until(lambda: world.trainer.committed == 30, limit_s=20_000.0)
    assert world.machine.state.counters.migrations_kv > 0


@pytest.mark.parametrize("policy", ["one_step", "stream", "streamrl"])
def test_one_step_trains_on_batches_of_the_version_before(policy: str) -> None:
    """The first version makes two batches; from then on each makes one."""
    assert staleness(policy, window=2) == [Counter({0: 8})] + [Counter({1: 8})] * 5


@pytest.mark.parametrize("policy", ["laminar", "staleflow"])
def test_asynchronous_strategies_stay_within_the_window(policy: str) -> None:
    trained = staleness(policy, window=3)
    assert all(step.total() == 8 and max(step) <= 2 for step in trained)
    assert max(max(step) for step in trained) > 0


@pytest.mark.parametrize("limit", [8, 16, 24])
def test_what_is_in_flight_is_limited_though_it_is_generated(limit: int) -> None:
    """Whole batches wait for a slow trainer: they count until it has trained on them, as in AReaL and verl."""
    base = scenario_for("small", "partial")
    pace = base.trainer.model_copy(update={"step_s": 600.0})
    world = World(base.model_copy(update={"in_flight_groups": limit, "trainer": pace}), seed=0)
    seen: list[int] = []

    def in_flight(_now_s: float, _event: object, _commands: object) -> None:
        state = world.machine.state
        seen.append(state.groups_named - 8 * state.window.newest)  # admitted, less the batches that were trained on

    world.observers.append(in_flight)
    world.run_until(lambda: world.trainer.committed == 4, limit_s=20_000.0)
    assert max(seen) == limit


def test_less_than_a_batch_in_flight_is_refused() -> None:
    scenario = scenario_for("small", "partial").model_copy(update={"in_flight_groups": 7})
    with refused(InvalidValue, names=("in_flight_groups", "trainer.groups_per_step", "8")):
        check_cluster(scenario)


def test_the_smallest_kv_that_is_allowed_holds_the_longest_prompt_with_the_longest_response() -> None:
    """Prompts far above their mean are drawn here: with the KV of the mean one they would outgrow an empty engine."""
    workload = {"prompt_tokens": 500, "lengths": {"mu": 4.0, "cap_tokens": 100}}
    least = 2048 + 100
    scenario = composed({"cluster": {"kv_tokens": least}, "workload": workload}, "small")
    with refused(InvalidValue, field="cluster.kv_tokens", value=least - 1, names=(least, 2048)):
        check_cluster(composed({"cluster": {"kv_tokens": least - 1}, "workload": workload}, "small"))
    report = simulate(scenario, steps=6, warmup=0, seed=0)
    assert (report.steps, report.violations, report.lost) == (6, 0, 0) and 0.0 < report.kv_utilisation <= 1.0

    world = World(scenario, seed=0)
    longest = 0

    def kv_fits(_now_s: float, _event: object, _commands: object) -> None:
        nonlocal longest
        for worker in world.workers.values():
            assert worker.engine.kv <= least
            longest = max([longest, *(request.prompt for request in worker.engine.requests.values())])

    world.observers.append(kv_fits)
    world.run_until(lambda: world.trainer.committed == 6, limit_s=20_000.0)
    assert longest > 500 + 100


def test_partial_rollout_goes_on_under_its_only_version() -> None:
    trained = staleness("partial", window=64)
    assert [set(step) for step in trained] == [{step} for step in range(6)]


def test_partial_rollout_has_no_last_step() -> None:
    """It knows one version alone, so it runs on beyond the widest window there is."""
    report = simulate(composed({}, "small", "partial"), steps=70, warmup=2, seed=0)
    assert (report.steps, report.violations, report.lost, report.duplicated) == (70, 0, 0, 0)


def test_partial_rollout_reports_no_staleness_as_it_knows_no_versions() -> None:
    report = simulate(composed({}, "small", "partial"), steps=2, warmup=1, seed=0)
    assert (report.staleness_mean, report.staleness_max) == (None, None)
    assert simulate(composed({}, "small", "stream"), steps=2, warmup=1, seed=0).staleness_max == 1
