"""The runs of the page, the results that are there, and the making of those that are missing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from experiments.convergence.plan import read_json, write_json
from experiments.pinning.cell import REGIMES, Cell, Failures

Result = Mapping[str, Any]  # ``cell``: its specification, and what Rollout.result returns

PAUSES: Final = (0.1, 1.0, 3.0, 10.0)
FAILING: Final = (0.05, 0.15)
FAILED_REGIMES: Final = ["pinned-2", "kept"]
RATES: Final = (1e-2, 3e-3)  # the policy moves about as far in a step as at the map's 0.003 and 0.001
MAIN: Final = Cell("pinned-1", pause=1.0, learning_rate=RATES[0], steps=40)
RECALL_STEPS: Final = 50
SLOW_STEPS: Final = 50
SEEDS: Final = 3
MAIN_SEEDS: Final = 10


def cells() -> Iterator[Cell]:
    """Yields the runs seed by seed, so that a sweep that is cut short has as many of each regime."""
    every = [each.name for each in REGIMES]
    recall = replace(MAIN, task="recall", steps=RECALL_STEPS)
    others = [(replace(MAIN, pause=pause), every) for pause in (10.0, 3.0, 0.1)]
    failed = [replace(MAIN, failing=failing, failures=how) for failing in FAILING for how in get_args(Failures)]
    others += [(recall, every), *((each, FAILED_REGIMES) for each in failed)]
    others += [(replace(MAIN, learning_rate=rate, steps=SLOW_STEPS), every) for rate in RATES[1:]]
    for seed in range(MAIN_SEEDS):
        for like, regimes in [(MAIN, every), *(others if seed < SEEDS else ())]:
            yield from (replace(like, regime=regime, seed=seed) for regime in regimes)


def result_of(cell: Cell, folder: Path) -> Result | None:
    """None: there is none, or it is of another specification."""
    found = read_json(folder / f"{cell.name}.json")
    return found if found is not None and found["cell"] == cell.specification else None


def make(wanted: Sequence[Cell], folder: Path, may_begin: Callable[[], bool], say: Callable[[str], None]) -> None:
    """Runs the missing cells in order."""
    from experiments.pinning.rollout import Rollout

    for number, cell in enumerate(wanted, start=1):
        if result_of(cell, folder) is None and may_begin():
            write_json(folder / f"{cell.name}.json", {"cell": cell.specification, **Rollout(cell).result()})
            say(f"{number} of {len(wanted)}: {cell.name}")
