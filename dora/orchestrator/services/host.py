"""The gRPC service for agents: one stream each, with reports and orders; and the files that hosts fetch."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from dora.errors import MISSING, InvalidValue, NotFound
from dora.host.files import FILE_CHUNK_BYTES, digest_of, model_files
from dora.orchestrator.hosts.examinations import checked_examination
from dora.orchestrator.hosts.hosts import Hosts
from dora.orchestrator.hosts.remote import HostSession
from dora.orchestrator.recovery.incarnation import Incarnation
from dora.orchestrator.rollout.journal import Journal
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.errors import ServicerContext
from dora.rpc.roles import SESSION
from dora.rpc.sealed import sealed
from dora.system.log_lines import about
from dora.weights.files import WeightFile
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")

HELLO_S: Final = 60.0
TROUBLE_MAX: Final = 4000  # characters of one worker's error


@dataclass(eq=False, repr=False)
class HostService(stubs.HostServicer):
    """Connects hosts' agents. Hashes the model's files once, when the first host joins."""

    _hosts: Hosts
    _store: WeightStore
    _journal: Journal
    _incarnation: Incarnation

    def __post_init__(self) -> None:
        self._model: tuple[WeightFile, ...] | None = None
        self._hashing = asyncio.Lock()

    async def Join(
        self, request_iterator: AsyncIterator[pb.HostMessage], context: ServicerContext
    ) -> AsyncIterator[pb.HostOrder]:
        hosts = self._hosts
        await hosts.opened()
        hello = await self._hello(request_iterator)
        digest = digest_of(await self._files())
        session = hosts.join(hello, digest)
        reading = asyncio.create_task(self._read(session, request_iterator))
        reading.add_done_callback(lambda _: session.give_up())
        try:
            welcome = hosts.welcome(session, digest, self._incarnation.orphan_timeout_s)
            await self._journal.settled()  # a later incarnation must not reuse this epoch
            yield sealed(pb.HostOrder(welcome=welcome), SESSION.get())
            how = "came back" if session.goes_on else "joined"
            log.info("host %s %s (epoch %d)", session.name, how, session.epoch, extra=about(host=session.name))
            hosts.welcomed(session, hello.workers)
            await self._journal.settled()  # a later incarnation must know of the workers whose start is ordered
            while (order := await session.next_order()) is not None:
                yield sealed(order, SESSION.get())
            if reading.done() and not reading.cancelled() and (error := reading.exception()):
                raise error
        finally:
            reading.cancel()
            hosts.lose(session, "its agent's connection broke", "connection")

    async def _hello(self, messages: AsyncIterator[pb.HostMessage]) -> pb.HostHello:
        try:
            async with asyncio.timeout(HELLO_S):
                message = await anext(aiter(messages), None)
        except TimeoutError as error:
            raise InvalidValue("hello", MISSING, f"sent within {HELLO_S:g} s") from error
        if message is None or not message.HasField("hello"):
            raise InvalidValue("hello", MISSING, "the first message of an agent")
        return message.hello

    async def _read(self, session: HostSession, messages: AsyncIterator[pb.HostMessage]) -> None:
        """Raises InvalidValue, which the agent receives, for a wrong message; its epoch ends."""
        hosts = self._hosts
        async for message in messages:
            session.heard()
            if message.HasField("report"):
                report = message.report
                if any(len(text) > TROUBLE_MAX for text in (*report.troubles.values(), report.failed)):
                    raise InvalidValue("troubles", "a longer text", f"texts of at most {TROUBLE_MAX} characters")
                hosts.reported(session, report)
            elif message.HasField("ready"):
                hosts.ready(session, message.ready)
            elif message.HasField("arrived"):
                hosts.arrived(session, message.arrived)
            elif message.HasField("failed"):
                hosts.failed(session, message.failed)
            elif message.HasField("examined"):
                session.examined(checked_examination(message.examined))
            elif message.HasField("leaving"):
                hosts.leaves(session, message.leaving.within_s)
            else:
                raise InvalidValue("kind", message.WhichOneof("kind"), "a message of dora.proto")

    async def ListFiles(self, request: pb.ListFilesRequest, context: ServicerContext) -> pb.ListFilesReply:
        files = await self._files()
        found = [pb.ModelFile(name=each.name, file_bytes=each.file_bytes, blake3=each.blake3) for each in files]
        return pb.ListFilesReply(files=found, digest=digest_of(files))

    async def FetchFile(self, request: pb.FetchFileRequest, context: ServicerContext) -> AsyncIterator[pb.FileChunk]:
        sizes = {file.name: file.file_bytes for file in await self._files()}
        if request.name not in sizes:
            raise NotFound("name", request.name[:200], "a file of ListFiles")
        if request.offset > sizes[request.name]:
            raise InvalidValue("offset", request.offset, f"at most {sizes[request.name]}")
        file = self._store.reference.folder / request.name
        with await asyncio.to_thread(open, file, "rb") as stream:
            stream.seek(request.offset)
            while content := await asyncio.to_thread(stream.read, FILE_CHUNK_BYTES):
                yield pb.FileChunk(content=content)

    async def _files(self) -> tuple[WeightFile, ...]:
        async with self._hashing:
            if self._model is None:
                self._model = await asyncio.to_thread(model_files, self._store.reference)
            return self._model
