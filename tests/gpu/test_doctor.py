"""Stages of ``dora doctor`` that need a GPU, and the trainer's choice of one."""

import os
from pathlib import Path

import pytest

from dora.host.placement import gpus
from dora.models import resolve_model
from dora.ops.doctor.run import chosen, run_stage
from dora.trainers.start import gpu_of

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
]
STAGES = ("host", "every GPU", "links", "engine", "speed", "moves", "late copies", "invariance", "run")


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_does_not_fail_on_a_healthy_machine(name: str) -> None:
    (stage,) = chosen([name])
    verdict = run_stage(stage, "cuda", Path(resolve_model("tiny")))
    assert verdict.outcome != "failed", (verdict.said, verdict.traceback, verdict.logs)


def test_torch_and_the_driver_name_a_gpu_alike() -> None:
    visible = [f"GPU-{torch.cuda.get_device_properties(each).uuid}" for each in range(torch.cuda.device_count())]
    assert {*visible} <= {gpu.uuid for gpu in gpus()}, os.environ.get("CUDA_VISIBLE_DEVICES")
    assert gpu_of(visible, 0, {"trainer": visible[-1:]}) == len(visible) - 1
