"""Refusals as HTTP statuses, in the shape that the clients of each protocol read."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from dora.errors import Conflict, DoraError, InvalidValue, LimitExceeded, NotFound
from dora.rpc.errors import PermissionDenied, ServiceUnavailable, Unauthenticated

RETRY_AFTER_S: Final = 1
CLIENT_LEFT: Final = 499  # nginx's status for a client that has closed its connection


class TooLarge(LimitExceeded):
    """A request over a limit of size: sending it again is useless."""


class SessionClosed(Conflict):
    """A call of a session that has ended."""

    REFUSED = "has ended"


_STATUSES: Final[tuple[tuple[type[DoraError], HTTPStatus, str], ...]] = (
    (TooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "invalid_request_error"),  # subclasses first
    (LimitExceeded, HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error"),
    (Conflict, HTTPStatus.CONFLICT, "conflict_error"),
    (NotFound, HTTPStatus.NOT_FOUND, "not_found_error"),
    (Unauthenticated, HTTPStatus.UNAUTHORIZED, "authentication_error"),
    (PermissionDenied, HTTPStatus.FORBIDDEN, "permission_error"),
    (InvalidValue, HTTPStatus.BAD_REQUEST, "invalid_request_error"),
    (ServiceUnavailable, HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable_error"),
)
_UNKNOWN: Final = "api_error"
KINDS: Final = tuple(dict.fromkeys((*(name for _, _, name in _STATUSES), _UNKNOWN)))


def status_of(error: DoraError) -> tuple[HTTPStatus, str]:
    """Returns the status of a refusal, and its type as OpenAI names it."""
    for kind, status, name in _STATUSES:
        if isinstance(error, kind):
            return status, name
    return HTTPStatus.INTERNAL_SERVER_ERROR, _UNKNOWN


def headers_of(error: DoraError) -> Mapping[str, str]:
    """Returns the headers that tell clients whether to repeat a request. The OpenAI client repeats a 409 on its own."""
    status, _ = status_of(error)
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return {"Retry-After": str(RETRY_AFTER_S)}
    if status is HTTPStatus.UNAUTHORIZED:
        return {"WWW-Authenticate": "Bearer"}
    return {"x-should-retry": "false"} if status is HTTPStatus.CONFLICT else {}


def openai_body(error: DoraError) -> dict[str, Any]:
    status, kind = status_of(error)
    field = getattr(error, "field", "") or None
    code = "model_not_found" if field == "model" and status is HTTPStatus.NOT_FOUND else None
    if status is HTTPStatus.BAD_REQUEST and "max_model_len_tokens" in str(error):
        code = "context_length_exceeded"  # by which harnesses know that a session has no room, and end their loop
    return {"error": {"message": str(error), "type": kind, "param": field, "code": code or int(status)}}


def category_of(error: DoraError) -> str:
    """Returns whose fault a refusal is, in Tinker's words."""
    status, _ = status_of(error)
    return "user" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server"


def tinker_body(error: DoraError) -> dict[str, Any]:
    return {"error": str(error), "category": category_of(error)}


def anthropic_body(error: DoraError) -> dict[str, Any]:
    status, kind = status_of(error)
    names = {HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error", HTTPStatus.CONFLICT: "invalid_request_error"}
    return {"type": "error", "error": {"type": names.get(status, kind), "message": str(error)}}
