"""Roles: the token of each, and the caller that a token or a certificate identifies. ``access`` says who may call what.

The owner's token may do everything that a client or a host may. The other tokens are derived from it by a hash that is
slow to invert (scrypt; RFC 7914), so a service restarted with the same token has the same tokens for all roles. A
worker that the service or a host's agent starts has a token of its own. It is valid for that worker's name until the
worker is restarted or its host is lost. Tokens never cross a connection: both ends prove their keys (``proof``).
"""

import base64
import hmac
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Self
from urllib.parse import unquote

from dora.rpc import proof

_TOKEN_BYTES: Final = 24
_REPLACED_MAX: Final = 4  # owner's tokens that are valid beside the newest
_ENDED_MAX: Final = 4  # earlier tokens of a worker, to which the service still proves itself


class Role(StrEnum):
    OWNER = "owner"
    TRAINER = "trainer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    WORKER = "worker"
    HOST = "host"
    ENVIRONMENT = "environment"  # attends sessions
    SESSION = "session"  # asks turns of sessions, and ends them
    METRICS = "metrics"  # reads the state of the service


SERVICES: Final[Mapping[str, Role]] = {
    "Trainer": Role.TRAINER,
    "Prompts": Role.SUBMITTER,
    "Sessions": Role.SUBMITTER,
    "Operator": Role.OPERATOR,
    "Worker": Role.WORKER,
    "Host": Role.HOST,
}  # services of dora.proto, with the role that may use all of each
CERTIFIED: Final[Mapping[str, tuple[Role, ...]]] = {
    **{str(role): (role,) for role in Role},
    "service": (Role.WORKER, Role.SUBMITTER, Role.METRICS),
    "host": (Role.HOST, Role.WORKER),
    "front": (Role.SUBMITTER, Role.METRICS),
}  # by the role in a certificate: those that its holder has. Workers use the certificate of their machine, and the
# service's own front and environment use that of the service.


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller. A worker that the service started may use no name but ``worker_id``."""

    role: Role
    worker_id: str = ""
    grant: int = field(default=0, compare=False)  # counts the tokens that the service gave out
    name: str = field(default="", compare=False)  # in its certificate


CALLER: Final[ContextVar[Caller]] = ContextVar("caller")  # of the current call
SESSION: Final[ContextVar[bytes]] = ContextVar("session")  # its session's key, for sealing


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a token, with its caller. If it ``is_ended``, the token is not valid."""

    key: bytes = field(repr=False)
    caller: Caller
    is_ended: bool = False


@dataclass(frozen=True, slots=True)
class TokenGeneration:
    """An owner's token and those that follow from it."""

    of: Mapping[Role, str] = field(repr=False)
    keys: Mapping[Role, Key]

    @classmethod
    def following(cls, owner: str) -> Self:
        """Derives the tokens, in some 50 ms. Raises InvalidValue for a token that is weak or not printable ASCII."""
        proof.check_owner(owner)
        root = proof.root_of(owner)
        derived: dict[Role, str] = {role: _derived(root, role) for role in Role if role is not Role.OWNER}
        keys = {role: Key(proof.key_of(token), Caller(role)) for role, token in derived.items()}
        return cls(
            {Role.OWNER: owner, **derived}, {Role.OWNER: Key(proof.owner_key_of(root), Caller(Role.OWNER)), **keys}
        )


class ServiceTokens:
    """The tokens of one service. Earlier ones stay valid for an overlap after they were replaced."""

    def __init__(self, owner: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """``owner`` is the owner's token, a new one if empty. Raises InvalidValue as ``TokenGeneration.following``."""
        self._clock = clock
        self._newest = TokenGeneration.following(owner or secrets.token_hex(proof.OWNER_BITS // 4))
        self._replaced: list[tuple[float, TokenGeneration]] = []  # each with the end of its overlap, the latest last
        self._started: dict[str, list[Key]] = {}  # by worker id: of its tokens, the newest last
        self._grants = 0

    @property
    def of(self) -> Mapping[Role, str]:
        return self._newest.of

    def replace(self, newest: TokenGeneration, overlap_s: float) -> None:
        """Makes these tokens the valid ones. Those before stay valid for so long; of many replaced ones, the last."""
        self._replaced.append((self._clock() + overlap_s, self._newest))
        del self._replaced[:-_REPLACED_MAX]
        self._newest = newest

    def _valid(self) -> Iterator[TokenGeneration]:
        now_s = self._clock()
        self._replaced = [each for each in self._replaced if now_s < each[0]]
        yield self._newest
        yield from (generation for _, generation in reversed(self._replaced))

    def keys(self, worker_id: str) -> Iterator[tuple[str, Key]]:
        """Yields the holders' names, and their keys: of all roles, and of a started worker's tokens, ended ones too."""
        for generation in self._valid():
            yield from generation.keys.items()
        for each in self._started.get(worker_id, ()):
            yield proof.holder_of_worker(worker_id), each

    def keys_of(self, holder: str) -> list[Key]:
        """Returns the keys that a holder of this name may have; an unknown holder has none."""
        role, _, worker_id = holder.partition("/")
        if worker_id:
            return list(self._started.get(unquote(worker_id), ())) if role == Role.WORKER else []
        return [generation.keys[Role(role)] for generation in self._valid()] if role in list(Role) else []

    def role_of(self, token: str) -> Role | None:
        """Returns the role of a token in the clear, or None if it is no role's, or not valid."""
        raw = token.encode(errors="replace")
        found = None
        for generation in self._valid():
            for role, known in generation.of.items():
                if hmac.compare_digest(raw, known.encode()):
                    found = role
        return found

    def started(self, worker_id: str) -> str:
        """Returns a new token for a worker that is being started; its previous one becomes invalid."""
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._begin(worker_id, proof.key_of(token))
        return token

    def ended(self, worker_id: str) -> None:
        """Invalidates the worker's token; its name stays the service's."""
        keys = self._started.get(worker_id)
        if keys:
            keys[-1] = replace(keys[-1], is_ended=True)

    def mark_of(self, worker_id: str) -> str:
        """Returns the mark of the worker's token, by which a later service recognises it, or an empty text. A process
        with the mark can prove the token.
        """
        keys = self._started.get(worker_id)
        return keys[-1].key.hex() if keys else ""

    def known_again(self, worker_id: str, mark: str) -> None:
        """Accepts the token of a worker that an earlier service started."""
        self._begin(worker_id, bytes.fromhex(mark))

    def _begin(self, worker_id: str, key: bytes) -> None:
        self.ended(worker_id)
        self._grants += 1
        keys = self._started.setdefault(worker_id, [])
        keys.append(Key(key, Caller(Role.WORKER, worker_id, self._grants)))
        del keys[: -1 - _ENDED_MAX]

    def may_take(self, caller: Caller, worker_id: str) -> bool:
        """Returns whether a worker may use this name. A name of the service's is for the worker that it started, while
        its token is valid; the caller showed the token some time ago.
        """
        if not caller.worker_id:
            return worker_id not in self._started
        keys = self._started.get(worker_id)
        held = keys[-1] if keys else None
        is_valid = held is not None and not held.is_ended and held.caller.grant == caller.grant
        return caller.worker_id == worker_id and is_valid


def _derived(root: bytes, role: Role) -> str:
    return base64.urlsafe_b64encode(hmac.digest(root, role.encode(), "sha256")[:_TOKEN_BYTES]).decode()
