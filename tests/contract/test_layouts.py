"""Models whose KV is not one list of alike blocks: latent attention, layers that read the last tokens alone, and layers
that keep a state.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dora.data.types import RequestSpec
from dora.engine_patches.patch import PatchFailed
from dora.errors import LayoutMisfit, SnapshotRefused
from dora.models.tiny import WINDOW_TOKENS, make_tiny
from dora.weights.canary import compute_canary
from dora.worker.vllm.device.port import EngineSettings
from dora.worker.vllm.engine import VllmEngine
from tests.contract.driver import (
    EVERYTHING,
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
    run,
)
from tests.refusals import refused
from tests.sweeps import full, some_of

pytestmark = pytest.mark.xdist_group("vllm-moe")  # a process imports vLLM for many tests

LONG = 120  # prompt tokens: beyond the window from the start
KINDS = {
    "vllm-mla": "mla",
    "vllm-window": "window",
    "vllm-chunk": "chunk",
    "vllm-hybrid": "hybrid",
    "vllm-mamba": "mamba",
    "vllm-conv": "conv",
}
STATES = ("vllm-hybrid", "vllm-mamba", "vllm-conv")


@pytest.fixture(scope="module", params=some_of(KINDS, "vllm-hybrid"))  # with a state, and layers of every token
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def version_folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> VersionFolder:
    base = tmp_path_factory.mktemp(kind)
    return lambda version: make_tiny(KINDS[kind], base / f"v{version}", seed=version)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def started_engine(version_folder: VersionFolder) -> Iterator[VllmEngine]:
    engine = VllmEngine(
        version_folder(1), EngineSettings(slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS)
    )
    yield engine
    engine.close()


def requests_of(prompt_tokens: int, max_tokens: int) -> list[RequestSpec]:
    samplings = (GREEDY, SAMPLED, replace(EVERYTHING, stop_token_ids=(), ignore_eos=True))
    return [
        make_request(index, sampling, prompt_tokens, max_tokens=max_tokens) for index, sampling in enumerate(samplings)
    ]


@pytest.mark.parametrize(
    ("prompt_tokens", "at_step"),
    [(20, 5), (LONG, 40), *full((20, 60), (LONG, 1))],
)
def test_a_moved_request_equals_an_unmoved_one_bitwise(
    engine: VllmEngine, driver: Driver, prompt_tokens: int, at_step: int
) -> None:
    requests = requests_of(prompt_tokens, 100)
    untouched = run(engine, requests)
    before = engine.load().reprefilled_tokens
    for request in requests:
        driver.add(request)
    driver.step(at_step)
    while not all(response.token_ids for response in driver.responses.values()):  # a step has room for two prompts
        driver.step()
    snapshots = [driver.take_out(request.request_id) for request in requests]
    assert engine.load().kv_used_tokens == 0
    for snapshot in reversed(snapshots):
        engine.take_in(snapshot)
    assert driver.finish() == untouched
    assert engine.load().reprefilled_tokens == before


def test_a_request_copied_in_rounds_equals_an_unmoved_one_bitwise(engine: VllmEngine, driver: Driver) -> None:
    requests = requests_of(LONG, 100)
    untouched = run(engine, requests)
    for request in requests:
        driver.add(request)
    driver.step(5)
    for request in requests:
        engine.take_in(driver.take_out_in_rounds(request.request_id, 8, 3))
    assert driver.finish() == untouched


def test_only_what_a_window_still_covers_is_sent(engine: VllmEngine, driver: Driver, kind: str) -> None:
    driver.add(make_request(1, GREEDY, LONG, max_tokens=60))
    driver.step(40)
    snapshot = driver.take_out("r1")
    layout, windowed = snapshot.layout, snapshot.layout.windowed
    counts = {name: sum(map(len, pieces)) for name, pieces in snapshot.blocks.items()}
    whole = -(-snapshot.kv_tokens // layout.block_tokens)
    assert len(windowed) == (0 if kind == "vllm-mla" else 2)
    most = 1 if kind in STATES else WINDOW_TOKENS // layout.block_tokens + 1
    for name, count in counts.items():
        assert count == whole if name not in windowed else count <= most
        assert all(np.any(block) for piece in snapshot.blocks[name] for block in piece), "no null block"


def test_as_many_tokens_fit_as_were_asked_for(engine: VllmEngine, driver: Driver) -> None:
    block_tokens = engine.capability.block_tokens
    assert engine.capability.kv_tokens == KV_TOKENS // block_tokens * block_tokens
    for index in range(SLOTS):
        driver.add(make_request(index, GREEDY, 100, max_tokens=20))
    driver.step(10)
    load = engine.load()
    assert load.running == SLOTS, "eight times 110 tokens, whatever the groups of layers"
    assert 0 < load.kv_used_tokens <= KV_TOKENS


def test_a_preempted_request_comes_back_with_its_windows(
    engine: VllmEngine, driver: Driver, version_folder: VersionFolder, kind: str
) -> None:
    if kind == "vllm-chunk":
        pytest.skip("its chunks leave room for all")
    request = make_request(1, GREEDY, 60, max_tokens=90)
    untouched = run(engine, [request])
    engine.load_weights(1, version_folder(1), None)  # nothing is left in the prefix cache
    driver.preempt(request)
    before = engine.load().reprefilled_tokens
    tokens = 60 + len(driver.responses["r1"].token_ids)
    assert tokens >= WINDOW_TOKENS
    assert farthest({"r1": driver.finish()["r1"]}, untouched) < ROUNDING
    assert engine.load().reprefilled_tokens > before


def test_logprobs_are_those_of_transformers(engine: VllmEngine, version_folder: VersionFolder) -> None:
    reference = AutoModelForCausalLM.from_pretrained(version_folder(2), dtype=torch.float32).eval()
    engine.load_weights(2, version_folder(2), compute_canary(reference))
    requests = [replace(request, version=2) for request in requests_of(LONG, 40)]
    for request, response in zip(requests, run(engine, requests).values(), strict=True):
        tokens = torch.tensor([[*request.prompt_token_ids, *response.token_ids]])
        with torch.no_grad():
            logprobs = reference(tokens).logits[0, :-1].float().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        expected = logprobs[len(request.prompt_token_ids) - 1 :]
        assert float((torch.tensor(response.logprobs) - expected).abs().max()) < 1e-3


def test_a_patched_rope_is_proven(engine: VllmEngine, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from dora.engine_patches import registry
    from dora.engine_patches.cpu import interleaved_rope
    from dora.engine_patches.cpu.registry import PATCHES

    runner = engine.core.model_executor.driver_worker.worker.model_runner
    registry.verify(runner, PATCHES)
    if kind == "vllm-mla":
        for module in runner.get_model().modules():
            if isinstance(module, RotaryEmbedding):
                monkeypatch.setattr(module, "_forward_method", partial(interleaved_rope._kernel, module))
        with refused(PatchFailed, field="patch", value="interleaved_rope"):
            registry.verify(runner, PATCHES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("found", "wanted"), [(32, 64), (96, 32)])
def test_blocks_of_another_size_are_what_the_kernel_would_have_written(
    dtype: torch.dtype, found: int, wanted: int
) -> None:
    """vLLM's CPU kernel writes the same keys and values into both."""
    from vllm import _custom_ops
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from dora.kvtransfer.reblock import _resized
    from dora.worker.vllm.groups import interior_in_memory

    tokens, heads, size = 150, 2, 64
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(tokens, heads, size, generator=generator).to(dtype) for _ in range(2))

    def written(block_tokens: int) -> np.ndarray:
        blocks = -(-tokens // block_tokens)
        cache = torch.zeros(blocks, heads, block_tokens, 2 * size, dtype=dtype)
        key_cache, value_cache = cache.view(blocks, heads, 2 * block_tokens, size).chunk(2, dim=2)
        _custom_ops.cpu_attn_reshape_and_cache(
            keys,
            values,
            key_cache,
            value_cache,
            torch.arange(tokens),
            "vec",
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype="auto",
        )
        return cache.view(blocks, -1).view(torch.uint8).numpy()

    interior = interior_in_memory(
        FullAttentionSpec(block_size=found, num_kv_heads=heads, head_size=size, dtype=dtype), "CPU_ATTN", "vec"
    )
    assert np.array_equal(_resized(written(found), interior, 0, 0, tokens, wanted), written(wanted))


def begun(driver: Driver, turns: int) -> list[int]:
    """Plays a session of so many turns of 3 sampled tokens, each but the first with one given token.

    Returns its outputs at each turn's end.
    """
    driver.add(replace(make_request(1, GREEDY, 40, max_tokens=3), keeps=True))
    driver.finish()
    ends = [3]
    for turn in range(1, turns):
        asked(driver, (3 + turn,))
        ends.append(ends[-1] + 4)
    return ends


def asked(driver: Driver, given: tuple[int, ...], after: int | None = None) -> Response:
    """The next turn, after so many outputs; None: all."""
    before, engine = driver.responses["r1"], driver.engine
    after = len(before.token_ids) if after is None else after
    engine.extend("r1", given, replace(GREEDY, max_tokens=3), after=after)
    kept = Response([*before.token_ids[:after], *given], [*before.logprobs[:after], *(0.0 for _ in given)])
    driver.responses["r1"] = kept
    return driver.finish()["r1"]


def test_a_session_of_fifty_turns_prefills_nothing_twice(engine: VllmEngine, driver: Driver, kind: str) -> None:
    before = engine.load().reprefilled_tokens
    begun(driver, 50)
    assert engine.load().reprefilled_tokens == before
    assert engine.load().state_bytes == 50 * engine.layout.state_bytes
    driver.drop("r1")
    assert engine.load().state_bytes == 0


def test_a_fork_at_a_turns_end_continues_from_the_state_kept_there(
    engine: VllmEngine, driver: Driver, kind: str
) -> None:
    """It computes again one token: the turn's last, which had no KV when the state was kept."""
    if kind not in STATES:
        pytest.skip("its KV can be cut")
    *_, place, _, _ = begun(driver, 4)
    before = engine.load().reprefilled_tokens
    found = asked(driver, (7, 8), after=place)
    assert engine.load().reprefilled_tokens - before == 1
    driver.drop("r1")
    begun(driver, 2)
    assert asked(driver, (7, 8)) == found, "bit for bit the session that never went on"
    driver.drop("r1")


def test_a_fork_within_a_turn_continues_from_the_nearest_state(engine: VllmEngine, driver: Driver, kind: str) -> None:
    if kind not in STATES:
        pytest.skip("its KV can be cut")
    checkpoints, every = engine.core.scheduler.checkpoints, engine.core.scheduler.checkpoints.every_tokens
    for every_tokens, again in ((every, 40 + 12), (4, 1)):
        checkpoints.every_tokens = every_tokens
        driver.add(replace(make_request(1, GREEDY, 40, max_tokens=20), keeps=True))
        driver.finish()
        before = engine.load().reprefilled_tokens
        found = asked(driver, (7,), after=13)
        assert engine.load().reprefilled_tokens - before == again
        driver.drop("r1")
    checkpoints.every_tokens = every
    driver.add(replace(make_request(1, GREEDY, 40, max_tokens=13), keeps=True))
    driver.finish()
    alone = asked(driver, (7,))
    assert found.token_ids == alone.token_ids
    assert farthest({"r1": found}, {"r1": alone}) < ROUNDING
    driver.drop("r1")


def test_a_fork_after_a_move_is_prefilled_whole(engine: VllmEngine, driver: Driver, kind: str) -> None:
    """The checkpoints stay behind."""
    if kind not in STATES:
        pytest.skip("its KV can be cut")
    place, *_ = begun(driver, 2)
    engine.take_in(driver.take_out("r1"))
    assert engine.load().state_bytes == 0
    before = engine.load().reprefilled_tokens
    asked(driver, (7,), after=place)
    assert engine.load().reprefilled_tokens - before == 40 + place - 1
    driver.drop("r1")


def test_a_snapshot_without_its_state_or_of_another_models_state_is_refused(
    engine: VllmEngine, driver: Driver, kind: str
) -> None:
    if kind not in STATES:
        pytest.skip("it has no state")
    driver.add(make_request(1, GREEDY, 40))
    driver.step(4)
    engine.freeze("r1")
    snapshot = engine.export("r1")
    assert snapshot is not None
    engine.remove("r1")
    layout = snapshot.layout
    name = next(iter(layout.windowed))
    half = layout.backend.replace("float32", "bfloat16", 1)
    for change, error, field in (
        ({"blocks": {**snapshot.blocks, name: []}}, SnapshotRefused, f"blocks.{name}"),
        ({"state_tokens": snapshot.kv_tokens - 1}, SnapshotRefused, "state_tokens"),
        ({"layout": replace(layout, backend=half)}, LayoutMisfit, "layout.backend"),
        ({"layout": replace(layout, windows=())}, LayoutMisfit, "layout.windows"),
    ):
        with pytest.raises(error) as caught:
            engine.take_in(replace(snapshot, **change))
        assert caught.value.field == field
    assert not engine.has_work()
