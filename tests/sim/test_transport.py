"""Messages and wake-ups of simulated workers travel on the agenda."""

import pytest

from dora.core import commands as do
from dora.core import events as on
from dora.lab.sim.presets import scenario_for
from dora.lab.sim.world import World


@pytest.mark.parametrize("latency_s", [0.0, 0.25])
def test_what_a_worker_says_at_one_moment_arrives_at_one_moment_and_in_order(latency_s: float) -> None:
    scenario = scenario_for("small", "dora")
    cluster = scenario.cluster.model_copy(update={"link_latency_s": latency_s})
    world = World(scenario.model_copy(update={"cluster": cluster}), seed=0)
    heard: list[tuple[float, str, int]] = []

    def hear(now_s: float, event: on.Event, _commands: list[do.Command]) -> None:
        if isinstance(event, on.CommandDone) and event.command_id > 10**6:
            heard.append((now_s, event.worker_id, event.command_id))

    world.observers.append(hear)

    def say(*numbers: int) -> None:
        for number in numbers:
            for worker in list(world.workers.values())[:2]:
                world.to_core(worker, on.CommandDone(worker.worker_id, worker.epoch, 10**6 + number))

    world.after(1.0, say, 1, 2)
    world.after(1.0, say, 3)
    world.after(1.125, say, 4)
    world.run_until(lambda: len(heard) == 8, limit_s=10.0)
    for name in ("w0", "w1"):
        said = [(at_s, number - 10**6) for at_s, worker_id, number in heard if worker_id == name]
        assert said == [(at_s + latency_s, n) for at_s, n in ((1.0, 1), (1.0, 2), (1.0, 3), (1.125, 4))]


def test_the_words_of_a_worker_that_is_lost_on_the_way_are_not_heard() -> None:
    """The second of two words that travel together is void where the first one ends the worker."""
    world = World(scenario_for("small", "dora"), seed=0)
    worker = world.workers["w0"]
    heard: list[str] = []

    def hear(_now_s: float, event: on.Event, _commands: list[do.Command]) -> None:
        heard.append(type(event).__name__)
        if isinstance(event, on.Tick):
            world.lose(worker, "killed")

    world.observers.append(hear)
    world.to_core(worker, on.Tick())
    world.to_core(worker, on.RebalanceRequested())
    world.run_until(lambda: world.now_s > 0.5, limit_s=10.0)
    assert "WorkerLost" in heard and "RebalanceRequested" not in heard
