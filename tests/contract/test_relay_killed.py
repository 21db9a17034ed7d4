"""Hosts that are killed in each phase of a publication: the others end with every version, whole and equal.

Eight relays behind a head, each a process that ends itself at a word of the protocol; ``Broadcast`` directs them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dora.models.tiny import make_tiny
from tests.contract.relay_process import Service
from tests.sweeps import some_of

RELAYS = [f"h{number}" for number in range(1, 9)]
VICTIMS = ("h1", "h4", "h8")
PHASES = [
    ("order", 0.0),
    ("manifest", 0.0),
    ("chunk", 0.0),
    ("chunk", 0.5),
    ("chunk", 1.0),
    ("seal", 0.0),
    ("sealed", 0.0),
]
SHORT = (("h1", ("manifest", 0.0)), ("h4", ("chunk", 0.5)), ("h8", ("sealed", 0.0)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("model") / "dense")


@pytest.fixture
def service(tmp_path: Path, model: Path) -> Iterator[Service]:
    with Service(tmp_path, model) as directed:
        yield directed


def started(service: Service, dies: dict[str, tuple[str, float]]) -> None:
    hosts = ["h0", *RELAYS]
    for host in hosts:
        service.start(host, dies.get(host, ("", 0.0)))
    service.until(lambda: service.broadcast.hosts() == tuple(hosts))


def all_equal(service: Service, *versions: int) -> None:
    """Every host has these versions and no other one, under their names, with the same bytes."""
    sums = service.sums()
    expected = sums[service.hosts[0]]
    assert list(expected) == list(versions)
    assert {version: name for version, (name, _) in expected.items()} == service.broadcast.versions()
    assert all(found == expected for found in sums.values())


@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        pytest.param(
            victim,
            phase,
            marks=() if (victim, phase) in SHORT else pytest.mark.full,
            id=f"{victim}-{phase[0]}-{phase[1]}",
        )
        for victim in VICTIMS
        for phase in PHASES
    ],
)
def test_a_relay_is_killed(service: Service, victim: str, phase: tuple[str, float]) -> None:
    started(service, {victim: phase})
    service.publish("h0", 1)
    service.until(lambda: victim not in service.hosts and service.have(1))
    all_equal(service, 1)
    assert not service.gone
    service.start(victim)  # it comes back, with what it had sealed
    service.publish("h0", 2)
    service.until(lambda: service.have(1, 2))
    all_equal(service, 1, 2)


def test_several_are_killed_in_different_phases(service: Service) -> None:
    started(service, {"h2": ("chunk", 0.3), "h3": ("manifest", 0.0), "h6": ("chunk", 0.9), "h7": ("seal", 0.0)})
    service.publish("h0", 1)
    service.until(lambda: len(service.hosts) == 5 and service.have(1))
    all_equal(service, 1)


@pytest.mark.parametrize("share", some_of((0.0, 0.5, 0.99), 0.5))
def test_the_head_is_killed_before_another_has_the_version(service: Service, share: float) -> None:
    """It is gone then, and is published anew by another host; nothing of the first is left anywhere."""
    started(service, {"h0": ("served", share)})
    service.publish("h0", 1)
    service.until(lambda: "h0" not in service.hosts)
    assert service.gone and not service.broadcast.holders(1)
    service.publish("h3", 1, anew=True)
    service.until(lambda: service.have(1))
    all_equal(service, 1)


def test_a_dead_head_is_replaced_by_a_holder(service: Service) -> None:
    started(service, {})
    service.publish("h0", 1)
    service.until(lambda: len(service.broadcast.holders(1)) > 1)
    service.kill("h0")
    service.until(lambda: "h0" not in service.hosts and service.have(1))
    assert service.broadcast.chain(1)[0] != "h0"
    service.start("late")
    service.until(lambda: service.have(1))
    all_equal(service, 1)


def test_a_late_host_catches_up_with_every_version(service: Service) -> None:
    for host in ("h0", "h1"):
        service.start(host)
    service.until(lambda: len(service.broadcast.hosts()) == 2)
    for version in (1, 2, 3):
        service.publish("h0", version)
    service.until(lambda: service.have(1, 2, 3))
    service.kill("h0")
    service.start("late")
    service.until(lambda: service.hosts == ["h1", "late"] and service.have(1, 2, 3))
    all_equal(service, 1, 2, 3)
