"""Stands in for what a machine without a GPU lacks: vLLM's compiled modules, the driver, Triton's driver.

``install`` comes before vLLM is imported. An operator that vLLM asks for at its import, whether the device supports
something, says no; all others are missing, as vLLM's own checks for them see.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import triton.backends

CAPABILITY = (9, 0)
NAME = "NVIDIA H100 80GB HBM3"
MEMORY_BYTES = 80 << 30


class CompiledModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules in place of vLLM's compiled ones."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        last = name.rpartition(".")[2]
        is_compiled = name.startswith("vllm.") and last.startswith("_") and "C" in last
        return importlib.machinery.ModuleSpec(name, self) if is_compiled else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    driver = _Driver


def _supports_nothing(*_: Any, **__: Any) -> bool:
    return False


def install() -> None:
    sys.meta_path.append(CompiledModules())
    triton.backends.backends.clear()
    triton.backends.backends["nvidia"] = _Backend
    found = torch._ops._OpNamespace.__getattr__

    def operator(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if "support" in name:
                return _supports_nothing
            raise

    torch._ops._OpNamespace.__getattr__ = operator
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Platform(NonNvmlCudaPlatform):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*CAPABILITY)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return NAME

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return MEMORY_BYTES

    platforms._current_platform = Platform()
