"""``make experiments ARGS=pinning``: makes the missing runs, and writes docs/pinning.md from all that are there.

python -m experiments pinning --minutes 30 --page docs/pinning.md
python -m experiments.kept restore pinning out/pinning/cells          # then --tell-only, to write the page again
python -m experiments.kept restore pinning-fleet out/pinning/fleet
"""

import sys
from collections.abc import Sequence
from typing import Final

from experiments.convergence.page import with_results
from experiments.convergence.plan import end_s, make_missing, stored, sweep_parser
from experiments.pinning import cell, fleet
from experiments.pinning.report import Results, draw, markdown

MARK: Final = "<!-- results: written by python -m experiments pinning -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if every wanted run has a result, else 1."""
    parser = sweep_parser("python -m experiments pinning", __doc__, "out/pinning")
    parser.add_argument("--part", type=int, default=0, help="make each run of that number, modulo --parts")
    parser.add_argument("--parts", type=int, default=1, help="processes that share the runs (%(default)s)")
    options = parser.parse_args(arguments)
    until_s = end_s(options.minutes)
    cells, runs = list(cell.cells()), list(fleet.runs())
    cell_folder, fleet_folder = options.out / "cells", options.out / "fleet"
    if not options.tell_only:
        import torch

        from experiments.pinning.rollout import Rollout

        torch.set_num_threads(1)  # small products are slower on two threads, far slower if cores are busy
        part = slice(options.part, None, options.parts)
        make_missing(cells[part], cell_folder, lambda each: Rollout(each).result(), until_s)
        make_missing(runs[part], fleet_folder, fleet.simulated, until_s)
    results = Results(
        {each: found for each in cells if (found := stored(each, cell_folder)) is not None},
        {each: found for each in runs if (found := stored(each, fleet_folder)) is not None},
    )
    text = markdown(results) if results.cells else ""
    print(text)
    if options.page is not None and text:
        options.page.write_text(with_results(options.page.read_text(), text, MARK))
        draw(results, options.page.parent)
    return 0 if len(results.cells) + len(results.fleets) == len(cells) + len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
