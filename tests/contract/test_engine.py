"""What every rollout engine does, whatever it is made of."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dora.errors import CanaryMismatch, Conflict, InvalidValue, NotFound, SnapshotRefused
from dora.kvtransfer.codec import decode, encode
from dora.kvtransfer.shm import ShmTransport
from dora.types import Canary
from dora.worker.engine import RolloutEngine
from tests.contract.driver import (
    EVERYTHING,
    GREEDY,
    KV_TOKENS,
    MAX_MODEL_LEN_TOKENS,
    SAMPLED,
    SLOTS,
    Driver,
    Response,
    farthest,
    make_request,
    mixed_requests,
    run,
)

VersionFolder = Callable[[int], Path]
ROUNDING = 1e-4  # of a logprob whose KV was computed in another order


# Generating.


def test_a_response_is_told_token_by_token_with_its_logprobs(driver: Driver) -> None:
    before = driver.engine.load().generated_tokens
    requests = mixed_requests(6)
    for request in requests:
        driver.add(request)
    driver.step()
    assert driver.engine.load().running == 6
    assert driver.engine.load().kv_used_tokens > 0
    responses = driver.finish()
    for request in requests:
        response, sampling = responses[request.request_id], request.sampling
        assert response.finish_reason == ("length" if len(response.token_ids) == sampling.max_tokens else "stop")
        assert len(response.token_ids) >= sampling.min_tokens
        assert all(math.isfinite(logprob) and logprob <= 0 for logprob in response.logprobs)
    load = driver.engine.load()
    assert (load.running, load.waiting, load.kv_used_tokens) == (0, 0, 0)
    assert load.generated_tokens - before == sum(len(response.token_ids) for response in responses.values())
    assert driver.engine.step() == []


def test_the_same_request_gives_the_same_response_whatever_runs_beside_it(engine: RolloutEngine) -> None:
    together = run(engine, mixed_requests(6))
    for request in mixed_requests(6):
        assert run(engine, [request]) == {request.request_id: together[request.request_id]}


def test_seeds_matter_when_sampling_only(engine: RolloutEngine) -> None:
    for sampling, same in ((GREEDY, True), (SAMPLED, False)):
        first = run(engine, [make_request(1, sampling)])
        other = run(engine, [make_request(1, replace(sampling, seed=999))])
        assert (first == other) is same


def test_a_stop_token_ends_a_response_and_belongs_to_it(engine: RolloutEngine) -> None:
    free = run(engine, [make_request(1, GREEDY)])["r1"]
    stop = free.token_ids[10]
    first = free.token_ids.index(stop)
    stopped = run(engine, [make_request(1, replace(GREEDY, stop_token_ids=(stop,)))])["r1"]
    assert stopped == Response(free.token_ids[: first + 1], free.logprobs[: first + 1], "stop")


def test_a_response_ends_at_the_context(engine: RolloutEngine) -> None:
    response = run(engine, [make_request(1, GREEDY, prompt_tokens=MAX_MODEL_LEN_TOKENS - 5)])["r1"]
    assert (len(response.token_ids), response.finish_reason) == (5, "length")


def test_more_requests_than_slots_wait(driver: Driver) -> None:
    for request in mixed_requests(3 * SLOTS):
        driver.add(request)
    driver.step()
    assert (driver.engine.load().running, driver.engine.load().waiting) == (SLOTS, 2 * SLOTS)
    assert all(response.finish_reason for response in driver.finish().values())


def test_what_kv_pressure_throws_out_goes_on_and_is_counted(engine: RolloutEngine, driver: Driver) -> None:
    requests = [make_request(index, replace(SAMPLED, max_tokens=120), 100) for index in range(SLOTS)]
    alone = {}
    for request in requests:
        alone.update(run(engine, [request]))
    before = engine.load().reprefilled_tokens
    for request in requests:  # together they need more than there is
        driver.add(request)
    assert sum(100 + 120 for _ in requests) > KV_TOKENS
    assert farthest(driver.finish(), alone) < ROUNDING
    assert engine.load().reprefilled_tokens > before


# Freezing.


def test_frozen_requests_stand_still_and_go_on_as_if_nothing_had_happened(
    engine: RolloutEngine, driver: Driver
) -> None:
    requests = mixed_requests(6)
    untouched = run(engine, requests)
    for request in requests:
        driver.add(request)
    driver.step(8)
    for request_id in ("r0", "r1", "r2"):
        engine.freeze(request_id)
        engine.freeze(request_id)
    still = {
        name: replace(driver.responses[name], token_ids=list(driver.responses[name].token_ids))
        for name in ("r0", "r1", "r2")
    }
    assert engine.export("r0") is not None  # a handoff that is then given up
    driver.step(5)
    for name, response in still.items():
        assert driver.responses[name].token_ids == response.token_ids
    for request_id in ("r2", "r0", "r1"):
        engine.thaw(request_id)
    assert driver.finish() == untouched


def test_a_frozen_request_keeps_its_slot(driver: Driver) -> None:
    for request in mixed_requests(2 * SLOTS):
        driver.add(request)
    driver.step(3)
    driver.engine.freeze("r0")
    driver.step(2)
    assert driver.engine.load().running == SLOTS
    driver.engine.thaw("r0")
    driver.step()
    assert driver.engine.load().running == SLOTS
    driver.finish()


def test_a_waiting_request_freezes_and_thaws_but_has_nothing_to_export(driver: Driver) -> None:
    requests = mixed_requests(SLOTS + 1)
    for request in requests:
        driver.add(request)
    driver.step()
    last = requests[-1].request_id
    driver.engine.freeze(last)
    assert driver.engine.export(last) is None
    driver.step(60)
    assert driver.responses[last].token_ids == []
    assert not driver.engine.has_work()
    driver.engine.thaw(last)
    assert driver.finish()[last].finish_reason is not None


def test_only_frozen_requests_are_exported_and_only_known_ones_frozen(driver: Driver) -> None:
    driver.add(make_request(1))
    driver.step(2)
    with pytest.raises(Conflict, match="frozen"):
        driver.engine.export("r1")
    for refuse in (driver.engine.freeze, driver.engine.thaw, driver.engine.export):
        with pytest.raises(NotFound, match="nobody"):
            refuse("nobody")
    driver.engine.remove("nobody")
    driver.engine.remove("r1")
    with pytest.raises(NotFound):
        driver.engine.freeze("r1")
    assert not driver.engine.has_work()
    assert driver.engine.load().kv_used_tokens == 0


# Moving.


@pytest.mark.parametrize("at_step", [1, 7, 30])
def test_a_moved_request_equals_an_unmoved_one_bitwise(engine: RolloutEngine, driver: Driver, at_step: int) -> None:
    requests = mixed_requests(6)
    untouched = run(engine, requests)
    before = engine.load().reprefilled_tokens
    for request in requests:
        driver.add(request)
    driver.step(at_step)
    snapshots = [driver.take_out(name) for name in driver.unfinished()]
    assert len(snapshots) >= 3
    assert engine.load().kv_used_tokens == 0
    for snapshot in reversed(snapshots):
        engine.admit(snapshot)
    driver.step()
    for snapshot in snapshots:  # one token at once: no step was spent on old ones
        assert len(driver.responses[snapshot.request.request_id].token_ids) == at_step + 1
    assert driver.finish() == untouched
    assert engine.load().reprefilled_tokens == before


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
        engine.admit(snapshot)
    driver.step()
    assert (engine.load().running, engine.load().waiting) == (SLOTS, SLOTS)
    assert driver.finish() == untouched
    assert engine.load().reprefilled_tokens == before


def test_a_snapshot_that_waits_for_a_slot_can_move_on(engine: RolloutEngine, driver: Driver) -> None:
    mover = replace(make_request(1, EVERYTHING, ignore_eos=True, min_tokens=40), request_id="mover")
    untouched = run(engine, [mover])["mover"]
    before = engine.load().reprefilled_tokens
    driver.add(mover)
    driver.step(9)
    snapshot = driver.take_out("mover")
    for request in mixed_requests(SLOTS):
        driver.add(request)
    driver.step(2)
    engine.admit(snapshot)
    driver.step(3)
    again = driver.take_out("mover")
    assert again.request == snapshot.request
    engine.admit(again)
    assert driver.finish()["mover"] == untouched
    assert engine.load().reprefilled_tokens == before


def test_kv_decides_what_follows(engine: RolloutEngine, driver: Driver) -> None:
    """The negative control: were KV ignored or recomputed, moved requests would equal unmoved ones for nothing."""
    request = make_request(1, GREEDY)
    untouched = run(engine, [request])["r1"]
    driver.add(request)
    driver.step(8)
    snapshot = driver.take_out("r1")
    flipped = {name: np.array(blocks) for name, blocks in snapshot.blocks.items()}
    first_layer = flipped[snapshot.layout.layers[0][0]]
    first_layer[0, ::7] ^= 0x10
    engine.admit(decode(b"".join(encode(replace(snapshot, blocks=flipped)))))  # with a checksum of its own
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
    with pytest.raises(Conflict, match="r1"):
        engine.admit(snapshot)
    engine.remove("r1")
    layout = snapshot.layout
    for change, name in (
        ({"layout": replace(layout, fingerprint="another")}, "fingerprint"),
        ({"layout": replace(layout, dtype="bfloat16")}, "dtype"),
        ({"layout": replace(layout, backend="cuda/flash")}, "backend"),
        ({"layout": replace(layout, tp_size=2)}, "tp_size"),
        ({"kv_tokens": snapshot.kv_tokens - 1}, "kv_tokens"),
        ({"rng_draws": snapshot.rng_draws + 1}, "rng_draws"),
        ({"request": replace(snapshot.request, version=2)}, "version"),
        ({"blocks": {}}, "blocks"),
    ):
        with pytest.raises(SnapshotRefused, match=name):
            engine.admit(replace(snapshot, **change))
    engine.load_weights(2, version_folder(2), None)
    with pytest.raises(SnapshotRefused, match=r"version = 1, this engine has loaded 2"):
        engine.admit(snapshot)
    assert not engine.has_work()


# Resuming without KV.


@pytest.mark.parametrize("at_step", [1, 12])
def test_a_request_resumed_from_its_outputs_goes_on_the_same_and_is_counted(
    engine: RolloutEngine, driver: Driver, version_folder: VersionFolder, at_step: int
) -> None:
    requests = mixed_requests(6)
    untouched = run(engine, requests)
    for request in requests:
        driver.add(request)
    driver.step(at_step)
    resumed = [request for request in requests if request.request_id in driver.unfinished()]
    for request in resumed:
        engine.remove(request.request_id)
    engine.load_weights(1, version_folder(1), None)  # nothing is left in the prefix cache
    before = engine.load().reprefilled_tokens
    for request in resumed:
        driver.resume(request)
    assert farthest(driver.finish(), untouched) < ROUNDING
    assert engine.load().reprefilled_tokens - before == sum(
        len(request.prompt_token_ids) + at_step - 1 for request in resumed
    )


# Refusing.


def test_requests_that_cannot_be_served_are_refused_by_field(engine: RolloutEngine) -> None:
    good = make_request(1)
    too_long = tuple([5] * MAX_MODEL_LEN_TOKENS)
    for request, field in (
        (replace(good, prompt_token_ids=too_long), "context of 256"),
        (replace(good, prompt_token_ids=(5, 64)), "prompt_token_ids = 64"),
        (replace(good, prompt_token_ids=()), "prompt_token_ids"),
        (replace(good, output_token_ids=(5,)), "logprobs"),
        (replace(good, output_token_ids=(5,) * 40, logprobs=(-1.0,) * 40), "max_tokens"),
        (replace(good, sampling=replace(SAMPLED, temperature=-1.0)), "temperature"),
        (replace(good, sampling=replace(SAMPLED, top_p=0.0)), "top_p"),
        (replace(good, sampling=replace(SAMPLED, seed=-1)), "seed"),
        (replace(good, sampling=replace(SAMPLED, min_tokens=41)), "min_tokens"),
    ):
        with pytest.raises(InvalidValue, match=field):
            engine.add(request)
    assert not engine.has_work()


def test_a_known_id_and_another_version_are_conflicts(driver: Driver) -> None:
    driver.add(make_request(1))
    with pytest.raises(Conflict, match="r1"):
        driver.engine.add(make_request(1))
    with pytest.raises(Conflict, match="version = 2"):
        driver.engine.add(make_request(2, version=2))


# Weights.


def test_weights_are_replaced_whole_and_old_kv_is_never_used_again(
    engine: RolloutEngine, version_folder: VersionFolder
) -> None:
    def serve(version: int) -> dict[str, Response]:
        engine.load_weights(version, version_folder(version), None)
        return run(engine, [make_request(index, GREEDY, 150, version=version) for index in range(2)])

    first, second = serve(1), serve(2)
    assert second["r0"].logprobs != first["r0"].logprobs
    assert serve(1) == first
    assert serve(2) == second


def test_the_canary_is_reproduced_and_a_wrong_tensor_is_caught_by_it(
    engine: RolloutEngine, version_folder: VersionFolder, tmp_path: Path
) -> None:
    canary = engine.load_weights(1, version_folder(1), None)
    assert len(canary.logprobs) == len(canary.token_ids) - 1
    assert engine.load_weights(1, version_folder(1), canary) == canary
    damaged = tmp_path / "model.safetensors"
    content = bytearray((version_folder(1) / damaged.name).read_bytes())
    content[-4096:] = bytes(4096)
    damaged.write_bytes(content)
    with pytest.raises(CanaryMismatch, match="version 1"):
        engine.load_weights(1, tmp_path, canary)
    assert engine.version is None
    with pytest.raises(Conflict, match="None, the version loaded"):
        engine.add(make_request(1))
    engine.load_weights(1, version_folder(1), canary)
    assert engine.version == 1
    with pytest.raises(InvalidValue, match=r"canary\.logprobs"):
        engine.load_weights(1, version_folder(1), Canary(canary.token_ids, canary.logprobs[:-1]))


def test_the_canary_leaves_no_trace(engine: RolloutEngine, version_folder: VersionFolder) -> None:
    before = engine.load()
    engine.load_weights(1, version_folder(1), None)
    assert engine.load() == before
    assert not engine.has_work()


def test_weights_are_refused_while_requests_are_held(driver: Driver, version_folder: VersionFolder) -> None:
    untouched = run(driver.engine, [make_request(1)])
    driver.add(make_request(1))
    driver.step(4)
    for act in (driver.engine.freeze, driver.engine.thaw):
        act("r1")
        with pytest.raises(Conflict, match="requests held = 1"):
            driver.engine.load_weights(2, version_folder(2), None)
    assert driver.engine.version == 1
    assert driver.finish() == untouched


@pytest.mark.parametrize("defect", ["renamed", "misshapen", "missing file", "truncated"])
def test_weights_that_are_not_the_models_are_refused_before_anything_is_touched(
    engine: RolloutEngine, version_folder: VersionFolder, tmp_path: Path, defect: str
) -> None:
    untouched = run(engine, [make_request(1)])
    content = (version_folder(2) / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = "model.norm.weight"
    if defect == "renamed":
        header["model.norm.wait"] = header.pop(name)
    elif defect == "misshapen":
        header[name]["shape"] = [2, header[name]["shape"][0] // 2]
    text = json.dumps(header).encode()
    body = content[8 + length :] if defect != "truncated" else content[8 + length : -1]
    if defect != "missing file":
        (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    with pytest.raises(InvalidValue, match=name if defect == "misshapen" else None):
        engine.load_weights(2, tmp_path, None)
    assert engine.version is None
    engine.load_weights(1, version_folder(1), None)
    assert run(engine, [make_request(1)]) == untouched


# Between processes.


def test_requests_go_on_in_another_process_and_weights_are_the_same_there(
    engine: RolloutEngine, driver: Driver, kind: str, version_folder: VersionFolder, tmp_path: Path
) -> None:
    requests = mixed_requests(6)
    untouched = run(engine, requests)
    moved = [replace(request, request_id=f"moved-{request.request_id}") for request in requests]
    for request in moved:
        driver.add(request)
    driver.step(9)
    transport = ShmTransport(tmp_path)
    locators = [transport.put(driver.take_out(name)) for name in driver.unfinished()]
    finished_here = {name: response for name, response in driver.responses.items() if response.finish_reason}

    orders = {
        "kind": kind,
        "model": str(version_folder(2)),
        "version": 1,
        "weights": str(version_folder(1)),
        "snapshots": str(tmp_path),
        "locators": locators,
        "prompts": len(requests),
    }
    (tmp_path / "orders.json").write_text(json.dumps(orders))
    command = [sys.executable, "-m", "tests.contract.peer", str(tmp_path / "orders.json")]
    peer = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert peer.returncode == 0, peer.stderr[-4000:]
    told = json.loads(peer.stdout.splitlines()[-1])
    responses = {name: Response(**response) for name, response in told["responses"].items()} | finished_here
    assert len(responses) == 2 * len(requests)
    for name, response in untouched.items():
        assert responses[name] == response  # started there: a fresh engine with the same weights
        assert responses[f"moved-{name}"] == response
    assert told["reprefilled_tokens"] == 0
    assert list(tmp_path.glob("*.kv")) == []
