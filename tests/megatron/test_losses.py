"""Megatron and the plain trainer on the same stream: the same losses, and weights that say the same elsewhere."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron", reason="Megatron has an environment of its own: make test-megatron")

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dora.data.trajectory import Trajectory
from dora.data.types import Canary
from dora.models.tiny import make_tiny
from dora.trainers.learner import Learner
from dora.trainers.packing import packed_logprobs, prepare
from tests.megatron.record import read_record, write_record
from tests.megatron.world import learner_config, run

STEPS = 20
SETTINGS = {"learning_rate": 1e-3, "micro_batch_tokens": 128}
BOUND = {"dense": 1e-4, "moe": 1e-3}


@dataclass(frozen=True)
class Case:
    """One training on the record's steps. ``steps``: how many of them in the short form; 0: it is not in it."""

    kind: str
    layout: Mapping[str, int]
    steps: int
    learner: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "dense-tp2": Case("dense", {"tp": 2}, 6),
    "dense-pp2": Case("dense", {"pp": 2}, 4),
    "dense-dp2": Case("dense", {}, 4),
    "dense-cp2": Case("dense", {"cp": 2}, 0),
    "moe-ep2": Case("moe", {"ep": 2}, 6),
    "moe-tp2": Case("moe", {"tp": 2}, 0),
    "moe-pp2": Case("moe", {"pp": 2}, 0),
    "moe-etp2": Case("moe", {"tp": 2, "etp": 2}, 0),
    "kl": Case("dense", {"pp": 2}, 4, {"kl_coefficient": 0.5}),
    "distributed-optimizer": Case("dense", {}, 4, options={"distributed_optimizer": True}),
    "bfloat16": Case("dense", {"tp": 2}, 4, options={"dtype": "bfloat16"}),
}
FLOAT32 = [name for name in CASES if name != "bfloat16"]
IN_VLLM = {"dense": ("dense-tp2", "dense-pp2"), "moe": ("moe-ep2",)}


class Trained:
    """The cases of this form of the tests, trained, each in a folder: what it exported; beside it its own logprobs."""

    def __init__(self, folder: Path, steps: int) -> None:
        """``steps``: of every case; 0: those of the short form."""
        self.folder, self.models = folder, {}
        for kind in ("dense", "moe"):
            self.models[kind] = make_tiny(kind, folder / kind, kv_heads=2)
            write_record(folder / f"{kind}.jsonl", self.models[kind], STEPS, groups=3)
        self._steps = {name: steps or case.steps for name, case in CASES.items()}
        self._answer = run({name: self._order(name) for name, count in self._steps.items() if count}, folder)
        self._plain: dict[str, list[dict[str, float]]] = {}

    def _order(self, name: str) -> dict[str, Any]:
        case = CASES[name]
        return {
            "model": str(self.models[case.kind]),
            "record": str(self.folder / f"{case.kind}.jsonl"),
            "steps": self._steps[name],
            "layout": case.layout,
            "learner": {**SETTINGS, **case.learner},
            "options": case.options,
        }

    def steps(self, name: str) -> list[dict[str, float]]:
        """The metrics of each. Skips the test where this form is without the case."""
        if name not in self._answer:
            pytest.skip("not in the short form: make test-megatron ARGS=--all")
        found: list[dict[str, float]] = self._answer[name]["steps"]
        assert len(found) == self._steps[name]
        return found

    def canary(self, name: str) -> Canary:
        found = self._answer[name]["canary"]
        return Canary(tuple(found["token_ids"]), tuple(found["logprobs"]))

    def plain(self, name: str, dtype: torch.dtype = torch.float32) -> list[dict[str, float]]:
        """As :meth:`steps`, by the plain trainer; once for all layouts."""
        case, count = CASES[name], self._steps[name]
        key = f"{case.kind} {case.learner} {dtype}"
        if len(self._plain.get(key, ())) < count:
            config = learner_config({**SETTINGS, **case.learner})
            module, reference = (
                AutoModelForCausalLM.from_pretrained(self.models[case.kind], dtype=dtype) for _ in range(2)
            )
            learner = Learner(module, config, reference=reference if config.objective.needs_reference else None)
            self._plain[key] = []
            for groups in list(read_record(self.folder / f"{case.kind}.jsonl"))[:count]:
                for group in groups:
                    learner.add_group(group)
                self._plain[key].append(learner.finish_step().numbers())
        return self._plain[key][:count]

    def last(self, name: str) -> Iterator[tuple[Sequence[Trajectory], torch.Tensor]]:
        """The groups of its last step, with the logprobs that Megatron gives their responses after it."""
        groups = list(read_record(self.folder / f"{CASES[name].kind}.jsonl"))[self._steps[name] - 1]
        own = load_file(self.folder / f"{name}.bin")
        assert len(own) == len(groups)
        for index, group in enumerate(groups):
            yield group.trajectories, own[str(index)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Trained:
    torch.set_num_threads(1)
    return Trained(tmp_path_factory.mktemp("world"), STEPS if pytestconfig.getoption("--all", default=False) else 0)


def largest_gap(steps: Sequence[dict[str, float]], others: Sequence[dict[str, float]], name: str) -> float:
    return max(abs(step[name] - other[name]) for step, other in zip(steps, others, strict=True))


@pytest.mark.parametrize("name", FLOAT32)
def test_losses_are_those_of_the_plain_trainer(name: str, trained: Trained) -> None:
    steps, plain, bound = trained.steps(name), trained.plain(name), BOUND[CASES[name].kind]
    assert largest_gap(steps, plain, "loss") <= bound
    assert largest_gap(steps, plain, "grad_norm") <= 100 * bound
    assert largest_gap(steps, plain, "logprob_gap") <= 10 * bound
    assert steps[-1]["logprob_gap"] > 1.2 * steps[0]["logprob_gap"], "the weights have moved"
    for number in ("tokens_trained", "groups_trained", "trajectories", "reward_mean", "length_mean"):
        assert [step[number] for step in steps] == [step[number] for step in plain], number


@pytest.mark.parametrize("name", FLOAT32)
def test_the_policy_moves_as_far_in_a_step_as_with_the_plain_trainer(name: str, trained: Trained) -> None:
    """They measure it on different rows of the step, so it differs by some of its size."""
    pairs = zip(trained.steps(name), trained.plain(name), strict=True)
    ratios = [step["movement"] / other["movement"] for step, other in pairs]
    assert 0.5 < sorted(ratios)[len(ratios) // 2] < 2.0, ratios


def test_bfloat16_rounds_losses_as_it_does_those_of_the_plain_trainer(trained: Trained) -> None:
    few = CASES["bfloat16"].steps  # rounding adds up from step to step
    steps, plain = trained.steps("bfloat16")[:few], trained.plain("bfloat16")[:few]
    rounded = trained.plain("bfloat16", torch.bfloat16)[:few]
    assert 0 < largest_gap(steps, plain, "loss") <= 2 * largest_gap(rounded, plain, "loss")
    assert largest_gap(steps, plain, "logprob_gap") <= 1e-2


def test_a_kl_term_refers_to_the_reference(trained: Trained) -> None:
    gap = largest_gap(trained.steps("kl"), trained.plain("dense-pp2"), "loss")
    assert gap > 10 * BOUND["dense"], "the weights have moved away from it"


@pytest.mark.parametrize("name", FLOAT32)
def test_exported_weights_say_in_transformers_what_they_say_in_megatron(name: str, trained: Trained) -> None:
    trained.steps(name)
    module = exported(trained, name)
    with torch.no_grad():
        for trajectories, own in trained.last(name):
            assert (packed_logprobs(module, trajectories) - own).abs().max() <= 1e-3


def exported(trained: Trained, name: str) -> Any:
    for file in ("config.json", "tokenizer.json"):
        shutil.copy(trained.models[CASES[name].kind] / file, trained.folder / name)
    module, report = AutoModelForCausalLM.from_pretrained(
        trained.folder / name, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    prepare(module)
    return module


@pytest.mark.parametrize("kind", IN_VLLM)
def test_exported_weights_say_in_vllm_what_they_say_in_megatron(kind: str, trained: Trained) -> None:
    from dora.worker.vllm.device.port import EngineSettings
    from dora.worker.vllm.engine import VllmEngine

    engine = VllmEngine(trained.models[kind], EngineSettings(slots=4, kv_tokens=512, max_model_len_tokens=128))
    try:
        for version, name in enumerate(IN_VLLM[kind], start=1):
            canary = trained.canary(name)
            found = engine.load_weights(version, trained.folder / name, canary)
            assert largest(found.logprobs, canary.logprobs) <= 1e-3
            for trajectories, own in trained.last(name):
                logprobs: list[float] = []
                for each in trajectories:
                    scored = engine._score([*each.prompt_token_ids.tolist(), *each.response_token_ids.tolist()])
                    logprobs.extend(scored[len(each.prompt_token_ids) - 1 :])
                assert largest(logprobs, own.tolist()) <= 1e-3
            before = engine.load_weights(0, trained.models[kind], None)
            assert largest(before.logprobs, canary.logprobs) > 1e-2, "the weights have moved"
    finally:
        engine.close()


def largest(numbers: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(number - other) for number, other in zip(numbers, others, strict=True))


def test_every_rank_writes_what_is_its_own(trained: Trained) -> None:
    for name, files in (("dense-tp2", 2), ("dense-pp2", 2), ("moe-ep2", 2), ("dense-dp2", 1)):
        assert len(list((trained.folder / name).glob("*.safetensors"))) == files, name
