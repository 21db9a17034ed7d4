"""Shared prefixes at a target: who may name one, who holds it, and its release."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dora.errors import SnapshotRefused
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.snapshot import NO_PREFIX, Prefix
from dora.kvtransfer.transfer import Sent
from dora.worker.prefixes import NOTES_MAX, Prefixes, SentPrefixes
from tests.sweeps import examples

PEER = Peer("w2", 2, "", ("shm",))
STAY = (1, 0)

# At the source.


def a_round(is_ahead: bool = True) -> "Future[Sent]":
    done: Future[Sent] = Future()
    done.set_result(Sent("K", "shm", 1, 0.1, is_ahead=is_ahead))
    return done


def test_a_round_is_named_once_it_has_arrived() -> None:
    sent, done = SentPrefixes(), Future[Sent]()
    sent.note(PEER, done, done, {"r2": (STAY, 7)})
    assert sent.find(PEER, "r2", STAY) is None
    done.set_result(a_round().result())
    assert sent.find(PEER, "r2", STAY) == Prefix("K", 7)
    assert sent.find(PEER, "r3", STAY) == NO_PREFIX


def test_a_round_in_parts_is_named_by_its_first_one_once_the_noted_blocks_have_arrived() -> None:
    sent, first, later = SentPrefixes(), a_round(), Future[Sent]()
    sent.note(PEER, first, first, {"r2": (STAY, 3)})
    assert sent.find(PEER, "r2", STAY) == Prefix("K", 3)
    sent.note(PEER, first, later, {"r2": (STAY, 7)})
    assert sent.find(PEER, "r2", STAY) is None
    later.set_result(Sent("L", "shm", 1, 0.1, is_ahead=True))
    assert sent.find(PEER, "r2", STAY) == Prefix("K", 7)


@pytest.mark.parametrize(
    ("peer", "segment"),
    [(Peer("w3", 3, "", ()), STAY), (Peer("w2", 4, "", ()), STAY), (PEER, (1, 1)), (PEER, (2, 0))],
    ids=["another worker", "its next life", "preempted since", "here for the second time"],
)
def test_what_may_be_other_blocks_is_never_named(peer: Peer, segment: tuple[int, int]) -> None:
    sent = SentPrefixes()
    whole = a_round()
    sent.note(PEER, whole, whole, {"r2": (STAY, 7)})
    assert sent.find(peer, "r2", segment) == NO_PREFIX


def test_a_round_that_failed_or_is_kept_in_memory_is_never_named() -> None:
    sent, failed = SentPrefixes(), Future[Sent]()
    failed.set_exception(RuntimeError("gone"))
    for done in (failed, a_round(is_ahead=False)):
        sent.note(PEER, done, done, {"r2": (STAY, 7)})
        assert sent.find(PEER, "r2", STAY) == NO_PREFIX


def test_notes_have_an_end() -> None:
    sent = SentPrefixes()
    whole = a_round()
    sent.note(PEER, whole, whole, {f"r{index}": (STAY, 1) for index in range(NOTES_MAX + 1)})
    assert sent.find(PEER, "r0", STAY) == NO_PREFIX
    assert sent.find(PEER, f"r{NOTES_MAX}", STAY) == Prefix("K", 1)


# At the target.


class Pool:
    """Blocks with a count of holders each; a block that has none is free."""

    def __init__(self) -> None:
        self.count = Counter[int]()

    def pin(self, block_ids: Sequence[int]) -> None:
        assert all(self.count[block_id] for block_id in block_ids), "a free block may be anything by now"
        self.count.update(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        self.count.subtract(block_ids)
        assert min(self.count.values(), default=0) >= 0

    def holders(self, block_id: int) -> int:
        return self.count[block_id]


class Target(RuleBasedStateMachine):
    """Rounds are written, claimed, taken in or cancelled, and requests end, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.prefixes = Prefixes(self.pool)
        self.written: dict[str, list[int]] = {}  # by rounds whose reservation is there
        self.claimed: list[tuple[Prefix, tuple[int, ...]]] = []
        self.requests: list[tuple[str, Sequence[int]]] = []  # those that were taken in: whose blocks they have
        self.keys: list[str] = []
        self.content: dict[int, str] = {}

    @rule(count=st.integers(1, 4))
    def write(self, count: int) -> None:
        first, key = 4 * len(self.keys), f"K{len(self.keys)}"
        self.keys.append(key)
        self.written[key] = list(range(first, first + count))
        self.pool.count.update(self.written[key])
        self.prefixes.offer(key, self.written[key])
        self.content.update(dict.fromkeys(self.written[key], key))

    @precondition(lambda self: self.keys)
    @rule(data=st.data(), blocks=st.integers(0, 5))
    def claim(self, data: st.DataObject, blocks: int) -> None:
        prefix = Prefix(data.draw(st.sampled_from(self.keys)), blocks)
        try:
            found = self.prefixes.claim(prefix)
        except SnapshotRefused:
            return
        assert len(found) == blocks and all(self.content[block_id] == prefix.key for block_id in found)
        self.claimed.append((prefix, found))

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def write_anew(self, data: st.DataObject) -> None:
        """The copy of a request begins anew in its reservation: it must not be seen by who has claimed its blocks."""
        key = data.draw(st.sampled_from(sorted(self.written)))
        if not self.prefixes.withdraw(key):
            return
        block_ids, again = self.written.pop(key), f"K{len(self.keys)}"
        self.keys.append(again)
        self.written[again] = block_ids
        self.prefixes.offer(again, block_ids)
        self.content.update(dict.fromkeys(block_ids, again))

    @precondition(lambda self: self.written)
    @rule(data=st.data(), takes_in=st.booleans())
    def settle(self, data: st.DataObject, takes_in: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.written)))
        block_ids = self.written.pop(key)
        self.prefixes.keep(key)
        if takes_in:
            self.requests.append((key, block_ids))
        else:
            self.pool.unpin(block_ids)

    @precondition(lambda self: self.claimed)
    @rule(takes_in=st.booleans())
    def settle_claim(self, takes_in: bool) -> None:
        prefix, found = self.claimed.pop()
        if takes_in:
            self.pool.pin(found)
            self.requests.append((prefix.key, found))
        self.prefixes.give_up(prefix)

    @precondition(lambda self: self.requests)
    @rule()
    def end(self) -> None:
        self.pool.unpin(self.requests.pop(0)[1])

    def _taken(self) -> list[Sequence[int]]:
        return [found for _, found in self.requests]

    @invariant()
    def what_was_claimed_stays_as_it_is(self) -> None:
        held = [*self.requests, *((prefix.key, found) for prefix, found in self.claimed)]
        assert all(self.content[block_id] == key for key, found in held for block_id in found)

    @invariant()
    def nothing_is_held_for_nobody(self) -> None:
        self.prefixes.sweep()
        wanted = {block_id for found in [*self.written.values(), *self._taken()] for block_id in found}
        for prefix, found in self.claimed:
            held = [block_id for block_id in found if self.pool.count[block_id]]
            assert len(held) == len(found), prefix
            wanted.update(found)
        assert wanted == {block_id for block_id, count in self.pool.count.items() if count}


TestTarget = Target.TestCase
TestTarget.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)
