"""Bodies that go from one device's memory to another's: faults, the way back by host memory, and whole requests.

The device is a CPU, so all of this runs without a GPU. ``test_transport`` has what holds for every transport.
"""

import multiprocessing
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dora.errors import TransferFailed
from dora.kvtransfer.codec import closing_of, opening_of, parts_of, round_of
from dora.kvtransfer.device import OnDevice, Whole, is_on_device
from dora.kvtransfer.layout import blocks_for
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.snapshot import FullBlocks, KvSnapshot
from dora.kvtransfer.transports.nixl_pair import _device_place, nixl_package
from dora.models.tiny import make_tiny
from dora.rpc import dora_pb2 as pb
from dora.worker.copying.cuda_blocks import DeviceStore
from dora.worker.copying.device_memory import Landings
from dora.worker.fake.engine import FakeEngine
from dora.worker.reservation import KvStore
from dora.worker.vllm.device.cpu import Cpu
from tests.contract import nixl_stand_in
from tests.contract.conftest import Engines
from tests.contract.driver import EVERYTHING, KV_TOKENS, MAX_MODEL_LEN_TOKENS, SLOTS, Driver, make_request, run
from tests.contract.planes import ON_DEVICE, WAIT_S, End, a_plane, until
from tests.contract.test_transport import arrived, made, moved, refusal, sent
from tests.contract.test_worker_handoff import alone, long_request, reserved, started
from tests.contract.workers import Worker, peer_of

GLOO = (f"gloo{ON_DEVICE}",)
LANDING_BYTES = 64 << 20
plane_of = partial(a_plane, timeout_s=2 * WAIT_S)  # a pair joins in half of it, also on a busy machine


def allocated(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def on_device(arrays: list[np.ndarray]) -> Any:
    return [OnDevice(Whole(torch.from_numpy(each).reshape(-1)), 0, each.shape) for each in arrays]


# The way by host memory.


def test_a_body_that_finds_no_room_on_the_target_goes_by_host_memory(tmp_path: Path) -> None:
    few = Landings("cpu", 5 << 20, allocated)
    with plane_of(tmp_path, 1, GLOO) as source, plane_of(tmp_path, 2, GLOO, landings=few) as target:
        for ticket, size, straight in (("a", 4 << 20, True), ("b", 6 << 20, False), ("c", 1 << 20, True)):
            target.plane.expect(ticket, 1, size)
            done = sent(source, target, ticket, made([size])).done.result(WAIT_S)
            _, body = arrived(target, done.key)
            assert (done.transport, done.fallbacks, is_on_device([body])) == ("gloo", (), straight)
            assert np.array_equal(body, made([size])[0])
            del body
            until(lambda: target.plane.held_bytes()[1] == 0)


@pytest.mark.parametrize("without", ["source", "target"])
def test_host_memory_at_either_end_is_todays_path(tmp_path: Path, without: str) -> None:
    ways = [("gloo",) if without == end else GLOO for end in ("source", "target")]
    with plane_of(tmp_path, 1, ways[0]) as source, plane_of(tmp_path, 2, ways[1]) as target:
        moved(source, target, "r", made([3 << 20, 5]))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_transport_of_host_memory_brings_what_lies_on_a_device(tmp_path: Path, transport: str) -> None:
    with plane_of(tmp_path, 1, (f"{transport}{ON_DEVICE}",)) as source, plane_of(tmp_path, 2, (transport,)) as target:
        moved(source, target, "r", made([3 << 20, 5]))


def test_another_host_gets_no_body_by_a_checksum_that_finds_no_forgery(tmp_path: Path) -> None:
    with plane_of(tmp_path, 1, GLOO) as source, plane_of(tmp_path, 2, GLOO, host="elsewhere") as target:
        target.plane.expect("r", 1, 1 << 20)
        done = sent(source, target, "r", made([1 << 20])).done.result(WAIT_S)
        assert done.transport == "gloo" and not is_on_device([arrived(target, done.key)[1]])


class Exhausted(Whole):
    """A region whose device has no host memory to copy to."""

    def host(self, begin: int, end: int) -> np.ndarray:
        raise TransferFailed("pinned memory: it is in use")


def test_a_copy_without_host_memory_fails_and_its_pair_goes_on(tmp_path: Path) -> None:
    with plane_of(tmp_path, 1, (f"tcp{ON_DEVICE}",)) as source, plane_of(tmp_path, 2, ("tcp",)) as target:
        target.plane.expect("r", 1, 100)
        parts = [OnDevice(Exhausted(allocated(100)), 0, (100,))]
        assert "pinned memory" in refusal(source.plane.send_parts(target.peer, "r", parts, b"head"))
        moved(source, target, "r", made([100]))


# Faults.


class Flipping(Landings):
    """A device whose memory changes one bit of each body after it has arrived."""

    def array(self, size_bytes: int) -> OnDevice | None:
        return OnDevice(_Flipped(allocated(size_bytes)), 0, (size_bytes,))


class _Flipped(Whole):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self._bytes = tensor
        self._seen: set[int] = set()

    def tensor(self, begin: int, end: int) -> Any:
        if begin in self._seen and begin:  # asked for again: to be checked. The second chunk and later ones
            self._bytes[begin] ^= 1
        self._seen.add(begin)
        return super().tensor(begin, end)


def test_a_changed_slice_is_found_by_the_digest(tmp_path: Path) -> None:
    size = 20 << 20  # three chunks
    bad = Flipping("cpu", LANDING_BYTES, allocated)
    with plane_of(tmp_path, 1, GLOO) as source, plane_of(tmp_path, 2, GLOO, landings=bad) as target:
        target.plane.expect("r", 1, size)
        assert "checksum of chunk 2" in refusal(sent(source, target, "r", made([size])))
        assert target.plane.arriving(1) == []


def _send_slowly(folder: str, peer: Peer, told: Connection) -> None:
    with plane_of(Path(folder), 1, GLOO, bandwidth_bytes_per_s=8 << 20) as source:
        source.plane.send_parts(peer, "r", source.parts(made([64 << 20])), b"head")
        told.recv()


def test_a_source_that_is_killed_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with plane_of(tmp_path, 2, GLOO) as target:
        target.plane.expect("r", 1, 64 << 20)
        child = context.Process(target=_send_slowly, args=(str(tmp_path), target.peer, theirs), daemon=True)
        child.start()
        until(lambda: target.plane.arriving(1) != [])
        assert target.plane.held_bytes()[1] == 64 << 20
        child.kill()
        child.join()
        until(lambda: target.plane.arriving(1) == [] and target.plane.held_bytes()[1] == 0)
    ours.close()


# Requests.


class FakeOnDevice(FakeEngine):
    """A fake engine whose KV lies on a device: it shows and takes it there."""

    device_memory: Any = None

    def export(self, request_id: str, first: int = 0) -> KvSnapshot | None:
        found = super().export(request_id, first)
        if found is None:
            return None
        blocks = {name: on_device(list(pieces)) for name, pieces in found.blocks.items()}
        return KvSnapshot(found.layout, found.request, found.kv_tokens, found.rng_draws, blocks, found.ahead)

    def full_blocks(self, request_id: str, first: int, most: int | None = None) -> FullBlocks:
        found = super().full_blocks(request_id, first, most)
        return FullBlocks(found.segment, found.end, {name: on_device(list(p)) for name, p in found.blocks.items()})


def a_worker(end: End, model: Path) -> Worker:
    engine = FakeOnDevice(slots=4, kv_tokens=2048, max_model_len_tokens=256, mean_tokens=25, model=model)
    engine.device_memory = end.landings
    worker = Worker(end, model, engine=engine)
    assert worker.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
    return worker


@pytest.mark.parametrize("landing_bytes", [LANDING_BYTES, 0], ids=["straight", "no room there"])
def test_a_request_moves_in_rounds_between_devices(tmp_path: Path, landing_bytes: int) -> None:
    model = make_tiny("dense", tmp_path / "model", seed=1)
    room = Landings("cpu", landing_bytes, allocated)
    with plane_of(tmp_path, 1, GLOO) as one, plane_of(tmp_path, 2, GLOO, landings=room) as two:
        source, target = a_worker(one, model), a_worker(two, model)
        started(source, [long_request()], 5)
        reserved(target, "r1")
        copied = source.copied(source.order(copy_out=pb.CopyOut(request_id="r1", target=peer_of(two))), "r1")
        assert copied.ok and copied.kv_transport == "gloo" and not copied.kv_fallbacks and copied.snapshot_bytes > 0
        target.tokens["r1"] = list(source.tokens["r1"])
        assert target.obey(copy_in=pb.CopyIn(request_id="r1", version=1, locator=copied.locator)).ok
        assert source.obey(remove_request=pb.RemoveRequest(request_id="r1")).ok
        assert target.finish("r1") == alone(model, long_request())
        assert target.engine.load().reprefilled_tokens == 0
        until(lambda: two.plane.held_bytes() == (0, 0))


def test_a_request_that_must_wait_at_its_target_waits_in_host_memory(tmp_path: Path) -> None:
    """All slots are taken, so no blocks are reserved: the device's memory for bodies is not held for long."""
    model = make_tiny("dense", tmp_path / "model", seed=1)
    with plane_of(tmp_path, 1, GLOO) as one, plane_of(tmp_path, 2, GLOO) as two:
        target = a_worker(two, model)
        for ticket, takes in (("a", True), ("b", False)):
            reservation = target.engine.reserve(ticket, 64)
            assert reservation.has_blocks is takes
            two.plane.expect(ticket, 1, 1 << 20, reservation)
            done = sent(one, two, ticket, made([4096])).done.result(WAIT_S)
            assert is_on_device([arrived(two, done.key)[1]]) is takes and not done.fallbacks
            if takes:
                for index in range(4):
                    target.engine.add(make_request(index + 1))
                target.engine.step()


class CpuAsDevice(Cpu):
    """vLLM's CPU engine with the KV store of a GPU's."""

    def kv_store(self, rows: Any, tensors: Any, groups: Any, block_count: int) -> KvStore:
        (own,) = tensors()
        return DeviceStore(own, groups, block_count, landing_bytes=LANDING_BYTES, stage_bytes=100_000)


@pytest.fixture
def vllm_driver(engines: Engines) -> Iterator[Driver]:
    from dora.worker.vllm.device.port import EngineSettings
    from dora.worker.vllm.engine import VllmEngine

    engines.close()  # one engine of vLLM in a process
    engine = VllmEngine(
        engines.version("vllm-dense", 1),
        EngineSettings(slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS),
        device=CpuAsDevice(),
    )
    engine.load_weights(1, engines.version("vllm-dense", 1), None)
    yield Driver(engine)
    engine.close()


def test_vllm_continues_bit_for_bit_after_a_move_between_devices(vllm_driver: Driver, tmp_path: Path) -> None:
    """Full blocks go ahead into reserved blocks while it decodes, the rest is frozen; with KV as the control."""
    driver, engine = vllm_driver, vllm_driver.engine
    request = make_request(1, EVERYTHING, 120, max_tokens=60)
    untouched = run(engine, [request])["r1"]
    before = engine.load().reprefilled_tokens
    for transport in (GLOO[0], "tcp"):
        with plane_of(tmp_path, 1, (transport,)) as one, plane_of(tmp_path, 2, (transport,)) as two:
            for end in (one, two):
                end.plane.use(engine.device_memory if transport in GLOO else None)
            driver.add(request)
            driver.step(6)
            reservation = engine.reserve("r1", 200)
            opening = opening_of(engine.layout, engine.request("r1"))
            full = engine.full_blocks("r1", 0)
            parts = parts_of(engine.layout, full.blocks, 0, full.end)
            assert is_on_device(parts) and full.end
            two.plane.expect("r1", 1, 1 << 30, reservation)
            first = one.plane.send_parts(two.peer, "r1", parts, opening.raw, goes_on=True).done.result(WAIT_S)
            assert first.is_ahead and reservation.written == full.end
            driver.step(9)
            engine.freeze("r1")
            snapshot = engine.export("r1", full.end)
            assert snapshot is not None
            left = blocks_for(snapshot.kv_tokens, engine.layout.block_tokens) - full.end
            head = closing_of(snapshot, opening, [full.end, left])
            last = one.plane.send_parts(two.peer, "r1", round_of(snapshot, full.end), head, first.key)
            key = last.done.result(WAIT_S).key
            engine.remove("r1")
            taken = two.plane.take(key)
            came_on_device = is_on_device(piece for pieces in taken.blocks.values() for piece in pieces)
            assert came_on_device == (transport in GLOO)
            engine.take_in(taken)
            del taken
            assert driver.finish()["r1"] == untouched
            driver.drop("r1")
    assert engine.load().reprefilled_tokens == before


# NIXL, which is not installed here: its calls against a stand-in that knows what is registered.


@pytest.mark.skipif(bool(nixl_package()), reason="NIXL itself is installed: test_transport has it")
@pytest.mark.parametrize("ways", [("", ""), (ON_DEVICE, ON_DEVICE), (ON_DEVICE, ""), ("", ON_DEVICE)])
def test_nixl_writes_only_where_memory_is_registered(tmp_path: Path, ways: tuple[str, str]) -> None:
    with nixl_stand_in.installed():
        with plane_of(tmp_path, 1, (f"nixl{ways[0]}",)) as source, plane_of(tmp_path, 2, (f"nixl{ways[1]}",)) as target:
            for sizes in ([7], [(4 << 20) + 5, 3], [13 << 20]):
                assert moved(source, target, "r", made(sizes)).fallbacks == ()
            until(lambda: target.plane.held_bytes()[1] == 0)
            if "" not in ways:  # one for the body that was given back, and the source's stages of both kinds
                kinds = [[each.kind for each in agent.registered] for agent in nixl_stand_in.AGENTS.values()]
                assert sorted(kinds) == [[], ["DRAM", "DRAM"]]
        assert all(not agent.registered for agent in nixl_stand_in.AGENTS.values())


class _OnGpu:
    """What NIXL's half reads of a tensor on the third GPU."""

    is_cuda, nbytes = True, 77

    def data_ptr(self) -> int:
        return 4096

    def get_device(self) -> int:
        return 2


def test_nixl_names_a_gpus_memory_by_its_device() -> None:
    assert _device_place(_OnGpu()) == ((4096, 77, 2), "VRAM")


def test_the_way_between_devices_is_timed_beside_the_others(tmp_path: Path) -> None:
    names = (*GLOO, f"tcp{ON_DEVICE}")
    with plane_of(tmp_path, 1, names) as source, plane_of(tmp_path, 2, names) as target:
        target.plane.expect("r", 1, 2 << 20)
        sent(source, target, "r", made([2 << 20])).done.result(WAIT_S)
        rates = source.plane.measured()["w2"]
        assert set(rates) == {"gloo", "tcp"} and all(rate > 0 for rate in rates.values())
