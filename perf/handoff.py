"""What a handoff costs, against its limit (copying the same bytes) and its alternative (re-prefilling), in one run.

    python perf/handoff.py --model smollm2 --tokens 128 512 --json

One engine plays both ends: a request is frozen, exported, sent by shared memory, removed, and taken in.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from rich.console import Console
from rich.table import Table

from dora.data.types import RequestSpec, SamplingParams
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import Identity, Peer, this_host
from dora.kvtransfer.plane import DataPlane, PlaneSettings
from dora.models import resolve_model
from dora.worker.vllm.device.port import EngineSettings
from dora.worker.vllm.engine import VllmEngine

ROUNDS = 7
PROMPT_TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, tiny, tiny-moe, tiny-hybrid, or a Hugging Face folder"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 960], help="context lengths")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = resolve_model(options.model)
    longest = max(options.tokens) + ROUNDS + 64
    engine = VllmEngine(folder, EngineSettings(slots=4, kv_tokens=4 * longest, max_model_len_tokens=longest))
    engine.load_weights(0, folder, None)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        settings = PlaneSettings(os.urandom(32), Path(shared), ("shm",))
        listener, target_listener = Listener("127.0.0.1"), Listener("127.0.0.1")
        host = this_host()
        source = DataPlane(listener, Identity("w1", 1, "f", host), settings)
        target = DataPlane(target_listener, Identity("w2", 2, "f", host), settings)
        peer = Peer("w2", 2, target_listener.address, ("shm",))
        rows = [measure(engine, source, target, peer, tokens) for tokens in options.tokens]
        source.close()
        target.close()
    engine.close()
    print(json.dumps({"model": options.model, "rounds": ROUNDS, "rows": rows})) if options.json else show(rows)


def measure(engine: VllmEngine, source: DataPlane, target: DataPlane, peer: Peer, tokens: int) -> dict[str, Any]:
    """Medians over rounds for one request of ``tokens`` tokens of context."""
    request = RequestSpec(f"r{tokens}", 0, tuple(range(3, 3 + PROMPT_TOKENS)), sampling(4 * tokens + 64))
    engine.add(request)
    produced = 0
    while produced < tokens - PROMPT_TOKENS:
        produced += len(engine.step())
    found: dict[str, list[float]] = {}
    size_bytes = 0
    for round_number in range(ROUNDS):
        step_ms = timed(found, "step_ms", engine.step)
        began_s = time.perf_counter()
        snapshot = timed(found, "export_ms", lambda: exported(engine, request.request_id))
        size_bytes = sum(piece.nbytes for pieces in snapshot.blocks.values() for piece in pieces)
        target.expect(request.request_id, 1, size_bytes)
        transfer = timed(found, "send_ms", lambda held=snapshot: source.send(peer, request.request_id, held))
        sent = timed(found, "copy_ms", lambda under_way=transfer: under_way.done.result(60))
        engine.remove(request.request_id)
        taken = timed(found, "get_ms", lambda key=sent.key: target.take(key))
        timed(found, "admit_ms", lambda got=taken: engine.take_in(got))
        first = timed(found, "first_step_ms", engine.step)
        found.setdefault("blackout_ms", []).append((time.perf_counter() - began_s) * 1000)
        assert len(first) == 1 and step_ms is not None
        copied = np.concatenate([piece.reshape(-1) for pieces in taken.blocks.values() for piece in pieces])
        onto = np.zeros_like(copied)
        timed(found, "memcpy_ms", lambda a=onto, b=copied: np.copyto(a, b))
        # the alternative: as many tokens re-prefilled; another prompt, or the prefix cache would answer
        engine.freeze(request.request_id)
        engine.add(as_long(snapshot.request, round_number))
        timed(found, "reprefill_step_ms", engine.step)
        engine.remove(f"{request.request_id}.{round_number}")
        engine.thaw(request.request_id)
    engine.remove(request.request_id)
    medians = {name: round(statistics.median(values), 3) for name, values in found.items()}
    moved_ms = medians["blackout_ms"] - medians["step_ms"]
    return {
        "tokens": tokens,
        "kv_mb": round(size_bytes / 1e6, 2),
        **medians,
        "reprefill_over_handoff": round((medians["reprefill_step_ms"] - medians["step_ms"]) / moved_ms, 2),
        "handoff_over_memcpy": round(moved_ms / medians["memcpy_ms"], 1),
    }


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=1, max_tokens=max_tokens, ignore_eos=True)


def as_long(request: RequestSpec, round_number: int) -> RequestSpec:
    """Another request with as many tokens delivered."""
    prompt = tuple(20 + round_number + token for token in request.prompt_token_ids)
    return replace(request, request_id=f"{request.request_id}.{round_number}", prompt_token_ids=prompt)


def exported(engine: VllmEngine, request_id: str) -> Any:
    engine.freeze(request_id)
    return engine.export(request_id)


def timed(found: dict[str, list[float]], name: str, call: Callable[[], Any]) -> Any:
    began_s = time.perf_counter()
    result = call()
    found.setdefault(name, []).append((time.perf_counter() - began_s) * 1000)
    return result


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="one request, medians in ms")
    for name in rows[0]:
        table.add_column(name.removesuffix("_ms").replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:,}" for value in row.values()))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
