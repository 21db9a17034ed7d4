"""What is checked after every event of a large run: by itself, without a look at the whole state, it finds bugs."""

import pytest

from dora.orchestrator.core import commands as do
from dora.orchestrator.core import events as on
from dora.sim.ledger import Failure, failure_of
from dora.sim.trial import Trial, conduct
from dora.sim.unreliable import UnreliableWorld
from dora.sim.watch import Watch
from tests.sim import plants
from tests.sim.test_planted_bugs import BUGS, SEEDS, Bug

# What only a look at the whole state finds: how many workers are to stay is no single one's, and what a snapshot would
# show is nobody's.
UNNAMED = {plants.staying_is_counted_again, plants.given_work_is_not_noted}


class WatchedWorld(UnreliableWorld):
    """Checked by a watch alone."""

    watch: Watch | None = None

    def check(self, event: on.Event, commands: list[do.Command]) -> None:
        if self.watch is None:
            self.watch = Watch(lambda: self.machine)
        self.watch.saw(self.now_s, event, commands)


def watched(seed: int, kinds: str = "all", policy: str = "dora") -> Failure | None:
    trial = Trial(seed, policy, kinds)
    world = None
    try:
        world = WatchedWorld(trial.cluster(), seed)
        conduct(world, trial.faults, trial.steps_after)
    except Exception as error:
        return failure_of(error, world.now_s if world is not None else 0.0)
    return None


@pytest.mark.parametrize("policy", ["dora", "laxity", "staleflow"])
def test_a_watch_finds_nothing_where_nothing_is_wrong(policy: str) -> None:
    failures = {seed: failure for seed in range(SEEDS) if (failure := watched(seed, policy=policy))}
    assert not failures


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.plant not in UNNAMED], ids=lambda bug: bug.plant.__name__)
def test_a_watch_finds_a_planted_bug(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    found = next((failure for seed in range(SEEDS) if (failure := watched(seed, bug.kinds))), None)
    assert found is not None, f"unseen for {SEEDS} seeds: {bug.what}"
