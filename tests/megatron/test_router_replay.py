"""Megatron's routers are led to the experts of the record, as the plain trainer's: on every part of a pack."""

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron", reason="Megatron has an environment of its own: make test-megatron")

import torch
from transformers import AutoModelForCausalLM

from dora.models import routing
from dora.models.tiny import make_tiny
from dora.trainers.learner import Learner, LearnerConfig
from tests.megatron.record import read_record, write_record
from tests.megatron.world import run

STEPS = 4
SETTINGS = {"learning_rate": 1e-3, "micro_batch_tokens": 128}
LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}, "ep2": {"ep": 2}}
OFF = "own routers"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a record beside it, in whose every token is sent to random experts."""
    folder = make_tiny("moe", tmp_path_factory.mktemp("models") / "moe", kv_heads=2)
    write_record(folder.parent / "moe.jsonl", folder, STEPS, groups=3, shape=routing(folder))
    return folder


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {
        name: {
            "model": str(model),
            "record": str(model.parent / "moe.jsonl"),
            "steps": STEPS,
            "layout": LAYOUTS.get(name, {}),
            "learner": {**SETTINGS, "router_replay": name != OFF},
            "options": {},
        }
        for name in (*LAYOUTS, OFF)
    }
    return run(cases, tmp_path_factory.mktemp("world"))


@functools.cache
def plain(model: Path, replays: bool) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    learner = Learner(module, LearnerConfig(**SETTINGS, router_replay=replays))
    steps = []
    for groups in read_record(model.parent / "moe.jsonl"):
        for group in groups:
            learner.add_group(group)
        steps.append(learner.finish_step().numbers())
    return steps


@pytest.mark.parametrize("name", [*LAYOUTS, OFF])
def test_steps_are_those_of_the_plain_trainer(name: str, model: Path, trained: dict[str, Any]) -> None:
    steps, expected = trained[name]["steps"], plain(model, replays=name != OFF)
    assert len(steps) == STEPS
    for field, bound in (("loss", 1e-3), ("grad_norm", 0.1), ("logprob_gap", 1e-2)):
        assert max(abs(one[field] - other[field]) for one, other in zip(steps, expected, strict=True)) <= bound, field
    # What was recorded is off by a normal deviation of 0.05, whose mean is 0.04.
    assert (steps[0]["logprob_gap"] < 0.06) == (name != OFF)
