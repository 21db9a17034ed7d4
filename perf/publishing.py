"""Measures how long a commit holds the trainer, and how much of a version travels after a step of an optimiser."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM

import dora
from dora.models import default_cache, resolve_model
from dora.weights.delta import encode
from tests.contract.trainer_service import TOKEN, start_service

PIECE_BYTES: Final = 4 << 20
RATES: Final = (1e-6, 1e-5)  # learning rates of Adam, whose steps move a weight by at most about so much


def stall(model: str, rounds: int) -> tuple[Mapping[str, float], list[Table]]:
    """``commit`` of a module on the service's host, while nothing of the commit before is left to do."""
    folder = resolve_model(model, default_cache())
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    copies = [torch.empty_like(parameter) for parameter in module.parameters()]
    copied_ms: list[float] = []
    held_ms: list[float] = []
    settled_ms: list[float] = []
    work: list[float] = []  # processor time of a commit while it holds the trainer, by that of the copy

    async def run(base: Path) -> None:
        service = await start_service(base / "store", folder)
        async with dora.Trainer(service.address, token=TOKEN) as trainer:
            async for step in trainer.steps(groups=2):
                async for _ in step:
                    pass
                await asyncio.sleep(1.0)  # in which a trainer trains, and its next version's room is made ready
                copy_work_s = time.process_time()
                copied_ms.append(_copy_ms(module, copies))
                began_s, work_s = time.perf_counter(), time.process_time()
                copy_work_s = work_s - copy_work_s
                await step.commit(module)
                held_ms.append((time.perf_counter() - began_s) * 1000)
                work.append((time.process_time() - work_s) / copy_work_s)
                await trainer.settled()
                settled_ms.append((time.perf_counter() - began_s) * 1000)
                service.service.store.retire(step.number)
                if step.number == rounds:
                    break
        await service.server.stop(None)

    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="dora-perf-", dir=parent) as base:
        asyncio.run(run(Path(base)))
    first_ms, held = held_ms[0], statistics.median(held_ms[1:])
    copied = statistics.median(copied_ms[1:])
    ratio = statistics.median(held / copied for held, copied in zip(held_ms[1:], copied_ms[1:], strict=True))
    size_bytes = sum(parameter.nbytes for parameter in module.parameters())
    found = Table(title=f"A commit of {size_bytes / 1e6:.0f} MB; medians of {rounds}, the first one apart")
    for heading in ("copy of the bytes, ms", "held, ms", "first commit held, ms", "published after, ms"):
        found.add_column(heading, justify="right")
    found.add_row(*(f"{value:.0f}" for value in (copied, held, first_ms, statistics.median(settled_ms[1:]))))
    return {"stall_vs_memcpy": round(ratio, 2), "stall_work_vs_memcpy": round(statistics.median(work[1:]), 2)}, [found]


def delta(model: str) -> tuple[Mapping[str, float], list[Table]]:
    """Two dtypes and two learning rates; the number that has a name is of bfloat16 at the lower rate."""
    folder = resolve_model(model, default_cache())
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = Table(title="A version after a step of Adam, by all of its bytes")
    for heading in ("dtype", "learning rate", "elements changed", "bytes", "encoded, MB/s"):
        found.add_column(heading, justify="right")
    values = {}
    for dtype in (torch.bfloat16, torch.float32):
        for rate in RATES:
            changed, share, speed = _delta(module, dtype, rate)
            name = str(dtype).removeprefix("torch.")
            found.add_row(name, f"{rate:g}", f"{changed:.1%}", f"{share:.1%}", f"{speed:.0f}")
            values[f"delta_vs_full_{name}_{rate:g}"] = round(share, 3)
    return {"delta_vs_full": values["delta_vs_full_bfloat16_1e-06"], **values}, [found]


def _delta(module: torch.nn.Module, dtype: torch.dtype, rate: float) -> tuple[float, float, float]:
    """The share of elements that changed, the share of bytes that travel, bytes encoded a second in millions."""
    generator = torch.Generator().manual_seed(1)
    whole = sent = elements = changed = 0
    took_s = 0.0
    for parameter in module.parameters():
        before = parameter.detach()
        step = torch.rand(before.shape, generator=generator).mul_(2).sub_(1).mul_(rate)
        old, new = before.to(dtype).contiguous(), (before - step).to(dtype).contiguous()
        elements += old.numel()
        changed += int((old != new).sum())
        ours, theirs = _bytes(new), _bytes(old)
        began_s = time.perf_counter()
        for offset in range(0, len(ours), PIECE_BYTES):
            end = offset + PIECE_BYTES
            sent += len(encode(ours[offset:end], theirs[offset:end], old.element_size()))
        took_s += time.perf_counter() - began_s
        whole += len(ours)
    return changed / elements, sent / whole, whole / took_s / 1e6


def _bytes(tensor: torch.Tensor) -> memoryview:
    content: Any = tensor.reshape(-1).view(torch.uint8).numpy().data
    return memoryview(content)


def _copy_ms(module: torch.nn.Module, copies: list[torch.Tensor]) -> float:
    """One copy of all weights, into memory that was used before, by as many threads as torch has."""
    began_s = time.perf_counter()
    with torch.no_grad():
        for copy, parameter in zip(copies, module.parameters(), strict=True):
            copy.copy_(parameter)
    return (time.perf_counter() - began_s) * 1000
