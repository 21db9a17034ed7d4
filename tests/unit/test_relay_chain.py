"""The chain of a version over hosts: its order, and what is left when hosts go and come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.errors import Conflict, InvalidValue, NotFound
from dora.relay.chain import Chain, Site, planned, ranked
from dora.relay.link import ASSUMED, PIECE_BYTES_MAX, Link, broadcast_s, chain_s, piece_chunks
from perf.relays import least_broadcast_s
from tests.refusals import refused
from tests.sweeps import examples

PLACES = ("", "east", "west")


def sites(count: int, zone: str = "", first: int = 0) -> list[Site]:
    return [Site(f"h{number}", zone) for number in range(first, first + count)]


def check(chain: Chain) -> None:
    """It is one tree from its head, and both directions say the same."""
    hosts = chain.hosts
    assert hosts[0] == chain.head and len(set(hosts)) == len(hosts) == len(chain)
    assert chain.upstream(chain.head) == ""
    for host in hosts:
        upstreams = chain.upstreams(host)
        assert len(set(upstreams)) == len(upstreams) and host not in upstreams
        assert host == chain.head or (upstreams[0] == chain.upstream(host) and upstreams[-1] == chain.head)


def crossings(chain: Chain, zones: dict[str, str]) -> list[str]:
    return [host for host in chain.hosts[1:] if zones[host] != zones[chain.upstream(host)]]


def test_hosts_follow_one_another() -> None:
    chain = planned(Site("head"), sites(4))
    assert chain.hosts == ("head", "h0", "h1", "h2", "h3")
    assert [chain.upstream(host) for host in chain.hosts] == ["", "head", "h0", "h1", "h2"]
    assert chain.upstreams("h3") == ("h2", "h1", "h0", "head") and chain.upstreams("h0") == ("head",)
    assert chain.upstreams("h3", most=2) == ("h2", "head")


def test_slow_links_come_last() -> None:
    rated = [Site("slow", "", 1e6), Site("unknown"), Site("slower", "", 1e5), Site("fast", "", 1e9)]
    assert planned(Site("head"), rated).hosts == ("head", "unknown", "fast", "slow", "slower")


def test_one_stream_crosses_to_each_place_and_leaves_from_no_slow_host() -> None:
    here = [Site("h1", "here", 1e9), Site("h2", "here", 1e9), Site("slow", "here", 1e6)]
    there = [Site("e1", "east", 1e8), Site("e2", "east", 1e8), Site("w1", "west", 1e8), Site("w2", "west", 1e7)]
    chain = planned(Site("head", "here", 1e9), [*here, *there])
    zones = {"head": "here", **{site.host: site.zone for site in [*here, *there]}}
    check(chain)
    assert crossings(chain, zones) == ["e1", "w1"] or crossings(chain, zones) == ["w1", "e1"]
    assert {chain.upstream("e1"), chain.upstream("w1")} == {"h1", "h2"}
    assert chain.upstream("e2") == "e1" and chain.upstream("w2") == "w1" and chain.upstream("slow") == "h2"


def test_a_lost_relay_is_cut_out() -> None:
    chain = planned(Site("head"), sites(4))
    assert chain.cut("h1") == ("h2",)
    assert chain.hosts == ("head", "h0", "h2", "h3")
    assert chain.cut("h3") == ()
    check(chain)
    assert chain.add(Site("h9")) == "h2"


def test_what_leads_to_another_place_is_replaced_from_within_it() -> None:
    chain = planned(Site("head", "here"), [*sites(2, "here"), *sites(3, "there", 5)])
    before = chain.upstream("h5")
    assert chain.cut("h5") == ("h6",)
    assert chain.upstream("h6") == before and chain.upstream("h7") == "h6"


def test_a_lost_head_is_replaced_by_any_holder() -> None:
    chain = planned(Site("head"), sites(4))
    assert set(chain.replace_head("h2")) == {"h0", "h3"}
    check(chain)
    assert chain.upstream("h0") == "h2" and chain.upstream("h1") == "h0" and chain.upstream("h3") == "h1"
    assert "head" not in chain


def test_refusals() -> None:
    chain = planned(Site("head"), sites(2))
    with refused(Conflict, field="host", value="head", why="is the head"):
        chain.cut("head")
    with refused(Conflict, field="host", value="h1", why="is in the chain already"):
        chain.add(Site("h1"))
    for act in (chain.cut, chain.upstream, chain.replace_head):
        with refused(NotFound, field="host", value="nobody"):
            act("nobody")


@given(st.data())
def test_any_order_of_losses_and_returns_leaves_one_tree_and_changes_little(data: st.DataObject) -> None:
    rates = st.sampled_from([0.0, 1e6, 1e8])
    everyone = [Site(f"h{number}", data.draw(st.sampled_from(PLACES)), data.draw(rates)) for number in range(8)]
    by_name = {site.host: site for site in everyone}
    chain = planned(everyone[0], everyone[1:])
    check(chain)
    if len(set(PLACES)) > 1:
        zones = {site.host: site.zone for site in everyone}
        assert len(crossings(chain, zones)) == len({site.zone for site in everyone}) - 1
    for _ in range(data.draw(st.integers(1, 12))):
        host = data.draw(st.sampled_from(sorted(by_name)))
        before = {each: chain.upstream(each) for each in chain.hosts}
        if host not in chain:
            chain.add(by_name[host])
            changed: tuple[str, ...] = (host,)
        elif host != chain.head:
            followers = tuple(each for each in chain.hosts if chain.upstream(each) == host)
            changed = chain.cut(host)
            assert changed == followers
        elif len(chain) > 1:
            changed = chain.replace_head(data.draw(st.sampled_from(chain.hosts[1:])))
        else:
            continue
        check(chain)
        same = [each for each in chain.hosts if each not in changed and each in before and each != chain.head]
        assert all(chain.upstream(each) == before[each] for each in same)


def test_other_holders_come_after_the_chain() -> None:
    assert ranked(("b", "head"), {"head", "z", "c"}, most=3) == ("b", "head", "c")


# Appendix C.


def simulated_s(link: Link, hosts: int, pieces: list[int]) -> float:
    """A piece leaves a host when it is there, and the one before it has left."""
    there_s = [0.0] * len(pieces)
    for _ in range(hosts - 1):
        free_s = 0.0
        for number, piece in enumerate(pieces):
            there_s[number] = free_s = max(free_s, there_s[number]) + piece / link.bytes_per_s + link.start_s
    return there_s[-1]


@settings(max_examples=examples(60), deadline=None)
@given(st.floats(1e6, 1e10), st.floats(1e-6, 1e-1), st.integers(2, 12), st.integers(1, 64), st.integers(1, 1 << 20))
def test_the_size_of_pieces_is_the_best_of_all(rate: float, start_s: float, hosts: int, chunks: int, rest: int) -> None:
    link, chunk = Link(rate, start_s), 1 << 20
    body = (chunks - 1) * chunk + rest

    def took_s(each: int) -> float:
        size = each * chunk
        return simulated_s(link, hosts, [min(size, body - at) for at in range(0, body, size)])

    chosen = piece_chunks(link, hosts, body, chunk)
    best_s = min(took_s(each) for each in range(1, min(chunks, PIECE_BYTES_MAX // chunk) + 1))
    assert took_s(chosen) == pytest.approx(best_s)
    assert chain_s(link, hosts, body, chosen * chunk) == pytest.approx(best_s)
    assert best_s >= least_broadcast_s(link, hosts, body) * 0.999999


@given(st.floats(1e6, 1e11), st.floats(1e-6, 1e-1), st.integers(3, 200), st.integers(1 << 20, 1 << 40))
def test_the_bound_is_what_brute_force_finds(rate: float, start_s: float, hosts: int, body: int) -> None:
    link, bound_s = Link(rate, start_s), least_broadcast_s(Link(rate, start_s), hosts, body)
    best = max(1, round(((hosts - 2) * body / rate / start_s) ** 0.5))
    around = {max(1, best + step) for step in range(-3, 4)}
    assert all(broadcast_s(link, hosts, body, pieces) >= bound_s * 0.999999 for pieces in {1, *around, 2 * best})
    assert min(broadcast_s(link, hosts, body, pieces) for pieces in around) <= bound_s * 1.34


def test_more_hosts_cost_little() -> None:
    link, body = Link(1e9, 1e-4), 10 << 30
    assert least_broadcast_s(link, 128, body) < 1.1 * least_broadcast_s(link, 2, body)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_link_is_finite_and_positive(bad: float) -> None:
    with refused(InvalidValue, names=("0",)):
        Link(bad, 1e-3)
    with refused(InvalidValue, names=("0",)):
        Link(1e9, bad)


def test_a_measurement_moves_what_is_believed() -> None:
    believed = ASSUMED
    for _ in range(30):
        believed = believed.after(Link(1e8, 1e-3))
    assert believed.bytes_per_s == pytest.approx(1e8, rel=0.01) and believed.start_s == pytest.approx(1e-3, rel=0.01)
