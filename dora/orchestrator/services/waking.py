"""Admits only workers and pools while a service is being restored; other calls wait, some seconds at most."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc

from dora.orchestrator.recovery.incarnation import Incarnation
from dora.rpc.errors import ServerInterceptor, wrapped_handler

WORKERS: Final = "/dora.v1.Worker/"


class WakingInterceptor(ServerInterceptor):
    """Runs behind the interceptor that identifies callers."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or str(handler_call_details.method).startswith(WORKERS):
            return handler
        return wrapped_handler(handler, self._one, self._stream)

    def _one(self, behaviour: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            await self._incarnation.reattachment.over()
            return await behaviour(request, context)

        return call

    def _stream(self, behaviour: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._incarnation.reattachment.over()
            async for message in behaviour(request, context):
                yield message

        return call
