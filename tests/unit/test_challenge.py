"""Sessions of proven callers: each call's number once, each challenge for a time, and no more sessions than may be."""

import base64
import random
import secrets

import pytest

from dora.errors import InvalidValue, LimitExceeded
from dora.rpc import challenge, proof
from dora.rpc.challenge import FRESH_S, NUMBERS_KEPT, Challenges
from dora.rpc.errors import Unauthenticated
from dora.rpc.proven import ProvenSession
from dora.rpc.roles import Caller, Role, ServiceTokens, TokenGeneration
from tests.owner_token import owner_token
from tests.proofs import session_with
from tests.refusals import refused

METHOD = "/dora.v1.Operator/GetStatus"
TOKENS = ServiceTokens(owner_token("owner"))


class Bench:
    """The challenges of one incarnation, and its clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.challenges = Challenges(TOKENS, lambda: self.now_s)

    def session(self, token: str = owner_token("owner")) -> ProvenSession:
        return session_with(self.challenges, token)

    def admit(self, session: ProvenSession, number: int, method: str = METHOD) -> challenge.ProvenCall:
        session.calls = number - 1
        sent = session.credential(METHOD)
        return self.challenges.admit(sent.metadata, method)


@pytest.mark.parametrize("seed", range(20))
def test_a_number_is_taken_once_in_whatever_order_calls_come(seed: int) -> None:
    chance, bench, used, highest = random.Random(seed), Bench(), set[int](), 0
    session = bench.session()
    for _ in range(400):
        number = max(1, highest + chance.choice((1, 1, 2, 0, -1, -chance.randrange(2 * NUMBERS_KEPT), 700)))
        if number in used or number <= highest - NUMBERS_KEPT:
            with refused(Unauthenticated, field="proof", value="(used before)"):
                bench.admit(session, number)
            continue
        assert bench.admit(session, number).caller == Caller(Role.OWNER)
        used.add(number)
        highest = max(highest, number)


def test_a_session_begins_soon_after_its_challenge_and_then_lasts() -> None:
    bench = Bench()
    early, late = bench.session(), bench.session()
    bench.admit(early, 1)
    bench.now_s += FRESH_S + 1
    bench.admit(early, 2)
    with refused(Unauthenticated, field="proof"):
        bench.admit(late, 1)


def test_sessions_are_bounded_and_a_dropped_one_never_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(challenge, "SESSIONS_MAX", 3)
    bench = Bench()
    sessions = [bench.session() for _ in range(4)]
    for each in sessions[:3]:
        bench.admit(each, 1)
    with refused(LimitExceeded, field="sessions", value="4"):
        bench.admit(sessions[3], 1)
    bench.now_s += FRESH_S + 1
    bench.admit(sessions[0], 2)
    bench.admit(bench.session(), 1)
    for session, number in ((sessions[1], 1), (sessions[1], 2)):
        with refused(Unauthenticated, field="proof"):
            bench.admit(session, number)
    bench.admit(sessions[0], 3)


def test_a_proof_is_for_its_method_its_incarnation_and_its_key() -> None:
    bench, other = Bench(), Bench()
    session = bench.session()
    with refused(Unauthenticated, field="token", value="(wrong)"):
        bench.admit(session, 1, "/dora.v1.Operator/Drain")
    with refused(Unauthenticated, field="proof", value="(of another incarnation)"):
        other.admit(session, 1)
    with refused(Unauthenticated, field="token", value="(wrong)"):
        bench.admit(bench.session("wrong"), 1)


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_credential_is_refused(seed: int) -> None:
    chance, bench = random.Random(seed), Bench()
    (name, header), *_ = bench.session().credential(METHOD).metadata
    damaged = list(header)
    place = chance.randrange(len(damaged))
    damaged[place] = chance.choice([each for each in "A9- /=\x00é" if each != damaged[place]])
    with pytest.raises(Unauthenticated):
        bench.challenges.admit(((name, "".join(damaged)),), METHOD)


@pytest.mark.parametrize("text", ["AB==", "AAB=", "A+==", "A", "AA"])
def test_content_has_one_form(text: str) -> None:
    """So that a changed letter is always seen."""
    with pytest.raises(ValueError):
        proof.bytes_of(text)


def test_an_ended_token_is_known_but_not_valid() -> None:
    """So that its worker can believe that it is refused."""
    tokens, nonce = ServiceTokens(owner_token("owner")), secrets.token_bytes(proof.NONCE_BYTES)
    first, second = tokens.started("w0"), tokens.started("w0")
    held = Challenges(tokens)
    for token, is_ended in ((first, True), (second, False)):
        reply = held.answer(nonce, "w0")
        key = proof.key_of(token)
        assert proof.service_proof(key, nonce, reply.nonce) in {each.proof for each in reply.proofs}
        session = ProvenSession("worker/w0", nonce, reply.nonce, proof.session_key(key, nonce, reply.nonce))
        sent = session.credential("/dora.v1.Worker/Connect")
        found = held.admit(sent.metadata, "/dora.v1.Worker/Connect")
        assert found.is_ended is is_ended and found.caller.worker_id == "w0" and found.answer == sent.answer


WEAK = (
    "", "secret", "correct-horse", "correct-horse-battery-staple", "a" * 200, "1234567890" * 8, "deadbeef" * 8,
    "P4ssw0rd!" * 4, "2026-11-29T14:30", "0123456789abcdef", "an-owner's-token-of-more-than-32-characters",
)  # fmt: skip


@pytest.mark.parametrize("token", WEAK[1:])
def test_a_weak_owners_token_is_refused(token: str) -> None:
    with refused(InvalidValue, field="token", value="(not shown)", names=[128, "openssl"]) as caught:
        TokenGeneration.following(token)
    assert token not in str(caught.value)


def test_tokens_that_programs_make_are_strong_enough() -> None:
    chance = random.Random(63)
    for size in (32, 48):
        raw = [chance.randbytes(size) for _ in range(200)]
        for each in raw:
            for token in (each.hex(), each.hex().upper(), proof.text_of(each), base64.b64encode(each).decode()):
                assert proof.strength_of(token) >= proof.OWNER_BITS, token
    assert all(proof.strength_of(ServiceTokens().of[Role.OWNER]) >= proof.OWNER_BITS for _ in range(3))
    assert not any(proof.strength_of(token) >= proof.OWNER_BITS for token in WEAK)
