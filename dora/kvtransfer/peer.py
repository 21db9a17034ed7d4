"""Identities of the two ends of a connection, and the proof that each belongs to this run.

Both ends hold the run's secret and prove it without sending it: each makes a keyed BLAKE3 of both greetings, to which
each has added a random number. An end of another run, model or epoch is refused with the reason. Later frames have tags
under a key derived from the same two numbers, so frames of another connection are rejected. Nothing is encrypted,
except under TLS (``Stream.secure``), which comes first.
"""

import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgpack
from blake3 import blake3

from dora.errors import TransferFailed
from dora.kvtransfer.wire import Kind, Stream

PROTOCOL: Final = 2
SECRET_BYTES: Final = 32
ANY_MODEL: Final = ""
_NONCE_BYTES: Final = 16
_TEXT_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Identity:
    """One epoch of one worker, as presented to its peers."""

    worker_id: str
    epoch: int
    fingerprint: str  # EngineCapability.fingerprint; ANY_MODEL for a pool, which only stores snapshots
    host: str  # ``this_host()``: equal if shared memory may be shared
    is_sealed: bool = False  # all that it sends to another host, or takes, goes under TLS

    def needs_proof(self, other: "Identity") -> bool:
        """Returns whether the checksum between the two must find forgeries, as nothing else does."""
        return self.host != other.host and not (self.is_sealed and other.is_sealed)


@dataclass(frozen=True, slots=True)
class Peer:
    """The target worker of a snapshot: its identity, its listener's address and its transports."""

    worker_id: str
    epoch: int
    address: str  # host:port
    transports: tuple[str, ...]


def this_host() -> str:
    """An id that is equal for processes of one running kernel and one network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux: no two processes are assumed to share a host
        return secrets.token_hex(_NONCE_BYTES)


def greet(stream: Stream, own: Identity, peer: Peer, secret: bytes) -> Identity:
    """The sending half's handshake. Returns the peer's identity. Raises TransferFailed with either end's reason."""
    greeting = {
        "protocol": PROTOCOL,
        **_named(own),
        "wanted": [peer.worker_id, peer.epoch],
        "nonce": secrets.token_bytes(_NONCE_BYTES),
    }
    stream.send(Kind.GREETING, greeting)
    challenge = _expect(stream, Kind.CHALLENGE)
    proof = challenge.pop("proof", b"")
    if not _equal(proof, _proof(secret, b"R", greeting, challenge)):
        raise TransferFailed(f"{peer.address} does not hold the secret of this run", "secret", peer.address)
    stream.send(Kind.PROOF, {"proof": _proof(secret, b"S", greeting, challenge)})
    stream.authenticate(*(_proof(secret, role, greeting, challenge) for role in (b"from S", b"from R")))
    _expect(stream, Kind.WELCOME)
    found = _identity(challenge)
    if (found.worker_id, found.epoch) != (peer.worker_id, peer.epoch):
        raise TransferFailed(f"this is {found.worker_id} in epoch {found.epoch}, but epoch {peer.epoch} was wanted")
    _check_model(found, own)
    return found


def answer(stream: Stream, own: Identity, secret: bytes) -> Identity:
    """The receiving half's handshake. Returns the peer's identity. Raises TransferFailed and sends the reason."""
    greeting = _expect(stream, Kind.GREETING)
    if greeting.get("protocol") != PROTOCOL:
        raise _refused(stream, f"protocol = {greeting.get('protocol')!r}, this worker has {PROTOCOL}")
    challenge = {**_named(own), "nonce": secrets.token_bytes(_NONCE_BYTES)}
    stream.send(Kind.CHALLENGE, {**challenge, "proof": _proof(secret, b"R", greeting, challenge)})
    proof = _expect(stream, Kind.PROOF).get("proof", b"")
    if not _equal(proof, _proof(secret, b"S", greeting, challenge)):
        raise _refused(stream, "the secret is not that of this run")
    stream.authenticate(*(_proof(secret, role, greeting, challenge) for role in (b"from R", b"from S")))
    found = _identity(greeting)
    if greeting.get("wanted") != [own.worker_id, own.epoch]:
        raise _refused(stream, f"{greeting.get('wanted')!r} was wanted, this is {own.worker_id} in epoch {own.epoch}")
    try:
        _check_model(found, own)
    except TransferFailed as error:
        raise _refused(stream, str(error)) from error
    stream.send(Kind.WELCOME, {})
    return found


def _check_model(found: Identity, own: Identity) -> None:
    if found.fingerprint != own.fingerprint and ANY_MODEL not in (found.fingerprint, own.fingerprint):
        raise TransferFailed(f"fingerprint = {found.fingerprint!r}, this worker has {own.fingerprint!r}")


def _named(own: Identity) -> dict[str, Any]:
    return {
        "worker_id": own.worker_id,
        "epoch": own.epoch,
        "fingerprint": own.fingerprint,
        "host": own.host,
        "sealed": own.is_sealed,
    }


def _identity(said: dict[str, Any]) -> Identity:
    texts = [said.get(name) for name in ("worker_id", "fingerprint", "host")]
    epoch = said.get("epoch")
    if not isinstance(epoch, int) or not all(isinstance(text, str) and len(text) <= _TEXT_MAX for text in texts):
        raise TransferFailed("the other end did not identify itself")
    worker_id, fingerprint, host = map(str, texts)
    return Identity(worker_id, epoch, fingerprint, host, said.get("sealed") is True)


def _proof(secret: bytes, role: bytes, greeting: dict[str, Any], challenge: dict[str, Any]) -> bytes:
    return blake3(role + msgpack.packb([greeting, challenge]), key=secret).digest()


def _equal(found: object, expected: bytes) -> bool:
    return isinstance(found, bytes) and hmac.compare_digest(found, expected)


def _expect(stream: Stream, kind: Kind) -> dict[str, Any]:
    frame = stream.receive()
    if frame.kind is Kind.REFUSED:
        raise TransferFailed(f"refused: {frame.head.get('reason')}")
    if frame.kind is not kind or frame.body_bytes:
        raise TransferFailed(f"the other end sent {frame.kind.name}, not {kind.name}")
    return frame.head


def _refused(stream: Stream, reason: str) -> TransferFailed:
    stream.send(Kind.REFUSED, {"reason": reason})
    return TransferFailed(f"refused a worker: {reason}")
