"""``python -m experiments.staleness.replays``: what replaying earlier groups gains, at equal fresh samples.

Runs the missing cells of experience replay at lag 1, beside the same seeds without it, and writes their table.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from dora.client.replay import ReplayBy
from experiments.convergence.intervals import Estimate, ratio
from experiments.convergence.page import with_results
from experiments.convergence.plan import end_s, stored, sweep_parser
from experiments.staleness.cell import Cell
from experiments.staleness.grid import STEPS, Result, make
from experiments.staleness.report import counted, steps_to_level

MARK: Final = "<!-- replays: written by python -m experiments.staleness.replays -->"
LAG: Final = 1
RATES: Final = (1e-3, 3e-4)
MODES: Final[tuple[tuple[float, ReplayBy], ...]] = (
    (0.0, "age"),
    (0.25, "age"),
    (0.25, "priority"),
    (0.5, "age"),
    (0.5, "priority"),
)


@dataclass(frozen=True, slots=True)
class Gain:
    """One mode of replay, beside the same seeds without it."""

    objective: str
    learning_rate: float
    share: float
    by: str
    replayed: float  # groups a step, mean over seeds
    steps: float  # to the level, mean over seeds
    reached: int  # seeds that reached the level
    seeds: int
    samples: Estimate  # fresh ones to the level, relative to no replay: geometric mean over seeds


def cells(objectives: Sequence[str], seeds: int) -> Iterator[Cell]:
    """Yields the cells, seed by seed, so that a run that is cut short has as many of each mode."""
    for seed in range(seeds):
        for objective in objectives:
            for rate in RATES:
                for share, by in MODES:
                    yield Cell("tiny", objective, rate, LAG, seed, STEPS["tiny"], share, by)


def gains(results: Iterable[Result]) -> list[Gain]:
    """One for each objective, learning rate and mode, over the seeds that it shares with the mode without replay."""
    found: dict[tuple[str, float, float, str], dict[int, Result]] = {}
    for result in results:
        cell = result["cell"]
        mode = cell["objective"], cell["learning_rate"], cell.get("replay", 0.0), cell.get("replay_by", "")
        found.setdefault(mode, {})[cell["seed"]] = result
    gained = []
    for (objective, rate, share, by), of_mode in sorted(found.items(), key=lambda each: (each[0][0], -each[0][1])):
        without = found.get((objective, rate, 0.0, ""), {})
        seeds = sorted(of_mode.keys() & without.keys())
        samples = ratio([counted(of_mode[seed]) for seed in seeds], [counted(without[seed]) for seed in seeds])
        if samples is not None:
            gained.append(_gain(objective, rate, share, by, [of_mode[seed] for seed in seeds], samples))
    return gained


def _gain(objective: str, rate: float, share: float, by: str, results: list[Result], samples: Estimate) -> Gain:
    return Gain(
        objective,
        rate,
        share,
        by,
        replayed=fmean(line.get("groups_replayed", 0.0) for result in results for line in result["steps"]),
        steps=fmean(map(counted, results)),
        reached=sum(steps_to_level(result) is not None for result in results),
        seeds=len(results),
        samples=samples,
    )


def markdown(gained: Sequence[Gain]) -> str:
    """The table of docs/convergence.md: a line for each objective and rate, a column for each way to replay."""
    ways = list(dict.fromkeys((each.share, each.by) for each in gained if each.share))
    lines = ["| objective | learning rate | seeds | steps without |" + "".join(f" {x:g} by {by} |" for x, by in ways)]
    lines.append("|---|---:|---:|---:|" + "---:|" * len(ways))
    for objective, rate in dict.fromkeys((each.objective, each.learning_rate) for each in gained):
        own = {
            (each.share, each.by): each for each in gained if (each.objective, each.learning_rate) == (objective, rate)
        }
        plain = next(each for each in own.values() if not each.share)
        cells = (_cell(own[way], plain.seeds) if way in own else "-" for way in ways)
        lines.append(f"| {objective} | {rate:g} | {plain.seeds} | {plain.steps:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(gain: Gain, seeds: int) -> str:
    """Fresh samples over those without replay; in brackets the groups replayed in a step."""
    half = "" if gain.samples.half is None else f" ± {gain.samples.half:.2f}"
    missed = "" if gain.reached == gain.seeds == seeds else f", {gain.reached} of {gain.seeds}"
    return f"{gain.samples.mean:.2f}{half} ({gain.replayed:.1f}{missed})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if every wanted cell has a result, else 1."""
    options = _parser().parse_args(arguments)
    wanted = list(cells(options.objectives, options.seeds))
    if not options.tell_only:
        import torch

        torch.set_num_threads(options.threads)
        make(wanted, options.out / "cells", end_s(options.minutes))
    results = [each for cell in wanted if (each := stored(cell, options.out / "cells")) is not None]
    table = markdown(gains(results))
    print(table)
    if options.page is not None:
        options.page.write_text(with_results(options.page.read_text(), table, MARK))
    return 0 if len(results) == len(wanted) else 1


def _parser() -> argparse.ArgumentParser:
    parser = sweep_parser("python -m experiments.staleness.replays", __doc__, "out/staleness")
    parser.add_argument("--objectives", nargs="+", choices=("dapo", "decoupled-ppo"), default=["dapo"])
    parser.add_argument("--seeds", type=int, default=5, help="of each cell (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
