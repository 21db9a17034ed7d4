"""One engine on a tiny model that plays both ends of migrations, over two data planes of this process.

So what both ends of a migration cost falls on one engine. One process has one such engine.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

from dora.data.types import RequestSpec, SamplingParams
from dora.kvtransfer.copying import Copying
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import Identity, Peer, this_host
from dora.kvtransfer.plane import DataPlane, PlaneSettings
from dora.models.tiny import TinyKind, make_tiny
from dora.worker.prefixes import SentPrefixes
from dora.worker.rounds import EngineRounds
from dora.worker.vllm.device.port import EngineSettings
from dora.worker.vllm.engine import VllmEngine

SLOTS: Final = 16
SLOT_TOKENS: Final = 2048
MOST_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class Ends:
    """One engine, and the data planes by which a request leaves it and comes back."""

    engine: VllmEngine
    source: DataPlane
    target: DataPlane
    peer: Peer

    def timed_step_ms(self) -> float:
        began_s = time.perf_counter()
        self.engine.step()
        return (time.perf_counter() - began_s) * 1000

    def begin_copy(self, request_id: str) -> Copying:
        """With blocks that are reserved for the request's context, as the orchestrator asks for them."""
        request = self.engine.request(request_id)
        kv_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        self.target.expect(request_id, 1, MOST_BYTES, self.engine.reserve(request_id, kv_tokens))
        return Copying(
            self.source,
            self.peer,
            request_id,
            EngineRounds(self.engine, self.peer, request_id, SentPrefixes(), self.source.part_bytes),
        )


@contextmanager
def ends(tokens: int, kind: TinyKind = "dense") -> Iterator[Ends]:
    """For contexts of up to ``tokens`` tokens of a tiny model of this kind."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        longest = tokens + 4096
        folder = long_model(Path(shared) / "model", longest, kind)
        kv_tokens = max(2 * longest, SLOTS * SLOT_TOKENS)
        engine = VllmEngine(folder, EngineSettings(slots=SLOTS, kv_tokens=kv_tokens, max_model_len_tokens=longest))
        engine.load_weights(0, folder, None)
        settings = PlaneSettings(os.urandom(32), Path(shared), ("shm",))
        listener, target_listener = Listener("127.0.0.1"), Listener("127.0.0.1")
        source = DataPlane(listener, Identity("w1", 1, "f", this_host()), settings)
        target = DataPlane(target_listener, Identity("w2", 2, "f", this_host()), settings)
        try:
            yield Ends(engine, source, target, Peer("w2", 2, target_listener.address, ("shm",)))
        finally:
            source.close()
            target.close()
            engine.close()


def long_model(folder: Path, positions: int, kind: TinyKind = "dense") -> Path:
    """A tiny model whose context is long; its weights do not depend on that."""
    make_tiny(kind, folder, seed=0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
    return folder


def a_request(name: str, tokens: int) -> RequestSpec:
    prompt = tuple(3 + index % 61 for index in range(tokens))
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=4000, ignore_eos=True)
    return RequestSpec(name, 0, prompt, sampling)
