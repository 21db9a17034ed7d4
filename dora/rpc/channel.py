"""Channels and server options, shared by both ends of every connection."""

import ipaddress
import resource
from typing import Any, Final

import grpc

from dora.errors import InvalidValue
from dora.rpc.errors import LimitExceeded

MAX_MESSAGE_BYTES: Final = 64 << 20
BATCH_BYTES: Final = 512 << 10  # trajectories travel in messages of about this size: 5 times faster than one by one
PACKED_BYTES: Final = 1 << 20  # and packed ones of this: a message costs as much as twenty of them
FRAME_BYTES: Final = 1 << 20  # into which a message to a client is cut; HTTP/2's default is 16 KB
WEIGHT_CHUNK_BYTES: Final = 4 << 20
LOOKAHEAD_BYTES: Final = 1 << 20  # unread bytes of one call: less would slow down uploads over long round trips
STREAMS_AT_ONCE: Final = 128  # calls of one connection; further ones wait at its client, or are refused
CALLS_WAITING_MAX: Final = 16384  # that the event loop has not begun to answer; gRPC drops further ones by chance
CONNECTIONS_MAX: Final = 4096 + 512  # every worker there may be, and others
HANDSHAKE_S: Final = 5.0  # for a connection's first bytes
IDLE_S: Final = 15.0  # of a connection without a call, which holds a place: a client connects again for its next call

Options = list[tuple[str, int]]


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES, proxied: bool = True) -> Options:
    """Returns a client's options: message limits, keepalive that notices a dead host in 30 s, quick reconnects.

    With ``proxied``, uses the environment's ``http_proxy``, gRPC's default.
    """
    return [
        *_limits(max_message_bytes),
        ("grpc.enable_http_proxy", int(proxied)),
        ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, whose calls are the channel's alone
        ("grpc.http2.max_frame_size", FRAME_BYTES),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.min_reconnect_backoff_ms", 5_000),  # time for one attempt: hosts may be far, or busy
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Returns the service's options: the same limits and keepalive, clients' pings allowed, and an error for a busy
    port.

    Unread bytes are bounded too: gRPC would let them grow with the connection's speed, up to 200 MB for eight unread
    messages of 60 MB. The numbers of connections and of calls on each are bounded, and the time of an idle connection.
    """
    return [
        *_limits(max_message_bytes),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ("grpc.max_concurrent_streams", STREAMS_AT_ONCE),
        ("grpc.server.max_pending_requests", CALLS_WAITING_MAX),
        ("grpc.server.max_pending_requests_hard_limit", CALLS_WAITING_MAX),
        ("grpc.max_allowed_incoming_connections", connections_most()),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", round(IDLE_S * 1000)),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


def open_channel(
    address: str,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    *,
    proxied: bool = True,
    credentials: grpc.ChannelCredentials | None = None,
    name: str = "",
) -> grpc.aio.Channel:
    """Returns a channel to ``address`` (host:port), which connects with its first call. Needs a running event loop.

    ``credentials`` are of TLS; without them, the connection is not encrypted. The service's certificate must have
    ``name``, or if that is empty the host, or localhost for the wildcard address.

    This host is never reached through a proxy, because the proxy's own loopback is another host. Without ``proxied``,
    no host is. Raises InvalidValue for an address without port.
    """
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdigit() and 0 < int(port) < 1 << 16):
        raise InvalidValue("address", address, "host:port with a port of 1 to 65535, e.g. 127.0.0.1:7070")
    options: list[tuple[str, str | int]] = [*channel_options(max_message_bytes, proxied and not is_loopback(host))]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    if name or is_wildcard(host):
        options.append(("grpc.ssl_target_name_override", name or "localhost"))
    return grpc.aio.secure_channel(address, credentials, options=options)


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address means this host, as the wildcard address does in a connection."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or mapped.is_unspecified


def is_wildcard(host: str) -> bool:
    """Returns whether a service that listens there listens at all addresses of its machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def check_message_bytes(what: str, message: Any, max_message_bytes: int) -> None:
    """Raises LimitExceeded (an InvalidValue) before sending a message that the receiver would refuse."""
    if message.ByteSize() > max_message_bytes:
        raise LimitExceeded(f"{what}: message bytes", message.ByteSize(), f"at most {max_message_bytes}")


def connections_most() -> int:
    """Returns the service's limit of connections, which leaves half of the process's files to others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(CONNECTIONS_MAX, soft // 2) if soft != resource.RLIM_INFINITY else CONNECTIONS_MAX


def _limits(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]
