"""The cells of the map, the results that are there, and the run of those that are missing."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from experiments.convergence.plan import make_missing
from experiments.staleness.cell import Cell

RATES: Final[Mapping[str, tuple[float, ...]]] = {"tiny": (3e-3, 1e-3, 3e-4, 1e-4), "counting": (1e-4, 3e-5)}
STEPS: Final[Mapping[str, int]] = {"tiny": 400, "counting": 150}
LAGS: Final = (0, 1, 2, 3)
TRIED_SEEDS: Final = (1000, 1001)  # choose each mode's learning rate; no run that is compared has one of them

Result = Mapping[str, Any]  # ``cell``: its specification, ``steps``: see lagged.Lagged.steps, ``seconds``


def cells(tasks: Sequence[str], objectives: Sequence[str], lags: Sequence[int], seeds: int) -> Iterator[Cell]:
    """Yields the cells, seed by seed, so that a run that is cut short has as many of each mode."""
    for task in tasks:
        for seed in (*TRIED_SEEDS, *range(seeds)):
            for objective in objectives:
                for rate in RATES[task]:
                    for lag in lags:
                        yield Cell(task, objective, rate, lag, seed, STEPS[task])


def make(wanted: Sequence[Cell], folder: Path, until_s: float) -> None:
    """Runs the missing cells in order; begins none after ``until_s`` of the monotonic clock."""
    from experiments.staleness.lagged import Lagged

    def result(cell: Cell) -> Result:
        began_s = time.monotonic()
        steps = Lagged(cell).steps()
        return {"cell": cell.specification, "steps": steps, "seconds": round(time.monotonic() - began_s, 1)}

    make_missing(
        wanted, folder, result, until_s, lambda found: f": {len(found['steps'])} steps, {found['seconds']:g} s"
    )
