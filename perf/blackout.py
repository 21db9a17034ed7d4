"""How long a request that moves goes without a token, by its context: copied ahead in rounds, and stopped and copied.

One engine on a tiny model plays both ends, over two data planes of this process; a blackout is given in decode steps of
the same engine beside the same request. Re-prefill, the alternative, computes the same context from its tokens.
"""

import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.table import Table

from dora.kvtransfer.door import Door
from dora.kvtransfer.peer import Identity, Peer, this_host
from dora.kvtransfer.plane import DataPlane, PlaneSettings
from dora.kvtransfer.transfer import Transfer
from dora.models.tiny import make_tiny
from dora.types import RequestSpec, SamplingParams
from dora.worker.copying import Copying
from dora.worker.vllm_engine import VllmEngine

MOVES = 7
WARM_STEPS = 8
WAIT_S = 60.0
MOST_BYTES = 1 << 30


def measured(all_tokens: list[int]) -> list[dict[str, Any]]:
    """One row for each length of context, the shortest first."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        longest = max(all_tokens) + 4096
        folder = long_model(Path(shared) / "model", longest)
        engine = VllmEngine(folder, slots=4, kv_tokens=2 * longest, max_model_len_tokens=longest)
        engine.load_weights(0, folder, None)
        settings = PlaneSettings(os.urandom(32), Path(shared), ("shm",))
        door, target_door = Door("127.0.0.1"), Door("127.0.0.1")
        source = DataPlane(door, Identity("w1", 1, "f", this_host()), settings)
        target = DataPlane(target_door, Identity("w2", 2, "f", this_host()), settings)
        peer = Peer("w2", 2, target_door.address, ("shm",))
        rows = [measure(engine, source, target, peer, tokens) for tokens in sorted(all_tokens)]
        source.close()
        target.close()
        engine.close()
    return rows


def values(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The worst context's median, and the longest context by the shortest."""
    return {
        "blackout_steps_p50": max(row["blackout_steps"] for row in rows),
        "blackout_16k_vs_1k": round(rows[-1]["blackout_ms"] / rows[0]["blackout_ms"], 2),
        "reprefill_vs_blackout_16k": round(rows[-1]["reprefill_ms"] / rows[-1]["blackout_ms"], 1),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    found = Table(title="A request that moves, by its context")
    for heading in rows[0]:
        found.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        found.add_row(*map(str, row.values()))
    return found


def long_model(folder: Path, positions: int) -> Path:
    """A tiny model whose context is long; its weights do not depend on that."""
    make_tiny("dense", folder, seed=0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
    return folder


def measure(engine: VllmEngine, source: DataPlane, target: DataPlane, peer: Peer, tokens: int) -> dict[str, Any]:
    """Medians over moves of one request with ``tokens`` tokens of context."""
    prompt = tuple(3 + index % 61 for index in range(tokens))
    request = RequestSpec(f"r{tokens}", 0, prompt, SamplingParams(temperature=1.0, seed=1, max_tokens=4000))
    request = replace(request, sampling=replace(request.sampling, ignore_eos=True))
    began_s = time.perf_counter()
    engine.add(request)
    engine.step()
    reprefill_ms = (time.perf_counter() - began_s) * 1000
    steps_ms = [timed_step(engine) for _ in range(WARM_STEPS)][2:]
    ends = engine, source, target, peer, request.request_id
    ahead_ms: list[float] = []
    stopped_ms: list[float] = []
    for _ in range(MOVES):
        for found, move in ((ahead_ms, copy_ahead), (stopped_ms, stop_and_copy)):
            found.append(move(*ends))
            steps_ms += [timed_step(engine) for _ in range(4)]
    engine.remove(request.request_id)
    step_ms, blackout_ms = statistics.median(steps_ms), statistics.median(ahead_ms)
    return {
        "tokens": tokens,
        "step_ms": round(step_ms, 2),
        "blackout_ms": round(blackout_ms, 2),
        "blackout_steps": round(blackout_ms / step_ms, 2),
        "stop_and_copy_ms": round(statistics.median(stopped_ms), 2),
        "reprefill_ms": round(reprefill_ms, 1),
    }


def copy_ahead(engine: VllmEngine, source: DataPlane, target: DataPlane, peer: Peer, request_id: str) -> float:
    """Milliseconds between the last token here and the first one there."""
    target.expect(request_id, 1, MOST_BYTES, engine.reserve(request_id, engine.load().kv_used_tokens))
    copying = Copying(engine, source, peer, request_id)
    last_s = time.perf_counter()
    while (last := copying.advance()) is None:
        engine.step()
        last_s = time.perf_counter()
    return taken_in(engine, target, last, last_s)


def stop_and_copy(engine: VllmEngine, source: DataPlane, target: DataPlane, peer: Peer, request_id: str) -> float:
    """The same where nothing is copied before the freeze."""
    target.expect(request_id, 1, MOST_BYTES)
    last_s = time.perf_counter()
    engine.freeze(request_id)
    snapshot = engine.export(request_id)
    assert snapshot is not None
    return taken_in(engine, target, source.send(peer, request_id, snapshot), last_s)


def taken_in(engine: VllmEngine, target: DataPlane, last: Transfer, last_s: float) -> float:
    key = last.done.result(WAIT_S).key
    engine.remove(last.ticket)
    engine.take_in(target.take(key))
    engine.step()
    return (time.perf_counter() - last_s) * 1000


def timed_step(engine: VllmEngine) -> float:
    began_s = time.perf_counter()
    engine.step()
    return (time.perf_counter() - began_s) * 1000
