"""The demo's time series, ``series.jsonl``: one JSON line per sample of the service's status."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dora.ops.demo.moves import MoveArc
from dora.rpc.dora_pb2 import Status


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One worker at one time. ``version`` is -1 if it hosts none."""

    worker: str
    state: str
    version: int
    target_version: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The service at ``t_s`` seconds after it became ready."""

    t_s: float
    step: int  # the newest version = steps committed
    running: int
    waiting: int
    finished: int  # finished groups that wait for a step
    reward: float | None  # mean of the latest committed step
    workers: tuple[WorkerSample, ...]
    counters: dict[str, float]
    moves: tuple[MoveArc, ...] = ()  # that ended since the previous sample


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares over the samples between the start and the last commit; None without samples."""

    two_versions: float | None = None  # samples in which engines generate for two or more versions
    idle: float | None = None  # engines that run no request, over all samples


def sample_of(status: Status, t_s: float, moves: tuple[MoveArc, ...] = ()) -> Sample:
    workers = tuple(
        WorkerSample(w.worker_id, w.state, w.version, w.target_version, w.running, w.waiting) for w in status.workers
    )
    return Sample(
        t_s=round(t_s, 3),
        step=status.newest_version,
        running=sum(worker.running for worker in workers),
        waiting=sum(worker.waiting for worker in workers),
        finished=sum(version.groups_finished for version in status.versions),
        reward=status.steps[-1].mean_reward if status.steps else None,
        workers=workers,
        counters=dict(status.counters),
        moves=moves,
    )


def sample_json(sample: Sample) -> str:
    """One line of ``series.jsonl``, without the line end."""
    return json.dumps(asdict(sample), separators=(",", ":"))


def read_series(path: Path) -> list[Sample]:
    return [_parsed(line) for line in path.read_text().splitlines()]


def shares(samples: Sequence[Sample]) -> Shares:
    """Returns the use of the engines while steps were left to train. After the last commit the service only drains."""
    training = [sample for sample in samples if sample.step < samples[-1].step] or samples
    engines = [worker for sample in training for worker in sample.workers]
    if not engines:
        return Shares()
    several = sum(len({worker.version for worker in sample.workers if worker.running}) > 1 for sample in training)
    return Shares(several / len(training), sum(not worker.running for worker in engines) / len(engines))


def stretches(samples: Sequence[Sample], worker: str) -> list[tuple[float, float, int, str]]:
    """A worker's history as ``(start_s, end_s, version, state)``, with equal adjacent samples merged."""
    joined: list[tuple[float, float, int, str]] = []
    for sample in samples:
        for row in sample.workers:
            if row.worker != worker:
                continue
            if joined and joined[-1][2:] == (row.version, row.state):
                joined[-1] = (joined[-1][0], sample.t_s, row.version, row.state)
            else:
                if joined:
                    joined[-1] = (joined[-1][0], sample.t_s, *joined[-1][2:])
                joined.append((sample.t_s, sample.t_s, row.version, row.state))
    return joined


def _parsed(line: str) -> Sample:
    tree = json.loads(line)
    workers = tuple(WorkerSample(**row) for row in tree["workers"])
    return Sample(**{**tree, "workers": workers, "moves": tuple(MoveArc(**row) for row in tree.get("moves", ()))})
