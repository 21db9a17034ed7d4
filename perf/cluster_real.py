"""The parts of perf/cluster.py with real processes: hosts that join a service, and nodes that Slurm or Ray takes.

The hosts are fake engines at a fixed pace, so that a machine's loss is a loss of capacity and not of this machine's.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import orchestrator
from orchestrator import Child, stdin_lines, tell

import dora
from dora.client import Operator
from dora.config import load_config
from dora.host.agent import AgentOptions, run_agent
from dora.models import default_cache, resolve_model
from dora.rpc.dora_pb2 import Status
from dora.rpc.roles import Role

if TYPE_CHECKING:
    from tests.clusters.ray_nodes import Ray

Take = Callable[[int], Awaitable[None]]  # takes a node, by the number of those taken before

PROGRAM: Final = str(Path(__file__).with_name("cluster.py"))
PROCESSES: Final = 4  # that speak for the hosts
WATCH_MS: Final = 50
NODE_GROUPS: Final = 8 / 3  # of a step, for each node: about 25 s
PERIOD_S: Final = 60.0  # between two nodes that are taken
NOTICE_S: Final = 30.0  # of Ray; Slurm's is in its own configuration
AWAY_S: Final = 30  # a node is gone for so long, a raylet with its start
RAYLET_START_S: Final = 5
BLOCK_S: Final = 4 * PERIOD_S  # of disturbed and of undisturbed time, by turns
WARMUP_STEPS: Final = 4
ENGINE: Final = """\
import sys
if "dora.worker" in sys.orig_argv:
    import time
    from dora.worker.fake.engine import FakeEngine
    decode = FakeEngine.step
    FakeEngine.__init__.__kwdefaults__["mean_tokens"] = 100
    def step(self):
        ends_s = time.monotonic() + 0.2
        found = decode(self)
        time.sleep(max(0.0, ends_s - time.monotonic()))
        return found
    FakeEngine.step = step
"""
RUN: Final = """\
model = "tiny"
prompts = "tiny"
[window]
size = 3
[rollout]
group_size = 8
max_tokens = 100
[workers]
engine = "fake"
count = 0
slots = 16
kv_tokens = 8192
max_model_len_tokens = 512
[kv]
pool_mb = 64
[host]
notice_s = 25
{table}
folder = "{folder}/run"
hosts = {hosts}
workers = 1
port = {port}
"""
SLURM: Final = """\
[slurm]
address = "127.0.0.1"
service = ["--partition=high"]
dora = "{dora}"
setup = ["export PYTHONPATH={folder}"]"""


def join(options: argparse.Namespace) -> dict[str, Any]:
    return asyncio.run(_joined(options.hosts))


async def _joined(hosts: int) -> dict[str, Any]:
    """Hosts join a service, then some end at once, and some fall silent."""
    settings = ('model="tiny"', 'prompts="tiny"', 'service.listen="127.0.0.1:0"', "workers.count=0", "kv.pool_mb=0")
    share = hosts // PROCESSES
    async with contextlib.AsyncExitStack() as stack:
        config = load_config(None, settings).model_dump_json()
        service = await stack.enter_async_context(Child.of("service", config, program=orchestrator.__file__))
        told = await service.hear()
        spoken = [("hosts", told["address"], told["model"], str(at), str(share)) for at in range(0, hosts, share)]
        speakers = [await stack.enter_async_context(Child.of(*words, program=PROGRAM)) for words in spoken]
        pids = [(await each.hear())["pid"] for each in speakers]
        operator = await stack.enter_async_context(Operator(told["address"], told["token"]))
        before, began_s = await service.ask("mark"), time.monotonic()
        await asyncio.gather(*(each.ask(told["tokens"][Role.HOST]) for each in speakers))
        joined_s = await _seen_s(operator, "ready", hosts + 1, began_s)  # with the service's own
        after = await service.ask("mark")
        killed, stopped, *_ = pids
        os.kill(killed, signal.SIGKILL)
        lost = {"killed_known_s": await _seen_s(operator, "lost", share, time.monotonic())}
        os.kill(stopped, signal.SIGSTOP)
        stack.callback(os.kill, stopped, signal.SIGCONT)
        lost["silent_known_s"] = await _seen_s(operator, "lost", 2 * share, time.monotonic())
    return {"hosts": hosts, "joined_s": joined_s, "service_cpu_s": after["cpu_s"] - before["cpu_s"], **lost}


async def _seen_s(operator: Operator, state: str, hosts: int, since_s: float) -> float:
    """Returns the time until the status has so many hosts in this state."""
    async for status in operator.watch(period_ms=WATCH_MS):
        if sum(each.state == state for each in status.hosts) >= hosts:
            break
    return time.monotonic() - since_s


async def be_hosts(address: str, model: str, first: int, count: int) -> None:
    """Agents of so many hosts, each with its own connection. They begin once stdin has the token."""
    tell({"pid": os.getpid()})
    lines = stdin_lines()
    token = (await anext(lines)).decode().strip()
    agents = (AgentOptions(address, token, f"h{first + at}", workers=0, model=model) for at in range(count))
    running = asyncio.gather(*(run_agent(each, asyncio.Event(), lambda _: None) for each in agents))
    tell({})
    async for _ in lines:
        pass
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# ------------------------------------------------------------------------------------------------------ Slurm and Ray


def slurm(options: argparse.Namespace) -> dict[str, Any]:
    from tests.clusters.slurm import Slurm  # the tests' folder is on the path where PYTHONPATH has the checkout

    with _engines_folder() as folder, Slurm(folder / "slurm", options.nodes + 1) as nodes:
        table = SLURM.format(folder=folder, dora=Path(sys.executable).with_name("dora"))
        take = partial(asyncio.to_thread, _take_node, nodes.call)
        return _run(options, folder, table, sys.executable, nodes.environment, take)


def ray(options: argparse.Namespace) -> dict[str, Any]:
    from tests.clusters.ray_nodes import Ray

    with _engines_folder() as folder, Ray() as nodes:
        variables = {"PYTHONPATH": f"{folder}:{nodes.environment['PYTHONPATH']}"}
        names = [nodes.add(variables) for _ in range(options.nodes)]
        take = partial(_take_raylet, nodes, names, variables)
        return _run(options, folder, "[ray]", str(nodes.python), nodes.environment, take)


@contextlib.contextmanager
def _engines_folder() -> Iterator[Path]:
    """A folder that gives the fake engines their pace where it is on Python's path."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(ENGINE)
        yield Path(folder)


def _run(
    options: argparse.Namespace, folder: Path, table: str, python: str, environment: Mapping[str, str], take: Take
) -> dict[str, Any]:
    from tests.prometheus.server import free_address

    address, file = free_address(), folder / "run.toml"
    values = {"folder": folder, "hosts": options.nodes, "port": address.rpartition(":")[2], "table": table}
    file.write_text(RUN.format(**values))

    def cluster(word: str) -> None:
        words = [python, "-m", "dora", "cluster", word, "--file", str(file)]
        subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, check=True)

    cluster("up")
    try:
        return asyncio.run(_taken(options, take, address, (folder / "run" / "token").read_text()))
    finally:
        cluster("down")


async def _taken(options: argparse.Namespace, take: Take, address: str, token: str) -> dict[str, Any]:
    """Trains by turns undisturbed and while a node is taken each minute."""
    commits, groups = list[float](), list[str]()
    training = asyncio.create_task(_train(options, address, token, commits, groups))
    async with _ended(training), Operator(address, token) as operator:
        await _until(training, lambda: len(commits) >= WARMUP_STEPS)
        async for status in operator.watch():
            if sum(each.workers_ready for each in status.hosts) == options.nodes:
                break
        block_s = min(BLOCK_S, options.spot_minutes * 60.0)
        blocks, taken = [], 0
        for is_spot in (False, True) * round(options.spot_minutes * 60.0 / block_s):
            began_s, at = time.monotonic(), len(commits)
            for period in range(round(block_s / PERIOD_S)):
                ends_s = began_s + (period + 1) * PERIOD_S
                passed = _until(training, lambda ends_s=ends_s: time.monotonic() >= ends_s)
                await asyncio.gather(passed, *([take(taken)] if is_spot else ()))
                taken += is_spot
            blocks.append((is_spot, at, len(commits)))
            said = {"spot": is_spot, "steps": len(commits) - at, "taken": taken}
            print(json.dumps(said), file=sys.stderr, flush=True)
        status = await operator.status()
    return {"nodes": options.nodes, "nodes_taken": taken, **_times(commits, blocks), **_found(status, groups)}


def _take_node(call: Callable[..., str], number: int) -> None:
    """A job of more rank takes a host's node for a while; Slurm gives 30 s of notice."""
    listed = call("squeue", "--noheader", "--partition=low", "--states=running", "--format=%N")
    names = sorted(listed.split(), key=lambda name: (len(name), name))
    node = f"--nodelist={names[number % len(names)]}"
    call("sbatch", "--partition=high", node, "--output=/dev/null", f"--wrap=sleep {AWAY_S}")


async def _take_raylet(nodes: "Ray", names: list[str], variables: Mapping[str, str], number: int) -> None:
    """The node that is there for longest drains until its end; another one comes for it."""
    node = names.pop(0)
    await asyncio.to_thread(nodes.drain, node, NOTICE_S)
    await asyncio.sleep(NOTICE_S)
    await asyncio.to_thread(nodes.lose, node)
    await asyncio.sleep(AWAY_S - RAYLET_START_S)
    names.append(await asyncio.to_thread(nodes.add, variables))


def _times(commits: list[float], blocks: list[tuple[bool, int, int]]) -> dict[str, Any]:
    """The time of a step in both kinds of blocks. A step belongs to the block of its commit."""
    found: dict[str, Any] = {}
    for kind, name in ((False, "undisturbed"), (True, "spot")):
        took_s = sum(commits[end - 1] - commits[at - 1] for is_spot, at, end in blocks if is_spot is kind)
        found[f"steps_{name}"] = sum(end - at for is_spot, at, end in blocks if is_spot is kind)
        found[f"step_{name}_s"] = took_s / found[f"steps_{name}"]
    return found | {"spot_over_undisturbed": found["step_spot_s"] / found["step_undisturbed_s"]}


def _found(status: Status, groups: list[str]) -> dict[str, Any]:
    names = ("groups_lost", "c1_violations", "hosts_noticed", "migrations_kv", "tokens_reprefilled", "staleness_max")
    lost = {each.name: each.reason for each in status.hosts if each.state == "lost"}
    counters = {name: status.counters[name] for name in names}
    doubled = len(groups) - len(set(groups))
    found = {"groups_taken": len(groups), "lost_or_doubled": counters["groups_lost"] + doubled}
    return {**found, **counters, "hosts_lost": lost}


async def _train(
    options: argparse.Namespace, address: str, token: str, commits: list[float], groups: list[str]
) -> None:
    model = resolve_model("tiny", default_cache())
    async with dora.Trainer(address, token=token, connect_s=300.0) as trainer:
        async for step in trainer.steps(groups=round(options.nodes * NODE_GROUPS)):
            groups += [group.group_id async for group in step]
            await step.commit(weights=model, wait=True)
            commits.append(time.monotonic())


async def _until(training: asyncio.Task[None], condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.wait({training}, timeout=0.1)
        if training.done():
            raise SystemExit(f"the trainer ended: {training.exception()!r}")


@contextlib.asynccontextmanager
async def _ended(training: asyncio.Task[None]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
