"""A trainer that publishes other weights with each step, one moment armed in each publish (``mortal.py``).

``python -m tests.e2e.publisher ADDRESS MODEL GROUPS HOSTS MOMENT...``. The token is in DORA_TOKEN. HOSTS,
joined by commas, are all that there are. A version is committed only once every one of them has every version of the
window, and a worker has loaded the newest. It ends once all moments have passed, and nothing is armed any more. A
trainer that attaches before a moment of an upload takes the service for another machine's.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import load_file

import dora
from dora.client import Operator, session
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from tests.e2e.mortal import passes
from tests.service import until

STEPS_MAX: Final = 60
PATIENCE_S: Final = 120.0
FOLDER: Final = Path(os.environ["MORTAL"])


async def main(address: str, model: str, groups: int, hosts: Sequence[str], moments: Sequence[str]) -> None:
    tensors = load_file(Path(model) / "model.safetensors")
    token = os.environ["DORA_TOKEN"]
    trainer = dora.Trainer(address, token=token, connect_s=PATIENCE_S, reconnect_s=PATIENCE_S)
    async with trainer, Operator(address, token) as operator:
        async for step in trainer.steps(groups=groups):
            async for _ in step:
                pass
            await settled(operator, hosts, step.number)
            if not arm(moments):
                return
            assert step.number < STEPS_MAX, f"{moments} have not all come"
            passes("before")
            await step.commit(weights=weights_of(tensors, step.number + 1), wait=True)
            passes("committed")


def weights_of(tensors: dict[str, Any], version: int) -> dict[str, Any]:
    return {name: tensor * np.float32(1 + 0.01 * version) for name, tensor in tensors.items()}


async def settled(operator: Operator, hosts: Sequence[str], version: int) -> None:
    while True:
        try:
            await until(operator, lambda status: is_settled(status, hosts, version))
            return
        except ServiceUnavailable:
            async with asyncio.timeout(PATIENCE_S):
                await operator._connection.channel.channel_ready()


def is_settled(status: pb.Status, hosts: Sequence[str], version: int) -> bool:
    ready = {host.name: set(host.versions) for host in status.hosts if host.state == "ready" and host.workers_ready}
    window = {each.version for each in status.versions}
    everywhere = set(ready) == set(hosts) and all(window <= held for held in ready.values())
    return everywhere and any(worker.version == version for worker in status.workers)


def arm(moments: Sequence[str]) -> bool:
    """The first that has not passed; False where all have."""
    moment = next_of(moments)
    if moment:
        (FOLDER / moment).touch()
    return bool(moment)


def next_of(moments: Sequence[str]) -> str:
    return next((moment for moment in moments if not (FOLDER / f"{moment}.passed").exists()), "")


def apart_for_uploads(moments: Sequence[str]) -> None:
    shares_host = session._shares_host
    session._shares_host = lambda reply: not next_of(moments).endswith(".upload") and shares_host(reply)


if __name__ == "__main__":
    apart_for_uploads(sys.argv[5:])
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4].split(","), sys.argv[5:]))
