"""The runs in order; a run is done once its result is there and has the same specification."""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dora.config import load_config
from dora.errors import DoraError
from experiments.convergence.rows import HALF_RATE, RATE_SEEDS, SYNC, Row

Result = Mapping[str, Any]  # one file of ``runs``; see trial.py. ``run`` or ``cell``: its specification


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the live service, wholly specified."""

    row: str
    seed: int
    steps: int
    learning_rate: float
    settings: tuple[str, ...]
    trainer_arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.row}-lr{self.learning_rate:g}-seed{self.seed}"

    @property
    def specification(self) -> dict[str, Any]:
        """As it reads in a result."""
        return json.loads(json.dumps(asdict(self)))


@dataclass(frozen=True, slots=True)
class Store:
    """The folder of all results."""

    root: Path

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def fleet(self) -> Path:
        return self.root / "fleet"

    @property
    def work(self) -> Path:
        """A folder for the demo of each run, removed when the run has ended well."""
        return self.root / "work"

    def result(self, run: Run) -> Result | None:
        return stored(run, self.runs)

    def write(self, run: Run, result: Result) -> None:
        write_json(self.runs / f"{run.name}.json", result)


class Specified(Protocol):
    """A run of any experiment."""

    @property
    def name(self) -> str: ...
    @property
    def specification(self) -> dict[str, Any]: ...


AnyRun = TypeVar("AnyRun", bound=Specified)


def stored(run: Specified, folder: Path) -> Result | None:
    """The run's result. None: there is none, or it is of another specification."""
    found = read_json(folder / f"{run.name}.json")
    return found if found is not None and run.specification in (found.get("run"), found.get("cell")) else None


def make_missing(
    wanted: Sequence[AnyRun],
    folder: Path,
    result: Callable[[AnyRun], Result],
    until_s: float,
    words: Callable[[Result], str] = lambda result: "",
) -> None:
    """Makes the results that are not there, in order; begins none after ``until_s`` of the monotonic clock. Says each
    with the ``words`` of its result.
    """
    missing = [run for run in wanted if stored(run, folder) is None]
    for number, run in enumerate(missing, start=1):
        if time.monotonic() > until_s:
            print(f"the time is up: {len(missing) - number + 1} runs are left", file=sys.stderr, flush=True)
            return
        found = result(run)
        write_json(folder / f"{run.name}.json", found)
        print(f"{number} of {len(missing)}: {run.name}{words(found)}", file=sys.stderr, flush=True)


def sweep_parser(prog: str, description: str | None, out: str) -> argparse.ArgumentParser:
    """The options of each experiment that makes what is missing and writes it into a page."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no run after so long; 0: no limit")
    parser.add_argument("--tell-only", action="store_true", help="run nothing, and show what is there")
    parser.add_argument("--page", type=Path, default=None, help="a page whose results are replaced, with its figures")
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser


def end_s(minutes: float) -> float:
    """Returns when a sweep that begins now ends, by the monotonic clock. ``minutes`` 0: never."""
    return time.monotonic() + 60 * minutes if minutes else math.inf


def read_json(path: Path) -> Any:
    """None where there is no such file."""
    return json.loads(path.read_text()) if path.exists() else None


def write_json(path: Path, content: Any) -> None:
    """The file appears whole: a run that is interrupted leaves none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def refusal(row: Row) -> str:
    """Returns the reason for which this version cannot run the row; empty: it can, or the row is only simulated."""
    try:
        load_config(None, [*row.settings])
    except DoraError as error:
        return str(error)
    return ""


def rate_runs(sync: Row, rates: Sequence[float], steps: int, settings: Sequence[str]) -> list[Run]:
    """The sweep of the learning rate."""
    return [_run(sync, seed, steps, rate, settings) for seed in RATE_SEEDS for rate in rates]


def row_runs(rows: Sequence[Row], seeds: int, steps: int, rate: float, settings: Sequence[str]) -> list[Run]:
    """Seed by seed, so that what slows the machine down for a while slows every row down, and rows end together."""
    return [
        _run(row, seed, steps, rate / 2 if row.name == HALF_RATE else rate, settings)
        for seed in range(seeds)
        for row in rows
        if not row.reward_of
    ]


def _run(row: Row, seed: int, steps: int, rate: float, settings: Sequence[str]) -> Run:
    return Run(row.name, seed, steps, rate, (*row.settings, *settings), row.trainer_arguments)


def chosen_rate(results: Sequence[Result]) -> float:
    """Returns a sweep's learning rate with the highest reward, mean over all steps and seeds."""
    rewards: dict[float, list[float]] = {}
    for result in results:
        assert result["run"]["row"] == SYNC
        rewards.setdefault(result["run"]["learning_rate"], []).extend(rewards_of(result))
    return max(rewards, key=lambda rate: sum(rewards[rate]) / len(rewards[rate]))


def rewards_of(result: Result) -> Iterator[float]:
    """The mean reward of each step; 0 where no response had a valid one."""
    return (step["reward"] or 0.0 for step in result["steps"])
