"""Who may call what: the roles, the token of each, and what a token says of its caller.

The owner's token may do everything that a client may. The others follow from it, by a hash that is slow to guess
backwards (scrypt; RFC 7914), so a service that is started again with the same token has the same tokens for all roles.
A worker that the service starts has a token of its own, which is good for its name alone, until that worker is started
again.
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dora.rpc.channel import bearer

_TOKEN_BYTES: Final = 24
_SCRYPT: Final = {"n": 1 << 14, "r": 8, "p": 1}  # 16 MiB and some 50 ms a guess


class Role(StrEnum):
    """What a caller is to the service."""

    OWNER = "owner"
    TRAINER = "trainer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    WORKER = "worker"


SERVICES: Final[Mapping[str, Role]] = {
    "Trainer": Role.TRAINER,
    "Prompts": Role.SUBMITTER,
    "Operator": Role.OPERATOR,
    "Worker": Role.WORKER,
}  # of dora.proto, with the role that each is for


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling. ``worker_id``: of a worker that the service has started, the one name that it may take."""

    role: Role
    worker_id: str = ""

    def may(self, needed: Role) -> bool:
        return self.role is needed or (self.role is Role.OWNER and needed is not Role.WORKER)


CALLER: Final[ContextVar[Caller]] = ContextVar("caller")  # of the call that is being answered


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

    def caller(self, token: str) -> Caller | None:
        """Whose token it is; None for nobody's. Looked up by its digest, so that the time taken tells nothing of it."""
        return self._callers.get(_digest(token))

    def started(self, worker_id: str) -> str:
        """A new token for a worker that is being started; the one that it was started with before ends."""
        self._callers.pop(self._started.get(worker_id, b""), None)
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._started[worker_id] = _digest(token)
        self._callers[self._started[worker_id]] = Caller(Role.WORKER, worker_id)
        return token

    def may_take(self, caller: Caller, worker_id: str) -> bool:
        """Whether a worker may bear this name: one that the service gave out is for the worker that it started."""
        return caller.worker_id == worker_id if caller.worker_id else worker_id not in self._started


def _derived(root: bytes, role: Role) -> str:
    return base64.urlsafe_b64encode(hmac.digest(root, role.encode(), "sha256")[:_TOKEN_BYTES]).decode()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
