"""``make experiments ARGS=pinning``: makes the missing runs, and writes docs/pinning.md from all that are there.

python -m experiments pinning --minutes 30 --page docs/pinning.md
python -m experiments.kept restore pinning out/pinning/cells          # then --tell-only, to write the page again
python -m experiments.kept restore pinning-fleet out/pinning/fleet
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from experiments.convergence.page import with_results
from experiments.pinning import fleet, grid
from experiments.pinning.report import Results, draw, markdown

MARK: Final = "<!-- results: written by python -m experiments pinning -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if every wanted run has a result, else 1."""
    options, began_s = _parser().parse_args(arguments), time.monotonic()
    until_s = began_s + 60 * options.minutes if options.minutes else math.inf
    cells, runs = list(grid.cells()), list(fleet.runs())
    if not options.tell_only:
        for library in ("OPENBLAS", "OMP"):  # small products are slower on two threads, far slower if cores are busy
            os.environ.setdefault(f"{library}_NUM_THREADS", "1")
        may_begin = lambda: time.monotonic() < until_s  # noqa: E731
        from experiments.pinning.rollout import rolled_out

        part = slice(options.part, None, options.parts)
        grid.make(cells[part], options.out / "cells", rolled_out, may_begin)
        grid.make(runs[part], options.out / "fleet", fleet.simulated, may_begin)
    found = [each for cell in cells if (each := grid.result_of(cell, options.out / "cells")) is not None]
    fleets = [each for run in runs if (each := grid.result_of(run, options.out / "fleet")) is not None]
    text = markdown(results := Results(found, fleets)) if found else ""
    print(text)
    if options.page is not None and found:
        options.page.write_text(with_results(options.page.read_text(), text, MARK))
        draw(results, options.page.parent)
    return 0 if len(found) + len(fleets) == len(cells) + len(runs) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments pinning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no run after so long; 0: no limit")
    parser.add_argument("--part", type=int, default=0, help="make each run of that number, modulo --parts")
    parser.add_argument("--parts", type=int, default=1, help="processes that share the runs (%(default)s)")
    parser.add_argument("--tell-only", action="store_true", help="run nothing, and show what is there")
    parser.add_argument("--page", type=Path, default=None, help="a page whose results are replaced, with its figures")
    parser.add_argument("--out", type=Path, default=Path("out/pinning"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
