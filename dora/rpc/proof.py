"""Proofs of a secret that never crosses the connection, for both ends of a call. See the header of dora.proto.

    client                                                   service
    Challenge: a nonce of the client  ──────────────────▶
                ◀── a nonce of the service, and a proof of each key that it holds
    a call: both nonces, a number, a proof of the call ──▶
                ◀── a proof of the answer, then messages

Keys are derived from tokens. Proofs are HMAC-SHA256 (RFC 2104) with a label for each use. The owner's token may be one
that a person chose, and a stranger can ask for proofs to try guesses on, so it must have ``OWNER_BITS``, and its key
takes scrypt (RFC 7914): each guess costs 16 MiB and some 50 ms. All other tokens are random.
"""

import base64
import binascii
import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self
from urllib.parse import quote

from dora.errors import InvalidValue

CHALLENGE: Final = "/dora.v1.Access/Challenge"
NONCE_KEY: Final = "dora-nonce"  # metadata of a challenge: the client's nonce, in base64
WORKER_KEY: Final = "dora-worker"  # and the percent-encoded name of a worker or pool
AUTHORIZATION: Final = "authorization"  # metadata of each call: its credential
ANSWER_KEY: Final = "dora-proof"  # initial and trailing metadata of each answer: its proof, in base64
SCHEME: Final = "DORA1"  # of a credential
OWNER: Final = "owner"  # the holder whose key is stretched
NONCE_BYTES: Final = 16
SERVICE_NONCE_BYTES: Final = 40
OWNER_BITS: Final = 128  # of an owner's token, estimated
_MAC_BYTES: Final = 32
_SAME: Final = 5  # characters that occur again
_HEX_SIZE: Final = 16
_KINDS: Final = (("[0-9]", 10), ("[a-z]", 26), ("[A-Z]", 26))
_SCRYPT: Final = {"n": 1 << 14, "r": 8, "p": 1}


def root_of(owner: str) -> bytes:
    """Returns the root of all keys and tokens that are derived from the owner's token. Takes some 50 ms."""
    return hashlib.scrypt(owner.encode(), salt=b"dora tokens", **_SCRYPT)


@lru_cache(maxsize=64)
def _owner_key(token: str) -> bytes:
    return owner_key_of(root_of(token))


def owner_key_of(root: bytes) -> bytes:
    return hmac.digest(root, b"the owner's key", "sha256")


def key_of(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def holder_key(holder: str, token: str) -> bytes:
    """Returns the key of a holder's token. Takes some 50 ms for the owner's, the first time."""
    return _owner_key(token) if holder == OWNER else key_of(token)


def holder_of_worker(worker_id: str) -> str:
    """Returns the name of the secret that a worker has from its start; a role's secret has the role's name."""
    return "worker/" + quote(worker_id, safe="")


def service_proof(key: bytes, client_nonce: bytes, service_nonce: bytes) -> bytes:
    return _mac(key, b"service", client_nonce, service_nonce)


def session_key(key: bytes, client_nonce: bytes, service_nonce: bytes) -> bytes:
    return _mac(key, b"session", client_nonce, service_nonce)


def call_proof(session: bytes, method: str, number: int) -> bytes:
    return _mac(session, b"call", method.encode(), number.to_bytes(8))


def answer_proof(session: bytes, method: str, number: int) -> bytes:
    return _mac(session, b"answer", method.encode(), number.to_bytes(8))


@dataclass(frozen=True, slots=True)
class Credential:
    """A client's proof for one call, as the header ``authorization`` has it."""

    holder: str
    client_nonce: bytes
    service_nonce: bytes
    number: int  # of the call within its session
    proof: bytes

    def header(self) -> str:
        nonces = text_of(self.client_nonce + self.service_nonce)
        return f"{SCHEME} {self.holder} {nonces} {self.number} {text_of(self.proof)}"

    @classmethod
    def parsed(cls, header: str) -> Self | None:
        """Parses a header. Returns None for any other text."""
        try:
            scheme, holder, nonces, number, proof = header.split(" ")
            both, mac = bytes_of(nonces), bytes_of(proof)
        except ValueError:
            return None
        sizes = (NONCE_BYTES + SERVICE_NONCE_BYTES, _MAC_BYTES)
        if scheme != SCHEME or (len(both), len(mac)) != sizes or not (number.isdecimal() and len(number) < 16):
            return None
        return cls(holder, both[:NONCE_BYTES], both[NONCE_BYTES:], int(number), mac)


def seal(session: bytes, content: bytes) -> bytes:
    """Encrypts a short secret for the other end of a session: HMAC in counter mode, then HMAC over the result."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    body = _masked(session, nonce, content)
    return nonce + body + _mac(session, b"sealed", nonce, body)


def unseal(session: bytes, sealed: bytes) -> bytes:
    """Decrypts a secret. Raises InvalidValue if ``seal`` did not make it for this session."""
    nonce, body, mac = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:-_MAC_BYTES], sealed[-_MAC_BYTES:]
    if len(sealed) < NONCE_BYTES + _MAC_BYTES or not hmac.compare_digest(mac, _mac(session, b"sealed", nonce, body)):
        raise InvalidValue("secret", "(not shown)", "sealed for this session")
    return _masked(session, nonce, body)


def check_token(token: str) -> None:
    """Raises InvalidValue for a token that no file or variable holds safely."""
    if not token.isascii() or not token.isprintable():
        raise InvalidValue("token", "(not shown)", "printable ASCII")


def check_owner(token: str) -> None:
    """Raises InvalidValue as ``check_token``, and for an owner's token that can be guessed: a stranger gets proofs to
    try guesses on, and all roles' tokens follow from it.
    """
    check_token(token)
    if (bits := strength_of(token)) < OWNER_BITS:
        allowed = f"one of {OWNER_BITS} bits or more, such as `openssl rand -hex 32` prints"
        raise InvalidValue("token", "(not shown)", allowed, f"has about {bits:.0f} bits by its length and characters")


def strength_of(token: str) -> float:
    """Estimates a token's bits cautiously. A letter of a word counts 2, and repeated characters count once."""
    words = sum(map(len, re.findall("[a-z]{4,}|[A-Z]{4,}", token)))
    once = min(len(token), len({token[at : at + _SAME] for at in range(len(token) - _SAME + 1)}) + _SAME - 1)
    if 4 * words >= 3 * sum(map(str.isalnum, token)):
        return 2.0 * once
    size = sum(size for kind, size in _KINDS if re.search(kind, token))
    return once * math.log2(_HEX_SIZE if re.fullmatch("[0-9a-f-]+|[0-9A-F-]+", token) and size > 10 else max(1, size))


def text_of(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode()


def bytes_of(text: str) -> bytes:
    """Decodes URL-safe base64, of which content has one form only. Raises ValueError."""
    try:
        content = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error
    if text_of(content) != text:
        raise ValueError("not base64 as it is written here: bits that mean nothing are set")
    return content


def _masked(session: bytes, nonce: bytes, content: bytes) -> bytes:
    key = _mac(session, b"mask", nonce)
    blocks: Iterable[bytes] = (_mac(key, b"block", n.to_bytes(8)) for n in range(-(-len(content) // _MAC_BYTES)))
    mask = b"".join(blocks)[: len(content)]
    return bytes(a ^ b for a, b in zip(content, mask, strict=True))


def _mac(key: bytes, label: bytes, *parts: bytes) -> bytes:
    """Computes a MAC. The lengths make the parts unambiguous."""
    framed = b"".join(len(part).to_bytes(8) + part for part in (label, *parts))
    return hmac.digest(key, framed, "sha256")
