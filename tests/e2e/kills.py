"""The orchestrator is killed at many moments, with real engines: ``python -m tests.e2e.kills --kills 20``.

One step, one kill: as groups are admitted, in a handoff, while a response is scored, between two deliveries, before, in
and after a commit, while a worker loads. Then the record is verified. Ends with 1 where something was lost, came twice,
or has a logprob that no recorded version gives.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import dora
from dora.client import Operator
from dora.client.step import Step
from dora.data.trajectory import TrajectoryGroup
from dora.errors import DoraError
from dora.models.tiny import make_tiny
from dora.ops.verify import verify
from dora.rpc import dora_pb2 as pb
from tests.e2e.restarts import Killed, settings_of
from tests.service import ask_move, check_promises

GROUPS = 3
LOOKS_MAX = 60  # at a status, for a moment to come; then the service is killed all the same
MOMENTS = ("admission", "handoff", "scoring", "delivery", "before commit", "commit", "after commit", "loading")
SETTINGS = {
    "workers.engine": "vllm",
    "workers.kv_tokens": 4096,
    "workers.max_model_len_tokens": 256,
    "rollout.max_tokens": 96,
    "rollout.temperature": 0.9,
}


@dataclass
class Report:
    kills: dict[str, int]
    moments_missed: int  # the moment did not come before the look for it was given up
    steps: int
    groups: int
    trajectories_verified: int
    versions: int
    logprob_difference: float
    workers_lost: float
    c1_violations: float
    wrong: list[str]


class Run:
    """A trainer's steps on a service that is killed once in each."""

    def __init__(self, service: Killed, model: Path, moments: Sequence[str]) -> None:
        self._service = service
        self._tensors = load_file(model / "model.safetensors")
        self._moments = moments
        self.steps: list[list[TrajectoryGroup]] = []
        self.missed = 0

    async def train(self) -> None:
        """One step a moment, and one more to the end."""
        async with dora.Trainer(self._service.address, token=self._service.token) as trainer:
            async for step in trainer.steps(groups=GROUPS):
                number = len(self.steps)
                await self._step(step, self._moments[number] if number < len(self._moments) else "")
                if number == len(self._moments):
                    return

    async def _step(self, step: Step, moment: str) -> None:
        hunting = asyncio.create_task(self._hunt(moment)) if moment in ("admission", "handoff", "scoring") else None
        groups: list[TrajectoryGroup] = []
        async for group in step:
            groups.append(group)
            if moment == "delivery" and len(groups) == 1 + len(self.steps) % (GROUPS - 1):
                await self._service.restart()
        self.steps.append(groups)
        if hunting is not None:
            await hunting
        if moment == "before commit":
            await self._service.restart()
        committing = asyncio.create_task(step.commit(weights=self._weights(step.number + 1), wait=True))
        if moment == "commit":
            await self._service.restart()
        await committing
        if moment == "after commit":
            await self._service.restart()
        if moment == "loading":
            await self._hunt(moment)

    def _weights(self, version: int) -> dict[str, Any]:
        """Returns other weights for each version: a wrong one would be seen."""
        return {name: (tensor * np.float32(1 + 0.01 * version)) for name, tensor in self._tensors.items()}

    async def _hunt(self, moment: str) -> None:
        """Kills the service once it is at the moment."""
        looks, first = 0, -1.0
        async with Operator(self._service.address, self._service.token) as operator:
            async for status in operator.watch(period_ms=50):
                first = status.counters["groups_admitted"] if first < 0 else first
                looks += 1
                if await self._is_at(moment, operator, status, first):
                    break
                if looks == LOOKS_MAX:
                    self.missed += 1
                    break
        await self._service.restart()

    async def _is_at(self, moment: str, operator: Operator, status: pb.Status, first: float) -> bool:
        if moment == "admission":
            return bool(status.counters["groups_admitted"] > first)
        if moment == "handoff":
            return await ask_move(operator, status)
        if moment == "loading":
            return any(worker.state == "loading" for worker in status.workers)
        try:
            return bool((await operator.trajectories("finished", limit=1)).trajectories)
        except DoraError:
            return False


async def killed(model: Path, folder: Path, moments: Sequence[str], change: Callable[..., Any] = dict) -> Report:
    """``change``: of the settings."""
    record = folder / "record"
    settings = change(settings_of(model, folder, window__size=2, record=str(record)) | SETTINGS)
    service = Killed(folder, settings)
    await service.start()
    try:
        run = Run(service, model, moments)
        await run.train()
        async with Operator(service.address, service.token) as operator:
            counters = (await operator.status()).counters
    finally:
        await service.stop()
    wrong: list[str] = []
    try:
        check_promises(run.steps, window=2, groups=GROUPS)
    except AssertionError as error:
        wrong.append(f"promises: {error}")
    found = verify(record, atol=1e-3, window_versions=2)
    wrong += [str(each) for each in found.violations]
    return Report(
        kills={moment: list(moments).count(moment) for moment in dict.fromkeys(moments)},
        moments_missed=run.missed,
        steps=len(run.steps),
        groups=sum(map(len, run.steps)),
        trajectories_verified=found.trajectories,
        versions=len(found.versions),
        logprob_difference=found.max_abs_diff,
        workers_lost=counters["workers_lost"],
        c1_violations=counters["c1_violations"],
        wrong=wrong,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args(arguments)
    moments = [MOMENTS[number % len(MOMENTS)] for number in range(options.kills)]
    with tempfile.TemporaryDirectory() as scratch:
        model = make_tiny("dense", Path(scratch) / "tiny")
        report = asyncio.run(killed(model, Path(scratch), moments))
    print(json.dumps(asdict(report), indent=2))
    return bool(report.wrong or report.c1_violations)


if __name__ == "__main__":
    sys.exit(main())
