"""The whole storm: ``python -m tests.abuse --count 100000``. Ends with 1 where a bar is not met."""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dora.models.tiny import make_tiny
from tests.abuse import folders, storm

MEMORY_MOST_BYTES = 200 << 20  # above the start's


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.abuse", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="messages to each RPC")
    parser.add_argument("--folders", type=int, default=1000, help="weight folders")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        model = make_tiny("dense", Path(scratch) / "tiny")
        report = asyncio.run(storm.stormed(model, options.count, options.seed, _tell))
        weights = folders.stormed(model, Path(scratch), options.folders, options.seed)
    failed = failures(report, weights)
    result = {**asdict(report), "weight_folders": asdict(weights), "failures": failed}
    print(json.dumps(result, indent=2) if options.json else table(report, weights, failed))
    return bool(failed)


def failures(report: storm.Report, weights: folders.Outcome) -> list[str]:
    """Returns the bars that are missed."""
    bugs = [f"{each.name}: {bug}" for each in report.outcomes for bug in each.bugs] + weights.bugs
    grown = report.memory_after_bytes - report.memory_before_bytes
    return [
        *bugs,
        *([f"the service died: {report.failure}"] if report.deaths else []),
        *([f"{report.wedged_steps} steps wedged"] if report.wedged_steps else []),
        *(f"{each.name}: {each.hung} calls hung" for each in report.outcomes if each.hung),
        *([f"memory grew by {grown >> 20} MB"] if grown > MEMORY_MOST_BYTES else []),
    ]


def table(report: storm.Report, weights: folders.Outcome, failed: Sequence[str]) -> str:
    lines = [f"{'RPC':<26}{'messages':>10}{'calls':>10}{'hung':>6}{'bugs':>6}{'s':>8}  statuses"]
    lines += [_row(each) for each in report.outcomes]
    lines += [
        f"{'weight folders':<26}{weights.folders:>10}{'':>16}{len(weights.bugs):>6}{weights.took_s:>8.1f}  "
        f"accepted {weights.accepted}, refused {weights.refused}",
        f"deaths {report.deaths}, wedged steps {report.wedged_steps}, {report.took_s:.0f} s",
        f"memory: {report.memory_before_bytes >> 20} MB before, {report.memory_after_bytes >> 20} MB after, "
        f"{report.memory_most_bytes >> 20} MB at most",
        *failed[:20],
    ]
    return "\n".join(lines)


def _row(each: storm.Outcome) -> str:
    statuses = ", ".join(f"{name} {count}" for name, count in each.statuses.most_common())
    counts = f"{each.messages:>10}{each.calls:>10}{each.hung:>6}{len(each.bugs):>6}"
    return f"{each.name:<26}{counts}{each.took_s:>8.1f}  {statuses}"


def _tell(each: Any) -> None:
    print(_row(each), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
