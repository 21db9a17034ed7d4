"""The agent of a machine that joins a service: ``dora host --join``. One stream is one epoch of the host.

    join ──▶ welcome ──▶ the model is fetched ──▶ orders: start, stop, hold a version, retire it ──▶ leave
      ▲                                                  │
      └──── the stream broke: all processes end ◀────────┘
            or continue for the time that the welcome states

Nothing of an epoch remains in the next: workers end before the host joins again and then get new tokens. The folder's
content is kept, and is verified before it is used. Processes continue without a service only if the service keeps its
state, and only its next incarnation takes them over. Under any other service they end.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from dora.errors import Conflict, DoraError
from dora.host.capacity import capacity_to_wire
from dora.host.command import LaunchContext
from dora.host.files import digest_of, model_files
from dora.host.folder import MODEL, host_folder, kept_bytes
from dora.host.gpu_host import check_host
from dora.host.launcher import check_host_name, check_zone
from dora.host.orphaned import Orphaned
from dora.host.placement import Placement, log_unbound, placement_of
from dora.host.runtime import Files, HostRuntime
from dora.release import __version__
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.errors import ServiceUnavailable, from_rpc_error
from dora.rpc.proven import ProvenStream, Prover, proven_channel
from dora.rpc.sealed import unsealed
from dora.session.member import TOLD_TO_END, Member
from dora.system.probes import serving_probes
from dora.tls import Tls
from dora.weights.reference import read_reference

log = logging.getLogger("dora.host")

REPORT_S: Final = 1.0
STILL_S: Final = 30.0  # without a report, after which the agent is not live
JOIN_PAUSE_S: Final = 0.5  # doubled at each attempt, up to
JOIN_PAUSE_MAX_S: Final = 2.0
SAID_PAUSE_S: Final = 10.0  # until the same failure is said again; doubled each time
JOIN_S: Final = 30.0  # a busy service may not answer at once, and one that is being started does later
WELCOME_S: Final = 120.0  # the service may hash the model first
NAME_S: Final = 90.0  # the service may not have noticed yet that this machine's earlier agent ended
MESSAGES_MAX: Final = 1024
AS_THE_SERVICE: Final = -1  # workers


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of ``dora host``. ``kv_host`` is for other hosts, detected if empty; ``zone`` the service's if empty."""

    address: str
    token: str | Path = field(repr=False)  # or the file that has it
    name: str
    workers: int = AS_THE_SERVICE
    device: str = ""
    gpus_for_trainer: int = 0
    model: str = ""  # the service's model, where this machine has it; empty: it is fetched
    folder: str = ""
    kv_host: str = ""
    zone: str = ""
    rejoin_s: float = 600.0  # how long it tries to join again
    probes: str = ""  # HOST:PORT of /live and /ready; empty: none
    notice_s: float = 0.0  # how long it lasts once it is told to end; 0: as the service says
    tls: Tls | None = None


async def run_agent(options: AgentOptions, stop: asyncio.Event, said: Callable[[str], None]) -> str:
    """Joins and serves until the service releases the host; returns the reason. It leaves once ``stop`` is set.

    Raises InvalidValue, Conflict and LimitExceeded if the service refuses the host, and ServiceUnavailable if the
    service was unreachable for ``rejoin_s``, or for ``JOIN_S`` before the first join (``NAME_S`` if the host's name is
    in use). After the first join, Conflict and LimitExceeded are also retried for ``rejoin_s``.
    """
    check_host_name(options.name)
    check_zone(options.zone)
    placement = placement_of(options.device, for_trainer=options.gpus_for_trainer, field="--device")
    await asyncio.to_thread(check_host, placement.gpus, options.device, (), "--device")
    log_unbound(placement)
    with host_folder(options.folder) as folder:
        digest = ""
        if options.model:
            reference = await asyncio.to_thread(read_reference, Path(options.model))
            digest = digest_of(await asyncio.to_thread(model_files, reference))
        agent = _Agent(options, placement, digest, folder, stop, said)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(agent.close)
            if options.probes:
                address = await stack.enter_async_context(serving_probes(options.probes, agent, "--probes"))
                said(f"probes are at http://{address}/live and /ready")
            return await agent.stay_connected()


def _first_join_s(error: DoraError) -> float:
    if isinstance(error, ServiceUnavailable):
        return JOIN_S
    return NAME_S if isinstance(error, Conflict) and error.field == "name" else 0.0


class FailedAttempts:
    """Decides which failed attempts to join are worth a line: a new reason, then after pauses that double."""

    def __init__(self) -> None:
        self._reason = ""
        self._next_s = 0.0
        self._pause_s = SAID_PAUSE_S
        self._count = 0

    def failed(self, reason: str, now_s: float) -> int | None:
        """Counts an attempt. Returns the number so far if it is to be said, or None if it repeats a recent line."""
        self._count += 1
        if reason != self._reason:
            self._reason, self._pause_s = reason, SAID_PAUSE_S
        elif now_s < self._next_s:
            return None
        self._next_s = now_s + self._pause_s
        self._pause_s *= 2
        return self._count


class _Agent(Member):
    """One stream is one session."""

    pause_s = JOIN_PAUSE_S
    pause_max_s = JOIN_PAUSE_MAX_S

    def __init__(
        self,
        options: AgentOptions,
        placement: Placement,
        digest: str,
        folder: Path,
        stop: asyncio.Event,
        said: Callable[[str], None],
    ) -> None:
        super().__init__(stop.is_set)
        self._options = options
        self._prover = Prover(options.address, options.token, tls=options.tls)
        self._placement = placement
        self._digest = digest
        self._folder = folder
        self._stop = stop
        self._said = said
        self._outbox: asyncio.Queue[pb.HostMessage | None] = asyncio.Queue(MESSAGES_MAX)
        self._keeping = Orphaned(said)
        self._attempts = FailedAttempts()
        self._runtime: HostRuntime | None = None  # of the present session
        self._reported_s = 0.0

    def live(self) -> str:
        """Returns why this process does not keep the host's lease, or an empty text. A lost service is no reason."""
        still_s = time.monotonic() - self._reported_s
        if self._runtime is None or still_s <= STILL_S:
            return ""
        return f"the host has sent no report for {still_s:.0f} s"

    def ready(self) -> str:
        """Returns why the host generates nothing for its service, or an empty text."""
        if self._stop.is_set():
            return "the host leaves"
        if self._runtime is None:
            return f"the host has not joined {self._options.address}"
        return "" if self._runtime.workers_serving else "no worker of the host has loaded a version"

    def patience_s(self, error: DoraError) -> float:
        rejoin_s = self._options.rejoin_s
        return rejoin_s if self.was_joined else min(rejoin_s, _first_join_s(error))

    async def live_on(self, pause_s: float, error: DoraError) -> None:
        if (tries := self._attempts.failed(str(error), time.monotonic())) is not None:
            lost = "the service is lost" if self.was_joined else "not joined yet"
            limit_s = self.patience_s(error)
            self._said(f"{lost} ({error}); joining again for up to {limit_s:g} s ({tries} attempts so far)")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), pause_s)

    async def run_session(self) -> str | None:
        self._outbox = asyncio.Queue(MESSAGES_MAX)
        async with proven_channel(self._options.address, self._prover, proxied=False) as channel:
            stub = stubs.HostStub(channel)
            call: Any = stub.Join(self._messages())
            orders = _opened(call)
            try:
                welcome = await asyncio.wait_for(anext(orders, None), WELCOME_S)
                if welcome is None or not welcome.HasField("welcome"):
                    raise ServiceUnavailable(f"{self._options.address} did not say welcome")
                self.has_joined = True
                self._attempts = FailedAttempts()
                how = "is back at" if welcome.welcome.goes_on else "has joined"
                self._said(f"{self._options.name} {how} {self._options.address}")
                return await self._stayed(orders, stub, welcome.welcome)
            except TimeoutError as error:
                raise ServiceUnavailable(f"{self._options.address} did not say welcome in {WELCOME_S:g} s") from error
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            finally:
                call.cancel()

    async def close(self) -> None:
        await self._keeping.end()

    async def _stayed(
        self, orders: AsyncIterator[pb.HostOrder], stub: stubs.HostStub, welcome: pb.HostWelcome
    ) -> str | None:
        runtime, work = await self._taken_up(orders, stub, welcome)
        self._runtime, self._reported_s = runtime, time.monotonic()
        working = asyncio.create_task(work)
        reporting = asyncio.create_task(self._report(runtime))
        stopping = asyncio.create_task(self._leave(self._options.notice_s or welcome.notice_s))
        is_lost = False
        try:
            await asyncio.wait({working, stopping, reporting}, return_when=asyncio.FIRST_COMPLETED)
            if reporting.done():
                reporting.result()
            if not working.done():  # it was told to stop, and the service did not release it in time
                return TOLD_TO_END
            is_lost = (reason := working.result()) is None
            return reason
        except grpc.aio.AioRpcError as error:
            is_lost = isinstance(from_rpc_error(error), ServiceUnavailable)
            raise
        except ServiceUnavailable:
            is_lost = True
            raise
        finally:
            self._runtime = None
            for task in (working, reporting, stopping):
                task.cancel()
            await asyncio.gather(working, reporting, stopping, return_exceptions=True)
            if is_lost and welcome.orphan_timeout_s and runtime.stand_still():
                self._keeping.keep(runtime, welcome.orphan_timeout_s)
            else:
                await runtime.close()

    async def _taken_up(
        self, orders: AsyncIterator[pb.HostOrder], stub: stubs.HostStub, welcome: pb.HostWelcome
    ) -> tuple[HostRuntime, Coroutine[None, None, str | None]]:
        """Returns a runtime and its first work: the kept one if it may continue, else a new one after its end."""
        if welcome.goes_on:
            kept = self._keeping.take()
            if kept is None:  # the service assumes that it continues, until this stream ends
                raise ServiceUnavailable("what had been kept has ended meanwhile")
            return kept, kept.proceed(welcome, orders)
        await self._keeping.end()
        options = self._options
        model = Path(options.model) if options.model else self._folder / MODEL
        context = LaunchContext(
            options.address,
            model,
            options.name,
            str(self._folder),
            options.kv_host,
            device=self._placement.kind,
            tls=self._prover.tls,
        )
        runtime = HostRuntime(context, self._placement, self._send, has_model=bool(options.model))
        return runtime, runtime.run(welcome, orders, Files(stub))

    async def _leave(self, within_s: float) -> None:
        await self._stop.wait()
        self._said(f"leaving within {within_s:g} s: the workers are being emptied")
        self._send(pb.HostMessage(leaving=pb.HostLeaving(within_s=within_s)))
        await asyncio.sleep(within_s)

    async def _report(self, runtime: HostRuntime) -> None:
        while True:
            self._send(pb.HostMessage(report=await asyncio.to_thread(runtime.report)))
            self._reported_s = time.monotonic()
            await asyncio.sleep(REPORT_S)

    def _send(self, message: pb.HostMessage) -> None:
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull as error:
            raise ServiceUnavailable(f"{self._options.address} reads nothing") from error

    async def _messages(self) -> AsyncIterator[pb.HostMessage]:
        yield pb.HostMessage(hello=await asyncio.to_thread(self._hello))
        while (message := await self._outbox.get()) is not None:
            yield message

    def _hello(self) -> pb.HostHello:
        options, capacity = self._options, capacity_to_wire(self._folder)
        capacity.store_free_bytes += kept_bytes(self._folder, has_model=bool(options.model))
        return pb.HostHello(
            name=options.name,
            dora_version=__version__,
            pid=os.getpid(),
            workers=options.workers,
            device=self._placement.kind,
            model_digest=self._digest or self._keeping.model_digest,
            capacity=capacity,
            kept=self._keeping.kept(),
            zone=options.zone,
        )


async def _opened(call: ProvenStream) -> AsyncIterator[pb.HostOrder]:
    async for order in call:
        assert call.session is not None
        yield unsealed(order, call.session.key)
