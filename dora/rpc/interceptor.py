"""The door: who is calling is known before a message is read, and how much may be read before memory is taken.

Every call passes here first. One without a token, or with the token of another role, ends before a byte of its message
is read: HTTP/2 lets a caller send no more than ``LOOKAHEAD_BYTES`` of what nobody reads. gRPC's own handlers of unary
calls read first and ask later, so here every call is taken as a stream, which on the wire is the same.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import EOF  # type: ignore[attr-defined] # missing from the type stubs

from dora.errors import MISSING, DoraError, InvalidValue
from dora.rpc.channel import AUTHORIZATION, MAX_MESSAGE_BYTES, SCHEME
from dora.rpc.errors import (
    ErrorInterceptor,
    LimitExceeded,
    PermissionDenied,
    ServerInterceptor,
    ServicerContext,
    Unauthenticated,
    abort,
)
from dora.rpc.roles import CALLER, SERVICES, Caller, Role, Tokens
from dora.system.memory import give_back_memory

SMALL_BYTES: Final = 64 << 10  # of a message with names and numbers only
COMMIT_BYTES: Final = 4 << 20  # of a commit, with its files' names and its canary, and of many prompts' ids
WORKER_BYTES: Final = 16 << 20  # of a worker's message: the tokens of one report
LARGE_AT_ONCE: Final = 2  # messages of one service that are being read, or are large and not yet answered
UPLOADS_AT_ONCE: Final = 4  # that are being read; further ones wait, unread
TRIMMED_BYTES: Final = 8 << 20  # after a message of so much, the C library is told to give memory back
SMALL_S: Final = 10.0  # a small message that is not whole by then is given up
LARGE_S: Final = 120.0  # any other

CALLS_AT_ONCE: Final[Mapping[Role, int]] = {
    Role.TRAINER: 64,
    Role.SUBMITTER: 64,
    Role.OPERATOR: 64,
    Role.WORKER: 4096 + 64,
    Role.HOST: 1024 + 64,
}  # open calls of one service; a further one is refused


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one method."""

    message_bytes: int = SMALL_BYTES
    is_upload: bool = False


class Counter:
    """Open calls of one kind, at most ``most``."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self._open = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Raises LimitExceeded where one more is too many."""
        if self._open >= self._most:
            raise LimitExceeded(self._what, self._open + 1, f"at most {self._most} open at once")
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1


class Pool:
    """What the callers of one service may have open and in memory at once."""

    def __init__(self, role: Role) -> None:
        self.calls = Counter(f"calls of the {role} service", CALLS_AT_ONCE[role])
        self.reading = asyncio.Semaphore(LARGE_AT_ONCE)
        self.uploading = asyncio.Semaphore(UPLOADS_AT_ONCE)


def server_interceptors(tokens: Tokens, max_message_bytes: int = MAX_MESSAGE_BYTES) -> Sequence[ServerInterceptor]:
    """For ``grpc.aio.server``: the door first; within it any DoraError becomes its status. Needs an event loop."""
    return (AccessInterceptor(tokens, max_message_bytes), ErrorInterceptor())


class AccessInterceptor(ServerInterceptor):
    """Refuses who has no business here; reads and decodes the messages of the others, within their limits."""

    def __init__(self, tokens: Tokens, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._tokens = tokens
        self._pools = {role: Pool(role) for role in CALLS_AT_ONCE}
        self._limits = {
            "Submit": Limits(max_message_bytes),
            "Evaluate": Limits(max_message_bytes),
            "CommitStep": Limits(min(COMMIT_BYTES, max_message_bytes)),
            "RepublishVersion": Limits(min(COMMIT_BYTES, max_message_bytes)),
            "Cancel": Limits(min(COMMIT_BYTES, max_message_bytes)),
            "UploadWeights": Limits(max_message_bytes, is_upload=True),
            "Connect": Limits(min(WORKER_BYTES, max_message_bytes)),
        }

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        service, _, method = handler_call_details.method.rpartition("/")
        needed = SERVICES[service.rpartition(".")[2]]
        try:
            caller = self._caller(handler_call_details.invocation_metadata, needed)
        except DoraError as error:
            return grpc.stream_stream_rpc_method_handler(_refusing(error))
        answer = _answering(handler, self._pools[needed], self._limits.get(method, Limits()))
        return grpc.stream_stream_rpc_method_handler(
            _admitted(answer, caller, self._pools[needed]), response_serializer=_serializer(handler)
        )

    def _caller(self, metadata: Any, needed: Role) -> Caller:
        """Who is calling. Raises Unauthenticated for nobody known, PermissionDenied for one of another role."""
        given = ""
        for key, value in metadata or ():
            if key == AUTHORIZATION:
                given = value if isinstance(value, str) else value.decode(errors="replace")
        caller = self._tokens.caller(given.removeprefix(SCHEME)) if given.startswith(SCHEME) else None
        allowed = f"the service's {needed} token" + ("" if needed is Role.WORKER else ", or its owner's")
        if caller is None:
            raise Unauthenticated("token", "(wrong)" if given else MISSING, allowed)
        if not caller.may(needed):
            raise PermissionDenied("token", f"the {caller.role}'s", allowed)
        return caller


def _serializer(handler: Any) -> Callable[[Any], bytes]:
    """Of a method's replies; those that are bytes are whole messages."""
    serialize = handler.response_serializer
    return lambda reply: reply if isinstance(reply, bytes) else serialize(reply)


Behaviour = Callable[[Any, ServicerContext], AsyncIterator[Any]]


def _admitted(answer: Behaviour, caller: Caller, pool: Pool) -> Behaviour:
    """``answer`` for this caller, as one of the calls that its service may have open."""

    async def behaviour(requests: Any, context: ServicerContext) -> AsyncIterator[Any]:
        CALLER.set(caller)
        try:
            with pool.calls.one():
                async for reply in answer(requests, context):
                    yield reply
        except DoraError as error:
            # Its traceback would keep the message in memory until the caller has heard of it.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            await abort(context, error)

    return behaviour


def _answering(handler: Any, pool: Pool, limits: Limits) -> Behaviour:
    """Takes a call of any kind as a stream of bytes, and reads no more of it at once than the pool allows.

    It reads by the context: gRPC's own iterator of a call's messages keeps the last one until the garbage collector
    comes by.
    """
    decode = handler.request_deserializer

    async def one(_: Any, context: ServicerContext) -> AsyncIterator[Any]:
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(pool.reading)
            content = await _only(context, limits.message_bytes)
            if len(content) > TRIMMED_BYTES:
                held.callback(give_back_memory)
            request, is_small = _decoded(content, decode, limits.message_bytes), len(content) <= SMALL_BYTES
            del content
            if is_small:
                await held.aclose()
            if handler.response_streaming:
                replies = handler.unary_stream(request, context)
                del request
                async for reply in replies:
                    await held.aclose()  # its message has been read, and the call may last
                    yield reply
            else:
                yield await handler.unary_unary(request, context)

    async def many(_: Any, context: ServicerContext) -> AsyncIterator[Any]:
        async with pool.uploading if limits.is_upload else contextlib.nullcontext():
            messages = _each(context, decode, limits.message_bytes)
            if handler.response_streaming:
                async for reply in handler.stream_stream(messages, context):
                    yield reply
            else:
                yield await handler.stream_unary(messages, context)

    return many if handler.request_streaming else one


def _refusing(error: DoraError) -> Behaviour:
    """Ends a call of any kind without reading of it."""

    async def refuse(_: Any, context: ServicerContext) -> AsyncIterator[Any]:
        await abort(context, error)
        yield  # an async generator, as every streaming method is

    return refuse


async def _only(context: ServicerContext, most_bytes: int) -> bytes:
    """A unary call's message. Raises InvalidValue where none comes, or not in time."""
    limit_s = SMALL_S if most_bytes <= SMALL_BYTES else LARGE_S
    try:
        async with asyncio.timeout(limit_s):
            content = await context.read()
    except TimeoutError as error:
        raise InvalidValue("message", f"not whole after {limit_s:g} s", "sent without such a pause") from error
    if content is EOF:
        raise InvalidValue("message", MISSING, "one message")
    return content


async def _each(context: ServicerContext, decode: Callable[[bytes], Any], most_bytes: int) -> AsyncIterator[Any]:
    while (content := await context.read()) is not EOF:
        message = _decoded(content, decode, most_bytes)
        del content
        yield message


def _decoded(content: bytes, decode: Callable[[bytes], Any], most_bytes: int) -> Any:
    """Raises LimitExceeded for a message that is larger than its method's may be, InvalidValue for one that is none."""
    if len(content) > most_bytes:
        raise LimitExceeded("message: bytes", len(content), f"at most {most_bytes} for this method")
    try:
        return decode(content)
    except DecodeError as error:
        raise InvalidValue("message", f"{len(content)} bytes", "as dora.proto has it") from error
