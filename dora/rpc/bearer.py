"""Callers of HTTP pages: by certificate, by a role's token as Bearer, or by both, which must then both permit the call.

A token crosses the connection, unlike those of gRPC calls: a server takes one under TLS alone.
"""

from datetime import UTC, datetime

from dora.errors import MISSING
from dora.rpc.access import certified, check_certificate, may_call, token_for
from dora.rpc.errors import PermissionDenied, Unauthenticated
from dora.rpc.roles import ServiceTokens
from dora.tls.certificate import Holder

READS = "Operator/GetStatus"  # what a scraper does, as a method in ``access``


def bearer_of(authorization: str) -> str:
    """Returns the token of an HTTP header, or an empty text."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def check_bearer(method: str, holder: Holder | None, token: str, tokens: ServiceTokens | None) -> None:
    """Raises Unauthenticated and PermissionDenied unless the caller may do what ``method`` does. ``holder`` is its
    certificate's, or None. ``tokens`` are those that count; if None, no token does.
    """
    if holder is not None:
        check_certificate(holder, method, datetime.now(UTC))
    if not token:
        if holder is None or not certified(holder.roles):
            raise Unauthenticated("token", MISSING, f"{token_for(method)}, as Authorization: Bearer, or a certificate")
        return
    role = None if tokens is None else tokens.role_of(token)
    if role is None:
        raise Unauthenticated("token", "(wrong)", token_for(method))
    if not may_call(role, method):
        raise PermissionDenied("token", f"the {role}'s", token_for(method))
