"""The simulated fleet learns: the step times and staleness of the simulator, with the learning that the map measured.

The trainer of a fixed window tells no movement, so its steps are those of every regime. That of an adaptive window
tells the movement of a policy that has learnt what its steps so far could teach it, at the staleness that they had.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dora.config import WindowConfig
from dora.lab.sim.ledger import SimGroup
from dora.lab.sim.presets import scenario_for
from dora.lab.sim.scenario import Scenario
from dora.lab.sim.world import World
from experiments.convergence.fleet import PREDICTOR
from experiments.convergence.plan import stored, write_json
from experiments.freshness import scaled
from experiments.staleness.regimes import Reached, Regime, SimStep, prolonged, reached
from experiments.tables import split

SYNC: Final = "sync"
AUTO: Final = "auto"
ROWS: Final[tuple[int | str, ...]] = (SYNC, 1, 2, 3, 4, AUTO)  # sync, and the sizes of a window
SPLITS: Final = {"as the paper has it": 24, "as planned for it": 28}  # of dora-64: accelerators that generate
SCALE: Final = 16  # a sixteenth of each batch, of the slots and of the KV: an engine step takes as long
FIXED_STEPS: Final = 40  # simulated of a fixed window,
AUTO_STEPS: Final = 96  # and at most of an adaptive one
REPEATED: Final = 32  # the last steps, which stand for those of a longer run
STEPS_MAX: Final = 1000
LIMIT_S: Final = 1e8


@dataclass(frozen=True, slots=True)
class Outcome:
    """When a row reaches the level in a regime, on one split."""

    split: str
    regime: str
    row: int | str
    seed: int
    reached: Reached


def scenario(row: int | str, rollout_gpus: int) -> Scenario:
    """dora-64 in small. Sync takes turns on all accelerators, as its preset does."""
    if row == SYNC:
        made = scenario_for("dora-64", "sync")
    else:
        made = split(scenario_for("dora-64", "laxity", 1), rollout_gpus)
        made = made.model_copy(update={"window": WindowConfig(size=row)})
    balance = made.balance.model_copy(update={"predictor": PREDICTOR})
    return scaled(made.model_copy(update={"balance": balance}), SCALE)


class Learning:
    """One simulated run. ``regime``: None: the trainer tells no movement, and the run ends after FIXED_STEPS."""

    def __init__(self, of: Scenario, regime: Regime | None, seed: int) -> None:
        self.steps: list[SimStep] = []
        self.sizes: list[int] = []  # of the window, at each step's commit
        self._regime, self._progress = regime, 0.0
        self._world = World(of, seed)
        self._world.trainer.on_step = self._step
        self._wait_of = self._world.trainer.tells
        self._world.trainer.tells = self._tells

    def run(self) -> None:
        """Runs to the level of reward, or to the last step. Raises Stalled if the service stands still."""
        self._world.run_until(self._has_ended, LIMIT_S)

    def _has_ended(self) -> bool:
        if self._regime is None:
            return len(self.steps) >= FIXED_STEPS
        return self._progress >= self._regime.steps or len(self.steps) >= AUTO_STEPS

    def _step(self, step: int, began_s: float, ended_s: float, groups: list[SimGroup], _busy: object) -> None:
        staleness = sum(step - group.version for group in groups) / max(1, len(groups))
        self.steps.append(SimStep((ended_s - began_s) / 60, staleness))
        self.sizes.append(self._world.machine.state.window.size)

    def _tells(self, groups: list[SimGroup]) -> tuple[float, ...]:
        waited_s, clipped = self._wait_of(groups)[:2]
        if self._regime is None:
            return waited_s, clipped
        movement = self._regime.at(self._progress)
        self._progress += self._regime.learnt(self._progress, self.steps[-1].staleness)
        return waited_s, clipped, -1.0, movement


def outcomes(
    of: Sequence[tuple[int, Sequence[Regime]]],
    folder: Path,
    say: Callable[[str], None],
    may_simulate: Callable[[], bool],
) -> list[Outcome]:
    """The outcomes of all rows that are in ``folder``, or may be simulated. ``of``: seeds, with the regimes of each."""
    found = []
    for seed, regimes in of:
        for name, gpus in SPLITS.items():
            for row in ROWS:
                for regime in regimes:
                    run = Run(row, gpus, regime if row == AUTO else None, seed)
                    steps = run.stored(folder) or (run.made(folder, say) if may_simulate() else None)
                    if steps is None:
                        continue
                    ended = reached(regime, prolonged(steps, STEPS_MAX, REPEATED))
                    found += [Outcome(name, regime.name, row, seed, ended)] if ended is not None else []
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated run, wholly specified. ``regime``: of an adaptive window; None: any."""

    row: int | str
    rollout_gpus: int
    regime: Regime | None
    seed: int

    @property
    def name(self) -> str:
        return f"{self.rollout_gpus}-{self.row}-{self.regime.name if self.regime else 'any'}-seed{self.seed}"

    @property
    def specification(self) -> dict[str, Any]:
        """As it reads in a result."""
        of = scenario(self.row, self.rollout_gpus).model_dump(mode="json")
        most = AUTO_STEPS if self.regime else FIXED_STEPS
        return json.loads(json.dumps({"scenario": of, "most_steps": most, **asdict(self)}))

    def stored(self, folder: Path) -> list[SimStep] | None:
        """None: there is no result, or it is of another specification."""
        found = stored(self, folder)
        return None if found is None else [SimStep(**each) for each in found["steps"]]

    def made(self, folder: Path, say: Callable[[str], None]) -> list[SimStep]:
        """Simulates and stores it."""
        learning = Learning(scenario(self.row, self.rollout_gpus), self.regime, self.seed)
        learning.run()
        steps = [asdict(each) for each in learning.steps]
        write_json(folder / f"{self.name}.json", {"run": self.specification, "steps": steps, "sizes": learning.sizes})
        say(f"simulated {self.name}: {len(steps)} steps, windows {''.join(map(str, learning.sizes))}")
        return learning.steps
