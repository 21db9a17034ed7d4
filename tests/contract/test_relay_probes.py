"""Probes of a relay: KV blocks that go there and back, and chunks of a version that are fetched and dropped."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dora.errors import TransferFailed
from dora.relay import probing
from tests.contract.relays import SECRET, Host, hosts_of, publish
from tests.refusals import refused


@pytest.fixture
def hosts(tmp_path: Path, tiny_dense: Path) -> Iterator[list[Host]]:
    with hosts_of(tmp_path, tiny_dense, 2, wait_s=0.5) as found:
        yield found


@pytest.mark.parametrize("size_bytes", [1, probing.PIECE_BYTES + 5, probing.KV_BYTES_MAX + 1])
def test_kv_goes_there_and_back(hosts: list[Host], size_bytes: int) -> None:
    one, other = hosts
    done_bytes, took_s = probing.probe_kv(other.upstream, one.identity, SECRET, size_bytes)
    assert 0 < done_bytes <= min(size_bytes, probing.KV_BYTES_MAX) and took_s > 0
    assert done_bytes == min(size_bytes, probing.KV_BYTES_MAX) or took_s > probing.PROBED_S


def test_chunks_of_a_version_are_fetched_and_dropped(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = hosts
    name = publish(one.store, 1)
    size = one.store.manifest(1).total_bytes
    fetched = probing.probe_fetch(one.upstream, other.identity, SECRET, name)
    assert fetched.bytes == size or fetched.took_s > probing.PROBED_S
    assert fetched.bytes and fetched.took_s > 0 and not list(other.store.versions())[1:]
    monkeypatch.setattr(probing, "FETCHED_MAX", 1)
    assert 0 < probing.probe_fetch(one.upstream, other.identity, SECRET, name).bytes <= size, "at least a chunk"
    other.fetch(name, one)
    assert other.arrived().came_bytes, "the relay serves its followers afterwards"


def test_a_version_that_is_not_there_and_another_run_are_refused(hosts: list[Host]) -> None:
    one, other = hosts
    name = publish(one.store, 1)
    with refused(TransferFailed):
        probing.probe_fetch(other.upstream, one.identity, SECRET, name)
    with refused(TransferFailed):
        probing.probe_kv(other.upstream, one.identity, bytes(32), 1)
