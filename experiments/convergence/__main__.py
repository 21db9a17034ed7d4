"""Learning curves by mode: ``python -m experiments.convergence``. A run that is done is not done again.

    python -m experiments.convergence --steps 80 --seeds 5          # everything that is not there yet, then the report
    python -m experiments.convergence --report                      # the report of what is there
    python -m experiments.convergence --parts modes --rows sync window-3 --lr 1e-3 --minutes 20

The learning rate is chosen once, on sync, with seeds of its own. Runs are made one at a time, seed by seed. The part
``map`` is ``python -m experiments.staleness --fleet``, into the folder ``staleness`` beside that of ``--out``.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, fields, is_dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dora.errors import DoraError
from experiments.convergence.fleet import Fleet, fleet_report, stored_report
from experiments.convergence.page import LIMITS_PLOT, REWARD_PLOT, markdown, write_page
from experiments.convergence.plan import Result, Run, Store, chosen_rate, rate_runs, refusal, row_runs, write_json
from experiments.convergence.plots import draw_limits, draw_reward
from experiments.convergence.report import Runs, built, end_reward
from experiments.convergence.rows import LIMITS, MODES, RATES, SYNC
from experiments.convergence.trial import tried
from experiments.staleness.__main__ import main as make_map

PARTS = ("rates", "fleet", "modes", "limits", "map")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    session = Session(options)
    if not options.report:
        session.make()
    code = session.tell()
    if "map" in options.parts:
        session.map()
    return code


class Session:
    """One call of the command."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._store = Store(options.out)
        self._settings: tuple[str, ...] = tuple(options.set)
        self._began_s = time.monotonic()
        self._failed: list[str] = []
        every = {row.name: row for row in (*MODES, *LIMITS)}
        asked = [row for row in every.values() if not options.rows or row.name in options.rows]
        self._refused = {row.name: why for row in asked if (why := refusal(row))}
        self._modes = [row for row in MODES if row in asked and row.name not in self._refused]
        self._limits = [row for row in LIMITS if row in asked and row.name not in self._refused]
        self._sync = every[SYNC]

    def make(self) -> None:
        """Makes what is asked for and not there."""
        for name, why in self._refused.items():
            _say(f"{name} is left out: {why}")
        parts = self._options.parts
        if "fleet" in parts:
            self._simulate()
        if "rates" in parts and self._options.lr is None:
            self._each(self._sweep())
        rate = self._rate()
        if rate is None:
            _say("no learning rate: give one (--lr), or let the part 'rates' end")
            return
        _say(f"learning rate {rate:g}")
        wanted = []
        if "modes" in parts:
            wanted += row_runs(self._modes, self._options.seeds, self._options.steps, rate, self._settings)
        if "limits" in parts:
            wanted += row_runs(self._limits, self._options.limit_seeds, self._options.steps, rate, self._settings)
        self._each(wanted)

    def tell(self) -> int:
        """Writes the report of all that is there, the plots, and the page where one is named; 1 where a run failed."""
        rate = self._rate()
        runs = self._runs(rate)
        if not runs.results:
            _say("no run has ended: there is nothing to report")
            return 1
        report = built(runs, self._modes, self._limits, self._done(self._sweep()), self._setup(rate, runs))
        out = self._store.root
        write_json(out / "report.json", _plain(report))
        text = markdown(report)
        (out / "results.md").write_text(text + "\n")
        for folder in (out, self._options.page.parent) if self._options.page else (out,):
            draw_reward(runs, self._modes, report["setup"]["level"], folder / REWARD_PLOT)
            draw_limits(runs, self._modes, self._limits, report, folder / LIMITS_PLOT)
        if self._options.page:
            write_page(self._options.page, text)
        print(text)
        for sentence in self._failed:
            _say(f"FAILED {sentence}")
        return int(bool(self._failed))

    def map(self) -> None:
        """Makes and tells the map of staleness and its fleets, in the time that is left."""
        arguments = ["--fleet", "--out", str(self._store.root.with_name("staleness"))]
        if self._options.page:
            arguments += ["--page", str(self._options.page)]
        if self._options.minutes:
            left = self._options.minutes - (time.monotonic() - self._began_s) / 60
            arguments += ["--minutes", str(left)] if left > 0 else ["--tell-only"]
        make_map([*arguments, *(["--tell-only"] if self._options.report else [])])

    def _each(self, wanted: Sequence[Run]) -> None:
        """Tries each run that is not there, one at a time, until the time is up. A failure is kept."""
        left = [each for each in wanted if self._store.result(each) is None]
        began_s = time.monotonic()
        for number, each in enumerate(left):
            spent_s = time.monotonic() - self._began_s
            if self._options.minutes and spent_s > 60 * self._options.minutes:
                _say(f"the time is up: {len(left) - number} are left, the next call goes on with them")
                return
            each_s = time.monotonic()
            try:
                words = self._try(each)
            except (DoraError, TimeoutError) as error:
                words = f"failed: {error or type(error).__name__}"
                self._failed.append(f"{each.name}: {error or type(error).__name__}")
            now_s = time.monotonic()
            ahead_min = (now_s - began_s) / (number + 1) * (len(left) - number - 1) / 60
            place = f"[{number + 1}/{len(left)}] {each.name}"
            _say(f"{place}: {words}, {now_s - each_s:.0f} s; about {ahead_min:.0f} min left")

    def _try(self, run: Run) -> str:
        result = tried(run, self._store.work / run.name)
        self._store.write(run, result)
        broken = f", BROKEN: {'; '.join(result['failures'])}" if result["failures"] else ""
        return (
            f"reward at the end {end_reward(result):.3f}, {result['steps'][-1]['committed_s']:.0f} s of steps{broken}"
        )

    def _simulate(self) -> None:
        """Runs the missing runs on all cores: no run of the live service is under way, and these have no clock."""
        left = [row for row in self._modes if stored_report(row, self._fleet(), self._store) is None]
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            rows = {pool.submit(fleet_report, row, self._fleet(), self._store): row for row in left}
            for number, done in enumerate(as_completed(rows), start=1):
                try:
                    words = f"{done.result()['step_time_min']:.2f} min a step, {done.result()['wall_s']:.0f} s"
                except DoraError as error:
                    words = f"failed: {error}"
                    self._failed.append(f"simulated {rows[done].name}: {error}")
                _say(f"[{number}/{len(left)}] simulated {rows[done].name}: {words}")

    def _fleet(self) -> Fleet:
        options = self._options
        return Fleet(options.preset, options.fleet_steps, options.fleet_warmup)

    def _sweep(self) -> list[Run]:
        return rate_runs(self._sync, RATES, self._options.steps, self._settings)

    def _done(self, runs: Sequence[Run]) -> list[Result]:
        return [result for run in runs if (result := self._store.result(run))]

    def _rate(self) -> float | None:
        """The one that was given, else the best of the sweep, once that has ended."""
        if self._options.lr is not None:
            return float(self._options.lr)
        sweep = self._sweep()
        done = self._done(sweep)
        return chosen_rate(done) if len(done) == len(sweep) else None

    def _runs(self, rate: float | None) -> Runs:
        results: dict[str, dict[int, Result]] = {}
        if rate is not None:
            options = self._options
            seeds = max(options.seeds, options.limit_seeds)
            wanted = row_runs([*self._modes, *self._limits], seeds, options.steps, rate, self._settings)
            for run in wanted:
                if found := self._store.result(run):
                    results.setdefault(run.row, {})[run.seed] = found
        reports = {row.name: stored_report(row, self._fleet(), self._store) for row in self._modes}
        return Runs(results, {name: report["step_time_min"] for name, report in reports.items() if report})

    def _setup(self, rate: float | None, runs: Runs) -> dict[str, Any]:
        loads = [load for seeds in runs.results.values() for each in seeds.values() for load in each["load_average"]]
        return {
            "steps": self._options.steps,
            "learning_rate": rate,
            "fleet": asdict(self._fleet()),
            "load": f"{min(loads):.1f} to {max(loads):.1f}",
        }


def _plain(content: Any) -> Any:
    if is_dataclass(content) and not isinstance(content, type):
        return {each.name: getattr(content, each.name) for each in fields(content)}
    if isinstance(content, dict):
        return {name: _plain(value) for name, value in content.items()}
    return [_plain(value) for value in content] if isinstance(content, list) else content


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    names = [row.name for row in (*MODES, *LIMITS)]
    parser = argparse.ArgumentParser(
        prog="python -m experiments.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="by default all, in this order")
    parser.add_argument("--rows", nargs="+", choices=names, default=[], metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--steps", type=int, default=80, help="of a run (%(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="of each mode (%(default)s)")
    parser.add_argument("--limit-seeds", type=int, default=2, help="of each row of the part limits (%(default)s)")
    parser.add_argument("--lr", type=float, help="instead of the sweep's best")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no run after so long; 0: no limit")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="of the service, in every run"
    )
    parser.add_argument("--preset", default="dora-64", help="what is simulated for the clock of a fleet (%(default)s)")
    parser.add_argument("--fleet-steps", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--fleet-warmup", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/convergence"))
    parser.add_argument("--page", type=Path, help="Markdown page whose results are written anew, with plots beside it")
    parser.add_argument("--report", action="store_true", help="make nothing: report what is there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
