"""What open sessions cost one orchestrator, most of them in tool time, against the same service without any.

    python perf/sessions_open.py --json

The service is the real one, in a process of its own. Its clients are processes of their own, too: a connection carries
at most 128 calls at once. Synthetic workers hold the sessions' KV and sample by the clock. A session alternates turns
of --length tokens and pauses, whose lengths are exponential; they are such that --in-tools of the sessions are in tool
time.

loop_lag_ms_p50, _p99          how late the service's event loop comes back to a sleeper of 5 ms
bytes_per_session              growth of the service's memory from a quarter of the sessions to all, without 8 bytes for
                               each of their tokens; free memory is returned before it is measured
turns_per_s, _per_core_s       turns that ended, by the clock and by the seconds of a core that the service used
turn_ms_p50, _p99              from a turn's call to its end, without the time to sample its tokens

*_vs_idle: by the same figure of the service before its first session.
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections.abc import Awaitable, Sequence
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from orchestrator import GROUP_SIZE, Child, capability, configured, first, shown, stdin_lines, tell
from rich.console import Console
from rich.table import Table
from swarm import Load, Swarm

import dora
from dora.client import Operator
from dora.client.sessions import Session
from dora.orchestrator.setup import open_many_files
from dora.rpc.packed import TOKEN
from dora.rpc.roles import Role

ENVIRONMENT: Final = "perf"
GIVEN: Final = [5, 6, 7]
PAUSE_MOST: Final = 4.0  # of the mean pause
SETTLE_S: Final = 5.0


def main() -> None:
    if sys.argv[1:2] == ["agents"]:
        asyncio.run(be_agents(*sys.argv[2:]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000, help="open at once")
    parser.add_argument("--in-tools", type=float, default=0.95, help="share of them that is in tool time")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--clients", type=int, default=8, help="processes that attend the environment")
    parser.add_argument("--length", type=int, default=128, help="sampled tokens of a turn")
    parser.add_argument("--request-tokens-per-s", type=float, default=32.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="that are measured, of each part")
    parser.add_argument("--set", action="append", default=[], help="a setting of the service: section.field=value")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    open_many_files()
    found = asyncio.run(measured(options))
    if options.json:
        print(json.dumps(found))
        return
    table = Table("figure", "value", title="Open sessions on one orchestrator")
    for name, value in found.items():
        table.add_row(name.replace("_", " "), shown(value))
    Console().print(table)


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    groups, turn_s = math.ceil(options.sessions / GROUP_SIZE), options.length / options.request_tokens_per_s
    pause_s = turn_s * options.in_tools / (1.0 - options.in_tools)
    slots = max(GROUP_SIZE, math.ceil(2 * options.sessions * (1.0 - options.in_tools) / options.workers))
    load = Load(slots, options.length, options.request_tokens_per_s)
    async with contextlib.AsyncExitStack() as stack:
        settings = [
            f'service.state="{stack.enter_context(TemporaryDirectory())}"', 'prompts="none"', "window.size=1",
            f"window.groups_per_step={groups}", 'reward.function="dora.rewards.tiny:score"', *options.set,
        ]  # fmt: skip
        config = configured(options.workers, load, settings)
        service = await stack.enter_async_context(Child.of("service", config.model_dump_json()))
        told = await service.hear()
        address, token = told["address"], told["token"]
        operator = await stack.enter_async_context(Operator(address, token))
        swarm = Swarm(address, told["tokens"][Role.WORKER], capability(config), load, options.workers)
        swarming = asyncio.create_task(swarm.run())
        stack.callback(swarming.cancel)
        await first(swarm.ready(), swarming)
        idle = await figures_of(service, options.seconds, swarming)
        arguments = (address, token, str(groups * GROUP_SIZE), str(pause_s), str(turn_s))
        clients = [
            await stack.enter_async_context(Child.of("agents", *arguments, program=__file__))
            for _ in range(options.clients)
        ]
        held = [
            await held_by(service, clients, submit(address, token, begun, ended), GROUP_SIZE * ended, swarming)
            for begun, ended in pairwise((0, groups // 4, groups))
        ]
        await driven_by(clients)
        before = (await operator.status()).counters
        busy = await figures_of(service, options.seconds, swarming)
        driven, counters = await driven_by(clients), (await operator.status()).counters
        swarming.cancel()
    turns = counters["turns_ended"] - before["turns_ended"]
    grown = {name: held[1][name] - held[0][name] for name in ("rss_bytes", "open", "tokens")}
    return {
        "sessions": driven["open"],
        "in_tools": 1.0 - driven["asking"] / driven["open"],
        "tokens_per_session": driven["tokens"] / driven["open"],
        "loop_lag_ms_p50": busy["lag_ms_p50"],
        "loop_lag_ms_p99": busy["lag_ms_p99"],
        "loop_lag_ms_max": busy["lag_ms_max"],
        "loop_lag_p50_vs_idle": busy["lag_ms_p50"] / idle["lag_ms_p50"],
        "loop_lag_p99_vs_idle": busy["lag_ms_p99"] / idle["lag_ms_p99"],
        "bytes_per_session": (grown["rss_bytes"] - TOKEN.itemsize * grown["tokens"]) / grown["open"],
        "rss_vs_idle": busy["rss_bytes"] / idle["rss_bytes"],
        "turns_per_s": turns / busy["seconds"],
        "turns_per_core_s": turns / busy["cpu_s"],
        "core_share": busy["cpu_s"] / busy["seconds"],
        "core_share_idle": idle["cpu_s"] / idle["seconds"],
        "turn_ms_p50": driven["turn_ms_p50"],
        "turn_ms_p99": driven["turn_ms_p99"],
    }


async def figures_of(service: Child, seconds: float, swarming: asyncio.Task[None]) -> dict[str, float]:
    """What the service used in so many seconds."""
    before = await service.ask("mark")
    await first(asyncio.sleep(seconds), swarming)
    after = await service.ask("mark")
    return after | {"seconds": after["at_s"] - before["at_s"], "cpu_s": after["cpu_s"] - before["cpu_s"]}


async def driven_by(clients: Sequence[Child]) -> dict[str, float]:
    """What the clients have open, and their turns since the last time."""
    told = [await client.ask("mark") for client in clients]
    p50, p99 = np.percentile([took for each in told for took in each["turn_ms"]] or [0.0], (50, 99)).tolist()
    sums = {name: sum(each[name] for each in told) for name in ("open", "asking", "tokens")}
    return sums | {"turn_ms_p50": p50, "turn_ms_p99": p99}


async def held_by(
    service: Child, clients: Sequence[Child], submitting: Awaitable[None], sessions: int, swarming: asyncio.Task[None]
) -> dict[str, float]:
    """What the service holds once so many sessions are open."""
    await submitting
    while (await driven_by(clients))["open"] < sessions:
        await first(asyncio.sleep(0.5), swarming)
    await first(asyncio.sleep(SETTLE_S), swarming)
    return await driven_by(clients) | await service.ask("memory")


async def submit(address: str, token: str, begun: int, ended: int) -> None:
    """Each group has one prompt, of GROUP_SIZE sessions: those with the numbers from ``begun`` up to ``ended``."""
    async with dora.Prompts(address, token) as prompts:
        await prompts.submit(
            [
                {"text": "ab" * 4, "prompt_id": f"p{number}", "group_size": GROUP_SIZE, "environment": ENVIRONMENT}
                for number in range(begun, ended)
            ]
        )


# ------------------------------------------------------------------------------------------------------------- clients


class Agents:
    """The environments of all sessions: each pauses and asks a turn, without end."""

    def __init__(self, pause_s: float, turn_s: float) -> None:
        self._pause_s, self._turn_s = pause_s, turn_s
        self._random = random.Random(0)
        self._asking, self._open, self._tokens = 0, 0, 0
        self._turn_ms: list[float] = []

    async def drive(self, session: Session) -> None:
        self._open += 1
        self._tokens += len(session.response)
        while True:
            await asyncio.sleep(min(self._random.expovariate(1 / self._pause_s), PAUSE_MOST * self._pause_s))
            began_s, self._asking = time.perf_counter(), self._asking + 1
            turn = await session.ask(GIVEN)
            self._asking -= 1
            self._turn_ms.append((time.perf_counter() - began_s - self._turn_s) * 1e3)
            self._tokens += len(GIVEN) + len(turn.token_ids)
            session.response.clear()  # this process has the memory of a client that forgets

    def told(self) -> dict[str, Any]:
        """The state, and the turns since the last time."""
        turn_ms, self._turn_ms = [round(took, 1) for took in self._turn_ms], []
        return {"open": self._open, "asking": self._asking, "tokens": self._tokens, "turn_ms": turn_ms}


async def be_agents(address: str, token: str, sessions: str, pause_s: str, turn_s: str) -> None:
    """Attends the environment. At each line of stdin it says where its sessions are."""
    agents = Agents(float(pause_s), float(turn_s))

    async def drive() -> None:
        async with dora.Sessions(address, token) as attending:
            await attending.drive(ENVIRONMENT, agents.drive, at_once=int(sessions))

    driving = asyncio.create_task(drive())
    async for _ in stdin_lines():
        if driving.done():
            driving.result()
        tell(agents.told())
    driving.cancel()
    await asyncio.gather(driving, return_exceptions=True)


if __name__ == "__main__":
    main()
