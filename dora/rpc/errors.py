"""Converts between DoraError and gRPC status with trailing metadata, by one table. See the header of dora.proto.

The message states the given value, the reason and what is allowed. The metadata has field, value and allowed for
programs, percent-encoded as in URLs, because metadata is ASCII.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast
from urllib.parse import quote, unquote

import grpc

from dora.errors import Conflict, DoraError, InvalidValue, NotFound, VersionRejected
from dora.errors import LimitExceeded as LimitExceeded  # known by this name to whoever calls

if TYPE_CHECKING:
    ServicerContext = grpc.aio.ServicerContext[Any, Any]
    ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:  # generic in the type stubs only
    ServicerContext = grpc.aio.ServicerContext
    ServerInterceptor = grpc.aio.ServerInterceptor

FIELD_KEY: Final = "dora-error-field"
VALUE_KEY: Final = "dora-error-value"
ALLOWED_KEY: Final = "dora-error-allowed"
_REJECTED: Final = "dora-rejected-"  # prefix of a VersionRejected's additional keys: version, reason, ...
_TEXT_BYTES = 512  # of each part: HTTP/2 headers have at most 8 KiB in all, and percent-encoding enlarges them


class Unauthenticated(InvalidValue):
    """The call carried no token, or a wrong one."""

    REFUSED = "is not accepted"


class PermissionDenied(InvalidValue):
    """The call carried a token of another role."""

    REFUSED = "may not do this"


class ServiceUnavailable(DoraError):
    """The service is unreachable, or the connection broke. The call may or may not have been executed."""


class NoAnswer(ServiceUnavailable):
    """The service was reached but did not answer in time."""


class CallFailed(DoraError):
    """The service answered with a status without a field: a bug, or an unexpected failure there."""


_STATUS: Final[tuple[tuple[type[InvalidValue], grpc.StatusCode], ...]] = (
    (Conflict, grpc.StatusCode.FAILED_PRECONDITION),  # subclasses first
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (LimitExceeded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (InvalidValue, grpc.StatusCode.INVALID_ARGUMENT),
)
_ERROR: Final = {status: error for error, status in _STATUS}
# The statuses that a client sees in any call when the service stops, dies or restarts.
_BROKEN: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
# grpc.aio's own status if sending failed before the call's true status came: the stream is closed.
_SEND_FAILED: Final = "Internal error from Core"
_DRAIN_S: Final = 30.0


def status_of(error: DoraError) -> grpc.StatusCode:
    if isinstance(error, ServiceUnavailable):
        return grpc.StatusCode.UNAVAILABLE
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    return grpc.StatusCode.INTERNAL


async def abort(context: ServicerContext, error: DoraError) -> NoReturn:
    """Ends the call with ``error``'s status and message. Its trailing metadata are added to those of the call."""
    metadata: tuple[tuple[str, str], ...] = tuple(context.trailing_metadata() or ())
    if isinstance(error, InvalidValue):
        metadata += (
            (FIELD_KEY, _encoded(error.field)),
            (VALUE_KEY, _encoded(str(error.value))),
            (ALLOWED_KEY, _encoded(error.allowed)),
        )
    if isinstance(error, VersionRejected):
        parts = {
            "version": error.version,
            "reason": error.reason,
            "workers": ",".join(error.worker_ids),
            "canary-difference": error.canary_difference,
        }
        metadata += tuple((_REJECTED + key, _encoded(str(part))) for key, part in parts.items())
    await context.abort(status_of(error), _shortened(str(error)), metadata)
    raise AssertionError("abort() raises")


_OF_TLS: Final = (
    ("CERTIFICATE_VERIFY_FAILED", "the service's certificate is not one that the authority of --tls-ca has issued"),
    ("Hostname Verification", "the service's certificate does not name the host of its address (see DORA_TLS_NAME)"),
    ("WRONG_VERSION_NUMBER", "the service speaks no TLS: leave --tls and DORA_TLS out, or start it with them"),
)  # what gRPC's words of a failed handshake mean


def is_broken(code: grpc.StatusCode, details: str | None) -> bool:
    """Returns whether a status is that of a connection, which needs no service to state it."""
    is_unsent = code is grpc.StatusCode.INTERNAL and details == _SEND_FAILED
    return code in _BROKEN or code is grpc.StatusCode.DEADLINE_EXCEEDED or is_unsent


def from_rpc_error(error: grpc.aio.AioRpcError) -> DoraError:
    """Returns the DoraError that the service raised; ServiceUnavailable for a broken connection; else CallFailed."""
    details = error.details() or error.code().name
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return NoAnswer(details)
    if is_broken(error.code(), details):
        return ServiceUnavailable(
            next((f"{meaning} ({details})" for found, meaning in _OF_TLS if found in details), details)
        )
    kind = _ERROR.get(error.code())
    if kind is None:
        return CallFailed(f"{error.code().name}: {details}")
    trailing = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())
    parts = {str(key): str(value) for key, value in trailing}
    if _REJECTED + "version" in parts:
        version, reason, workers, difference = (
            unquote(parts.get(_REJECTED + key, "")) for key in ("version", "reason", "workers", "canary-difference")
        )
        return VersionRejected(int(version), reason, tuple(filter(None, workers.split(","))), float(difference or 0))
    if FIELD_KEY not in parts:  # gRPC's own refusal, e.g. of a message over the limit
        found = kind("message", "", details)
    else:
        found = kind(*(unquote(parts.get(key, "")) for key in (FIELD_KEY, VALUE_KEY, ALLOWED_KEY)))
    found.args = (details,)  # the service's own sentence: there the value still had its type
    return found


class ErrorInterceptor(ServerInterceptor):
    """Converts a DoraError raised by any method to its status. Streaming methods must be async generators."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return wrapped_handler(handler, _draining if handler.request_streaming else _reporting, _reporting_stream)


UnaryWrapper = Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]]
StreamWrapper = Callable[[Callable[..., Any]], Callable[..., AsyncIterator[Any]]]


def wrapped_handler(handler: Any, unary: UnaryWrapper, stream: StreamWrapper) -> Any:
    """Returns ``handler`` with its behaviour wrapped in ``unary`` or ``stream``, by its kind of response."""
    makers = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    shape = (handler.request_streaming, handler.response_streaming)
    behaviour = {
        (False, False): handler.unary_unary,
        (False, True): handler.unary_stream,
        (True, False): handler.stream_unary,
        (True, True): handler.stream_stream,
    }[shape]
    wrapped = stream(behaviour) if handler.response_streaming else unary(behaviour)
    return makers[shape](
        wrapped,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _reporting(behaviour: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: ServicerContext) -> Any:
        try:
            return await behaviour(request, context)
        except DoraError as error:
            await abort(context, error)

    return call


def _draining(behaviour: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Reads a streaming client's messages to their end before refusing it.

    If the call ended earlier, the client's sending would fail, and the reason could be lost.
    """

    async def call(requests: Any, context: ServicerContext) -> Any:
        try:
            return await behaviour(requests, context)
        except DoraError as error:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_S):
                    async for _ in requests:
                        pass
            await abort(context, error)

    return call


def _reporting_stream(behaviour: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: ServicerContext) -> AsyncIterator[Any]:
        try:
            async for message in behaviour(request, context):
                yield message
        except DoraError as error:
            await abort(context, error)

    return call


def _encoded(text: str) -> str:
    return quote(_shortened(text), safe=" !#$&'()*+,-./:;<=>?@[]^_`{|}~\"")


def _shortened(text: str) -> str:
    """Limits bytes, because percent-encoding triples each; lone surrogates are escaped."""
    content = text.encode(errors="backslashreplace")
    if len(content) <= _TEXT_BYTES:
        return content.decode()
    return content[: _TEXT_BYTES - 4].decode(errors="ignore") + " ..."
