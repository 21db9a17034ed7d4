"""That a parked request goes on as if it had not been, whatever engines are made of: in its process and in another."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dora.kvtransfer.layout import blocks_for
from dora.kvtransfer.transports.arena import STEP_BYTES
from dora.rpc import dora_pb2 as pb
from dora.worker.engine import RolloutEngine
from tests.contract.driver import MAX_MODEL_LEN_TOKENS, SLOTS, Driver, Response, VersionFolder, mixed_requests, run
from tests.contract.guesses import guessed
from tests.contract.planes import a_plane
from tests.contract.pools import a_pool, park, sent_on
from tests.contract.workers import peer_of

POOL_EPOCH = 1  # that of which the other process expects what it is to take in
MOST_BYTES = 1 << 30


@pytest.mark.parametrize("spills", [False, True], ids=["memory", "disk"])
def test_parked_requests_equal_unparked_ones_bitwise(
    kind: str, engine: RolloutEngine, driver: Driver, tmp_path: Path, spills: bool
) -> None:
    """A whole engine's are parked, and others run in their place; on disk all but the last."""
    requests = [replace(request, request_id=f"p{index}") for index, request in enumerate(mixed_requests(SLOTS))]
    others = mixed_requests(SLOTS)
    untouched = run(engine, requests) | run(engine, others)
    before = engine.load().reprefilled_tokens
    longest_bytes = blocks_for(MAX_MODEL_LEN_TOKENS, engine.layout.block_tokens) * engine.layout.block_bytes
    one_bytes = -(-longest_bytes // STEP_BYTES) * STEP_BYTES
    with (
        guessed(engine, untouched) if kind == "vllm-drafts" else contextlib.nullcontext() as guessing,
        a_plane(tmp_path, 2, fingerprint=engine.layout.fingerprint) as end,
        a_pool(tmp_path, POOL_EPOCH, ("shm", "tcp"), one_bytes * (1 if spills else SLOTS), tmp_path / "spill") as pool,
    ):
        for request in requests:
            driver.add(request)
        driver.step(9)
        moving = driver.unfinished()
        for name in moving:
            park(engine, end, pool, name, one_bytes)
        assert engine.load().kv_used_tokens == 0
        pool.turn()
        assert pool.report.parked == len(moving) and pool.report.spilled == (len(moving) - 1 if spills else 0)
        for request in others:
            driver.add(request)
        driver.step(20)
        for name in reversed(moving):
            end.plane.expect(name, POOL_EPOCH, MOST_BYTES)
            engine.take_in(end.plane.take(sent_on(pool, peer_of(end), name)))
        assert driver.finish() == untouched
        assert guessing is None or guessing.accepted_tokens > 0
    assert engine.load().reprefilled_tokens == before


# A process with vLLM takes long to start.
@pytest.mark.parametrize("kind", ["fake", pytest.param("vllm-dense", marks=pytest.mark.full)], indirect=True)
def test_parked_requests_go_on_in_another_process_after_theirs_is_gone(
    engine: RolloutEngine, driver: Driver, kind: str, version_folder: VersionFolder, tmp_path: Path
) -> None:
    requests = mixed_requests(6)
    untouched = run(engine, requests)
    with a_pool(tmp_path, POOL_EPOCH, ("shm", "tcp")) as pool:
        with a_plane(tmp_path, 3, fingerprint=engine.layout.fingerprint) as source:
            for request in requests:
                driver.add(request)
            driver.step(9)
            moving = driver.unfinished()
            for name in moving:
                park(engine, source, pool, name, 0)
        orders = {
            "kind": kind,
            "model": str(version_folder(2)),
            "version": 1,
            "weights": str(version_folder(1)),
            "snapshots": str(tmp_path),
            "transport": "shm",
            "fingerprint": engine.layout.fingerprint,
            "moving": moving,
            "prompts": 0,
        }
        (tmp_path / "orders.json").write_text(json.dumps(orders))
        command = [sys.executable, "-m", "tests.contract.peer", str(tmp_path / "orders.json")]
        log = tmp_path / "peer.log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ
            ) as process,
        ):
            try:
                assert process.stdin is not None and process.stdout is not None
                address = process.stdout.readline().strip()
                assert address, log.read_text()[-4000:]
                peer = pb.KvPeer(worker_id="w2", epoch=2, address=address, transports=["shm"])
                keys = [sent_on(pool, peer, name) for name in moving]
                process.stdin.write(json.dumps(keys) + "\n")
                process.stdin.flush()
                said = process.stdout.read().splitlines()
            finally:
                process.kill()
        assert said, log.read_text()[-4000:]
    told = json.loads(said[-1])
    assert {name: Response(**response) for name, response in told["responses"].items()} == {
        name: untouched[name] for name in moving
    }
    assert told["reprefilled_tokens"] == 0
