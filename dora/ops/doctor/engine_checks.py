"""Stages that start an engine in their own process."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dora.data.types import RequestSpec, SamplingParams
from dora.errors import InvalidValue
from dora.ops.doctor.verdict import Failed, Skipped, Subject

if TYPE_CHECKING:
    from dora.kvtransfer.snapshot import KvSnapshot
    from dora.worker.vllm.device.port import Device
    from dora.worker.vllm.engine import VllmEngine

CONTEXT_TOKENS = 512
CPU_KV_TOKENS = 8192
SLOTS = 16
PROMPT = tuple(range(3, 15))
PLAIN = SamplingParams(temperature=1.0, seed=7, max_tokens=120, ignore_eos=True)
PENALTIES = replace(PLAIN, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.1, min_tokens=10)
LARGE_KV_TOKENS = 1 << 31  # more than any GPU has memory for
MEMORY_FIELDS = ("workers.kv_tokens", "engine settings")  # the latter if vLLM itself refuses


def nothing() -> None:
    pass


def engine(subject: Subject) -> dict[str, Any]:
    """Starts an engine, loads the model as version 0 and samples one response."""
    began_s = time.perf_counter()
    started = engine_of(subject)
    took_s = time.perf_counter() - began_s
    layout, capability = started.layout, started.capability
    began_s = time.perf_counter()
    started.load_weights(0, subject.model, None)
    load_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    token_ids, _ = finished(started, [request("one", PLAIN)])["one"]
    return {
        "runner": type(started.core.model_executor.driver_worker.worker.model_runner).__module__,
        "backend": layout.backend,
        "dtype": capability.dtype,
        "block_tokens": capability.block_tokens,
        "kv_tokens": capability.kv_tokens,
        "start_s": round(took_s, 1),
        "load_s": round(load_s, 2),
        "tokens_per_s": round(len(token_ids) / (time.perf_counter() - began_s), 1),
    }


def reload(subject: Subject) -> dict[str, Any]:
    """Loads weights A, other weights B, and A again."""
    started = engine_of(subject)
    other = _changed(subject.model, subject.folder / "other")
    first = started.load_weights(0, subject.model, None)
    second = started.load_weights(1, other, None)
    third = started.load_weights(2, subject.model, None)
    if first.logprobs == second.logprobs:
        raise Failed("other weights give the same logprobs: they were not loaded")
    difference = float(np.max(np.abs(np.subtract(first.logprobs, third.logprobs))))
    if first.logprobs != third.logprobs:
        raise Failed(f"the same weights give logprobs that differ by {difference:g} after others were loaded")
    return {"canary_tokens": len(first.token_ids)}


def neighbours(subject: Subject) -> dict[str, Any]:
    """Samples a seeded request alone, beside others, and with a hold. A difference only means another batch."""
    started = _loaded(subject)
    alone = finished(started, [request("alone", PLAIN)])["alone"]
    others = [request(f"n{number}", replace(PLAIN, seed=number), number) for number in range(SLOTS - 1)]
    beside = finished(started, [request("beside", PLAIN), *others])["beside"]
    started.add(request("held", PLAIN))
    held = stepped(started, "held", 20)
    started.freeze("held")
    started.thaw("held")
    held = joined(held, finished(started, [], "held")["held"])
    if held != alone:
        raise Failed("a request that was held and taken up again continues otherwise")
    return {"is_batch_invariant": beside == alone}


def moves(subject: Subject) -> dict[str, Any]:
    """Takes a request out with its KV and in again, after different numbers of tokens; it must continue unchanged."""
    started = _loaded(subject)
    return {"moves": check_moves(started), "block_tokens": started.capability.block_tokens}


def late_copies(subject: Subject) -> dict[str, Any]:
    """Does the same while copies into the KV-cache are late: a request's next token must wait for its KV."""
    from dora.ops.doctor.late import LateCpu, delay

    is_cpu = subject.device == "cpu"
    started = _loaded(subject, LateCpu() if is_cpu else None)
    return {"moves": check_moves(started, before=nothing if is_cpu else partial(delay, started))}


def check_moves(
    started: "VllmEngine",
    samplings: Sequence[SamplingParams] = (PLAIN, PENALTIES),
    before: Callable[[], None] = nothing,
) -> int:
    """Moves requests, calling ``before`` before each is taken in. Returns how often. Raises Failed if one changes."""
    block = started.capability.block_tokens
    moved = 0
    for sampling in samplings:
        stayed = finished(started, [request("stays", sampling)])["stays"]
        for tokens in (1, block - 1, block, 3 * block):
            if tokens >= sampling.max_tokens:
                continue
            started.add(request("moves", sampling))
            begun = stepped(started, "moves", tokens)
            started.freeze("moves")
            snapshot = started.export("moves")
            if snapshot is None:
                raise Failed(f"KV of a request with {tokens} tokens cannot move")
            copied = _copied(snapshot)
            started.remove("moves")
            before()
            started.take_in(copied)
            found = joined(begun, finished(started, [], "moves")["moves"])
            if found[0] != stayed[0]:
                raise Failed(f"moved after {tokens} tokens, a request continues with other tokens")
            if found[1] != stayed[1]:
                difference = float(np.max(np.abs(np.subtract(found[1], stayed[1]))))
                raise Failed(f"moved after {tokens} tokens, logprobs differ by {difference:g}")
            moved += 1
    return moved


def memory(subject: Subject) -> dict[str, Any]:
    """Asks for a KV-cache that no GPU has memory for."""
    if subject.device == "cpu":
        raise Skipped("on a CPU the KV-cache is the host's memory")
    try:
        engine_of(subject, LARGE_KV_TOKENS)
    except InvalidValue as error:
        if error.field not in MEMORY_FIELDS:
            raise Failed(f"the engine was refused for another reason: {error}") from error
        return {"refusal": str(error)[:200]}
    raise Failed(f"{LARGE_KV_TOKENS:,} tokens of KV were not refused")


def engine_of(
    subject: Subject, kv_tokens: int | None = None, device: "Device | None" = None, **settings: Any
) -> "VllmEngine":
    """Starts an engine without weights, on the subject's device unless another one is given. ``settings`` override the
    ``EngineSettings`` of all stages. Several ranks need no proof.
    """
    from dora.worker.vllm.device.cpu import Cpu
    from dora.worker.vllm.device.cuda import Cuda
    from dora.worker.vllm.device.port import EngineSettings
    from dora.worker.vllm.engine import VllmEngine

    is_cpu = subject.device == "cpu"
    return VllmEngine(
        subject.model,
        EngineSettings(
            **{
                "slots": SLOTS,
                "kv_tokens": kv_tokens if kv_tokens is not None else CPU_KV_TOKENS if is_cpu else 0,
                "block_tokens": 32 if is_cpu else 0,
                "max_model_len_tokens": CONTEXT_TOKENS,
                **settings,
            }
        ),
        device=device or (Cpu() if is_cpu else Cuda(proves_ranks=True)),
    )


def _loaded(subject: Subject, device: "Device | None" = None) -> "VllmEngine":
    started = engine_of(subject, None, device)
    started.load_weights(0, subject.model, None)
    return started


def request(name: str, sampling: SamplingParams, number: int = 0) -> RequestSpec:
    """Returns a request of version 0. Each ``number`` gives another prompt."""
    prompt = tuple(token_id + number % 5 for token_id in PROMPT) if number else PROMPT
    return RequestSpec(name, 0, prompt, sampling)


Response = tuple[list[int], list[float]]  # token ids and logprobs


def finished(engine: "VllmEngine", requests: Sequence[RequestSpec], *running: str) -> dict[str, Response]:
    """Adds the requests and steps until nothing runs. ``running`` are requests that run already."""
    found: dict[str, Response] = {name: ([], []) for name in running}
    for request in requests:
        engine.add(request)
        found[request.request_id] = ([], [])
    while engine.has_work():
        for delta in engine.step():
            found[delta.request_id][0].extend(delta.token_ids)
            found[delta.request_id][1].extend(delta.logprobs)
    return found


def stepped(engine: "VllmEngine", name: str, tokens: int) -> Response:
    found: Response = ([], [])
    while len(found[0]) < tokens:
        for delta in engine.step():
            if delta.request_id == name:
                found[0].extend(delta.token_ids)
                found[1].extend(delta.logprobs)
    return found


def joined(before: Response, after: Response) -> Response:
    return [*before[0], *after[0]], [*before[1], *after[1]]


def _copied(snapshot: "KvSnapshot") -> "KvSnapshot":
    """Copies the blocks, as a transport does: the engine's own are about to be freed."""
    blocks = {name: [np.array(piece) for piece in pieces] for name, pieces in snapshot.blocks.items()}
    return replace(snapshot, blocks=blocks)


def _changed(model: Path, folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    first, *others = sorted(model.glob("*.safetensors"))
    save_file({name: tensor * 1.25 for name, tensor in load_file(first).items()}, folder / first.name)
    for file in others:
        (folder / file.name).symlink_to(file.resolve())
    for file in model.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder
