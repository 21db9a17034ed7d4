"""``python -m tests.clusters.pods_run FOLDER MODEL``: a run in pods of ``FOLDER/plan.yaml``, in a network of its own.

A host's pod is deleted, and comes again; so is the service's, on its volume. Prints what happened as JSON.
"""

import asyncio
import fcntl
import json
import os
import secrets
import shutil
import socket
import struct
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

import dora
from dora.client import Operator
from dora.errors import DoraError
from dora.rpc.roles import TokenGeneration
from tests.clusters.pods import Node, node

STEPS, GROUPS = 4, 3
ADDRESS = "127.0.0.1:7070"
HOSTS = ("dora-host-0", "dora-host-1")


async def main(folder: Path, model: Path) -> dict[str, Any]:
    raise_loopback()
    os.umask(0o022)
    for private in (folder, *folder.parents[:2]):
        private.chmod(0o755)
    objects = [each for each in yaml.safe_load_all((folder / "plan.yaml").read_text()) if each]
    shutil.copytree(model, folder / "claims" / "models" / "tiny", copy_function=shutil.copyfile)
    async with node(folder, objects) as found:
        try:
            return await run(found, model)
        finally:
            for pod in found.pods.values():
                print(f"--- {pod.name}, ready: {pod.is_ready}, ends: {pod.codes}\n{pod.log[-3000:]}", file=sys.stderr)


async def run(found: Node, model: Path) -> dict[str, Any]:
    tokens = found.objects["Secret", "dora-tokens"]["stringData"]
    seen: dict[str, Any] = {}
    service = await found.create("StatefulSet", "dora-service", 0)
    for number, _ in enumerate(HOSTS):
        await found.create("StatefulSet", "dora-host", number)
    await found.create("Deployment", "dora-front", 0)
    await found.until_ready("dora-service-0", "dora-front-0", *HOSTS)
    await until_hosts(tokens["operator"], *HOSTS)
    seen["container"] = examined(service)

    async def happens(step: int) -> None:
        if step == 0:
            seen["host"] = asdict(await found.delete(HOSTS[1]))
            await found.create("StatefulSet", "dora-host", 1)
        elif step == 1:
            seen["service"] = asdict(await found.delete("dora-service-0"))
            await found.create("StatefulSet", "dora-service", 0)

    steps: list[list[Any]] = []
    async with dora.Trainer(ADDRESS, token=tokens["trainer"], connect_s=120.0) as trainer:
        asked = asyncio.create_task(asyncio.to_thread(ask_front, found.pods["dora-front-0"].ip, tokens["front"]))
        async for step in trainer.steps(groups=GROUPS):
            steps.append([group async for group in step])
            await happens(len(steps) - 1)
            await step.commit(weights=model, wait=True)
            if len(steps) == STEPS:
                break
    seen["asked"] = await asked
    rotated = {str(role): token for role, token in TokenGeneration.following(secrets.token_hex(32)).of.items()}
    found.replace_secret("dora-tokens", {**tokens, **rotated})
    await until_hosts(rotated["operator"], *HOSTS)
    seen["shows_token"] = tokens["owner"] in found.pods["dora-service-0"].log
    seen["groups"] = [[group.group_id for group in step] for step in steps]
    seen["staleness"] = sorted({age for step in steps for group in step for age in group.staleness.tolist()})
    seen["versions_of_one"] = max(len(set(group.versions)) for step in steps for group in step)
    async with Operator(ADDRESS, rotated["operator"]) as operator:
        counters = (await operator.status()).counters
    seen["lost"] = [counters["groups_lost"], counters["c1_violations"]]
    seen["restarts"] = {pod.name: pod.restarts for pod in found.pods.values()}
    return seen


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 1 | 0x40))  # SIOCSIFFLAGS: IFF_UP, IFF_RUNNING


def examined(pod: Any) -> dict[str, Any]:
    """What the kernel says of the container's first process."""
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pod.pid}/status").read_text().splitlines() if ":\t" in line
    )
    mounts = [line.split() for line in Path(f"/proc/{pod.pid}/mountinfo").read_text().splitlines()]
    options = {fields[4]: (fields[5].split(",")[0], fields[-1]) for fields in mounts}
    return {
        "uid": status["Uid"].split()[0],
        "capabilities": status["CapEff"],
        "no_new_privileges": status["NoNewPrivs"],
        "root": options["/"][0],
        "shm": options["/dev/shm"][1],
    }


def ask_front(ip: str, key: str) -> list[int]:
    """A session of an agent, which asks again while the service is away. Returns the statuses."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    calls = [
        ("v1/completions", {"model": "policy", "prompt": "1 2", "max_tokens": 8}),
        ("close", {"reward": 1.0}),
    ]
    statuses: list[int] = []
    while calls and len(statuses) < 100:
        path, body = calls[0]
        url = f"http://{ip}:8000/sessions/task-1/{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
                statuses.append(answer.status)
                calls.pop(0)
        except urllib.error.HTTPError as error:
            statuses.append(error.code)
            if error.code != 503:
                raise
            time.sleep(float(error.headers["Retry-After"]))
    return statuses


async def until_hosts(token: str, *names: str) -> None:
    async with asyncio.timeout(150):
        while True:
            try:
                async with Operator(ADDRESS, token) as operator:
                    hosts = (await operator.status()).hosts
                if {each.name for each in hosts if each.workers_ready} == {*names}:
                    return
            except DoraError:
                pass
            await asyncio.sleep(0.3)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))))
