"""Whatever versions a worker has had before, its logprobs are those of the version that it has now.

Compared with an engine that had no other version before, and with transformers. ``make test-all`` tries every kind of
model on one and two ranks, ``make test`` on one rank the kinds that vLLM repacks most.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dora.data.types import Canary
from dora.errors import CanaryMismatch
from dora.models.tiny import TinyKind, make_tiny
from dora.weights.canary import compute_canary
from dora.worker.vllm.device.port import EngineSettings
from dora.worker.vllm.engine import VllmEngine
from tests.contract.driver import (
    KV_TOKENS,
    MAX_MODEL_LEN_TOKENS,
    ROUNDING,
    SLOTS,
    Response,
    farthest,
    mixed_requests,
    run,
)

pytestmark = pytest.mark.xdist_group("vllm-moe")  # a process imports vLLM for many tests

AGREEMENT = 1e-3
SEQUENCE = (1, 2, 1, 3)
REQUESTS = mixed_requests(4)


@dataclass(frozen=True)
class Kind:
    name: str
    kind: TinyKind
    tied: bool
    ranks: int

    def folder(self, base: Path, version: int) -> Path:
        return make_tiny(self.kind, base / f"v{version}", seed=version, kv_heads=2, tied=self.tied)

    def engine(self, model: Path) -> VllmEngine:
        return VllmEngine(
            model,
            EngineSettings(
                slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS, tensor_parallel=self.ranks
            ),
        )


_MODELS: dict[str, tuple[TinyKind, bool]] = {
    "dense": ("dense", False),
    "tied": ("dense", True),
    "moe": ("moe", False),
    "moe-tied": ("moe", True),
    "mla": ("mla", False),
}
ALL = [Kind(f"{name}-{ranks}", kind, tied, ranks) for name, (kind, tied) in _MODELS.items() for ranks in (1, 2)]
SHORT = ("moe-tied-1",)
KINDS = [pytest.param(kind, marks=() if kind.name in SHORT else pytest.mark.full, id=kind.name) for kind in ALL]


@dataclass(frozen=True)
class Fresh:
    """The results for version 3 of an engine that has loaded no other."""

    canary: Canary
    responses: dict[str, Response]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def folders(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    base = tmp_path_factory.mktemp(kind.name)
    return {version: kind.folder(base, version) for version in set(SEQUENCE)}


@pytest.fixture(scope="module")
def fresh(kind: Kind, folders: dict[int, Path]) -> Fresh:
    engine = kind.engine(folders[1])
    canary = engine.load_weights(3, folders[3], None)
    found = Fresh(canary, run(engine, at(3)))
    engine.close()
    return found


@pytest.fixture(scope="module")
def engine(kind: Kind, folders: dict[int, Path], fresh: Fresh) -> Iterator[VllmEngine]:
    engine = kind.engine(folders[1])  # vLLM keeps some state for a process: ``fresh`` comes first
    yield engine
    engine.close()


def at(version: int) -> list:
    return [replace(request, version=version) for request in REQUESTS]


def reference(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_after_other_versions_logprobs_are_those_of_a_fresh_engine_and_of_transformers(
    engine: VllmEngine, folders: dict[int, Path], fresh: Fresh
) -> None:
    models = {version: reference(folder) for version, folder in folders.items()}
    for version in SEQUENCE:
        canary = compute_canary(models[version])
        engine.load_weights(version, folders[version], canary)
        responses = run(engine, at(version))
        for request in REQUESTS:
            assert off_by(models[version], request.prompt_token_ids, responses[request.request_id]) < AGREEMENT
    assert farthest(responses, fresh.responses) == 0.0
    assert engine.load_weights(3, folders[3], fresh.canary) == fresh.canary


def off_by(model: torch.nn.Module, prompt: tuple[int, ...], response: Response) -> float:
    tokens = torch.tensor([[*prompt, *response.token_ids]])
    with torch.no_grad():
        logprobs = model(tokens).logits[0, :-1].float().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return float((torch.tensor(response.logprobs) - logprobs[len(prompt) - 1 :]).abs().max())


def test_a_load_that_fails_half_way_serves_nothing_and_the_next_one_is_whole(
    engine: VllmEngine, kind: Kind, folders: dict[int, Path], fresh: Fresh, tmp_path: Path, monkeypatch
) -> None:
    if kind.ranks > 1:
        pytest.skip("ranks in processes of their own read the files themselves")
    from dora.worker.copying import weight_sources  # with vLLM, which only this test's process needs

    whole = weight_sources.mapped_tensors

    gone = OSError("the host's memory is gone")

    def cut(files):
        for index, found in enumerate(whole(files)):
            if index == 7:
                raise gone
            yield found

    engine.load_weights(1, folders[1], None)
    with monkeypatch.context() as broken:
        broken.setattr(weight_sources, "mapped_tensors", cut)
        with pytest.raises(OSError) as caught:
            engine.load_weights(2, folders[2], None)
    assert caught.value is gone
    assert engine.version is None
    with pytest.raises(CanaryMismatch):
        engine.load_weights(2, folders[2], fresh.canary)
    assert engine.version is None
    engine.load_weights(3, folders[3], fresh.canary)
    assert farthest(run(engine, at(3)), fresh.responses) == 0.0 < ROUNDING


@pytest.mark.full
def test_a_quantised_engine_has_scales_of_each_version_and_keeps_near_the_trainers_logprobs(tmp_path: Path) -> None:
    folders = {version: make_tiny("dense", tmp_path / f"v{version}", seed=version, kv_heads=2) for version in (1, 2, 3)}
    engine = VllmEngine(
        folders[1],
        EngineSettings(
            slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS, quantisation="int8"
        ),
    )
    canaries = {version: compute_canary(reference(folder)) for version, folder in folders.items()}
    first: dict[int, Canary] = {}
    for version in SEQUENCE:
        found = engine.load_weights(version, folders[version], canaries[version])
        assert found == first.setdefault(version, found), "of a version, always the same"
        assert found != canaries[version], "its own logprobs, not the trainer's"
    with pytest.raises(CanaryMismatch):
        engine.load_weights(2, folders[2], canaries[1])
    engine.close()
