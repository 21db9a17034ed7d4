"""Adds up the seconds of a run's tests by folder, and shows them at its end.

``python -m tests.durations`` writes the sums of the last run of all folders into CONTRIBUTING.md.
"""

import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.snippets import ROOT

STARTING: Final = "imports, collection"
KEPT: Final = "dora/durations"  # in pytest's cache
PAGE: Final = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- durations -->\n", "<!-- end of durations -->\n"

Row = Sequence[float]  # tests, elapsed seconds, CPU seconds


class Durations:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._rows: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        self._began_s = time.monotonic()
        self._counted_s = 0.0  # CPU seconds that are in a row already

    def pytest_collection_finish(self) -> None:
        """Each process of xdist imports and collects all tests."""
        self._counted_s = cpu_s()
        self._rows[STARTING][2] += self._counted_s
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["starting_s"] = self._counted_s

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._rows[STARTING][2] += getattr(node, "workeroutput", {}).get("starting_s", 0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before_s, self._counted_s = self._counted_s, cpu_s()
        report.cpu_s = self._counted_s - before_s  # xdist sends all attributes of a report
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._rows["/".join(Path(report.nodeid).parts[:2])]
        row[0] += report.when == "call"
        row[1] += report.duration
        row[2] += report.cpu_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("seconds by folder")
        for name, (count, elapsed_s, used_s) in ordered(self._rows):
            terminalreporter.line(f"{name:<24}{count:>6.0f} tests{elapsed_s:>9.1f} s{used_s:>9.1f} s of CPU")
        if self._config.args_source is pytest.Config.ArgsSource.TESTPATHS and self._config.cache is not None:
            took_s = time.monotonic() - self._began_s
            run = {"rows": self._rows, "took_s": took_s, "cores": len(os.sched_getaffinity(0)), "at": time.time()}
            self._config.cache.set(KEPT, run)


def cpu_s() -> float:
    """CPU seconds of this process and of all children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def ordered(rows: Mapping[str, Row]) -> list[tuple[str, Row]]:
    """The rows, those with most CPU seconds first, and their sum."""
    most_first = sorted(rows.items(), key=lambda item: -item[1][2])
    return [*most_first, ("all", [sum(column) for column in zip(*rows.values(), strict=True)])]


def table(run: Mapping[str, Any]) -> str:
    """A run as Markdown."""
    date = time.strftime("%Y-%m-%d", time.gmtime(run["at"]))
    lines = [
        f"`make test` on {date}: {run['took_s'] / 60:.1f} minutes for the tests, on {run['cores']} cores.\n",
        "| folder | tests | seconds | CPU seconds |",
        "|---|---|---|---|",
        *(f"| {name} | {row[0]:,.0f} | {row[1]:,.0f} | {row[2]:,.0f} |" for name, row in ordered(run["rows"])),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    try:
        run = json.loads((ROOT / ".pytest_cache" / "v" / KEPT).read_text())
    except FileNotFoundError:
        sys.exit("There is no run of all folders in .pytest_cache. Run `make test` first.")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(run) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
