"""The gRPC server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from dora.config import Config
from dora.errors import InvalidValue
from dora.orchestrator.guard import tls_of
from dora.orchestrator.recording.audit import Audit, AuditInterceptor
from dora.orchestrator.recovery.incarnation import Incarnation
from dora.orchestrator.services.host import HostService
from dora.orchestrator.services.operator import OperatorService, PromptService
from dora.orchestrator.services.sessions import SessionService
from dora.orchestrator.services.trainer import TrainerService
from dora.orchestrator.services.waking import WakingInterceptor
from dora.orchestrator.services.worker import WorkerService
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.channel import connections_most, server_options
from dora.rpc.interceptor import server_interceptors
from dora.rpc.roles import ServiceTokens
from dora.rpc.room import Room
from dora.rpc.secure import server_credentials
from dora.system.process_tree import listener_of

STREAM_END_S = 1.0  # time for open streams to end by themselves


@dataclass(frozen=True, slots=True)
class Services:
    """Holds the servicers of one service."""

    trainer: TrainerService
    prompts: PromptService
    sessions: SessionService
    operator: OperatorService
    workers: WorkerService
    hosts: HostService


@contextlib.asynccontextmanager
async def serving(
    config: Config, services: Services, incarnation: Incarnation, tokens: ServiceTokens, audit: Audit | None = None
) -> AsyncIterator[str]:
    """Runs the gRPC server; yields the actual listening address (port 0 takes a free one). ``audit`` notes acts."""
    limit_bytes = config.service.max_message_bytes
    room = Room(connections_most())
    noting = () if audit is None else (AuditInterceptor(audit),)
    access = server_interceptors(tokens, limit_bytes, room, config.tls.domain, audit)
    interceptors = (*access, *noting, WakingInterceptor(incarnation))
    server = grpc.aio.server(interceptors=interceptors, options=server_options(limit_bytes))
    stubs.add_TrainerServicer_to_server(services.trainer, server)
    stubs.add_PromptsServicer_to_server(services.prompts, server)
    stubs.add_SessionsServicer_to_server(services.sessions, server)
    stubs.add_OperatorServicer_to_server(services.operator, server)
    stubs.add_WorkerServicer_to_server(services.workers, server)
    stubs.add_HostServicer_to_server(services.hosts, server)
    address = _bound(server, config)
    await server.start()
    room.open(int(address.rpartition(":")[2]))
    watching = None if audit is None else asyncio.create_task(audit.watch())
    try:
        yield address
    finally:
        await asyncio.to_thread(room.close)
        await server.stop(grace=STREAM_END_S)
        if watching is not None and audit is not None:
            watching.cancel()
            await audit.settle(proof_s=0.0)


async def check_address(config: Config) -> None:
    """Raises InvalidValue if ``serving`` could not listen at its address."""
    server = grpc.aio.server(options=server_options(config.service.max_message_bytes))
    try:
        _bound(server, config)
    finally:
        await server.stop(grace=None)


def _bound(server: grpc.aio.Server, config: Config) -> str:
    """Returns the address at which the server will listen. Raises InvalidValue for one in use, and for unusable TLS
    files.
    """
    host, _, port = config.service.listen.rpartition(":")
    tls = tls_of(config)
    try:
        if tls is None:
            return f"{host}:{server.add_insecure_port(f'{host}:{port}')}"
        credentials = server_credentials(tls, mutual=config.tls.clients == "certificate")
        return f"{host}:{server.add_secure_port(f'{host}:{port}', credentials)}"
    except RuntimeError as error:
        owner = listener_of(int(port))
        why = f"is in use by process {owner}" if owner else ""
        raise InvalidValue("--listen", config.service.listen, "a free address of this host", why=why) from error
