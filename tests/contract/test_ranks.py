"""An engine of several ranks: a process each, one KV-cache to look at, the same responses as of one rank."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dora.data.types import Canary
from dora.errors import CanaryMismatch, SnapshotRefused, TransferFailed
from dora.kvtransfer.checksum import Seal, digest_with
from dora.kvtransfer.codec import head_of
from dora.kvtransfer.reslice import resliced
from dora.kvtransfer.snapshot import STATE, KvSnapshot
from dora.models.tiny import TinyKind, make_tiny
from dora.worker.vllm.device.cpu import Cpu
from dora.worker.vllm.device.port import Device, EngineSettings
from dora.worker.vllm.engine import VllmEngine
from tests.contract.driver import (
    KV_TOKENS,
    MAX_MODEL_LEN_TOKENS,
    ROUNDING,
    SLOTS,
    Driver,
    Response,
    VersionFolder,
    farthest,
    make_request,
    mixed_requests,
    run,
)
from tests.contract.guesses import guessed
from tests.contract.planes import SECRET, a_plane
from tests.contract.pools import a_pool, park, sent_on
from tests.contract.workers import peer_of
from tests.device_ranks import AsDevices
from tests.sweeps import some_of

pytestmark = pytest.mark.xdist_group("vllm-dense")  # a process imports vLLM for many tests

REQUESTS = mixed_requests(6)
MOST_BYTES = 1 << 30
# Ranks share layers of which some have a window or a state, or are stages of alike layers. tests/e2e shares dense ones.
RANKED: dict[TinyKind, dict[str, int]] = {
    "window": {"tensor_parallel": 2},
    "dense": {"pipeline_parallel": 2},
    "hybrid": {"tensor_parallel": 2},
}
# On a CPU the engine maps the KV of its ranks; on devices it opens the tensors, and has a store for each rank.
CASES: dict[str, tuple[TinyKind, Device]] = {
    "window": ("window", Cpu()),
    "dense": ("dense", Cpu()),
    "hybrid": ("hybrid", Cpu()),
    "window-devices": ("window", AsDevices()),
    "dense-devices": ("dense", AsDevices()),
}
SHORT = ("window",)
DRAFTED = ("window", "window-devices")  # the others verify no drafts


class Losses:
    """An engine's reports of its ranks' ends."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.said = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.said.set()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[TinyKind, VersionFolder]:
    base = tmp_path_factory.mktemp("ranks")
    return {kind: partial(_version, base, kind) for kind in RANKED}


def _version(base: Path, kind: TinyKind, version: int) -> Path:
    return make_tiny(kind, base / f"{kind}{version}", seed=version, kv_heads=2)


def make_ranked(model: Path, losses: Losses, device: Device, **ranks: int) -> VllmEngine:
    return VllmEngine(
        model,
        EngineSettings(slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS, **ranks),
        lost=losses,
        device=device,
    )


@dataclass(frozen=True)
class Alone:
    """The results of an engine of one rank in this process, for version 1."""

    canary: Canary
    responses: dict[str, Response]
    snapshot: KvSnapshot  # of the first request, on its way


@pytest.fixture(scope="module")
def alone_of(request: pytest.FixtureRequest, folders: dict[TinyKind, VersionFolder]) -> dict[str, Alone]:
    """Returns the results for the chosen cases. vLLM keeps some state for a process, so one rank comes first."""
    chosen = {item.callspec.params["case"] for item in request.session.items if item.path == request.path}  # type: ignore[attr-defined]
    return {case: _alone(folders[kind](1), device) for case, (kind, device) in CASES.items() if case in chosen}


def _alone(model: Path, device: Device) -> Alone:
    engine = make_ranked(model, Losses(), device)
    canary = engine.load_weights(1, model, None)
    responses = run(engine, REQUESTS)
    driver = Driver(engine)
    driver.add(REQUESTS[1])
    driver.step(30)
    snapshot = driver.take_out(REQUESTS[1].request_id)
    engine.close()
    return Alone(canary, responses, snapshot)


@pytest.fixture(
    scope="module", params=[case if case in SHORT else pytest.param(case, marks=pytest.mark.full) for case in CASES]
)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def version_folder(case: str, folders: dict[TinyKind, VersionFolder]) -> VersionFolder:
    return folders[CASES[case][0]]


@pytest.fixture(scope="module")
def alone(case: str, alone_of: dict[str, Alone]) -> Alone:
    return alone_of[case]


@pytest.fixture(scope="module")
def pair(case: str, version_folder: VersionFolder, alone: Alone) -> Iterator[tuple[VllmEngine, Losses]]:
    """An engine of two ranks."""
    kind, device = CASES[case]
    losses = Losses()
    engine = make_ranked(version_folder(1), losses, device, **RANKED[kind])
    yield engine, losses
    engine.close()


@pytest.fixture
def engine(pair: tuple[VllmEngine, Losses], version_folder: VersionFolder) -> VllmEngine:
    pair[0].load_weights(1, version_folder(1), None)
    return pair[0]


@pytest.fixture
def driver(engine: VllmEngine) -> Iterator[Driver]:
    driver = Driver(engine)
    yield driver
    driver.clear()


def test_responses_are_those_of_one_rank(engine: VllmEngine, alone: Alone) -> None:
    assert len(engine.ranks) == 2
    assert farthest(run(engine, REQUESTS), alone.responses) < ROUNDING


def test_each_rank_loads_its_part_of_a_version_and_the_canary_is_of_the_whole(
    engine: VllmEngine, alone: Alone, version_folder: VersionFolder
) -> None:
    canary = alone.canary
    with pytest.raises(CanaryMismatch):
        engine.load_weights(2, version_folder(2), canary)
    assert engine.version is None
    found = engine.load_weights(1, version_folder(1), canary)
    assert found.token_ids == canary.token_ids
    assert max(abs(ours - theirs) for ours, theirs in zip(found.logprobs, canary.logprobs, strict=True)) < ROUNDING


def test_a_request_that_leaves_and_returns_goes_on_bitwise(engine: VllmEngine, driver: Driver, case: str) -> None:
    undisturbed = run(engine, REQUESTS)
    with guessed(engine, undisturbed if case in DRAFTED else None) as guessing:
        for request in REQUESTS:
            driver.add(request)
        for _ in range(4):
            driver.step(5)
            for request_id in driver.unfinished()[:3]:
                engine.take_in(driver.take_out(request_id))
        assert driver.finish() == undisturbed
    assert guessing is None or guessing.accepted_tokens > 0
    assert engine.load().reprefilled_tokens == 0
    assert engine.load().kv_used_tokens == 0


def test_a_request_of_one_rank_goes_on_in_two_with_its_kv_bit_for_bit(
    engine: VllmEngine, driver: Driver, alone: Alone
) -> None:
    request, taken = alone.snapshot.request, alone.snapshot
    driver.responses[request.request_id] = Response(list(request.output_token_ids), list(request.logprobs))
    engine.take_in(taken)
    driver.step()
    full = taken.kv_tokens // engine.capability.block_tokens
    engine.freeze(request.request_id)
    shown = engine.export(request.request_id)
    assert shown is not None and full > 0
    back = resliced(shown, taken.layout.shards)
    assert back.layout == taken.layout
    states = [name for name, window in taken.layout.windowed.items() if window == STATE]  # which the step has changed
    for name, pieces in taken.blocks.items():
        assert name in states or np.array_equal(np.concatenate(back.blocks[name])[:full], np.concatenate(pieces)[:full])
    engine.thaw(request.request_id)
    found = driver.finish()
    assert farthest(found, {name: alone.responses[name] for name in found}) < ROUNDING
    assert engine.load().reprefilled_tokens == 0


def test_parked_requests_equal_unparked_ones_bitwise(
    engine: VllmEngine, driver: Driver, case: str, tmp_path: Path
) -> None:
    """The KV of both ranks lies in a pool while others run in their place."""
    undisturbed, others = run(engine, REQUESTS), [make_request(index) for index in range(6, 6 + SLOTS)]
    untouched = run(engine, others)
    before = engine.load().reprefilled_tokens
    with (
        guessed(engine, undisturbed | untouched if case in DRAFTED else None),
        a_plane(tmp_path, 2, fingerprint=engine.layout.fingerprint) as end,
        a_pool(tmp_path, 1, ("shm", "tcp")) as pool,
    ):
        for request in REQUESTS:
            driver.add(request)
        driver.step(9)
        parked = driver.unfinished()
        for name in parked:
            park(engine, end, pool, name)
        assert engine.load().kv_used_tokens == 0
        for request in others:
            driver.add(request)
        driver.step(20)
        for name in reversed(parked):
            end.plane.expect(name, 1, MOST_BYTES)
            engine.take_in(end.plane.take(sent_on(pool, peer_of(end), name)))
        assert driver.finish() == undisturbed | untouched
    assert (engine.load().reprefilled_tokens, engine.load().kv_used_tokens) == (before, 0)


def doubled(parts: list[bytes]) -> list[bytes]:
    return [parts[0], *parts]


def missing(parts: list[bytes]) -> list[bytes]:
    return parts[1:]


def swapped(parts: list[bytes]) -> list[bytes]:
    return [parts[1], parts[0], *parts[2:]]


def resized(parts: list[bytes]) -> list[bytes]:
    return [parts[0][: len(parts[0]) // 2], *parts[1:]]


@pytest.mark.parametrize("change", some_of((doubled, missing, swapped, resized), missing, swapped))
def test_a_shard_that_is_not_as_it_was_voids_all_and_the_source_goes_on(
    engine: VllmEngine, driver: Driver, tmp_path: Path, change: Callable[[list[bytes]], list[bytes]]
) -> None:
    request = REQUESTS[1]
    name, undisturbed = request.request_id, run(engine, [request])
    with (
        a_plane(tmp_path, 1, fingerprint=engine.layout.fingerprint) as source,
        a_plane(tmp_path, 2, fingerprint=engine.layout.fingerprint) as target,
    ):
        driver.add(request)
        driver.step(30)
        used_tokens = engine.load().kv_used_tokens
        target.plane.expect(name, 1, MOST_BYTES, engine.reserve(name, 60))
        engine.freeze(name)
        snapshot = engine.export(name)
        assert snapshot is not None
        held = [b"".join(piece.tobytes() for piece in snapshot.blocks[layer]) for layer, _ in snapshot.layout.layers]
        body, made = b"".join(held), b"".join(change(held))
        sums = Seal("xxh3", len(body), (digest_with("xxh3", SECRET)([body]),))
        sending = source.plane.send_parts(target.peer, name, [memoryview(made)], head_of(snapshot), seal=sums)
        with pytest.raises((SnapshotRefused, TransferFailed)) as caught:
            target.plane.take(sending.done.result(60).key)
        assert caught.value.field == "body bytes" or "checksum of chunk" in str(caught.value)
        engine.release(name)
        engine.thaw(name)
        assert engine.load().kv_used_tokens == used_tokens
        assert driver.finish() == undisturbed
    assert engine.load().kv_used_tokens == 0


def test_a_killed_rank_is_told_of_and_the_others_end_with_the_engine(pair: tuple[VllmEngine, Losses]) -> None:
    """The last test of this engine."""
    engine, losses = pair
    engine.add(make_request(1))
    engine.step()
    survivor, victim = engine.ranks
    os.kill(victim, signal.SIGKILL)
    assert losses.said.wait(30)
    assert losses.reasons == [f"rank 1 of 2 (process {victim}) has ended with -9"]
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(survivor, 0)
