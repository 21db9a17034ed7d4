"""The first host of ``test_hosts``: a service, a trainer and an operator. ``python -m tests.e2e.service_host ORDERS``.

ORDERS is JSON: model (folder), settings, workers (that it waits for), and a folder for the weights of versions, each a
small step from the one before; without it, all are the model's. It prints how workers join, then obeys lines of JSON:
``until``, a counter, grows by ``more`` while the operator moves requests; ``across``, some workers, waits until the
operator has moved a request between these and the others; an empty line ends training and gives what was seen. The next
line asks for the bytes of the last version that each host fetched, which also measures links.
"""

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

import dora
from dora.client import Operator
from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.data.types import RequestSpec
from dora.rpc.roles import Role
from dora.worker.fake.engine import FakeEngine
from tests.contract.driver import Response, farthest, run
from tests.service import ask_move, check_promises, configured, during, running, until

GROUPS = 4
WINDOW = 2
CONTEXT_TOKENS = 2048
FILE = "model.safetensors"


async def main(orders: dict[str, Any]) -> None:
    model = Path(orders["model"])
    config = configured(model, window__size=WINDOW, **orders["settings"])
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        say({"address": handle.address, "token": handle.tokens[Role.WORKER], "host_token": handle.tokens[Role.HOST]})
        await until(operator, lambda status: len(status.workers) == orders["workers"])
        say({"workers": orders["workers"]})
        steps: list[list[TrajectoryGroup]] = []
        enough = asyncio.Event()
        weights = Weights(model, orders["folder"])
        training = asyncio.create_task(train(trainer, operator, weights, steps, enough))
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            order = json.loads(line)
            obeyed = (
                crossed(operator, set(order["across"]))
                if "across" in order
                else grown(operator, order["until"], order["more"])
            )
            say(await during(training, obeyed))
        enough.set()
        await training
        status = await until(operator, lambda status: all(not worker.running for worker in status.workers))
        check_promises(steps, window=WINDOW, groups=GROUPS)
        moved = [
            each for step in steps for group in step for each in group.trajectories if len(each.worker_history) > 1
        ]
        found = {
            "counters": dict(status.counters),
            "moved": len(moved),
            "versions": len(steps),
            "arrivals": [[[each.worker_id, each.arrival] for each in response.worker_history] for response in moved],
            "kv_use": sum(worker.kv_use for worker in status.workers),
            "farthest_logprob": farthest_of(moved, weights),
        }
        say(found)
        if await asyncio.to_thread(sys.stdin.readline):
            say({each.host: each.fetched_bytes async for each in operator.examine()})


class Weights:
    """The folder of each version's weights."""

    def __init__(self, model: Path, folder: str) -> None:
        self.model, self._folder, self.differ = model, folder, bool(folder)

    def of(self, version: int) -> Path:
        """Makes it from the folder of the version before if it is missing."""
        if not self.differ or not version:
            return self.model
        made = Path(self._folder) / str(version)
        if not made.is_dir():
            before = load_file(self.of(version - 1) / FILE)
            shutil.copytree(self.model, made)
            generator = np.random.default_rng(version)
            step = {name: generator.uniform(-1e-6, 1e-6, tensor.shape) for name, tensor in before.items()}
            save_file({name: tensor + step[name].astype(tensor.dtype) for name, tensor in before.items()}, made / FILE)
        return made


async def train(
    trainer: dora.Trainer,
    operator: Operator,
    weights: Weights,
    steps: list[list[TrajectoryGroup]],
    enough: asyncio.Event,
) -> None:
    """Until it is enough, and all that had moved by then is trained on."""
    left = WINDOW
    async for step in trainer.steps(groups=GROUPS):
        steps.append([group async for group in step])
        left -= enough.is_set()
        if not left:
            return
        version = step.number + 1
        await step.commit(weights=weights.of(version), wait=True)
        if weights.differ:
            await loaded(operator, version)


async def loaded(operator: Operator, version: int) -> None:
    """Returns when all workers have the version."""
    await until(operator, lambda status: all(worker.version == version for worker in status.workers))


async def grown(operator: Operator, counter: str, more: int) -> dict[str, float]:
    """The counters, once this one has grown by so many."""
    before = (await operator.status()).counters[counter]
    async for status in operator.watch(period_ms=50):
        if status.counters[counter] >= before + more:
            return dict(status.counters)
        await ask_move(operator, status)
    raise AssertionError("the service stopped being watched")


async def crossed(operator: Operator, near: set[str]) -> dict[str, float]:
    """The counters, once a running request has moved between these workers and the others."""
    was_near: dict[str, bool] = {}
    async for status in operator.watch(period_ms=50):
        for request in (await operator.trajectories("running", limit=1000)).trajectories:
            is_near = request.worker in near
            if was_near.setdefault(request.trajectory_id, is_near) != is_near:
                return dict(status.counters)
        await ask_move(operator, status, near)
    raise AssertionError("the service stopped being watched")


def farthest_of(moved: list[Trajectory], weights: Weights) -> float:
    """The largest difference of a logprob from a run in which nothing moved."""
    farthest_yet = 0.0
    for version in sorted({each.behaviour_version for each in moved}):
        engine = FakeEngine(slots=8, kv_tokens=16384, max_model_len_tokens=CONTEXT_TOKENS, model=weights.model)
        engine.load_weights(version, weights.of(version), None)
        of_version = [each for each in moved if each.behaviour_version == version]
        requests = [
            RequestSpec(each.trajectory_id, version, tuple(each.prompt_token_ids.tolist()), each.sampling)
            for each in of_version
        ]
        found = {
            each.trajectory_id: Response(each.response_token_ids.tolist(), each.logprobs.tolist())
            for each in of_version
        }
        farthest_yet = max(farthest_yet, farthest(found, run(engine, requests)))
    return farthest_yet


def say(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
