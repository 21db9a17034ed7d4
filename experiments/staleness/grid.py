"""The cells of the map, the results that are there, and the run of those that are missing."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from experiments.convergence.plan import read_json, write_json
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


def result_of(cell: Cell, folder: Path) -> Result | None:
    """None: there is none, or it is of another specification."""
    found = read_json(cell.path(folder))
    return found if found is not None and found["cell"] == cell.specification else None


def make(wanted: Sequence[Cell], folder: Path, minutes: float, say: Callable[[str], None]) -> None:
    """Runs the missing cells in order. ``minutes``: begins no cell after so long; 0: no limit."""
    from experiments.staleness.lagged import Lagged

    began_s = time.monotonic()
    missing = [cell for cell in wanted if result_of(cell, folder) is None]
    for number, cell in enumerate(missing, start=1):
        if minutes and time.monotonic() - began_s > 60 * minutes:
            say(f"{len(missing) - number + 1} cells are left after {minutes:g} minutes")
            return
        cell_began_s = time.monotonic()
        steps = Lagged(cell).steps()
        seconds = round(time.monotonic() - cell_began_s, 1)
        write_json(cell.path(folder), {"cell": cell.specification, "steps": steps, "seconds": seconds})
        say(f"{number} of {len(missing)}: {cell.name}: {len(steps)} steps, {seconds:g} s")
