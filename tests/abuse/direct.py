"""A running service's calls without the network: its own interceptors and handlers, given bytes as gRPC would."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined] # missing from the type stubs

from dora.rpc.interceptor import AccessInterceptor
from dora.rpc.proven import Metadata, ProvenSession
from tests.proofs import session_with


class Details:
    """grpc.HandlerCallDetails, which is made by gRPC alone."""

    def __init__(self, method: str, metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = metadata


class Aborted(Exception):
    """The call ended with a status."""


class Context:
    """A handler's view of a call: messages to read, and an end. ``pause`` is awaited before each message."""

    def __init__(self, messages: Iterable[bytes], pause: Any = None) -> None:
        self._messages = iter(messages)
        self._pause = pause
        self.status: grpc.StatusCode | None = None
        self.reason = ""
        self._when_done: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._when_done.append(callback)

    def done(self) -> None:
        """The call is over, whoever ended it."""
        for callback in self._when_done:
            callback(self)

    def peer(self) -> str:
        return "here"

    def auth_context(self) -> dict[str, list[bytes]]:
        """Without TLS."""
        return {}

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass

    def trailing_metadata(self) -> Any:
        return ()

    async def read(self) -> Any:
        if self._pause is not None:
            await self._pause()
        return next(self._messages, EOF)

    async def abort(self, code: grpc.StatusCode, details: str = "", metadata: Any = ()) -> None:
        for text in (details, *(value for _, value in metadata)):
            text.encode()  # it has to travel
        assert sum(len(value) for _, value in metadata) < 8000 and len(details.encode()) < 8000
        self.status, self.reason = code, details
        raise Aborted


class Direct:
    """The handlers of the server that is made within ``of_next_server``."""

    def __init__(self) -> None:
        self._interceptors: tuple[Any, ...] = ()
        self._handlers: list[Any] = []
        self._sessions: dict[str, ProvenSession] = {}  # by token

    def took(self, interceptors: Iterable[Any], server: Any) -> None:
        self._interceptors = tuple(interceptors)
        add = server.add_generic_rpc_handlers

        def adding(handlers: Any) -> None:
            self._handlers.extend(handlers)
            add(handlers)

        server.add_generic_rpc_handlers = adding

    def servicers(self) -> set[Any]:
        """The objects whose methods these are."""
        methods = (each for handlers in self._handlers for each in handlers._method_handlers.values())
        return {
            (each.unary_unary or each.unary_stream or each.stream_unary or each.stream_stream).__self__
            for each in methods
        }

    def _session(self, token: str) -> ProvenSession:
        if token not in self._sessions:
            (access,) = (each for each in self._interceptors if isinstance(each, AccessInterceptor))
            self._sessions[token] = session_with(access.challenges, token)
        return self._sessions[token]

    async def replies(self, method: str, token: str, context: Context) -> AsyncIterator[Any]:
        """Yields a call's answers; ends with its status in ``context``. A bug raises."""
        details = Details(method, self._session(token).credential(method).metadata)

        async def found(_: Any) -> Any:
            return next(filter(None, (handler.service(details) for handler in self._handlers)))

        continuation = found
        for interceptor in reversed(self._interceptors):
            continuation = _bound(interceptor, continuation)
        handler = await continuation(details)
        try:
            async for reply in handler.stream_stream(None, context):
                yield reply
            context.status = grpc.StatusCode.OK
        except Aborted:
            pass
        finally:
            context.done()


def _bound(interceptor: Any, following: Any) -> Any:
    return lambda details: interceptor.intercept_service(following, details)


@contextmanager
def of_next_server() -> Iterator[Direct]:
    """Takes hold of the handlers of the server that is made in this block."""
    direct, make = Direct(), grpc.aio.server

    def making(*arguments: Any, interceptors: Any = (), **options: Any) -> Any:
        server = make(*arguments, interceptors=interceptors, **options)
        direct.took(interceptors, server)
        return server

    grpc.aio.server = making
    try:
        yield direct
    finally:
        grpc.aio.server = make


async def turns(count: int) -> None:
    """Lets others run."""
    for _ in range(count):
        await asyncio.sleep(0)
