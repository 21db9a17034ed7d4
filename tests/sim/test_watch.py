"""The check after every event of a large run finds bugs without looking at the whole state."""

import pytest

from dora.core import commands as do
from dora.core import events as on
from dora.lab.sim.faults.fault_kinds import KINDS
from dora.lab.sim.faults.trial import DRAWN, Trial, conduct
from dora.lab.sim.faults.unreliable import UnreliableWorld
from dora.lab.sim.ledger import Failure, failure_of
from dora.lab.sim.watch import Watch
from tests.sim import plants
from tests.sim.test_planted_bugs import BUGS, SEEDS, Bug, marked
from tests.sweeps import seeds_of

QUIET = 20  # seeds in which a watch has nothing to say

# What only a look at the whole state finds: how many workers are to stay is no single one's, and what a snapshot would
# show is nobody's. What a core draws by lot shows where its events are replayed, and who is replaced without a reason
# shows where every eviction is checked (dora/lab/sim/faults/unsteady.py).
UNNAMED = {
    plants.staying_is_counted_again,
    plants.given_work_is_not_noted,
    plants.core_draws_lots,
    plants.patience_is_short,
    plants.failed_handoff_stays_frozen,
}


class WatchedWorld(UnreliableWorld):
    """Checked by a watch alone."""

    watch: Watch | None = None

    def check(self, event: on.Event, commands: list[do.Command]) -> None:
        if self.watch is None:
            self.watch = Watch(lambda: self.machine)
        self.watch.saw(self.now_s, event, commands)


# A watch stays with one core: what a core that starts again stands at is compared as a whole (sim/faults/unsteady.py).
CRASH = "crash"
ALL = ",".join(kind for kind in KINDS if kind != CRASH)
SEEN = [bug for bug in BUGS if bug.plant not in UNNAMED and CRASH not in bug.kinds.split(",")]


def watched(seed: int, kinds: str = "all", policy: str = "dora", window: str = DRAWN) -> Failure | None:
    trial = Trial(seed, policy, ALL if kinds == "all" else kinds, window=window)
    world = None
    try:
        world = WatchedWorld(trial.cluster(), seed)
        conduct(world, trial.faults, trial.steps_after)
    except Exception as error:
        return failure_of(error, world.now_s if world is not None else 0.0)
    return None


@pytest.mark.parametrize(
    ("policy", "window"), [("dora", DRAWN), ("laxity", DRAWN), ("staleflow", DRAWN), ("laxity", "auto")]
)
@pytest.mark.parametrize("seeds", seeds_of(2, QUIET))
def test_a_watch_finds_nothing_where_nothing_is_wrong(policy: str, window: str, seeds: range) -> None:
    found = ((seed, watched(seed, policy=policy, window=window)) for seed in seeds)
    failures = {seed: failure for seed, failure in found if failure}
    assert not failures


@pytest.mark.parametrize("bug", marked(SEEN))
def test_a_watch_finds_a_planted_bug(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    found = next((failure for seed in bug.seeds if (failure := watched(seed, bug.kinds, window=bug.window))), None)
    assert found is not None, f"unseen for {SEEDS} seeds: {bug.what}"
