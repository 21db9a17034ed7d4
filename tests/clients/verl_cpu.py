"""CPUs as a platform of verl, which has none: its trainers then run without GPUs. See verl.plugin.platform."""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Device(ModuleType):
    """``torch.cpu``, with zeros for what verl asks of a GPU's memory."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *arguments, **options: 0)

    def get_device_name(self, *arguments: Any) -> str:
        return "CPU"

    def mem_get_info(self, *arguments: Any) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def get_rng_state(self, *arguments: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *arguments: Any) -> None:
        torch.set_rng_state(state)


def _init_process_group(backend: str | None = None, **options: Any) -> None:
    """verl names one backend for CPUs and one for its devices; here they are the same."""
    begin("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **options)


begin, torch.distributed.init_process_group = torch.distributed.init_process_group, _init_process_group


@PlatformRegistry.register("cpu")
class Cpu(PlatformBase):
    """Its ranks are of Ray's resource ``GPU``, of which a test may claim any number."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("device")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # an index is one of an accelerator

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
