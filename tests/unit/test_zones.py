"""Hosts say where they are: a version crosses to another place once, and goes on from host to host there."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from dora.client.publication import place_weights
from dora.data.types import Canary
from dora.errors import InvalidValue
from dora.host.launcher import check_zone
from dora.journal.durable import Durable
from dora.orchestrator.hosts.hosts import Hosts
from dora.orchestrator.hosts.remote import HostSession
from dora.release import __version__
from dora.rpc import dora_pb2 as pb
from dora.weights.store import WeightStore
from tests.refusals import refused
from tests.service import configured
from tests.unit.test_expected_hosts import DIGEST, Incarnation, orders


def hello(name: str, zone: str) -> pb.HostHello:
    return pb.HostHello(
        name=name, dora_version=__version__, zone=zone, capacity=pb.HostCapacity(store_free_bytes=1 << 40)
    )


def join(hosts: Hosts, name: str, zone: str, port: int) -> HostSession:
    session = hosts.join(hello(name, zone), DIGEST)
    hosts.ready(session, pb.HostReady(relay_address=f"127.0.0.1:{port}"))
    return session


@pytest.mark.parametrize(
    ("zones", "upstreams"),
    [
        (("", "", ""), {"a": "local", "b": "a", "c": "b"}),
        (("far", "", "far"), {"b": "local", "a": "b", "c": "a"}),
        (("far", "", "farther"), {"b": "local", "a": "b", "c": "local"}),
    ],
)
async def test_a_version_crosses_to_a_place_once(
    zones: tuple[str, str, str], upstreams: dict[str, str], tiny_dense: Path, tmp_path: Path
) -> None:
    store = WeightStore(tmp_path / "store", tiny_dense)
    hosts = Incarnation(tmp_path, configured(tiny_dense, workers__engine="fake"), Durable()).hosts
    hosts.open_relay("127.0.0.1")
    try:
        joined = {name: join(hosts, name, zone, at) for at, (name, zone) in enumerate(zip("abc", zones, strict=True))}
        tensors = load_file(tiny_dense / "model.safetensors")
        store.publish(1, 1, place_weights(tensors, (), store.begin(1, 1)), Canary((1, 2), (-0.5,)))
        hosts.published(1)
        found = {
            name: each.fetch_version.upstreams[0].host
            for name, session in joined.items()
            for each in orders(session)
            if each.HasField("fetch_version")
        }
        assert found == upstreams
        assert [host.zone for host in hosts.statuses()] == ["", *zones]
    finally:
        hosts.close_relay()


async def test_a_place_that_is_no_name_is_refused(tiny_dense: Path, tmp_path: Path) -> None:
    assert check_zone("eu-west/hall_2") == "eu-west/hall_2" and check_zone("") == ""
    hosts = Incarnation(tmp_path, configured(tiny_dense, workers__engine="fake"), Durable()).hosts
    for zone in ("x" * 65, "two words", "a\n", "é"):
        with refused(InvalidValue, names=("64",)):
            hosts.join(hello("h1", zone), DIGEST)
