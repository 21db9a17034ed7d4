"""Callers in any language: bytes out, the first reply or the error back."""

from typing import Any

import grpc

from dora.rpc.errors import from_rpc_error
from dora.rpc.roles import Role
from tests.proofs import credentials

METHODS = {
    "/dora.v1.Trainer/Attach": Role.TRAINER,
    "/dora.v1.Trainer/StreamStep": Role.TRAINER,
    "/dora.v1.Trainer/UploadWeights": Role.TRAINER,
    "/dora.v1.Prompts/Submit": Role.SUBMITTER,
    "/dora.v1.Operator/GetStatus": Role.OPERATOR,
    "/dora.v1.Operator/WatchStatus": Role.OPERATOR,
    "/dora.v1.Worker/Connect": Role.WORKER,
    "/dora.v1.Host/Join": Role.HOST,
    "/dora.v1.Host/ListFiles": Role.HOST,
}


async def answer(channel: grpc.aio.Channel, method: str, content: bytes, token: str | None) -> Any:
    """Returns the result of a call with one message, as bytes: its first reply, or the error."""
    metadata = await credentials(channel, method, token) if token is not None else ()
    call = channel.unary_stream(method)(content, metadata=metadata, timeout=30)
    try:
        return await call.read()
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    finally:
        call.cancel()
