"""That a request which moves goes on as if it had not, whatever engines are made of: with its KV or without."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dora.errors import Conflict, LayoutMisfit, SnapshotRefused
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.plane import DataPlane
from dora.worker.engine import RolloutEngine
from tests.contract.driver import (
    GREEDY,
    SLOTS,
    Driver,
    Response,
    VersionFolder,
    make_request,
    mixed_requests,
    over_the_wire,
    run,
)
from tests.contract.planes import HERE, a_plane
from tests.refusals import refused
from tests.sweeps import some_of

# Moving.


def test_sixteen_requests_move_at_once_through_eight_slots(engine: RolloutEngine, driver: Driver) -> None:
    requests = [replace(request, request_id=f"m{i}") for i, request in enumerate(mixed_requests(16))]
    untouched = run(engine, requests)
    before = engine.load().reprefilled_tokens
    snapshots = []
    for half in (requests[:SLOTS], requests[SLOTS:]):
        for request in half:
            driver.add(request)
        driver.step(6)
        snapshots += [driver.take_out(request.request_id) for request in half]
    for snapshot in snapshots:
        engine.take_in(snapshot)
    driver.step()
    assert (engine.load().running, engine.load().waiting) == (SLOTS, SLOTS)
    assert driver.finish() == untouched
    assert engine.load().reprefilled_tokens == before


def test_kv_decides_what_follows(engine: RolloutEngine, driver: Driver) -> None:
    """The negative control: were KV ignored or recomputed, moved requests would equal unmoved ones for nothing."""
    request = make_request(1, GREEDY)
    untouched = run(engine, [request])["r1"]
    driver.add(request)
    driver.step(8)
    snapshot = driver.take_out("r1")
    flipped = {name: [np.array(piece) for piece in pieces] for name, pieces in snapshot.blocks.items()}
    first_layer = flipped[snapshot.layout.layers[0][0]]
    first_layer[0][0, ::7] ^= 0x10
    engine.take_in(over_the_wire(replace(snapshot, blocks=flipped)))  # with checksums of its own
    changed = driver.finish()["r1"]
    assert changed.logprobs[:8] == untouched.logprobs[:8]
    assert changed.logprobs[8:] != untouched.logprobs[8:]


def test_a_snapshot_is_refused_by_name_of_what_differs(
    engine: RolloutEngine, driver: Driver, version_folder: VersionFolder
) -> None:
    driver.add(make_request(1))
    driver.step(4)
    engine.freeze("r1")
    snapshot = engine.export("r1")
    assert snapshot is not None
    with refused(Conflict, names=("r1",)):
        engine.take_in(snapshot)
    engine.remove("r1")
    layout = snapshot.layout
    for change, kind, field, value in (
        ({"layout": replace(layout, fingerprint="another")}, LayoutMisfit, "layout.fingerprint", "another"),
        ({"layout": replace(layout, dtype="bfloat16")}, LayoutMisfit, "layout.dtype", "bfloat16"),
        ({"layout": replace(layout, backend="cuda/flash")}, LayoutMisfit, "layout.backend", "cuda/flash"),
        ({"layout": replace(layout, shards=2)}, SnapshotRefused, "layout.shards", 2),
        ({"kv_tokens": snapshot.kv_tokens - 1}, SnapshotRefused, "kv_tokens", snapshot.kv_tokens - 1),
        ({"rng_draws": snapshot.rng_draws + 1}, SnapshotRefused, "rng_draws", snapshot.rng_draws + 1),
        ({"request": replace(snapshot.request, version=2)}, SnapshotRefused, "request.version", 2),
        ({"blocks": {}}, SnapshotRefused, "blocks", []),
    ):
        with refused(kind, field=field, value=value):
            engine.take_in(replace(snapshot, **change))
    engine.load_weights(2, version_folder(2), None)
    with refused(SnapshotRefused, field="request.version", value=1, names=(2,)):
        engine.take_in(snapshot)
    assert not engine.has_work()


# Between processes.


# A process with vLLM takes long to start: one transport each. In ``make test`` such processes are those of tests/e2e.
@pytest.mark.parametrize("kind", some_of(("fake", "vllm-dense", "vllm-moe"), "fake"), indirect=True)
@pytest.mark.parametrize("transport", some_of(HERE, "shm"))
def test_requests_go_on_in_another_process_and_weights_are_the_same_there(
    engine: RolloutEngine, driver: Driver, kind: str, version_folder: VersionFolder, tmp_path: Path, transport: str
) -> None:
    if transport not in {"vllm-dense": ("shm",), "vllm-moe": ("tcp",)}.get(kind, HERE):
        pytest.skip("another transport is tried with this engine")
    requests = mixed_requests(6)
    untouched = run(engine, requests)
    moved = [replace(request, request_id=f"moved-{request.request_id}") for request in requests]
    for request in moved:
        driver.add(request)
    driver.step(9)
    moving = driver.unfinished()
    finished_here = {name: response for name, response in driver.responses.items() if response.finish_reason}

    orders = {
        "kind": kind,
        "model": str(version_folder(2)),
        "version": 1,
        "weights": str(version_folder(1)),
        "snapshots": str(tmp_path),
        "transport": transport,
        "fingerprint": engine.layout.fingerprint,
        "moving": moving,
        "prompts": len(requests),
    }
    (tmp_path / "orders.json").write_text(json.dumps(orders))
    command = [sys.executable, "-m", "tests.contract.peer", str(tmp_path / "orders.json")]
    log = tmp_path / "peer.log"
    with (
        log.open("w") as errors,
        a_plane(tmp_path, 1, (transport,), fingerprint=engine.layout.fingerprint) as plane,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ
        ) as process,
    ):
        try:
            assert process.stdin is not None and process.stdout is not None
            address = process.stdout.readline().strip()
            assert address, log.read_text()[-4000:]
            keys = [move_out(engine, plane.plane, Peer("w2", 2, address, (transport,)), name) for name in moving]
            process.stdin.write(json.dumps(keys) + "\n")
            process.stdin.flush()
            said = process.stdout.read().splitlines()
        finally:
            process.kill()
    assert said, log.read_text()[-4000:]
    told = json.loads(said[-1])
    responses = {name: Response(**response) for name, response in told["responses"].items()} | finished_here
    assert len(responses) == 2 * len(requests)
    for name, response in untouched.items():
        assert responses[name] == response  # started there: a fresh engine with the same weights
        assert responses[f"moved-{name}"] == response
    assert told["reprefilled_tokens"] == 0
    assert list(tmp_path.rglob("*.kv")) == []


def move_out(engine: RolloutEngine, plane: DataPlane, peer: Peer, request_id: str) -> str:
    """Copies a request to another worker and forgets it here; its key there."""
    engine.freeze(request_id)
    snapshot = engine.export(request_id)
    assert snapshot is not None
    sent = plane.send(peer, request_id, snapshot).done.result(60)
    engine.remove(request_id)
    assert sent.fallbacks == ()
    return sent.key
