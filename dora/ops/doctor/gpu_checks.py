"""Stages on the host of GPUs and on every GPU: tools, links, rates beside the data sheet, and batch invariance."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from dora.data.hardware import Hardware, hardware_of
from dora.host.gpu_host import driver_number, links_of, processes_of, read_host, troubles
from dora.host.placement import placement_of
from dora.models import context_tokens
from dora.ops.doctor.engine_checks import PLAIN, SLOTS, check_moves, engine_of, finished, request
from dora.ops.doctor.verdict import Failed, Skipped, Subject

if TYPE_CHECKING:
    import torch

COPY_BYTES: Final = 256 << 20
REPEATS: Final = 8
SIDE: Final = 8192  # of the matrices that are multiplied
SLOW: Final[Mapping[str, float]] = {"memory": 0.6, "to_gpu": 0.15, "from_gpu": 0.15, "tflops": 0.3}  # of a data sheet
BESIDE: Final = 0.6  # of the median of a machine's GPUs
BATCH: Final = 64
BATCH_CONTEXT_TOKENS: Final = 1024
BATCH_TOKENS: Final = 64  # that each request of the batch samples


def host(subject: Subject) -> dict[str, Any]:
    """Reads driver, compiler, shared and lockable memory, and the processes on the GPUs."""
    if subject.device != "cuda":
        raise Skipped("workers on CPUs need none of it")
    read, gpus = read_host(), placement_of("cuda", field="--device").gpus
    found = {
        "driver": driver_number(read.driver),
        "compiler": read.compiler,
        "header": read.header,
        "shared_gb": round(read.shared_bytes / 1e9, 1),
        "memlock_bytes": read.lockable_bytes,
        "processes": [str(each) for each in processes_of(read.processes)],
    }
    if faults := troubles(read, gpus):
        raise Failed("it lacks " + "; ".join(faults), **found)
    return found


def links(subject: Subject) -> dict[str, Any]:
    """Asks each pair of GPUs for peer access, and nvidia-smi for the link between them."""
    if subject.device != "cuda":
        raise Skipped("there are no GPUs")
    import torch

    count, named = torch.cuda.device_count(), links_of(read_host().topology)
    pairs = [(one, other) for one in range(count) for other in range(one + 1, count)]
    if not pairs:
        raise Skipped(f"{count} GPUs are visible")
    without = [f"{one}-{other}" for one, other in pairs if not torch.cuda.can_device_access_peer(one, other)]
    return {"links": {f"{one}-{other}": link for (one, other), link in named.items()}, "without_peer_access": without}


def every_gpu(subject: Subject) -> dict[str, Any]:
    """Computes and copies on each GPU in turn, and compares its rates with its data sheet and with the other GPUs'."""
    if subject.device != "cuda":
        raise Skipped("there are no GPUs")
    import torch

    gpus = placement_of("cuda", field="--device").gpus
    rates = [rates_of(torch.device("cuda", number)) for number in range(torch.cuda.device_count())]
    sheet = hardware_of(gpus[0].model)
    found: dict[str, Any] = {"gpus": rates, "data_sheet": None if sheet is None else allowed_by(sheet)}
    if slow := slow_ones(rates, found["data_sheet"] or {}):
        raise Failed("; ".join(slow), **found)
    return found


def rates_of(device: "torch.device", copied: int = COPY_BYTES, side: int = SIDE) -> dict[str, float]:
    """Measures GB/s in memory and each way over the bus, and bfloat16 TFLOP/s. Raises Failed if results are wrong."""
    import torch

    on_gpu = device.type == "cuda"
    there = torch.empty(copied, dtype=torch.uint8, device=device)
    here = torch.randint(256, (copied,), dtype=torch.uint8, pin_memory=on_gpu)
    back, beside = torch.empty_like(here, pin_memory=on_gpu), torch.empty_like(there)
    ones = torch.ones(side, side, dtype=torch.bfloat16, device=device)

    def timed(action: Any) -> float:
        for repeats in (1, REPEATS):
            began_s = time.perf_counter()
            for _ in range(repeats):
                action()
            if on_gpu:
                torch.cuda.synchronize(device)
        return (time.perf_counter() - began_s) / REPEATS

    found = {
        "to_gpu": copied / timed(lambda: there.copy_(here, non_blocking=True)) / 1e9,
        "memory": 2 * copied / timed(lambda: beside.copy_(there)) / 1e9,
        "from_gpu": copied / timed(lambda: back.copy_(beside, non_blocking=True)) / 1e9,
        "tflops": 2 * side**3 / timed(lambda: ones @ ones) / 1e12,
    }
    if not torch.equal(here, back):
        raise Failed(f"bytes that went through {device} came back changed", **found)
    if not bool((ones @ ones == side).all()):
        raise Failed(f"{device} multiplies wrongly", **found)
    return {name: round(rate, 3) for name, rate in found.items()}


def allowed_by(sheet: Hardware) -> dict[str, float]:
    """Returns the rates of a data sheet under the names of ``rates_of``."""
    bus, memory = sheet.bus_bytes_per_s / 1e9, sheet.bandwidth_bytes_per_s / 1e9
    return {"to_gpu": bus, "memory": memory, "from_gpu": bus, "tflops": sheet.flops / 1e12}


def slow_ones(rates: Sequence[Mapping[str, float]], allowed: Mapping[str, float]) -> list[str]:
    """Returns a sentence for each rate of a GPU that is far below its data sheet, or below the other GPUs'."""
    found = []
    for number, own in enumerate(rates):
        for name, rate in own.items():
            usual = median(each[name] for each in rates)
            if rate < SLOW[name] * allowed.get(name, 0.0):
                found.append(f"GPU {number} is slow: {name} is {rate:g}, and its data sheet allows {allowed[name]:g}")
            elif rate < BESIDE * usual:
                found.append(f"GPU {number} is slow: {name} is {rate:g}, and the median of all GPUs is {usual:g}")
    return found


def speed(subject: Subject) -> dict[str, Any]:
    """Decodes a batch, and states the tokens per second that reading weights and KV from memory would allow."""
    on_gpu = subject.device == "cuda"
    batch, context = (BATCH, BATCH_CONTEXT_TOKENS) if on_gpu else (SLOTS, 128)
    context = min(context, (context_tokens(subject.model) or context) - BATCH_TOKENS)
    started = engine_of(subject, slots=batch, max_model_len_tokens=context + BATCH_TOKENS)
    started.load_weights(0, subject.model, None)
    sampling = replace(PLAIN, max_tokens=BATCH_TOKENS)
    requests = [request(f"b{number}", replace(sampling, seed=number)) for number in range(batch)]
    long = [replace(each, prompt_token_ids=_prompt(number, context)) for number, each in enumerate(requests)]
    finished(started, [replace(each, request_id=f"warm-{each.request_id}") for each in requests])
    for each in long:
        started.add(each)
    sampled = 0
    while sampled < batch:  # until all prompts are in: each request has its first token
        sampled += sum(len(delta.token_ids) for delta in started.step())
    began_s, begun = time.perf_counter(), sampled
    while started.has_work():
        sampled += sum(len(delta.token_ids) for delta in started.step())
    rate = (sampled - begun) / (time.perf_counter() - began_s)
    weights = sum(file.stat().st_size for file in subject.model.glob("*.safetensors"))
    store = started.core.scheduler.connector.store
    token_bytes = sum(size for _, size in store.layers) / started.capability.block_tokens
    sheet = hardware_of(placement_of("cuda", field="--device").gpus[0].model) if on_gpu else None
    most = None if sheet is None else round(most_tokens_per_s(sheet, weights, token_bytes, batch, context))
    return {"batch": batch, "context_tokens": context, "tokens_per_s": round(rate), "data_sheet_tokens_per_s": most}


def most_tokens_per_s(sheet: Hardware, weights: float, token_bytes: float, batch: int, context: int) -> float:
    """Returns the rate of a batch whose steps read all weights and all KV at the memory's full bandwidth."""
    return batch * sheet.bandwidth_bytes_per_s / (weights + batch * context * token_bytes)


def invariance(subject: Subject) -> dict[str, Any]:
    """Checks batch invariance: a request beside others, and one that moved, must equal one that ran alone."""
    if subject.device != "cuda":
        raise Skipped("on CPUs logits do not depend on neighbours with one thread")
    from dora.worker.vllm import environment as vllm_environment
    from dora.worker.vllm.device.cuda import Cuda

    vllm_environment.prepare(Cuda.environment, batch_invariant=True)
    started = engine_of(subject, batch_invariant=True)
    started.load_weights(0, subject.model, None)
    alone = finished(started, [request("alone", PLAIN)])["alone"]
    others = [request(f"n{number}", replace(PLAIN, seed=number), number) for number in range(SLOTS - 1)]
    if finished(started, [request("beside", PLAIN), *others])["beside"] != alone:
        raise Failed("a request's logprobs depend on its neighbours although batch invariance is on")
    return {"moves": check_moves(started), "backend": started.layout.backend}


def _prompt(number: int, tokens: int) -> tuple[int, ...]:
    return tuple(3 + (number * 31 + place * 7) % 40 for place in range(tokens))
