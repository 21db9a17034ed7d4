"""``python -m experiments.staleness``: runs the missing cells of the map and writes its tables and its figure.

``--fleet`` then simulates fleets that learn as the map says, and writes their table too.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from experiments.convergence.page import with_results
from experiments.convergence.plan import end_s, stored, sweep_parser
from experiments.staleness.cell import TASKS
from experiments.staleness.fleet import Outcome, outcomes
from experiments.staleness.fleet_page import fleet_markdown
from experiments.staleness.grid import LAGS, Result, cells, make
from experiments.staleness.page import draw, markdown
from experiments.staleness.regimes import regimes
from experiments.staleness.report import Point, best_rates, costs, points

OBJECTIVE_NAMES: Final = ("truncated", "dapo", "decoupled-ppo", "cispo")
MARK: Final = "<!-- map: written by python -m experiments.staleness -->"
FLEET_MARK: Final = "<!-- fleet: written by python -m experiments.staleness --fleet -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if every wanted cell has a result, else 1."""
    options = _parser().parse_args(arguments)
    until_s = end_s(options.minutes)
    wanted = list(cells(options.tasks, options.objectives, options.lags, options.seeds))
    if not options.tell_only:
        import torch

        torch.set_num_threads(options.threads)
        make(wanted, options.out / "cells", until_s)
    results = [each for cell in wanted if (each := stored(cell, options.out / "cells")) is not None]
    found, best = points(results), best_rates(results)
    learnt = _simulated(options, results, found, until_s) if options.fleet else []
    texts = {MARK: markdown(found, best) if found else "", FLEET_MARK: fleet_markdown(learnt)}
    if options.json:
        told = {"costs": costs(found), "points": _plain(found), "fleet": _plain(learnt)}
        print(json.dumps(told, indent=1))
    else:
        print("\n".join(text for text in texts.values() if text))
    if options.page is not None:
        for mark in (mark for mark, text in texts.items() if text):
            options.page.write_text(with_results(options.page.read_text(), texts[mark], mark))
        if found:
            draw(found, options.page.with_name("staleness-map.svg"))
    return 0 if len(results) == len(wanted) else 1


def _simulated(
    options: argparse.Namespace, results: Sequence[Result], found: Sequence[Point], until_s: float
) -> list[Outcome]:
    of = [(seed, regimes(results, found, seed)) for seed in range(options.fleet_seeds)]
    return outcomes(of, options.out / "fleet", _say, lambda: not options.tell_only and time.monotonic() < until_s)


def _plain(values: Sequence[Any]) -> list[Any]:
    return [asdict(each) for each in values]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = sweep_parser("python -m experiments.staleness", __doc__, "out/staleness")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["tiny"])
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVE_NAMES, default=list(OBJECTIVE_NAMES))
    parser.add_argument("--lags", nargs="+", type=int, default=list(LAGS))
    parser.add_argument("--seeds", type=int, default=5, help="of each cell (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (%(default)s)")
    parser.add_argument("--fleet", action="store_true", help="simulate fleets that learn as the map says")
    parser.add_argument("--fleet-seeds", type=int, default=1, help="of these simulations (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON document for programs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
