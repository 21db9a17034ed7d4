"""Roles: the calls of each, its token, and the caller that a token identifies.

The owner's token may do everything that a client or a host may. The other tokens are derived from it by a hash that is
slow to invert (scrypt; RFC 7914), so a service restarted with the same token has the same tokens for all roles. A
worker that the service or a host's agent starts has a token of its own. It is valid for that worker's name until the
worker is restarted or its host is lost.
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from dora.rpc.channel import bearer

_TOKEN_BYTES: Final = 24
_SCRYPT: Final = {"n": 1 << 14, "r": 8, "p": 1}  # 16 MiB and some 50 ms a guess


class Role(StrEnum):
    """The role of a caller."""

    OWNER = "owner"
    TRAINER = "trainer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    WORKER = "worker"
    HOST = "host"


SERVICES: Final[Mapping[str, Role]] = {
    "Trainer": Role.TRAINER,
    "Prompts": Role.SUBMITTER,
    "Operator": Role.OPERATOR,
    "Worker": Role.WORKER,
    "Host": Role.HOST,
}  # services of dora.proto, with the role for each


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller. ``worker_id``: for a worker that the service started, the only name that it may use."""

    role: Role
    worker_id: str = ""
    grant: int = field(default=0, compare=False)  # counts the tokens that the service gave out

    def may(self, needed: Role) -> bool:
        return self.role is needed or (self.role is Role.OWNER and needed is not Role.WORKER)


CALLER: Final[ContextVar[Caller]] = ContextVar("caller")  # of the current call


class Tokens:
    """The tokens of one service."""

    def __init__(self, owner: str = "") -> None:
        """``owner``: the owner's token; empty: a new one. Raises InvalidValue for a token that no header can hold."""
        owner = owner or secrets.token_urlsafe(_TOKEN_BYTES)
        bearer(owner)
        root = hashlib.scrypt(owner.encode(), salt=b"dora tokens", **_SCRYPT)
        derived: dict[Role, str] = {role: _derived(root, role) for role in Role if role is not Role.OWNER}
        self.of: Mapping[Role, str] = {Role.OWNER: owner, **derived}
        self._callers = {_digest(token): Caller(role) for role, token in self.of.items()}
        self._started: dict[str, bytes] = {}  # by worker id: the digest of the token that it was started with
        self._grants = 0

    def caller(self, token: str) -> Caller | None:
        """Returns the token's caller; None for an unknown one. Looks up its digest, so that timing reveals nothing."""
        return self._callers.get(_digest(token))

    def started(self, worker_id: str) -> str:
        """Returns a new token for a worker that is being started; its previous one becomes invalid."""
        self.ended(worker_id)
        self._grants += 1
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._started[worker_id] = _digest(token)
        self._callers[self._started[worker_id]] = Caller(Role.WORKER, worker_id, self._grants)
        return token

    def ended(self, worker_id: str) -> None:
        """Invalidates the worker's token; its name stays the service's."""
        self._callers.pop(self._started.get(worker_id, b""), None)

    def mark_of(self, worker_id: str) -> str:
        """Returns the mark of the worker's token, by which a later service recognises it; empty: it has none."""
        return self._started.get(worker_id, b"").hex()

    def known_again(self, worker_id: str, mark: str) -> None:
        """Accepts the token of a worker that an earlier service started."""
        self.ended(worker_id)
        self._grants += 1
        self._started[worker_id] = bytes.fromhex(mark)
        self._callers[self._started[worker_id]] = Caller(Role.WORKER, worker_id, self._grants)

    def may_take(self, caller: Caller, worker_id: str) -> bool:
        """Returns whether a worker may use this name. A name of the service's is for the worker that it started, while
        its token is valid; the caller showed the token some time ago.
        """
        if not caller.worker_id:
            return worker_id not in self._started
        held = self._callers.get(self._started.get(worker_id, b""))
        return caller.worker_id == worker_id and held is not None and held.grant == caller.grant


def _derived(root: bytes, role: Role) -> str:
    return base64.urlsafe_b64encode(hmac.digest(root, role.encode(), "sha256")[:_TOKEN_BYTES]).decode()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
