"""``workers.engine_args``: what is refused by name before an engine starts, and what a worker gets."""

import importlib.util
import json
from pathlib import Path

import pytest

from dora.data.engine_args import IDENTIFYING, OWNED, installed_arguments
from dora.errors import InvalidValue
from dora.host.command import LaunchContext, worker_argv
from dora.models.tiny import make_tiny
from dora.orchestrator.recovery.changed_settings import FIXED
from dora.orchestrator.setup import check_engine
from dora.worker.__main__ import _parser
from dora.worker.vllm.device.cpu import Cpu
from dora.worker.vllm.device.port import EngineSettings
from tests.refusals import refused
from tests.service import configured

FIELD = "workers.engine_args"
MODEL = Path("model")
ON_GPUS = {"enforce_eager": True, "kv_cache_dtype": "fp8", "max_num_batched_tokens": 4096}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.xdist_group("vllm-dense"),  # a process imports vLLM for many tests
]


def test_the_names_that_are_known_are_vllms_own() -> None:
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    assert installed_arguments() == [each.name for each in fields(EngineArgs)]
    assert {*OWNED, *IDENTIFYING} <= {*installed_arguments()}


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

    settings = EngineSettings(16, 4096, 32, 512, "float32", engine_args={"kv_cache_dtype": "fp8", "seed": 3})
    found = vllm_core.arguments(make_tiny("dense", tmp_path / "model", seed=1), settings, Cpu())
    assert (found.kv_cache_dtype, found.seed) == ("fp8", 3)
