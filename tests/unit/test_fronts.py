"""The fronts that Prometheus scrapes: those that serve, and those that were lost and did not leave."""

import pytest

from dora.errors import InvalidValue
from dora.orchestrator.hosts.fronts import FRONTS_MAX, LOST_S, Front, Fronts
from tests.refusals import refused

ONE = Front("10.0.0.1", 8000, secure=False)
OTHER = Front("10.0.0.2", 8000, secure=False)


def test_a_front_that_was_lost_stays_listed_for_a_while_and_is_listed_once() -> None:
    now = [0.0]
    fronts = Fronts(lambda: now[0])
    with fronts.serving(ONE), fronts.serving(OTHER):
        with fronts.serving(ONE):  # its earlier call is not known to be over yet
            assert list(fronts) == [ONE, OTHER]
        assert list(fronts) == [ONE, OTHER]
    now[0] = LOST_S - 1
    assert sorted(each.host for each in fronts) == [ONE.host, OTHER.host]
    with fronts.serving(ONE):
        now[0] = LOST_S + 1
        assert list(fronts) == [ONE]
    assert list(fronts) == [ONE], "it was lost again"


def test_a_front_that_leaves_is_listed_no_longer_whichever_call_ends_first() -> None:
    fronts = Fronts()
    with fronts.serving(ONE):
        fronts.leave(ONE)
        assert not list(fronts)
    assert not list(fronts)
    with fronts.serving(ONE):
        pass
    fronts.leave(ONE)
    assert not list(fronts)


def test_lost_fronts_are_bounded_and_the_oldest_is_forgotten() -> None:
    fronts = Fronts()
    for port in range(1, FRONTS_MAX + 3):
        with fronts.serving(Front("10.0.0.1", port, secure=False)):
            pass
    assert [each.port for each in fronts] == [*range(3, FRONTS_MAX + 3)]


OWN = (
    ("10.0.0.7:80", "10.0.0.7"), ("[2001:db8::7]:80", "2001:db8::7"), ("0.0.0.0:80", "10.0.0.7"),
    ("[::]:80", "127.0.0.1"), ("127.0.0.1:80", "127.0.0.1"), ("localhost:80", "127.0.0.1"), ("[::]:80", ""),
)  # fmt: skip
OTHERS = (
    ("10.0.0.9:80", "10.0.0.7"), ("127.0.0.1:80", "10.0.0.7"), ("localhost:80", "10.0.0.7"), ("[::1]:80", "10.0.0.7"),
    ("169.254.169.254:80", "127.0.0.1"), ("10.0.0.9:80", "127.0.0.1"), ("no-such-host.invalid:80", "127.0.0.1"),
)  # fmt: skip


@pytest.mark.parametrize(("address", "caller"), OWN)
async def test_a_front_at_its_own_machine_is_listed(address: str, caller: str) -> None:
    await Fronts().check(Front.of(address, caller, secure=False), caller)


@pytest.mark.parametrize(("address", "caller"), OTHERS)
async def test_a_front_at_another_machine_is_refused(address: str, caller: str) -> None:
    with refused(InvalidValue, field="address", names=[caller]):
        await Fronts().check(Front.of(address, caller, secure=False), caller)
