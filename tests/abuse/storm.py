"""Generated calls on every RPC of a running service, and an honest trainer after them.

Most calls reach the service's own interceptors and handlers directly, because that is ten times faster; every
``WIRED``-th goes over gRPC on loopback. Whatever comes is answered or refused with a status that the caller's error
earns. It must not end the service, keep it busy for ever, or stay in memory.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

import dora
from dora.data.trajectory import TrajectoryGroup
from dora.errors import DoraError
from dora.orchestrator.main import ServiceHandle
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import open_channel
from dora.rpc.roles import Role
from tests.abuse.calls import GROUPS, PATIENCE_S, RPCS, WORKERS, Rpc, Service
from tests.abuse.direct import Context, Direct, of_next_server, turns
from tests.proofs import credentials
from tests.service import configured, running, train

WIRED: Final = 20
AT_ONCE: Final = 8  # calls over gRPC
EXPECTED: Final = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
}


@dataclass
class Outcome:
    """The results of the messages to one RPC."""

    name: str
    messages: int = 0
    calls: int = 0
    hung: int = 0
    bugs: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    took_s: float = 0.0

    def ended(self, status: grpc.StatusCode | None, reason: str) -> None:
        self.calls += 1
        self.statuses[status.name if status is not None else "OPEN"] += 1
        if status is not None and status not in EXPECTED and reason != "Internal error from Core":
            self.bugs.append(f"{status.name}: {reason}")


async def storm(service: Service, rpc: Rpc, count: int, chance: random.Random) -> Outcome:
    """``count`` messages to one RPC."""
    outcome, began_s = Outcome(rpc.name), time.monotonic()
    async with open_channel(service.handle.address) as channel:
        wired: set[asyncio.Task[None]] = set()
        while outcome.messages < count and not service.failure and len(outcome.bugs) < 100:
            messages, token = service.messages(rpc, chance), service.token(rpc, chance)
            outcome.messages += len(messages)
            if outcome.calls % WIRED == 0:
                wired.add(asyncio.create_task(_over_grpc(channel, rpc, token, messages, outcome)))
                if len(wired) >= AT_ONCE:
                    _, wired = await asyncio.wait(wired, return_when=asyncio.FIRST_COMPLETED)
            await _directly(service.direct, rpc, token, messages, outcome)
        if wired:
            await asyncio.wait(wired)
    outcome.took_s = time.monotonic() - began_s
    return outcome


async def _directly(direct: Direct, rpc: Rpc, token: str, messages: list[bytes], outcome: Outcome) -> None:
    context = Context(messages, (lambda: turns(2)) if rpc.streams else None)

    async def call() -> None:
        async with aclosing(direct.replies(f"/dora.v1.{rpc.name}", token, context)) as replies:
            async for _ in replies:
                if rpc.waits and not rpc.streams:
                    return

    task = asyncio.create_task(call())
    if rpc.waits:
        await turns(4 + 8 * len(messages))
        if not task.done():
            task.cancel()
    done, _ = await asyncio.wait({task}, timeout=PATIENCE_S)
    if not done:
        outcome.hung += 1
        task.cancel()
    elif not task.cancelled() and (error := task.exception()) is not None:
        outcome.bugs.append(repr(error))
    outcome.ended(context.status, context.reason)


async def _over_grpc(channel: grpc.aio.Channel, rpc: Rpc, token: str, messages: list[bytes], outcome: Outcome) -> None:
    async def sent() -> Any:
        for message in messages:
            yield message

    status, reason = None, ""
    method = f"/dora.v1.{rpc.name}"
    call = channel.stream_stream(method)(sent(), metadata=await credentials(channel, method, token))
    try:
        async with asyncio.timeout(0.05 if rpc.waits else PATIENCE_S):
            async for _ in call:
                pass
        status = grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        status, reason = error.code(), error.details() or ""
    except TimeoutError:
        outcome.hung += not rpc.waits
    finally:
        call.cancel()
    outcome.ended(status, reason)


@dataclass
class Report:
    """The results of a whole storm."""

    outcomes: list[Outcome]
    deaths: int
    failure: str
    wedged_steps: int
    memory_before_bytes: int
    memory_after_bytes: int
    memory_most_bytes: int
    took_s: float


async def stormed(model: Path, count: int, seed: int, told: Callable[[Outcome], None] = lambda _: None) -> Report:
    """``count`` messages to each RPC of one service, then three honest steps."""
    logging.getLogger("dora").setLevel(logging.CRITICAL)
    chance, began_s = random.Random(seed), time.monotonic()
    config = configured(model, workers__engine="fake", workers__count=WORKERS, service__drain_timeout_s=2)
    with of_next_server() as direct:
        running_service = running(config)
        handle = await running_service.__aenter__()
    report = Report([], 0, "", 0, 0, 0, 0, 0.0)
    try:
        async with dora.Trainer(handle.address, token=handle.token) as trainer:
            await train(handle, trainer, steps=1, groups=GROUPS)  # what a service needs once is not the storm's
        service = Service(handle, direct, model)
        report.memory_before_bytes = report.memory_most_bytes = resident_bytes()
        watching = asyncio.create_task(_most(report))
        for rpc in (each for each in RPCS if not each.ends):
            if rpc.kind is pb.CommitStepRequest:
                await service.fill()
            report.outcomes.append(await storm(service, rpc, count, chance))
            told(report.outcomes[-1])
        watching.cancel()
        report.wedged_steps = await _wedged(handle)
        for rpc in (each for each in RPCS if each.ends):
            report.outcomes.append(await storm(service, rpc, count, chance))
            told(report.outcomes[-1])
        report.memory_after_bytes = resident_bytes()
        report.failure = service.failure
    finally:
        try:
            await running_service.__aexit__(None, None, None)
        except Exception as error:
            report.failure = report.failure or repr(error)
    report.deaths = bool(report.failure)
    report.took_s = time.monotonic() - began_s
    return report


async def _most(report: Report) -> None:
    while True:
        report.memory_most_bytes = max(report.memory_most_bytes, resident_bytes())
        await asyncio.sleep(0.05)


async def _wedged(handle: ServiceHandle) -> int:
    """Returns how many of three steps an honest trainer could not train in time. Raises if a promise is broken."""
    steps: list[list[TrajectoryGroup]] = []
    token = handle.tokens[Role.TRAINER]
    try:
        async with asyncio.timeout(3 * PATIENCE_S), dora.Trainer(handle.address, token=token) as trainer:
            steps += await train(handle, trainer, steps=3, groups=GROUPS)
    except (TimeoutError, DoraError):
        return 3
    numbers = [{each.trained_step for group in step for each in group.trajectories} for step in steps]
    first = min(numbers[0])
    assert numbers == [{first}, {first + 1}, {first + 2}]
    assert all(each.staleness <= 1 for step in steps for group in step for each in group.trajectories)
    return 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
