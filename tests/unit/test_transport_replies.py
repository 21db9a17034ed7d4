"""Replies of a pair's other end: each ends one snapshot or answers one question; any other ends the pair."""

import queue
from typing import Any

import pytest

from dora.errors import TransferFailed
from dora.kvtransfer.choice import TransportChoice
from dora.kvtransfer.replies import Replies
from dora.kvtransfer.transfer import Transfer
from dora.kvtransfer.wire import Frame, Kind
from tests.refusals import refused


class Told:
    """Replies of a pair, to which a test says what it likes."""

    def __init__(self) -> None:
        self.choice = TransportChoice(["shm", "tcp"])
        self.again: list[Transfer] = []
        self.replies = Replies(self.choice, self.again.append)

    def hear(self, kind: Kind, **head: Any) -> None:
        self.replies.hear(Frame(kind, head, 0))

    def sending(self, key: str, committed: bool = True) -> Transfer:
        transfer = Transfer("r", [memoryview(b"body")], b"head")
        self.replies.begin(key, "shm")
        if committed:
            self.replies.committed(key, transfer, "shm", began_s=0.0)
        return transfer


def reason(transfer: Transfer) -> str:
    return str(transfer.done.exception(0))


def test_each_word_ends_its_own_snapshot() -> None:
    told = Told()
    one, two = told.sending("1"), told.sending("2")
    told.hear(Kind.REFUSED, key="2", reason="checksum of chunk 1")
    assert reason(two) == "checksum of chunk 1" and not one.done.done() and told.replies.are_due()
    told.hear(Kind.ARRIVED, key="1")
    assert (one.done.result(0).key, one.done.result(0).transport) == ("1", "shm")
    assert not told.replies.are_due()


def test_a_transport_that_failed_at_the_target_is_doubted_and_the_snapshot_sent_again() -> None:
    told = Told()
    one = told.sending("1")
    told.hear(Kind.REFUSED, key="1", reason="it was not written", transport=True)
    assert told.again == [one] and not one.done.done()
    assert told.choice.take_suspects() == {"shm": "it was not written"}


def test_a_refusal_is_heard_while_chunks_are_still_sent() -> None:
    told = Told()
    told.sending("1", committed=False)
    assert told.replies.refused == ""
    told.hear(Kind.REFUSED, key="1", reason="it is expected no longer")
    assert told.replies.refused == "it is expected no longer"
    late = Transfer("r", [memoryview(b"body")], b"head")
    told.replies.committed("1", late, "shm", began_s=0.0)
    assert reason(late) == "it is expected no longer" and not told.replies.are_due()
    told.sending("2", committed=False)
    assert told.replies.refused == "", "the next one is another matter"


def test_a_question_gets_its_answer_or_a_refusal() -> None:
    told = Told()
    told.replies.ask(Kind.OPENED, "1")
    told.hear(Kind.OPENED, key="1", address=5)
    assert told.replies.wait(1) == (Kind.OPENED, {"key": "1", "address": 5})
    told.replies.ask(Kind.ATTACHED, "")
    told.hear(Kind.REFUSED, reason="there is no gloo here")
    assert told.replies.wait(1)[0] is Kind.REFUSED
    with pytest.raises(queue.Empty):
        told.replies.wait(0.001)


@pytest.mark.parametrize(
    ("kind", "key"),
    [(Kind.ATTACHED, "1"), (Kind.OPENED, "2"), (Kind.ARRIVED, "1"), (Kind.REFUSED, "2"), (Kind.CHUNK, "1")],
)
def test_what_answers_no_question_breaks_the_pair(kind: Kind, key: str) -> None:
    """Taken as an answer, it would be the answer to the next question too."""
    told = Told()
    with refused(TransferFailed, field="frame", value=kind.name):
        told.hear(kind, key=key)
    told.replies.ask(Kind.OPENED, "1")
    with refused(TransferFailed, field="frame", value=kind.name):
        told.hear(kind, key=key)


def test_the_end_is_the_end_of_all() -> None:
    told = Told()
    one = told.sending("1")
    told.replies.ask(Kind.OPENED, "2")
    assert told.replies.end("w2 has gone") == [one]
    assert told.replies.wait(1) == (Kind.REFUSED, {"reason": "w2 has gone"})
    assert reason(told.sending("3")) == "w2 has gone", "one that was still being sent then"


def test_a_silent_end_is_noticed() -> None:
    told = Told()
    assert not told.replies.are_overdue(0.0)
    told.sending("1")
    assert not told.replies.are_overdue(3600.0)
    assert told.replies.are_overdue(-1.0)


def test_a_transfer_ends_once() -> None:
    transfer = Transfer("r", [memoryview(b"body")], b"head")
    transfer.fail("first")
    transfer.fail("second")
    assert reason(transfer) == "first"
