"""Hosts with a store and a relay, for tests: in this process, each its own host to the others."""

import queue
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dora.client.publication import place_weights
from dora.data.types import Canary
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import Identity
from dora.models.tiny import make_tiny
from dora.relay.orders import Arrived, FetchFailed, FetchOrder, Outcome, Upstream
from dora.relay.relay import Relay, RelaySettings
from dora.weights import files, manifest
from dora.weights.files import CHUNK_BYTES
from dora.weights.host_store import HostStore
from dora.weights.store import WeightStore

SECRET = bytes(range(32))
WAIT_S = 120.0  # a relay stands back from busy cores
FILE = "model.safetensors"
SMALL = 4096  # bytes of a chunk


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, manifest):
        monkeypatch.setattr(module, "CHUNK_BYTES", SMALL)


@pytest.fixture(scope="module", name="model")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("model") / "dense")


@dataclass(frozen=True)
class Host:
    """One host: ``outcomes`` has what its relay told."""

    identity: Identity
    store: HostStore
    relay: Relay
    outcomes: "queue.SimpleQueue[Outcome]"

    @property
    def upstream(self) -> Upstream:
        return Upstream(self.identity.worker_id, self.identity.epoch, self.relay.address)

    def across(self, base: str) -> Upstream:
        """Itself as an upstream in another zone."""
        return replace(self.upstream, base=base)

    def fetch(self, name: str, *upstreams: "Host | Upstream", piece_bytes: int = CHUNK_BYTES) -> None:
        asked = tuple(each.upstream if isinstance(each, Host) else each for each in upstreams)
        self.relay.fetch(FetchOrder(name, asked, piece_bytes))

    def arrived(self) -> Arrived:
        outcome = self.outcomes.get(timeout=WAIT_S)
        assert isinstance(outcome, Arrived), outcome
        return outcome

    def failed(self) -> FetchFailed:
        outcome = self.outcomes.get(timeout=WAIT_S)
        assert isinstance(outcome, FetchFailed), outcome
        return outcome


@contextmanager
def a_host(
    store: HostStore, name: str, epoch: int = 1, machine: str = "", secret: bytes = SECRET, **settings: Any
) -> Iterator[Host]:
    """``machine``: hosts of one machine share a kernel; by default each is a machine of its own."""
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    identity = Identity(name, epoch, "", machine or name)
    relay = Relay(store, Listener("127.0.0.1"), identity, RelaySettings(secret, **settings), outcomes.put)
    try:
        yield Host(identity, store, relay, outcomes)
    finally:
        relay.close()


@contextmanager
def hosts_of(folder: Path, model: Path, count: int, **settings: Any) -> Iterator[list[Host]]:
    """The first has a store in which versions can be published."""
    with ExitStack() as stack:
        stores = [WeightStore(folder / "h0", model), *(HostStore(folder / f"h{at}", model) for at in range(1, count))]
        yield [stack.enter_context(a_host(store, f"h{at}", **settings)) for at, store in enumerate(stores)]


def publish(store: HostStore, version: int, changed: str = "") -> str:
    """Publishes weights of their own, or that differ from the model's in one tensor. Returns the version's name."""
    assert isinstance(store, WeightStore)
    generator = np.random.default_rng(version)
    tensors = load_file(store.reference.folder / FILE)
    for name, tensor in tensors.items():
        if changed in ("", name):
            tensors[name] = generator.standard_normal(tensor.shape).astype(tensor.dtype)
    store.publish(1, version, place_weights(tensors, (), store.begin(1, version)), Canary((1, 2), (-0.5,)))
    return store.name(version)


def publish_step(store: HostStore, version: int, rate: float = 1e-6) -> str:
    """Publishes the weights of the version before after a small step. Returns the version's name."""
    assert isinstance(store, WeightStore)
    generator = np.random.default_rng(version)
    tensors = load_file(store.folder(version - 1) / FILE)
    moved = {
        name: tensor + (rate * generator.uniform(-1, 1, tensor.shape)).astype(tensor.dtype)
        for name, tensor in tensors.items()
    }
    store.publish(1, version, place_weights(moved, (), store.begin(1, version)), Canary((1, 2), (-0.5,)))
    return store.name(version)


def publish_anew(store: HostStore, version: int = 1) -> str:
    """Other weights under a number that is in use."""
    assert isinstance(store, WeightStore)
    tensors = {name: tensor + 1 for name, tensor in load_file(store.reference.folder / FILE).items()}
    written = place_weights(tensors, (), store.begin(2, version))
    store.publish(2, version, written, Canary((1, 2), (-0.5,)), anew=True)
    return store.name(version)


def same(one: HostStore, other: HostStore, version: int) -> bool:
    """Whether both have a version whole, with equal bytes."""
    assert one.manifest(version).name == other.manifest(version).name
    assert one.canary(version) == other.canary(version)
    files = [file.name for file in one.manifest(version).files]
    return all(
        (one.folder(version) / file).read_bytes() == (other.folder(version) / file).read_bytes() for file in files
    )
