"""Whose call a request is: by its key, its client's certificate, or both, which must then both permit it."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from dora.agents.front.keys import is_same
from dora.errors import MISSING
from dora.prompts.check import check_name
from dora.rpc.access import certified, check_certificate, may_call, roles_of
from dora.rpc.errors import PermissionDenied, Unauthenticated
from dora.rpc.roles import Role
from dora.tls.certificate import Holder

TURNS: Final = "Sessions/Turn"  # what requests do, as methods of a service: a certificate needs a role for them
OPENS: Final = "Sessions/Open"
ENDS: Final = "Sessions/EndSession"


@dataclass(frozen=True, slots=True)
class Call:
    """The caller of a request.

    An empty ``session_id`` means a session of its own. It counts to the requests in flight of ``holder``. ``roles`` are
    those of a certificate that limits the sessions it may open. If ``is_own``, its key is that of the session.
    """

    holder: str
    session_id: str = ""
    roles: frozenset[str] = frozenset()
    is_own: bool = False

    def check_opens(self) -> None:
        """Raises PermissionDenied if the caller may open no session."""
        if self.is_own:
            raise PermissionDenied("key", "a session's", "the front's: a session's key is for its own session")
        if self.roles and not any(may_call(role, OPENS) for role in certified(self.roles)):
            allowed = f"for {', '.join(roles_of(OPENS))}, or a call of a session that is open"
            raise PermissionDenied("certificate", f"for {', '.join(sorted(self.roles))}", allowed)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of a request that does ``method``. ``own`` is the session whose key it has, compared."""

    key: str = ""
    session_id: str = ""
    own: str = ""
    holder: Holder | None = None
    method: str = TURNS


class Callers:
    """The callers of a front. All clients have ``key``; if it is empty, any key is accepted. If ``mutual``, all clients
    show certificates, and one with a role needs no key.
    """

    def __init__(self, key: str = "", *, mutual: bool = False) -> None:
        self._key = key.encode()
        self._mutual = mutual

    def is_fronts(self, key: str) -> bool:
        return bool(self._key) and is_same(key, self._key.decode())

    def call_of(self, credentials: Credentials) -> Call:
        """Raises Unauthenticated, PermissionDenied, and InvalidValue for the name of a session."""
        holder, roles = credentials.holder, frozenset[str]()
        if holder is not None:
            check_certificate(holder, credentials.method, datetime.now(UTC))
            roles = holder.roles
        if credentials.own:
            if credentials.session_id not in ("", credentials.own):
                raise Unauthenticated("key", "(of another session)", f"the key of session {credentials.session_id}")
            if not may_call(Role.SESSION, credentials.method):
                raise PermissionDenied("key", "a session's", "the front's: a session's key is for its own session")
            return Call(credentials.own, credentials.own, roles, is_own=True)
        self._check_key(credentials.key, has_role=bool(certified(roles)))
        if credentials.session_id:
            check_name(credentials.session_id, "session")
        named = holder.name if holder is not None else ""
        return Call(credentials.session_id or credentials.key or named or "anyone", credentials.session_id, roles)

    def _check_key(self, key: str, *, has_role: bool) -> None:
        if not self._key:
            if self._mutual and not has_role:
                allowed = f"one for {', '.join(roles_of(TURNS))}, or a session's key"
                raise Unauthenticated("certificate", "(without a role)", allowed)
        elif not (has_role and not key) and not self.is_fronts(key):
            shown = "(another)" if key else MISSING
            raise Unauthenticated("key", shown, "the front's or a session's, as Authorization: Bearer KEY")
