"""Identifies the caller before a message is read, and limits the bytes read before memory is taken.

Every call passes this interceptor first. It answers challenges itself. A call without a proof of a token and without a
certificate of a role, or with another role's, ends before a byte of its message is read: HTTP/2 lets a caller send at
most ``LOOKAHEAD_BYTES`` unread bytes. gRPC's own handlers of unary calls read before authentication, so every call is
handled as a stream, which is the same on the wire.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NoReturn
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import EOF  # type: ignore[attr-defined] # missing from the type stubs

from dora.errors import MISSING, DoraError, InvalidValue
from dora.rpc.access import caller_by, check_certificate, may_call, name_of, token_for
from dora.rpc.challenge import Challenges, ProvenCall, authorization_of
from dora.rpc.channel import MAX_MESSAGE_BYTES, connections_most
from dora.rpc.errors import (
    ErrorInterceptor,
    LimitExceeded,
    PermissionDenied,
    ServerInterceptor,
    ServicerContext,
    Unauthenticated,
    abort,
)
from dora.rpc.proof import ANSWER_KEY, CHALLENGE, NONCE_BYTES, NONCE_KEY, WORKER_KEY, bytes_of, text_of
from dora.rpc.roles import CALLER, SERVICES, SESSION, Caller, Role, ServiceTokens
from dora.rpc.room import Room
from dora.system.memory import give_back_memory
from dora.tls.certificate import Holder, holder_of

SMALL_BYTES: Final = 64 << 10  # of a message with only names and numbers
COMMIT_BYTES: Final = 4 << 20  # of a commit with its file names and canary, and of many prompts' ids
TURN_BYTES: Final = 4 << 20  # of a turn with its environment tokens
WORKER_BYTES: Final = 16 << 20  # of a worker's message: the tokens of one report
LARGE_AT_ONCE: Final = 2  # messages of one service that are being read, or are large and not yet answered
UPLOADS_AT_ONCE: Final = 4  # that are being read; further ones wait, unread
TRIMMED_BYTES: Final = 8 << 20  # after a message of this size the C library is asked to return memory
SMALL_S: Final = 10.0  # a small message that is not whole by then is given up
LARGE_S: Final = 120.0  # any other

CALLS_AT_ONCE: Final[Mapping[Role, int]] = {
    Role.TRAINER: 64,
    Role.SUBMITTER: 4096 + 64,  # each turn that is being sampled is a call of an environment
    Role.OPERATOR: 64,
    Role.WORKER: 4096 + 64,
    Role.HOST: 1024 + 64,
}  # open calls of one service; a further one is refused


class Watcher:
    """Learns which peers ask for a challenge, prove a token, and are refused; this one does nothing."""

    def challenged(self, address: str) -> None: ...

    def proven(self, address: str) -> None: ...

    async def refused(self, caller: Caller | None, address: str, method: str, error: DoraError) -> None: ...


Behaviour = Callable[[Any, ServicerContext], AsyncIterator[Any]]


@dataclass(frozen=True, slots=True)
class Limits:
    message_bytes: int = SMALL_BYTES
    is_upload: bool = False


class Counter:
    """The open calls of one kind, at most ``most``."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self._open = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Counts a call. Raises LimitExceeded at the limit."""
        if self._open >= self._most:
            raise LimitExceeded(self._what, self._open + 1, f"at most {self._most} open at once")
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1


class CallLimits:
    """The limits of open calls and memory of one service's callers."""

    def __init__(self, role: Role) -> None:
        self.calls = Counter(f"calls of the {role} service", CALLS_AT_ONCE[role])
        self.reading = asyncio.Semaphore(LARGE_AT_ONCE)
        self.uploading = asyncio.Semaphore(UPLOADS_AT_ONCE)


def server_interceptors(
    tokens: ServiceTokens,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    room: Room | None = None,
    domain: str = "",
    watcher: Watcher | None = None,
) -> Sequence[ServerInterceptor]:
    """Returns the interceptors of ``grpc.aio.server``: access first, then conversion of errors. Needs an event loop.

    ``room`` learns which peers prove a token. ``domain`` is that of names in certificates, as for ``holder_of``.
    """
    access = AccessInterceptor(tokens, max_message_bytes, room or Room(connections_most()), domain, watcher)
    return (access, ErrorInterceptor())


class AccessInterceptor(ServerInterceptor):
    """Refuses unauthorised callers; reads and decodes messages of others within their limits."""

    def __init__(
        self, tokens: ServiceTokens, max_message_bytes: int, room: Room, domain: str, watcher: Watcher | None = None
    ) -> None:
        self._domain = domain
        self._watcher = watcher or Watcher()
        self.challenges = Challenges(tokens)
        self._room = room
        self._pools = {role: CallLimits(role) for role in CALLS_AT_ONCE}
        self._limits = {
            "Submit": Limits(max_message_bytes),
            "Evaluate": Limits(max_message_bytes),
            "Open": Limits(max_message_bytes),
            "Turn": Limits(min(TURN_BYTES, max_message_bytes)),
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
        method = handler_call_details.method
        metadata = handler_call_details.invocation_metadata
        if method == CHALLENGE:
            return grpc.stream_stream_rpc_method_handler(self._challenged(metadata))
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        service, _, name = method.rpartition("/")
        pool = self._pools[SERVICES[service.rpartition(".")[2]]]
        answer = _answering(handler, pool, self._limits.get(name, Limits()))
        return grpc.stream_stream_rpc_method_handler(
            self._guarded(answer, method, metadata, pool), response_serializer=_serializer(handler)
        )

    def _guarded(self, answer: Behaviour, method: str, metadata: Any, pool: CallLimits) -> Behaviour:
        """Returns ``answer`` for a permitted caller, counted among open calls, after the service's proof."""

        async def behaviour(requests: Any, context: ServicerContext) -> AsyncIterator[Any]:
            holder = _holder(context, self._domain)
            try:
                admitted = self._admitted(method, metadata, holder)
            except DoraError as error:
                self._room.refused(context.peer())
                await self._refuse(None, context, method, error)
            self._room.proven(context.peer())
            self._watcher.proven(context.peer())
            CALLER.set(admitted.caller)
            SESSION.set(admitted.session)
            answer_proof = ((ANSWER_KEY, text_of(admitted.answer)),)
            await context.send_initial_metadata(answer_proof)
            context.set_trailing_metadata(answer_proof)
            try:
                try:
                    _check(admitted, name_of(method), holder)
                except DoraError as error:
                    await self._refuse(admitted.caller, context, method, error)
                with pool.calls.one():
                    async for reply in answer(requests, context):
                        yield reply
            except DoraError as error:
                # The traceback would keep the message in memory until the caller has read the error.
                error.__traceback__ = error.__cause__ = error.__context__ = None
                await abort(context, error)

        return behaviour

    async def _refuse(self, caller: Caller | None, context: ServicerContext, method: str, error: DoraError) -> NoReturn:
        await self._watcher.refused(caller, context.peer(), method, error)
        await abort(context, error)

    def _admitted(self, method: str, metadata: Any, holder: Holder | None) -> ProvenCall:
        """Returns the caller by its token, or by its certificate alone. Raises Unauthenticated and LimitExceeded."""
        if holder is not None and not authorization_of(metadata):
            caller = caller_by(holder, name_of(method))
            if caller is not None:
                return ProvenCall(caller, b"", b"", False)
        return self.challenges.admit(metadata, method)

    def _challenged(self, metadata: Any) -> Behaviour:
        """Answers a challenge from its metadata alone, so that callers who send no message hold nothing here."""

        async def answer(_: Any, context: ServicerContext) -> AsyncIterator[bytes]:
            own = {key: value for key, value in metadata or () if key in (NONCE_KEY, WORKER_KEY)}
            try:
                nonce = bytes_of(str(own.get(NONCE_KEY, "")))
            except ValueError:
                nonce = b""
            if len(nonce) != NONCE_BYTES:
                await abort(context, InvalidValue(NONCE_KEY, "(not shown)", f"{NONCE_BYTES} random bytes in base64"))
            self._room.challenged(context.peer())
            self._watcher.challenged(context.peer())
            yield self.challenges.answer(nonce, unquote(str(own.get(WORKER_KEY, "")))).SerializeToString()

        return answer


def _holder(context: ServicerContext, domain: str) -> Holder | None:
    shown = next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
    return holder_of(shown, domain) if shown else None


def _check(admitted: ProvenCall, method: str, holder: Holder | None) -> None:
    """Raises Unauthenticated for a token or certificate that is not valid, PermissionDenied for one of another role. If
    the caller has both, both must permit the method.
    """
    if holder is not None:
        check_certificate(holder, method, datetime.now(UTC))
    if admitted.is_ended:
        raise Unauthenticated("token", "(ended)", token_for(method))
    if not may_call(admitted.caller.role, method):
        raise PermissionDenied("token", f"the {admitted.caller.role}'s", token_for(method))


def _serializer(handler: Any) -> Callable[[Any], bytes]:
    serialize = handler.response_serializer
    return lambda reply: reply if isinstance(reply, bytes) else serialize(reply)


def _answering(handler: Any, pool: CallLimits, limits: Limits) -> Behaviour:
    """Handles a call of any kind as a stream of bytes, and reads at once no more than the pool allows.

    It reads through the context: gRPC's own iterator keeps the last message until garbage collection.
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


async def _only(context: ServicerContext, most_bytes: int) -> bytes:
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
    """Raises LimitExceeded for a message over its method's limit, InvalidValue for a malformed one."""
    if len(content) > most_bytes:
        raise LimitExceeded("message: bytes", len(content), f"at most {most_bytes} for this method")
    try:
        return decode(content)
    except DecodeError as error:
        raise InvalidValue("message", f"{len(content)} bytes", "as dora.proto has it") from error
