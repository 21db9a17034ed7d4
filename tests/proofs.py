"""Proofs of calls in tests: of clients that send what they like over a channel of their own."""

import secrets

import grpc

from dora.rpc import dora_pb2 as pb
from dora.rpc import proof
from dora.rpc.challenge import Challenges
from dora.rpc.proven import Metadata, ProvenSession
from dora.rpc.roles import Caller, ServiceTokens


async def credentials(channel: grpc.aio.Channel, method: str, token: str, worker_id: str = "") -> Metadata:
    """The metadata of one call with ``token``, which may be a wrong one, in a session of its own."""
    nonce = secrets.token_bytes(proof.NONCE_BYTES)
    ask = channel.unary_unary(proof.CHALLENGE, response_deserializer=pb.ChallengeReply.FromString)
    sent: Metadata = ((proof.NONCE_KEY, proof.text_of(nonce)), (proof.WORKER_KEY, worker_id))
    return session_of(token, nonce, await ask(b"", metadata=sent)).credential(method).metadata


def session_with(challenges: Challenges, token: str) -> ProvenSession:
    """A session without a network."""
    nonce = secrets.token_bytes(proof.NONCE_BYTES)
    return session_of(token, nonce, challenges.answer(nonce, ""))


def session_of(token: str, nonce: bytes, reply: pb.ChallengeReply) -> ProvenSession:
    """A client's session; a wrong token is shown as an operator's."""
    holders = [
        each.holder
        for each in reply.proofs
        if each.proof == proof.service_proof(proof.holder_key(each.holder, token), nonce, reply.nonce)
    ]
    holder = holders[0] if holders else "operator"
    key = proof.session_key(proof.holder_key(holder, token), nonce, reply.nonce)
    return ProvenSession(holder, nonce, reply.nonce, key)


def caller_of(tokens: ServiceTokens, token: str, worker_id: str = "") -> Caller | None:
    """The caller of a valid token."""
    return next(
        (
            each.caller
            for holder, each in tokens.keys(worker_id)
            if each.key == proof.holder_key(holder, token) and not each.is_ended
        ),
        None,
    )
