"""Channels, server options and the token: what both ends of every connection agree on."""

import hmac
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import grpc

from dora.errors import InvalidValue
from dora.rpc.errors import (
    ErrorInterceptor,
    LimitExceeded,
    ServerInterceptor,
    ServicerContext,
    Unauthenticated,
    abort,
    wrapped_handler,
)

MAX_MESSAGE_BYTES: Final = 64 << 20
BATCH_BYTES: Final = 512 << 10  # trajectories travel in messages of about this size: 5 times faster than one by one
WEIGHT_CHUNK_BYTES: Final = 4 << 20
_AUTHORIZATION: Final = "authorization"
_SCHEME: Final = "Bearer "

Options = list[tuple[str, int]]
Metadata = tuple[tuple[str, str], ...]


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES, proxied: bool = True) -> Options:
    """Of a client: message limits, keepalive that notices a dead host in 30 s, quick reconnects.

    ``proxied``: the environment's ``http_proxy`` holds, as gRPC has it by default.
    """
    return [
        *_limits(max_message_bytes),
        ("grpc.enable_http_proxy", int(proxied)),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Of the service: the same limits and keepalive, clients' pings allowed, and a busy port is an error."""
    return [
        *_limits(max_message_bytes),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


def open_channel(address: str, max_message_bytes: int = MAX_MESSAGE_BYTES, *, proxied: bool = True) -> grpc.aio.Channel:
    """A channel to ``address`` (host:port). It connects with its first call. Needs a running event loop.

    This host is never reached through a proxy, whatever the environment says: the proxy's own loopback is another.
    ``proxied`` False: no other host either. Raises InvalidValue where the address has no port.
    """
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdigit() and 0 < int(port) < 1 << 16):
        raise InvalidValue("address", address, "host:port with a port of 1 to 65535, e.g. 127.0.0.1:7070")
    options = channel_options(max_message_bytes, proxied and not is_loopback(host))
    return grpc.aio.insecure_channel(address, options=options)


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this host itself; so does the wildcard address, when one connects to it."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or mapped.is_unspecified


def bearer(token: str) -> Metadata:
    """The metadata that every call carries. Raises InvalidValue for a token that no header can hold."""
    if not token.isascii() or not token.isprintable():
        raise InvalidValue("token", "(not shown)", "printable ASCII")
    return ((_AUTHORIZATION, _SCHEME + token),)


def server_interceptors(token: str) -> Sequence[ServerInterceptor]:
    """For ``grpc.aio.server``: the token is checked first, and any DoraError becomes its status."""
    return (TokenInterceptor(token), ErrorInterceptor())


class TokenInterceptor(ServerInterceptor):
    """Refuses calls without the token; compares in constant time and never repeats what was given."""

    def __init__(self, token: str) -> None:
        """Raises InvalidValue for an empty token: it would let everybody in."""
        if not token:
            raise InvalidValue("token", "", "at least one character")
        self._expected = bearer(token)[0][1].encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        given = ""
        for key, value in handler_call_details.invocation_metadata or ():
            if key == _AUTHORIZATION:
                given = value if isinstance(value, str) else value.decode(errors="replace")
        if handler is None or hmac.compare_digest(given.encode(), self._expected):
            return handler
        error = Unauthenticated("token", "(none)" if not given else "(wrong)", "the token the service was started with")

        async def refuse(request: Any, context: ServicerContext) -> None:
            await abort(context, error)

        async def refuse_stream(request: Any, context: ServicerContext) -> AsyncIterator[None]:
            await abort(context, error)
            yield  # an async generator, as every streaming method is

        return wrapped_handler(handler, lambda _: refuse, lambda _: refuse_stream)


def check_message_bytes(what: str, message: Any, max_message_bytes: int) -> None:
    """Raises LimitExceeded (an InvalidValue) before a message is sent that the other side would refuse."""
    if message.ByteSize() > max_message_bytes:
        raise LimitExceeded(f"{what}: message bytes", message.ByteSize(), f"at most {max_message_bytes}")


def _limits(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]
