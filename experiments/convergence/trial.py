"""One run: a demo of the live service with the reference trainer, reduced to what the curves need.

A result has ``run`` (its specification), ``steps`` (by step: reward, staleness, seconds since the first commit, and the
trainer's signals), ``versions`` (by behaviour version: mean reward of what it sampled, and how many), ``staleness`` (by
staleness: responses, and the trainer's signals of them), and what the audit found.
"""

import asyncio
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from dora.data.run_record import STEPS_FILE
from dora.errors import DoraError
from dora.ops.demo.audit import Row as Trajectory
from dora.ops.demo.audit import read_record
from dora.ops.demo.folder import OutFolder
from dora.ops.demo.options import DemoOptions
from dora.ops.demo.run import run_demo
from dora.rpc.dora_pb2 import Status
from experiments.convergence.plan import Run

MODEL: Final = "tiny"
RUN_LIMIT_S: Final = 900.0
SIGNALS: Final = ("clip_fraction", "effective_sample", "ratio_p99", "entropy", "length_mean", "grad_norm")
BY_STALENESS: Final = ("clip_fraction", "effective_sample", "ratio_p99", "reward_mean")
AUDITED: Final = ("groups_lost", "groups_duplicated", "c1_violations", "staleness_max", "versions_live_max")
TIMES: Final = ("seconds_start", "seconds_first_step", "seconds_later_steps", "seconds_end", "seconds_total")


class TrialFailed(DoraError):
    """The run did not train all its steps."""


class _Silent:
    """A screen that shows nothing: the service's log is in the run's folder."""

    def line(self, text: str) -> None:
        return None

    def show(self, status: Status, *, last: bool = False) -> None:
        return None

    def __enter__(self) -> "_Silent":
        return self

    def __exit__(self, *exception: object) -> None:
        return None


def tried(run: Run, work: Path) -> dict[str, Any]:
    """The result of ``run``. Raises DoraError and TimeoutError; then ``work`` keeps the logs."""
    shutil.rmtree(work, ignore_errors=True)
    load = os.getloadavg()[0]
    folder = OutFolder(work)
    options = DemoOptions(
        model=MODEL,
        out=work,
        steps=run.steps,
        learning_rate=run.learning_rate,
        seed=run.seed,
        settings=run.settings,
        trainer_arguments=run.trainer_arguments,
        evaluate_every=0,
    )
    report = asyncio.run(_demo(options, folder))
    if report["steps"] != run.steps:
        raise TrialFailed("; ".join(report["failures"]))
    result = {
        "run": run.specification,
        **reduced(read_record(folder.trajectories), _lines(folder.trained), _lines(folder.record / STEPS_FILE)),
        "audit": {name: report[name] for name in AUDITED},  # type: ignore[literal-required]
        "failures": report["failures"],
        "times": {name: report[name] for name in TIMES},  # type: ignore[literal-required]
        "load_average": [load, os.getloadavg()[0]],  # of the last minute, when it began and when it ended
    }
    shutil.rmtree(work)
    return result


async def _demo(options: DemoOptions, folder: OutFolder) -> Mapping[str, Any]:
    async with asyncio.timeout(RUN_LIMIT_S):
        return await run_demo(options, folder, _Silent())


def reduced(
    rows: Sequence[Trajectory], trained: Sequence[Mapping[str, Any]], committed: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """``steps``, ``versions`` and ``staleness`` of a result, from the record, the trainer's lines and the commits."""
    commits_s = {line["step"]: line["committed_at"] for line in committed if "committed_at" in line}
    first_s = min(commits_s.values())
    of_step: dict[int, list[Trajectory]] = defaultdict(list)
    of_version: dict[int, list[Trajectory]] = defaultdict(list)
    kept = [row for row in rows if row["trained_step"] in commits_s]
    for row in kept:
        of_step[row["trained_step"]].append(row)
        of_version[row["behaviour_version"]].append(row)
    by_step = {line["step"]: line for line in trained}
    steps = [
        {
            "step": step,
            "reward": _reward(of_step[step]),
            "committed_s": round(commits_s[step] - first_s, 3),
            "seconds": round(by_step[step]["seconds"], 3),
            "waited_s": round(by_step[step]["waited_s"], 3),
            "staleness_mean": fmean(_staleness(row) for row in of_step[step]),
            "staleness_max": max(_staleness(row) for row in of_step[step]),
            **{name: by_step[step]["metrics"].get(name) for name in SIGNALS},
        }
        for step in sorted(commits_s)
    ]
    versions = [
        {"version": version, "reward": _reward(of_version[version]), "trajectories": len(of_version[version])}
        for version in sorted(of_version)
    ]
    return {"steps": steps, "versions": versions, "staleness": _by_staleness(kept, trained)}


def _by_staleness(rows: Iterable[Trajectory], trained: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Signals are means over the steps that have any, since each step counts alike."""
    counts: dict[int, int] = defaultdict(int)
    for row in rows:
        counts[_staleness(row)] += 1
    return {
        str(staleness): {"trajectories": counts[staleness], **_signals(trained, staleness)}
        for staleness in sorted(counts)
    }


def _signals(trained: Sequence[Mapping[str, Any]], staleness: int) -> dict[str, float | None]:
    found = {}
    for name in BY_STALENESS:
        key = f"staleness_{staleness}/{name}"
        values = [line["metrics"][key] for line in trained if key in line["metrics"]]
        found[name] = fmean(values) if values else None
    return found


def _reward(rows: Iterable[Trajectory]) -> float | None:
    rewards = [row["reward"] for row in rows if row["reward"] is not None and row.get("reward_valid", True)]
    return fmean(rewards) if rewards else None


def _staleness(row: Trajectory) -> int:
    return int(row["trained_step"]) - int(row["behaviour_version"])


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
