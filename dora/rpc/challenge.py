"""The service's half of the proofs: answers challenges, and recognises callers by their proofs.

A challenge leaves nothing behind: the service's nonce has the time of its issue and a sum of both under a key of this
incarnation. A session begins with its first valid call, within ``FRESH_S`` of the challenge. The service then keeps the
numbers of its last calls, so that no call is accepted twice. A session that was not used for the longest time is
dropped when there are too many; its client asks for another challenge. No session outlives the incarnation.
"""

import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dora.errors import MISSING, LimitExceeded
from dora.rpc import dora_pb2 as pb
from dora.rpc import proof
from dora.rpc.access import name_of, token_for
from dora.rpc.errors import Unauthenticated
from dora.rpc.roles import Caller, ServiceTokens

FRESH_S: Final = 30.0  # from a challenge to the first call of its session
SESSIONS_MAX: Final = 16384
NUMBERS_KEPT: Final = 1024  # of a session's calls: older ones than the last so many are refused
ALLOWED: Final = "a new proof of this incarnation's: see Access in dora.proto"
_TIME_BYTES: Final = 8
_SUM_AT: Final = _TIME_BYTES + proof.NONCE_BYTES


@dataclass(slots=True)
class _Numbers:
    """The numbers of a session's calls: the highest, and which of those below it were used."""

    highest: int = 0
    used: int = 0  # bit n: highest - n

    def take(self, number: int) -> bool:
        ahead = number - self.highest
        if ahead > 0:
            self.used = (self.used << min(ahead, NUMBERS_KEPT) | 1) & ((1 << NUMBERS_KEPT) - 1)
            self.highest = number
            return True
        if -ahead >= NUMBERS_KEPT or self.used >> -ahead & 1:
            return False
        self.used |= 1 << -ahead
        return True


@dataclass(frozen=True, slots=True)
class ProvenCall:
    """A caller that has proved its token, for one call."""

    caller: Caller
    session: bytes  # key for what is sealed
    answer: bytes  # the service's proof
    is_ended: bool  # the token was valid once


def authorization_of(metadata: Any) -> str:
    found = ""
    for key, value in metadata or ():
        if key == proof.AUTHORIZATION:
            found = value if isinstance(value, str) else value.decode(errors="replace")
    return found


class Challenges:
    """Challenges and proofs of one incarnation of a service."""

    def __init__(self, tokens: ServiceTokens, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens = tokens
        self._clock = clock
        self._incarnation = secrets.token_bytes(32)
        self._sessions: OrderedDict[bytes, _Numbers] = OrderedDict()  # by the service's nonce, last used last

    def answer(self, client_nonce: bytes, worker_id: str) -> pb.ChallengeReply:
        """Returns a new nonce, and the proof of each key that the client may mean."""
        issued = round(self._clock() * 1000).to_bytes(_TIME_BYTES) + secrets.token_bytes(proof.NONCE_BYTES)
        nonce = issued + self._sum(issued)
        proofs = [
            pb.ServiceProof(holder=holder, proof=proof.service_proof(each.key, client_nonce, nonce))
            for holder, each in self._tokens.keys(worker_id)
        ]
        return pb.ChallengeReply(nonce=nonce, proofs=proofs)

    def admit(self, metadata: Any, method: str) -> ProvenCall:
        """Returns the caller. Raises Unauthenticated without a valid new proof, LimitExceeded for too many sessions."""
        found = authorization_of(metadata)
        if not found:
            raise Unauthenticated("token", MISSING, token_for(name_of(method)))
        credential = proof.Credential.parsed(found)
        if credential is None:
            why = "is a token in the clear, which this release takes from no client"
            raise Unauthenticated(proof.AUTHORIZATION, "(not shown)", "a proof: see Access in dora.proto", why)
        if not self._is_ours(credential.service_nonce):
            raise Unauthenticated("proof", "(of another incarnation)", ALLOWED)
        for key in self._tokens.keys_of(credential.holder):
            session = proof.session_key(key.key, credential.client_nonce, credential.service_nonce)
            if hmac.compare_digest(credential.proof, proof.call_proof(session, method, credential.number)):
                self._use(credential)
                answer = proof.answer_proof(session, method, credential.number)
                return ProvenCall(key.caller, session, answer, key.is_ended)
        raise Unauthenticated("token", "(wrong)", token_for(name_of(method)))

    def _use(self, credential: proof.Credential) -> None:
        """Takes the call's number, and makes the session's record if there is none. Raises Unauthenticated for a
        second use, LimitExceeded for too many new sessions.
        """
        nonce, sessions = credential.service_nonce, self._sessions
        numbers = sessions.get(nonce)
        if numbers is None:
            if not self._is_fresh(nonce):
                raise Unauthenticated("proof", f"(of a challenge {FRESH_S:g} s ago)", ALLOWED)
            if len(sessions) >= SESSIONS_MAX:
                if self._is_fresh(next(iter(sessions))):
                    raise LimitExceeded("sessions", len(sessions) + 1, f"at most {SESSIONS_MAX} in {FRESH_S:g} s")
                sessions.popitem(last=False)
            numbers = sessions[nonce] = _Numbers()
        sessions.move_to_end(nonce)
        if not numbers.take(credential.number):
            raise Unauthenticated("proof", "(used before)", ALLOWED)

    def _is_fresh(self, nonce: bytes) -> bool:
        return self._clock() - int.from_bytes(nonce[:_TIME_BYTES]) / 1000 <= FRESH_S

    def _is_ours(self, nonce: bytes) -> bool:
        return hmac.compare_digest(nonce[_SUM_AT:], self._sum(nonce[:_SUM_AT]))

    def _sum(self, issued: bytes) -> bytes:
        return hmac.digest(self._incarnation, issued, "sha256")[: proof.SERVICE_NONCE_BYTES - _SUM_AT]
