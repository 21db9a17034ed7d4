"""A pair of workers chooses a transport, and reports those that failed."""

from dora.kvtransfer.choice import FASTER, MEASURED_LEAST_BYTES, TransportChoice

MUCH = 4 * MEASURED_LEAST_BYTES


def measured(**took_s: float) -> TransportChoice:
    choice = TransportChoice(["shm", "tcp", "gloo"])
    for name, seconds in took_s.items():
        choice.measure(name, MUCH, seconds)
    return choice


def test_the_preferred_one_is_first_until_another_is_clearly_faster() -> None:
    assert measured().order() == ["shm", "tcp", "gloo"]
    assert measured(shm=1.0, tcp=1.0 / FASTER).order() == ["shm", "tcp", "gloo"], "no more than by the factor"
    assert measured(shm=1.0, tcp=0.9 / FASTER).order() == ["tcp", "shm", "gloo"]
    assert measured(shm=9.0, tcp=3.0, gloo=1.0).order() == ["gloo", "tcp", "shm"]
    assert measured(gloo=1e-9).order() == ["shm", "tcp", "gloo"], "what was not measured is not slower"


def test_small_bodies_say_nothing_and_newer_ones_count_more() -> None:
    choice = measured(shm=1.0)
    choice.measure("tcp", MEASURED_LEAST_BYTES - 1, 1e-9)
    assert set(choice.measured()) == {"shm"}
    for _ in range(20):
        choice.measure("shm", MUCH, 2.0)
    assert MUCH / 2 < choice.measured()["shm"] < MUCH / 2 * 1.01
    choice.forget_measured("shm")
    assert choice.measured() == {}


def test_what_fails_is_left_for_good_and_told_once() -> None:
    choice = measured()
    choice.leave("shm", "it cannot be mapped")
    choice.measure("shm", MUCH, 1e-9)
    assert choice.order() == ["tcp", "gloo"] and not choice.works("shm")
    assert choice.take_news() == ["shm: it cannot be mapped"] and choice.take_news() == []


def test_what_has_no_room_just_now_is_told_and_stays() -> None:
    choice = measured()
    choice.pass_over("shm", "too much is in flight")
    assert choice.take_news() == ["shm: too much is in flight"]
    assert choice.order() == ["shm", "tcp", "gloo"]


def test_what_cannot_work_between_two_hosts_is_no_news() -> None:
    choice = measured()
    choice.rule_out("shm")
    choice.rule_out("pigeon")
    assert choice.order() == ["tcp", "gloo"] and choice.take_news() == []


def test_a_doubt_of_the_other_end_is_told_once() -> None:
    choice = measured()
    choice.suspect("tcp", "no room")
    choice.suspect("gloo", "the peer has gone")
    assert choice.take_suspect("tcp") == "no room" and choice.take_suspect("tcp") == ""
    assert choice.take_suspects() == {"gloo": "the peer has gone"} and choice.take_suspects() == {}
    assert choice.order() == ["shm", "tcp", "gloo"], "the thread that sends leaves it, when it closes its half"
