"""An engine of several ranks: a process each, one KV-cache to look at, the same responses as of one rank."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dora.errors import CanaryMismatch
from dora.kvtransfer.reslice import resliced
from dora.kvtransfer.snapshot import KvSnapshot
from dora.models.tiny import make_tiny
from dora.types import Canary
from dora.worker.vllm_engine import VllmEngine
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

REQUESTS = mixed_requests(6)


class Losses:
    """What an engine says of its ranks' ends."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.said = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.said.set()


@pytest.fixture(scope="module")
def version_folder(tmp_path_factory: pytest.TempPathFactory) -> VersionFolder:
    base = tmp_path_factory.mktemp("ranks")
    return lambda version: make_tiny("dense", base / f"v{version}", seed=version, kv_heads=2)


def make_ranked(model: Path, losses: Losses, **ranks: int) -> VllmEngine:
    return VllmEngine(
        model, slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS, lost=losses, **ranks
    )


@dataclass(frozen=True)
class Alone:
    """What an engine of one rank, in this process, makes of version 1."""

    canary: Canary
    responses: dict[str, Response]
    snapshot: KvSnapshot  # of the first request, on its way


@pytest.fixture(scope="module")
def alone(version_folder: VersionFolder) -> Alone:
    engine = make_ranked(version_folder(1), Losses())
    canary = engine.load_weights(1, version_folder(1), None)
    responses = run(engine, REQUESTS)
    driver = Driver(engine)
    driver.add(REQUESTS[1])
    driver.step(30)
    snapshot = driver.take_out(REQUESTS[1].request_id)
    engine.close()
    return Alone(canary, responses, snapshot)


@pytest.fixture(scope="module", params=["tensor_parallel", "pipeline_parallel"])
def pair(
    request: pytest.FixtureRequest, version_folder: VersionFolder, alone: Alone
) -> Iterator[tuple[VllmEngine, Losses]]:
    """Two ranks that share each layer, or the layers. vLLM keeps some state for a process, so ``alone`` comes first."""
    losses = Losses()
    engine = make_ranked(version_folder(1), losses, **{request.param: 2})
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


def test_a_request_that_leaves_and_returns_goes_on_bitwise(engine: VllmEngine, driver: Driver) -> None:
    undisturbed = run(engine, REQUESTS)
    for request in REQUESTS:
        driver.add(request)
    for _ in range(4):
        driver.step(5)
        for request_id in driver.unfinished()[:3]:
            engine.take_in(driver.take_out(request_id))
    assert driver.finish() == undisturbed
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
    for name, pieces in taken.blocks.items():
        assert np.array_equal(np.concatenate(back.blocks[name])[:full], np.concatenate(pieces)[:full])
    engine.thaw(request.request_id)
    found = driver.finish()
    assert farthest(found, {name: alone.responses[name] for name in found}) < ROUNDING
    assert engine.load().reprefilled_tokens == 0


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
