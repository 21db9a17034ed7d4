"""Patches with which Megatron runs on a CPU with gloo. They are for tests: a real run has a GPU for each rank."""

import sys
import threading
import types
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_STASH = "megatron.core.transformer.moe.ops.paged_stash"  # kernels that import Triton, for an option that is off


class CpuForCuda(TorchFunctionMode):
    """Each tensor that is asked for on a GPU is made on the CPU, and each one says that it is one of a GPU."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        if _is_cuda(options.get("device")):
            options["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return arguments[0]
        if function is torch.Tensor.type and len(arguments) == 1 and not options:
            return f"torch.cuda.{function(*arguments).rpartition('.')[2]}"
        return function(*("cpu" if _is_cuda(each) else each for each in arguments), **options)


class NoStream:
    """A GPU's stream, where everything runs in order: all of these are one."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoStream)

    __hash__ = None

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> "NoStream":
        return self

    def synchronize(self) -> None: ...


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda") if isinstance(device, str | torch.device) else False


def _host(tensor: Any, as_numpy: bool = False, **options: Any) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _with_cpu(run: Any, thread: threading.Thread) -> None:
    with CpuForCuda():
        run(thread)


@contextmanager
def _nothing(*arguments: Any, **options: Any) -> Any:
    yield


def fix_up() -> None:
    """For this process and its threads; before megatron is imported. May be repeated."""
    CpuForCuda().__enter__()  # of this thread
    if _STASH in sys.modules:
        return
    stash = types.ModuleType(_STASH)
    stash.paged_stash_copy_kernel = stash.paged_stash_pop_kernel = None  # type: ignore[attr-defined]
    stash.GLOBAL_BLOCK_SIZE = 1  # type: ignore[attr-defined]
    sys.modules[_STASH] = stash
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *arguments: None
    torch.cuda.Stream = NoStream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = NoStream  # type: ignore[assignment]
    torch.cuda.stream = _nothing  # type: ignore[assignment]
    thread_run = threading.Thread.run
    threading.Thread.run = lambda thread: _with_cpu(thread_run, thread)  # type: ignore[method-assign]

    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = _nothing
    random.model_parallel_cuda_manual_seed = lambda *arguments, **options: None
    import megatron.core.tensor_parallel as tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed = random.model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _host
