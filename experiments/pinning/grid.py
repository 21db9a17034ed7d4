"""The runs of the page, the results that are there, and the making of those that are missing."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from experiments.convergence.plan import read_json, write_json
from experiments.pinning.cell import REGIMES, Cell, Failures
from experiments.pinning.fleet import Run

AnyRun = TypeVar("AnyRun", Cell, Run)
Result = Mapping[str, Any]  # ``cell`` or ``run``: its specification

PAUSES: Final = (0.1, 1.0, 3.0, 10.0)
FAILING: Final = (0.05, 0.15)
FAILED_REGIMES: Final = ["pinned-2", "kept"]
RATES: Final = (1e-2, 3e-3)  # the policy moves about as far in a step as at the map's 0.003 and 0.001
MAIN: Final = Cell("pinned-1", pause=1.0, learning_rate=RATES[0], steps=40)
RECALL: Final = replace(MAIN, task="recall", steps=50)
SLOWER: Final = replace(MAIN, learning_rate=RATES[1], steps=50)
SEEDS: Final = 3
MAIN_SEEDS: Final = 10


def cells() -> Iterator[Cell]:
    """Yields the runs seed by seed, so that a sweep that is cut short has as many of each regime."""
    every = [each.name for each in REGIMES]
    others = [(replace(MAIN, pause=pause), every) for pause in (10.0, 3.0, 0.1)]
    failed = [replace(MAIN, failing=failing, failures=how) for failing in FAILING for how in get_args(Failures)]
    others += [(RECALL, every), *((each, FAILED_REGIMES) for each in failed), (SLOWER, every)]
    for seed in range(MAIN_SEEDS):
        for like, regimes in [(MAIN, every), *(others if seed < SEEDS else ())]:
            yield from (replace(like, regime=regime, seed=seed) for regime in regimes)


def result_of(run: Cell | Run, folder: Path) -> Result | None:
    """None: there is none, or it is of another specification."""
    found = read_json(folder / f"{run.name}.json")
    return found if found is not None and run.specification in (found.get("cell"), found.get("run")) else None


def make(
    wanted: Sequence[AnyRun], folder: Path, result: Callable[[AnyRun], Result], may_begin: Callable[[], bool]
) -> None:
    """Runs those that are missing, in order."""
    for number, run in enumerate(wanted, start=1):
        if result_of(run, folder) is None and may_begin():
            write_json(folder / f"{run.name}.json", result(run))
            print(f"{number} of {len(wanted)}: {run.name}", file=sys.stderr, flush=True)
