"""Versions over hosts that are network namespaces, with a slow link, a lossy one, and a host that is killed.

Each host has the kernel's own TCP, and no loopback in common with the others.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dora.models.tiny import make_tiny
from tests.e2e.relay_host import Apart
from tests.hosts import Hosts, Link, has_hosts

pytestmark = pytest.mark.skipif(not has_hosts(), reason="no network namespaces and TUN devices for this user")

HOSTS = [f"h{number}" for number in range(5)]
SLOW = "h2"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("model") / "dense")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(len(HOSTS)) as five:
        yield five


def linked(hosts: Hosts, name: str, link: Link) -> None:
    """All links of one host."""
    number = HOSTS.index(name)
    for other in range(len(HOSTS)):
        if other != number:
            hosts.link(number, other, link)


def all_equal(service: Apart, *versions: int) -> None:
    sums = service.sums()
    assert sorted(sums) == service.hosts
    expected = sums[service.hosts[0]]
    assert sorted(int(version) for version in expected) == list(versions)
    assert all(found == expected for found in sums.values())


def test_a_slow_link_comes_last_and_a_killed_host_is_cut_out(tmp_path: Path, model: Path, hosts: Hosts) -> None:
    linked(hosts, SLOW, Link(bytes_per_s=3e5, delay_s=0.002))
    linked(hosts, "h4", Link(loss=0.01, delay_s=0.001))
    with Apart(tmp_path, model, hosts) as service:
        for host in HOSTS:
            service.start(host, ("chunk", 0.5) if host == "h1" else ("", 0.0))
        service.until(lambda: service.broadcast.hosts() == tuple(HOSTS))
        service.publish("h0", 1)
        service.until(lambda: "h1" not in service.hosts and service.have(1))
        all_equal(service, 1)
        measured = service.broadcast.link(SLOW)
        assert measured is not None and measured.bytes_per_s < 4e6
        service.publish("h0", 2)
        service.until(lambda: service.have(1, 2))
        assert service.broadcast.chain(2)[-1] == SLOW
        all_equal(service, 1, 2)


@pytest.mark.full
def test_a_host_that_no_packet_reaches_is_passed_over(tmp_path: Path, model: Path, hosts: Hosts) -> None:
    """The service sees it live, so nobody cuts it out: who is behind it asks the next by itself."""
    with Apart(tmp_path, model, hosts) as service:
        for host in HOSTS[:4]:
            service.start(host)
        service.until(lambda: len(service.broadcast.hosts()) == 4)
        linked(hosts, "h1", Link(is_up=False))
        service.publish("h0", 1)
        service.until(lambda: set(service.broadcast.holders(1)) >= {"h0", "h2", "h3"})
        assert "h1" not in service.broadcast.holders(1)
        linked(hosts, "h1", Link())
        service.remind()
        service.until(lambda: service.have(1))
        all_equal(service, 1)
