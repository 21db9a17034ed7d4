"""The source of each version for each host, one decision at a time. tests/sim/test_broadcast.py has all orders."""

import pytest

from dora.errors import Conflict, InvalidValue
from dora.orchestrator.hosts.broadcast import ATTEMPTS, Broadcast, Command, Drop, Fetch, GaveUp, Gone, Ready
from dora.relay.link import Link, piece_chunks
from dora.relay.orders import Arrived, FetchFailed
from dora.weights.files import CHUNK_BYTES
from dora.weights.manifest import version_name
from tests.refusals import refused

BODY = 1 << 30


def name_of(version: int, edition: int = 0) -> str:
    return version_name(version, f"{edition:032x}")


def of_hosts(count: int, zone: str = "") -> Broadcast:
    broadcast = Broadcast()
    for at in range(count):
        assert broadcast.joined(f"h{at}", 1, f"h{at}:1", zone) == []
    return broadcast


def sources(commands: list[Command]) -> dict[str, list[str]]:
    """Returns, for each host that is to fetch, its sources in order."""
    return {each.host: [up.host for up in each.upstreams] for each in commands if isinstance(each, Fetch)}


def arrived(broadcast: Broadcast, host: str, version: int = 1, link: Link | None = None) -> list[Command]:
    return broadcast.sealed(host, 1, Arrived(name_of(version), "h0", BODY, 1.0, link))


def failed(broadcast: Broadcast, host: str, *culprits: str) -> list[Command]:
    return broadcast.failed(host, 1, FetchFailed(name_of(1), "why", culprits))


def test_a_published_version_goes_down_the_chain() -> None:
    broadcast = of_hosts(4)
    commands = broadcast.published(1, name_of(1), "h0", BODY)
    assert commands[0] == Ready("h0", 1)
    assert sources(commands) == {"h1": ["h0"], "h2": ["h1", "h0"], "h3": ["h2", "h1", "h0"]}
    assert broadcast.has("h0", 1) and not broadcast.has("h1", 1) and broadcast.has("h1", 0)
    assert arrived(broadcast, "h1") == [Ready("h1", 1)] and broadcast.has("h1", 1)
    assert broadcast.published(1, name_of(1), "h0", BODY) == []


def test_only_the_followers_of_a_lost_host_are_told() -> None:
    broadcast = of_hosts(6)
    broadcast.published(1, name_of(1), "h0", BODY)
    assert sources(broadcast.lost("h2", 1)) == {"h3": ["h1", "h0"]}
    assert broadcast.lost("h5", 1) == []
    arrived(broadcast, "h4")
    assert sources(broadcast.lost("h3", 1)) == {}, "who has it needs nobody"


def test_a_holder_takes_the_place_of_a_lost_head() -> None:
    broadcast = of_hosts(4)
    broadcast.published(1, name_of(1), "h0", BODY)
    arrived(broadcast, "h2")
    assert sources(broadcast.lost("h0", 1)) == {"h1": ["h2"], "h3": ["h1", "h2"]}
    assert broadcast.chain(1)[0] == "h2"


def test_a_version_that_nobody_has_is_gone_until_somebody_comes_with_it() -> None:
    broadcast = of_hosts(3)
    broadcast.published(1, name_of(1), "h0", BODY)
    assert broadcast.lost("h0", 1) == [Gone(1, name_of(1))]
    assert failed(broadcast, "h1") == []
    commands = broadcast.joined("h0", 2, "h0:2", held=[name_of(1), name_of(0)])
    assert commands[0] == Ready("h0", 1) and sources(commands) == {"h1": ["h0"], "h2": ["h1", "h0"]}


def test_what_was_live_before_the_service_started_again_is_not_dropped() -> None:
    broadcast = Broadcast()
    assert broadcast.restored(7, name_of(7), BODY) == []
    assert broadcast.joined("h0", 1, "h0:1", held=[name_of(7), name_of(3)]) == [
        Drop("h0", 1, name_of(3)),
        Ready("h0", 7),
    ]
    assert sources(broadcast.joined("h1", 1, "h1:1")) == {"h1": ["h0"]}
    with refused(Conflict, field="version", value="v6-00000000000000000000000000000000"):
        broadcast.published(6, name_of(6), "h0", BODY)


def test_a_late_host_gets_the_newest_first() -> None:
    broadcast = of_hosts(1)
    for version in (1, 2, 3):
        broadcast.published(version, name_of(version), "h0", BODY)
    commands = broadcast.joined("late", 1, "late:1")
    assert [each.name for each in commands if isinstance(each, Fetch)] == [name_of(3), name_of(2), name_of(1)]


@pytest.mark.parametrize("first", ["h2", "h3"])
def test_a_host_behind_a_slow_one_is_not_taken_for_slow(first: str) -> None:
    """It received no faster than the slow one did. Whichever of the two tells first."""
    broadcast = of_hosts(5)
    broadcast.published(1, name_of(1), "h0", BODY)
    told = {
        "h1": ("h0", Link(1e9, 1e-3)),
        "h2": ("h1", Link(1e6, 1e-3)),
        "h3": ("h2", Link(1.2e6, 1e-3)),
        "h4": ("h3", Link(1e9, 1e-3)),
    }
    for host in sorted(told, key=lambda host: (host != first, host)):
        giver, link = told[host]
        broadcast.sealed(host, 1, Arrived(name_of(1), giver, BODY, 1.0, link))
    broadcast.published(2, name_of(2), "h0", BODY)
    assert broadcast.chain(2) == ("h0", "h3", "h1", "h4", "h2")
    assert broadcast.link("h3") is None and broadcast.link("h2") == Link(1e6, 1e-3)


def test_a_slow_host_is_last_in_the_next_chain_and_pieces_fit_the_link() -> None:
    broadcast = of_hosts(3)
    broadcast.published(1, name_of(1), "h0", BODY)
    arrived(broadcast, "h1", link=Link(1e6, 1e-3))
    arrived(broadcast, "h2", link=Link(1e9, 1e-1))
    commands = broadcast.published(2, name_of(2), "h0", BODY)
    assert broadcast.chain(2) == ("h0", "h2", "h1")
    expected = piece_chunks(Link(1e6, 1e-1), 3, BODY, CHUNK_BYTES) * CHUNK_BYTES
    assert {each.piece_bytes for each in commands if isinstance(each, Fetch)} == {expected}
    assert broadcast.link("h1") == Link(1e6, 1e-3)


def test_one_stream_crosses_to_another_place() -> None:
    broadcast = of_hosts(2, "here")
    for host in ("e1", "e2", "e3"):
        broadcast.joined(host, 1, f"{host}:1", "east")
    found = sources(broadcast.published(1, name_of(1), "h0", BODY))
    assert [host for host, asked in found.items() if host[0] != asked[0][0]] == ["e1"]


def test_between_zones_the_nearest_version_that_both_have_is_the_base() -> None:
    broadcast = of_hosts(2)
    for host in ("e1", "e2"):
        broadcast.joined(host, 1, f"{host}:1", "east")

    def bases(commands: list[Command]) -> dict[str, list[tuple[str, str]]]:
        fetches = [each for each in commands if isinstance(each, Fetch)]
        return {each.host: [(up.host, up.base) for up in each.upstreams] for each in fetches}

    none = bases(broadcast.published(1, name_of(1), "h0", BODY))
    assert none == {"h1": [("h0", "")], "e1": [("h1", ""), ("h0", "")], "e2": [("e1", ""), ("h1", ""), ("h0", "")]}
    for host in ("h1", "e1"):
        arrived(broadcast, host)
    broadcast.published(2, name_of(2), "h0", BODY)
    arrived(broadcast, "e1", 2)
    base = name_of(1)
    third = {"h1": [("h0", "")], "e1": [("h1", base), ("h0", name_of(2))], "e2": [("e1", ""), ("h1", ""), ("h0", "")]}
    assert bases(broadcast.published(3, name_of(3), "h0", BODY)) == third
    broadcast.retired(1)
    assert bases(broadcast.lost("h1", 1))["e1"] == [("h0", name_of(2))]
    late = bases(broadcast.joined("w1", 1, "w1:1", "west", held=[name_of(3)]))
    assert late == {"w1": [("h0", name_of(3)), ("e1", "")]}, "an older version, as a delta from a newer one"


def test_a_fast_link_between_zones_has_no_deltas() -> None:
    broadcast = Broadcast(deltas=False)
    broadcast.joined("h0", 1, "h0:1", "", held=[name_of(1)])
    broadcast.joined("e1", 1, "e1:1", "east", held=[name_of(1)])
    (fetch,) = (each for each in broadcast.published(2, name_of(2), "h0", BODY) if isinstance(each, Fetch))
    assert fetch.host == "e1" and [each.base for each in fetch.upstreams] == [""]


def test_who_sends_wrong_bytes_is_asked_no_more() -> None:
    broadcast = of_hosts(4)
    broadcast.published(1, name_of(1), "h0", BODY)
    arrived(broadcast, "h1")
    assert sources(failed(broadcast, "h2", "h1")) == {"h2": ["h0"]}
    commands = failed(broadcast, "h3", "h1")
    assert Drop("h1", 1, name_of(1)) in commands and not broadcast.has("h1", 1)
    assert "h1" not in broadcast.chain(1)
    assert sources(broadcast.remind()) == {"h1": ["h3", "h2", "h0"]}, "it gets the version anew"


def test_attempts_are_bounded() -> None:
    broadcast = of_hosts(3)
    broadcast.published(1, name_of(1), "h0", BODY)
    for _ in range(ATTEMPTS - 1):
        assert sources(failed(broadcast, "h1")) == {"h1": ["h0"]}
    commands = failed(broadcast, "h1")
    assert GaveUp("h1", 1, "why") in commands and sources(commands) == {"h2": ["h0"]}
    assert sources(broadcast.remind()) == {"h1": ["h2", "h0"]} and broadcast.remind() == []


def test_a_retired_version_is_dropped_everywhere_and_never_comes_back() -> None:
    broadcast = of_hosts(2)
    broadcast.published(1, name_of(1), "h0", BODY)
    assert broadcast.retired(1) == [Drop("h0", 1, name_of(1)), Drop("h1", 1, name_of(1))]
    assert broadcast.retired(1) == [] and not broadcast.has("h0", 1)
    assert arrived(broadcast, "h1") == [Drop("h1", 1, name_of(1))], "it came all the same"
    with refused(Conflict, field="version", value="v1-00000000000000000000000000000000"):
        broadcast.published(1, name_of(1), "h0", BODY)


def test_another_version_of_a_number_needs_to_be_published_anew() -> None:
    broadcast = of_hosts(2)
    broadcast.published(1, name_of(1), "h0", BODY)
    with refused(Conflict, field="version", value="v1-00000000000000000000000000000005"):
        broadcast.published(1, name_of(1, 5), "h0", BODY)
    commands = broadcast.published(1, name_of(1, 5), "h1", BODY, anew=True)
    assert {each.name for each in commands if isinstance(each, Drop)} == {name_of(1)}
    assert sources(commands) == {"h0": ["h1"]} and not broadcast.has("h0", 1)


def test_the_same_weights_published_anew_may_be_loaded_again_by_whoever_has_them() -> None:
    """Until they were, nobody was to load them: what was told before counts no more."""
    broadcast = of_hosts(3)
    broadcast.published(1, name_of(1), "h0", BODY)
    arrived(broadcast, "h1")
    assert broadcast.published(1, name_of(1), "h0", BODY, anew=True) == [Ready("h0", 1), Ready("h1", 1)]
    assert arrived(broadcast, "h2") == [Ready("h2", 1)]


def test_a_host_that_misses_a_version_gets_it_from_whoever_has_it() -> None:
    broadcast = of_hosts(3)
    broadcast.published(1, name_of(1), "h0", BODY)
    arrived(broadcast, "h1")
    commands = broadcast.missed("h0", 1, name_of(1))
    assert commands[0] == Drop("h0", 1, name_of(1)) and not broadcast.has("h0", 1)
    assert sources(commands) == {"h2": ["h1"], "h0": ["h2", "h1"]}
    assert broadcast.missed("h0", 1, name_of(1)) == [] and broadcast.missed("h1", 2, name_of(1)) == []
    assert arrived(broadcast, "h0") == [Ready("h0", 1)]


def test_a_version_that_its_only_holder_misses_is_gone_until_it_is_published_anew() -> None:
    broadcast = of_hosts(2)
    broadcast.published(1, name_of(1), "h0", BODY)
    assert broadcast.missed("h0", 1, name_of(1)) == [Drop("h0", 1, name_of(1)), Gone(1, name_of(1))]
    assert broadcast.chain(1) == () and broadcast.remind() == []
    commands = broadcast.published(1, name_of(1), "h0", BODY, anew=True)
    assert commands[0] == Ready("h0", 1) and sources(commands) == {"h1": ["h0"]}


def test_events_of_a_past_epoch_change_nothing() -> None:
    broadcast = of_hosts(2)
    broadcast.published(1, name_of(1), "h0", BODY)
    broadcast.joined("h1", 2, "h1:2")
    assert broadcast.joined("h1", 1, "h1:1") == [] and broadcast.lost("h1", 1) == []
    assert arrived(broadcast, "h1") == [] and failed(broadcast, "h1") == []
    assert broadcast.hosts() == ("h0", "h1") and broadcast.holders(1) == ("h0",)


def test_a_name_that_is_none_is_refused() -> None:
    with refused(InvalidValue, field="version's name", value="latest"):
        of_hosts(1).joined("h1", 1, "h1:1", held=["latest"])
