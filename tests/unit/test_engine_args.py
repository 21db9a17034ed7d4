"""``workers.engine_args``: what is refused by name before an engine starts, and what a worker gets."""

import importlib.util
import json
from pathlib import Path

import pytest

from dora.data.engine_args import IDENTIFYING, OWNED, installed_arguments, installed_kv_dtypes
from dora.errors import InvalidValue
from dora.host.command import LaunchContext, worker_argv
from dora.models.tiny import make_tiny
from dora.orchestrator.recovery.changed_settings import FIXED
from dora.orchestrator.setup import check_engine
from dora.worker.__main__ import _parser
from dora.worker.vllm.device.cpu import Cpu
from dora.worker.vllm.device.cuda import Cuda
from dora.worker.vllm.device.port import EngineSettings
from tests.refusals import refused
from tests.service import configured
from tests.unit.test_batch_invariant import Capability, platform

FIELD = "workers.engine_args"
MODEL = Path("model")
ON_GPUS = {"enforce_eager": True, "max_num_batched_tokens": 4096}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.xdist_group("vllm-dense"),  # a process imports vLLM for many tests
]


def test_the_names_that_are_known_are_vllms_own() -> None:
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    assert installed_arguments() == [each.name for each in fields(EngineArgs)]
    assert {*OWNED, *IDENTIFYING} <= {*installed_arguments()}


def test_a_kv_dtype_that_the_build_lacks_is_refused_with_those_that_it_has() -> None:
    from typing import get_args

    from vllm.config.cache import CacheDType

    assert ["auto", *installed_kv_dtypes()] == [*get_args(CacheDType)]
    for name in ("fp9", "auto"):
        config = configured(MODEL, workers__engine="vllm", workers__kv_dtype=name)
        with refused(InvalidValue, field="workers.kv_dtype", value=name, names=("fp8_e4m3",)):
            check_engine(config)
    check_engine(configured(MODEL, workers__engine="vllm", workers__kv_dtype="fp8"))


@pytest.mark.parametrize(
    ("field", "value"), [("quantisation", "fp8"), ("kv_dtype", "nvfp4"), ("kv_dtype", "int8_per_token_head")]
)
def test_a_cpu_refuses_the_precision_that_it_lacks(field: str, value: str) -> None:
    with refused(InvalidValue, field=f"workers.{field}", value=value, names=("empty",)):
        Cpu().check_platform(EngineSettings(16, 4096, 32, 512, "float32", **{field: value}))


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [
        ("quantisation", "int8", 75),
        ("quantisation", "fp8", 89),
        ("kv_dtype", "fp8_e4m3", 89),
        ("kv_dtype", "bfloat16", 0),
    ],
)
@pytest.mark.parametrize("capability", [Capability(7, 0), Capability(8, 0), Capability(8, 9), Capability(9, 0)])
def test_a_gpu_needs_tensor_cores_for_it(
    field: str, value: str, least: int, capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.platforms

    monkeypatch.setattr(vllm.platforms, "_current_platform", platform(capability))
    settings = EngineSettings(16, 4096, 32, 512, "bfloat16", **{field: value})
    if capability.major * 10 + capability.minor >= least:
        Cuda().check_platform(settings)
        return
    with refused(InvalidValue, field=f"workers.{field}", value=value, names=(str(least / 10), str(capability))):
        Cuda().check_platform(settings)


def test_fp8_is_refused_on_cpus_before_a_worker_starts() -> None:
    with refused(InvalidValue, field="workers.quantisation", value="fp8", names=("8.9", "int8")):
        configured(MODEL, workers__engine="vllm", workers__quantisation="fp8")
    configured(MODEL, workers__engine="vllm", workers__quantisation="fp8", workers__device="cuda")
    configured(MODEL, workers__engine="vllm", workers__quantisation="fp8", workers__count=0)


@pytest.mark.parametrize("name", OWNED)
def test_an_argument_of_doras_own_is_refused_with_the_reason(name: str) -> None:
    with refused(InvalidValue, field=FIELD, value=name, names=("left out",)):
        configured(MODEL, **{f"workers__engine_args__{name}": 1})


def test_an_argument_that_vllm_does_not_know_is_refused_with_the_one_that_was_meant() -> None:
    config = configured(MODEL, workers__engine="vllm", workers__engine_args__enforce_eagr=True)
    with refused(InvalidValue, field=FIELD, value="enforce_eagr", names=("did you mean enforce_eager?",)):
        check_engine(config)


def test_a_table_is_asked_for() -> None:
    with refused(InvalidValue, field=FIELD, value=3, names=("a table",)):
        configured(MODEL, workers__engine_args=3)


def test_a_worker_gets_them_and_they_belong_to_its_state() -> None:
    named = {f"workers__engine_args__{name}": value for name, value in ON_GPUS.items()}
    workers = configured(MODEL, workers__device="cuda", **named).workers
    _, _, *argv = worker_argv(workers, "w0", LaunchContext("host:1", MODEL, device="cuda"))
    assert _parser().parse_args(argv).engine_args == ON_GPUS
    assert json.loads(argv[argv.index("--engine-args") + 1]) == ON_GPUS
    _, _, *argv = worker_argv(configured(MODEL).workers, "w0", LaunchContext("host:1", MODEL))
    assert _parser().parse_args(argv).engine_args == {}
    assert FIELD in FIXED


@pytest.mark.parametrize("name", Cpu.fixed_arguments)
def test_an_engine_on_a_cpu_refuses_what_it_needs_otherwise(name: str) -> None:
    from dora.worker.vllm import core as vllm_core

    settings = EngineSettings(16, 4096, 32, 512, "float32", engine_args={name: 1})
    with refused(InvalidValue, field=FIELD, value=name):
        vllm_core.arguments(MODEL, settings, Cpu())


def test_they_reach_vllm(tmp_path: Path) -> None:
    from dora.worker.vllm import core as vllm_core

    settings = EngineSettings(16, 4096, 32, 512, "float32", kv_dtype="fp8", engine_args={"seed": 3})
    found = vllm_core.arguments(make_tiny("dense", tmp_path / "model", seed=1), settings, Cpu())
    assert (found.kv_cache_dtype, found.seed) == ("fp8", 3)
