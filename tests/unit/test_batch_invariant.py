"""``workers.batch_invariant``: refused where vLLM lacks it, set before vLLM loads, and part of what an engine is."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dora.errors import InvalidValue
from dora.host.command import LaunchContext, worker_argv, worker_environment
from dora.orchestrator.recovery.changed_settings import FIXED
from dora.system.environment import BATCH_INVARIANT
from dora.worker.__main__ import _parser
from dora.worker.vllm import environment as vllm_environment
from dora.worker.vllm.device.cpu import Cpu
from dora.worker.vllm.device.cuda import Cuda
from dora.worker.vllm.device.port import EngineSettings
from tests.refusals import refused
from tests.service import configured
from tests.snippets import ROOT

FIELD = "workers.batch_invariant"
MODEL = Path("model")
SETTINGS = EngineSettings(16, 0, 512, 0, "bfloat16", batch_invariant=True)

pytestmark = pytest.mark.xdist_group("vllm-dense")  # a process imports vLLM for many tests


@pytest.mark.parametrize(
    ("device", "engine", "count", "is_allowed"),
    [
        ("cpu", "vllm", 2, False),
        ("cpu", "vllm", 0, True),  # joined hosts may have GPUs
        ("cpu", "fake", 0, False),
        ("cuda", "fake", 2, False),
        ("cuda", "vllm", 2, True),
        ("cuda:1", "vllm", 1, True),
    ],
)
def test_it_is_refused_for_workers_that_cannot_have_it(device: str, engine: str, count: int, is_allowed: bool) -> None:
    fields = {"device": device, "engine": engine, "count": count}
    named = {f"workers__{name}": value for name, value in fields.items()}
    assert not configured(MODEL, **named).workers.numerics.batch_invariant
    if not is_allowed:
        with refused(InvalidValue, field=FIELD, value=True):
            configured(MODEL, **named, workers__batch_invariant=True)
        return
    assert configured(MODEL, **named, workers__batch_invariant=True).workers.numerics.batch_invariant
    assert FIELD in FIXED


@pytest.mark.parametrize("is_chosen", [False, True])
def test_a_worker_gets_it_before_it_imports_anything(is_chosen: bool) -> None:
    workers = configured(MODEL, workers__device="cuda", workers__batch_invariant=is_chosen).workers
    assert worker_environment(workers, "token")[BATCH_INVARIANT] == str(int(is_chosen))
    _, _, *argv = worker_argv(workers, "w0", LaunchContext("host:1", MODEL, device="cuda"))
    assert _parser().parse_args(argv).batch_invariant == is_chosen


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "vllm", raising=False)
        yield


@pytest.mark.parametrize("operators", [{}, {BATCH_INVARIANT: "0"}, {BATCH_INVARIANT: "1"}])
@pytest.mark.parametrize("is_chosen", [False, True])
def test_the_setting_decides_whatever_the_operator_has_set(
    operators: dict[str, str], is_chosen: bool, without_vllm: None
) -> None:
    environment = {**operators}
    vllm_environment.prepare({}, environment)
    assert environment.get(BATCH_INVARIANT) == operators.get(BATCH_INVARIANT), "a child of an engine keeps its mode"
    vllm_environment.prepare({}, environment, batch_invariant=is_chosen)
    assert environment[BATCH_INVARIANT] == str(int(is_chosen))


def test_a_process_that_imported_vllm_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels would run in the other mode, and the fingerprint would be wrong."""
    monkeypatch.setitem(sys.modules, "vllm", sys.modules.get("vllm", ast))
    for mode, is_chosen in ((None, True), ("0", True), ("1", False)):
        environment = {} if mode is None else {BATCH_INVARIANT: mode}
        with refused(InvalidValue, field=FIELD, value=is_chosen):
            vllm_environment.prepare({}, environment, batch_invariant=is_chosen)
    vllm_environment.prepare({}, {BATCH_INVARIANT: "1"}, batch_invariant=True)
    vllm_environment.prepare({}, {}, batch_invariant=False)


class Capability(NamedTuple):
    major: int
    minor: int


def platform(capability: Capability) -> type:
    class Platform:
        device_type = "cuda"

        @staticmethod
        def has_device_capability(least: int) -> bool:
            return capability.major * 10 + capability.minor >= least

        @staticmethod
        def get_device_capability() -> Capability:
            return capability

    return Platform


@pytest.mark.parametrize("capability", [Capability(7, 0), Capability(7, 5), Capability(8, 0), Capability(9, 0)])
def test_a_gpu_too_old_for_it_is_refused(capability: Capability, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.platforms

    monkeypatch.setattr(vllm.platforms, "_current_platform", platform(capability))
    Cuda().check_platform(replace(SETTINGS, batch_invariant=False))
    if capability.major >= 8:
        Cuda().check_platform(SETTINGS)
        return
    with refused(InvalidValue, field=FIELD, value=True, names=[str(capability)]):
        Cuda().check_platform(SETTINGS)


def test_a_cpu_engine_refuses_it() -> None:
    Cpu().check_platform(replace(SETTINGS, batch_invariant=False))
    with refused(InvalidValue, field=FIELD, value=True):
        Cpu().check_platform(SETTINGS)


def test_vllms_refusals_of_its_kernels_are_known_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from vLLM itself: no attention backend, and state-space layers."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.attention.selector import _cached_get_mamba_attn_backend

    from dora.worker.vllm.core import names_batch_invariance

    def reasons(**named: bool) -> list[str]:
        return CPUAttentionBackend.validate_configuration(
            64, torch.float32, None, 32, False, False, False, False, False, None, "decoder", **named
        )

    (reason,) = set(reasons(use_batch_invariant=True)) - set(reasons())
    assert names_batch_invariance(ValueError(f"No valid attention backend: CPU_ATTN: [{reason}]"))
    monkeypatch.setenv(BATCH_INVARIANT, "1")
    with pytest.raises(RuntimeError) as caught:
        _cached_get_mamba_attn_backend.__wrapped__(MambaAttentionBackendEnum.MAMBA2)
    assert names_batch_invariance(caught.value)
    for other in (
        "block_size must be a multiple of 32",
        "No backend with Config(use_batch_invariant=True)",
    ):
        assert not names_batch_invariance(ValueError(other))


def test_the_document_names_the_backends_that_vllm_has_it_for() -> None:
    """By vLLM's sources, since some backends cannot be imported beside a CPU's torch."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    found = set()
    for file in (Path(spec.origin).parent / "v1" / "attention" / "backends").rglob("*.py"):
        for kind in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)):
            functions = {each.name: each for each in kind.body if isinstance(each, ast.FunctionDef)}
            if _returns(functions.get("supports_batch_invariance")) is True:
                found.add(_returns(functions["get_name"]))
    text = (ROOT / "docs" / "gpus.md").read_text()
    (line,) = (line for line in text.splitlines() if "FLASH_ATTN" in line and "batch_invariant" not in line)
    assert found == {word.strip("`,.") for word in line.split() if word.startswith("`")}


def _returns(function: ast.FunctionDef | None) -> Any:
    """The constant that a function returns at its end."""
    last = None if function is None else function.body[-1]
    return last.value.value if isinstance(last, ast.Return) and isinstance(last.value, ast.Constant) else None
