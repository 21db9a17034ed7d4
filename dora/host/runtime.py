"""A host's work for a service, within its agent: executes orders, runs processes and brings versions.

It lasts for one epoch of the host, or for several if the processes survive a service that keeps its state. Between two
epochs there are no orders: running processes continue, and ended ones are not restarted.
"""

import asyncio
import contextlib
import json
import logging
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import grpc

from dora.config import KvConfig, WorkersConfig
from dora.data.validation import validated_as
from dora.errors import InvalidValue
from dora.host.capacity import capacity_to_wire
from dora.host.command import LaunchContext, pool_argv, pool_id_of, worker_argv, worker_environment
from dora.host.examination import Examiner
from dora.host.files import bring, digest_of, keep_only
from dora.host.folder import DIGEST, LOGS, MODEL, SNAPSHOTS, WEIGHTS
from dora.host.launcher import number_of, prefix_of
from dora.host.placement import Placement
from dora.host.processes import Processes
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import Identity, this_host
from dora.kvtransfer.plane import local_host
from dora.kvtransfer.transports.segments import sweep
from dora.relay.orders import FetchFailed, FetchOrder, Outcome, Upstream
from dora.relay.relay import Relay, RelaySettings
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.errors import ServiceUnavailable, from_rpc_error
from dora.tls.contexts import Contexts
from dora.weights.files import WeightFile
from dora.weights.host_store import HostStore

log = logging.getLogger("dora.host")

HEADER_BYTES: Final = 16 << 20  # of a version's files, beside the tensors


class Files:
    """The service's methods for the model's files."""

    def __init__(self, stub: stubs.HostStub) -> None:
        self._stub = stub

    async def list(self) -> pb.ListFilesReply:
        """Lists the files. Raises ServiceUnavailable."""
        try:
            return await self._stub.ListFiles(pb.ListFilesRequest())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def content(self, name: str) -> AsyncIterator[bytes]:
        """Yields one file's content from its beginning."""
        request = pb.FetchFileRequest(name=name)
        try:
            async for chunk in self._stub.FetchFile(request):
                yield chunk.content
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


class HostRuntime:
    """Call ``run`` once, then ``stand_still`` and ``proceed`` any number of times, then ``close``. ``send`` tells the
    service.

    Orders of one kind are executed in order.
    """

    def __init__(
        self,
        context: LaunchContext,
        placement: Placement,
        send: Callable[[pb.HostMessage], None],
        has_model: bool = False,
    ) -> None:
        """``has_model`` says that the machine already has the model, as the service found; otherwise it is fetched."""
        self._context = context
        self._folder = Path(context.folder)
        self._placement = placement
        self._send = send
        self._has_model = has_model
        self._tokens: dict[str, str] = {}  # by worker id, and the pool's
        self._processes: Processes | None = None
        self._store: HostStore | None = None
        self._opening: asyncio.Future[HostStore] | None = None
        self._is_closed = threading.Event()
        self._relay: Relay | None = None
        self._examiner: Examiner | None = None
        self._examining: asyncio.Task[None] | None = None
        self._is_alone = False
        self.workers_serving = 0  # as the service says
        self.model_digest = ""  # of the model in use
        self.epoch = 0  # the latest

    async def run(self, welcome: pb.HostWelcome, orders: AsyncIterator[pb.HostOrder], service: Files) -> str | None:
        """Executes orders until the service releases the host; returns its reason, or None if the stream just ends."""
        self.epoch = welcome.epoch
        self._workers, self._kv = _settings(welcome.settings_json)
        if not self._has_model:
            await self._bring_model(welcome.model_digest, service)
        self.model_digest = welcome.model_digest
        self._opening = asyncio.get_running_loop().run_in_executor(None, self._checked_store)
        self._store = await asyncio.shield(self._opening)
        self._relay = self._open_relay(welcome, self._store)
        self._processes = self._launch(welcome.pool_token)
        return await self._obey(orders, self._processes, self._relay)

    def stand_still(self) -> bool:
        """Suspends without a service. Returns False if nothing was started that could continue."""
        self._is_alone = True
        if self._processes is None or self._relay is None:
            return False
        self._processes.stand_still()
        return True

    def kept(self) -> pb.KeptHost:
        assert self._processes is not None
        return pb.KeptHost(epoch=self.epoch, worker_ids=self._processes.workers)

    async def proceed(self, welcome: pb.HostWelcome, orders: AsyncIterator[pb.HostOrder]) -> str | None:
        """Continues as ``run`` does under a service that took over. Its relay has another epoch and secret."""
        assert self._processes is not None and self._relay is not None and self._store is not None
        self.epoch = welcome.epoch
        self._workers, self._kv = _settings(welcome.settings_json)
        await asyncio.to_thread(self._relay.close)
        self._is_alone, self.workers_serving = False, 0
        self._relay = self._open_relay(welcome, self._store)
        self._processes.proceed()
        return await self._obey(orders, self._processes, self._relay)

    async def close(self) -> None:
        """Ends all processes at once, since their epoch is over. Afterwards nothing uses the folder."""
        self._is_closed.set()
        if self._examining is not None:
            self._examining.cancel()
        if self._opening is not None:
            await asyncio.wait([self._opening])
        if self._processes is not None:
            await self._processes.close(grace_s=0)
            sweep(self._folder / SNAPSHOTS)
        if self._relay is not None:
            await asyncio.to_thread(self._relay.close)

    def report(self) -> pb.HostReport:
        """Returns the heartbeat. Also cleans up after ended processes."""
        processes = self._processes
        report = pb.HostReport(capacity=capacity_to_wire(self._folder))
        if processes is not None:
            sweep(self._folder / SNAPSHOTS)
            report.troubles.update(processes.statuses())
            if processes.failed.done() and not processes.failed.cancelled():
                report.failed = str(processes.failed.exception())
        return report

    async def _obey(self, orders: AsyncIterator[pb.HostOrder], processes: Processes, relay: Relay) -> str | None:
        async for order in orders:
            match order.WhichOneof("kind"):
                case "start_worker":
                    start = order.start_worker
                    self._tokens[start.worker_id] = start.token
                    processes.start(start.worker_id)
                case "stop_worker":
                    stop = order.stop_worker
                    if stop.token:
                        self._tokens[stop.worker_id] = stop.token
                    processes.stop(stop.worker_id, again=stop.again)
                case "fetch_version":
                    relay.fetch(_order(order.fetch_version))
                case "drop_version":
                    await asyncio.to_thread(relay.drop, order.drop_version.name)
                case "examine":
                    self._examine(order.examine)
                case "serving":
                    self.workers_serving = order.serving.workers
                case "leave":
                    await processes.close()
                    return order.leave.reason
                case kind:
                    raise InvalidValue("order", kind, "one that this DORA knows")
        return None

    def _examine(self, order: pb.ExamineHost) -> None:
        """Examines the machine beside its work. The service orders the next one after this one's answer."""
        if self._examiner is None or (self._examining is not None and not self._examining.done()):
            return
        examiner, received_at = self._examiner, time.time()

        async def work() -> None:
            found = await asyncio.to_thread(examiner.examine, order, received_at)
            if not self._is_alone:
                self._send(pb.HostMessage(examined=found))

        self._examining = asyncio.create_task(work())

    def _launch(self, pool_token: str) -> Processes:
        pool_id, prefix = pool_id_of(self._context.host), prefix_of(self._context.host)
        self._tokens[pool_id] = pool_token

        def command(worker_id: str) -> list[str]:
            if worker_id == pool_id:
                return pool_argv(self._kv, pool_id, self._context)
            return worker_argv(self._workers, worker_id, self._context)

        def environment(worker_id: str) -> Mapping[str, str]:
            workers = self._workers
            environment = worker_environment(workers, self._tokens[worker_id], self._context.tls)
            if worker_id == pool_id:
                return environment
            return {**environment, **self._placement.environment(number_of(prefix, worker_id), workers.ranks)}

        processes = Processes(
            self._workers,
            command,
            environment,
            self._folder / LOGS,
            lambda error: log.error("logs cannot be written: %s", error.strerror),
            [pool_id] if pool_token else [],
            prefix,
            bound=True,
            check=lambda workers: self._placement.check(workers, self._workers.ranks),
        )
        processes.open()
        return processes

    # -------------------------------------------------------------------------------------------------------- weights

    async def _bring_model(self, digest: str, service: Files) -> None:
        folder, whole = self._folder / MODEL, self._folder / DIGEST
        if not whole.is_file() or whole.read_text() != digest:
            whole.unlink(missing_ok=True)
            shutil.rmtree(self._folder / WEIGHTS, ignore_errors=True)  # they belong to another model
        folder.mkdir(exist_ok=True)
        reply = await service.list()
        files = [WeightFile(each.name, each.file_bytes, each.blake3) for each in reply.files]
        try:
            keep_only(folder, files)
            await bring(folder, files, service.content)
        except (InvalidValue, OSError) as error:
            raise ServiceUnavailable(f"the model cannot be brought: {error}") from error
        if digest_of(files) != digest:
            raise ServiceUnavailable("the model's files are not those that the service announced")
        whole.write_text(digest)

    def _checked_store(self) -> HostStore:
        """Opens the host's store. Damaged versions of an earlier agent are not reported as present."""
        store = HostStore(self._folder / WEIGHTS, self._context.model)
        for version in store.versions():
            if self._is_closed.is_set():
                break
            if version and not store.is_sound(version):
                log.warning("version %d in %s is damaged, and is brought anew if it is wanted", version, store.root)
                store.retire(version)
        return store

    def _open_relay(self, welcome: pb.HostWelcome, store: HostStore) -> Relay:
        context = self._context
        store.bound_bytes = welcome.versions_most * (store.reference.content_bytes + HEADER_BYTES)
        loop = asyncio.get_running_loop()

        def tell(outcome: Outcome) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
                loop.call_soon_threadsafe(self._tell, outcome)

        own = Identity(context.host, welcome.epoch, store.name(0), this_host())
        listener = Listener(context.kv_host or local_host(context.address))
        tls = Contexts(context.tls) if context.tls is not None else None
        relay = Relay(store, listener, own, RelaySettings(welcome.relay_secret, tls=tls), tell)
        self._examiner = Examiner(own, welcome.relay_secret, store, self._folder, context.tls)
        held = [store.name(version) for version in store.versions() if version]
        self._send(pb.HostMessage(ready=pb.HostReady(relay_address=relay.address, held=held)))
        return relay

    def _tell(self, outcome: Outcome) -> None:
        if self._is_alone:
            return
        if isinstance(outcome, FetchFailed):
            failed = pb.VersionFailed(name=outcome.name, reason=outcome.reason, culprits=outcome.culprits)
            self._send(pb.HostMessage(failed=failed))
            return
        arrived = pb.VersionArrived(
            name=outcome.name, upstream=outcome.upstream, came_bytes=outcome.came_bytes, took_s=outcome.took_s
        )
        if outcome.link is not None:
            arrived.bytes_per_s, arrived.start_s = outcome.link.bytes_per_s, outcome.link.start_s
        self._send(pb.HostMessage(arrived=arrived))


def _settings(text: str) -> tuple[WorkersConfig, KvConfig]:
    tree: dict[str, Any] = json.loads(text)
    return validated_as(WorkersConfig, tree["workers"], "workers"), validated_as(KvConfig, tree["kv"], "kv")


def _order(fetch: pb.FetchVersion) -> FetchOrder:
    upstreams = tuple(Upstream(each.host, each.epoch, each.address, each.base) for each in fetch.upstreams)
    return FetchOrder(fetch.name, upstreams, fetch.piece_bytes)
