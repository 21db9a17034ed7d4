"""Capabilities of sessions: a caller of the role session uses those that it was given, and no others by their ids."""

import hmac
import secrets
from typing import Final

from dora.errors import NotFound
from dora.rpc.roles import CALLER, Role

SECRET_BYTES: Final = 32


class Capabilities:
    """Makes and checks capabilities with the ``secret`` of an earlier incarnation, or a new one."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret or secrets.token_bytes(SECRET_BYTES)

    def of(self, session_id: str) -> bytes:
        return hmac.digest(self._secret, session_id.encode(), "sha256")

    def needed(self) -> bool:
        """Returns whether the caller may use only the sessions that it was given."""
        caller = CALLER.get(None)
        return caller is not None and caller.role is Role.SESSION

    def check(self, session_id: str, given: bytes) -> None:
        """Raises NotFound, as for an unknown session, if the caller needs a capability and shows another."""
        if self.needed() and not hmac.compare_digest(given, self.of(session_id)):
            raise NotFound("session_id", session_id[:80], "an open session, with its capability")
