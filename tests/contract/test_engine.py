"""The contract of rollout engines."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from dora.data.types import Canary
from dora.errors import CanaryMismatch, Conflict, InvalidValue, NotFound
from dora.worker.engine import RolloutEngine
from tests.contract.driver import (
    GREEDY,
    KV_TOKENS,
    MAX_MODEL_LEN_TOKENS,
    ROUNDING,
    SAMPLED,
    SLOTS,
    Driver,
    Response,
    VersionFolder,
    farthest,
    make_request,
    mixed_requests,
    run,
)
from tests.refusals import refused

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
    before = engine.load()
    for request in requests:  # together they need more than there is
        driver.add(request)
    assert sum(100 + 120 for _ in requests) > KV_TOKENS
    assert farthest(driver.finish(), alone) < ROUNDING
    after = engine.load()
    assert after.reprefilled_tokens > before.reprefilled_tokens and after.preemptions > before.preemptions


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
    with refused(Conflict, field="request_id", value="r1", allowed="a frozen request"):
        driver.engine.export("r1")
    for refuse in (driver.engine.freeze, driver.engine.thaw, driver.engine.export):
        with refused(NotFound, field="request_id", value="nobody"):
            refuse("nobody")
    driver.engine.remove("nobody")
    driver.engine.remove("r1")
    with pytest.raises(NotFound):
        driver.engine.freeze("r1")
    assert not driver.engine.has_work()
    assert driver.engine.load().kv_used_tokens == 0


# Refusing.


def test_requests_that_cannot_be_served_are_refused_by_field(engine: RolloutEngine) -> None:
    good = make_request(1)
    too_long = tuple([5] * MAX_MODEL_LEN_TOKENS)
    for request, field, value in (
        (replace(good, prompt_token_ids=too_long), "prompt and output tokens", MAX_MODEL_LEN_TOKENS),
        (replace(good, prompt_token_ids=(5, 64)), "prompt_token_ids", 64),
        (replace(good, prompt_token_ids=()), "prompt_token_ids", ()),
        (replace(good, output_token_ids=(5,)), "logprobs", "0 values"),
        (replace(good, output_token_ids=(5,) * 40, logprobs=(-1.0,) * 40), "output_token_ids", "40 tokens"),
        (replace(good, sampling=replace(SAMPLED, temperature=-1.0)), "sampling.temperature", -1.0),
        (replace(good, sampling=replace(SAMPLED, top_p=0.0)), "sampling.top_p", 0.0),
        (replace(good, sampling=replace(SAMPLED, seed=-1)), "sampling.seed", -1),
        (replace(good, sampling=replace(SAMPLED, min_tokens=41)), "sampling.min_tokens", 41),
    ):
        with refused(InvalidValue, field=field, value=value):
            engine.add(request)
    assert not engine.has_work()


def test_a_known_id_and_another_version_are_conflicts(driver: Driver) -> None:
    driver.add(make_request(1))
    with refused(Conflict, names=("r1",)):
        driver.engine.add(make_request(1))
    with refused(Conflict, field="version", value=2):
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
    with refused(CanaryMismatch, names=(1,)) as found:
        engine.load_weights(1, tmp_path, canary)
    assert found.value.difference > 1e-3
    assert engine.version is None
    with refused(Conflict, field="request.version", value=1):
        engine.add(make_request(1))
    engine.load_weights(1, version_folder(1), canary)
    assert engine.version == 1
    with refused(InvalidValue, field="canary.logprobs", value=len(canary.logprobs) - 1):
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
        with refused(Conflict, field="requests held", value=1):
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
    with refused(InvalidValue, field=f"weights: {name}: shape" if defect == "misshapen" else ""):
        engine.load_weights(2, tmp_path, None)
    assert engine.version is None
    engine.load_weights(1, version_folder(1), None)
    assert run(engine, [make_request(1)]) == untouched
