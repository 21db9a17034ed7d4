"""An engine that decodes, for benchmarks of what else happens on its host: tokens a second, on one core."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

os.environ.setdefault("OMP_NUM_THREADS", "1")

from dora.data.types import RequestSpec, SamplingParams
from dora.models.tiny import make_tiny
from dora.worker.vllm.device.port import EngineSettings
from dora.worker.vllm.engine import VllmEngine

SLOTS: Final = 4
MODEL_TOKENS: Final = 2048
LOOKS: Final = 20  # steps between two looks at whether it is to end


class Decoding:
    """vLLM on a tiny model, with all slots busy; a request that ends is begun again."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        model = make_tiny("dense", Path(self._folder.name) / "model")
        longest = 512
        self._engine = VllmEngine(
            model, EngineSettings(slots=SLOTS, kv_tokens=SLOTS * MODEL_TOKENS, max_model_len_tokens=longest)
        )
        self._engine.load_weights(0, model, None)
        self._begun = 0
        self._running: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close()
        self._folder.cleanup()

    def decode(self, for_s: float) -> float:
        """Tokens a second over so long."""
        ends_s = time.perf_counter() + for_s
        return self.decode_until(lambda: time.perf_counter() >= ends_s)

    def decode_until(self, ended: Callable[[], bool]) -> float:
        """Tokens a second until it has ended."""
        tokens, began_s = 0, time.perf_counter()
        while True:
            for _ in range(LOOKS):
                tokens += self._step()
            if ended():
                return tokens / (time.perf_counter() - began_s)

    def _step(self) -> int:
        while len(self._running) < SLOTS:
            name = f"r{self._begun}"
            self._begun += 1
            sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=400, ignore_eos=True)
            self._engine.add(RequestSpec(name, 0, tuple(range(3, 19)), sampling))
            self._running.add(name)
        deltas = self._engine.step()
        self._running -= {delta.request_id for delta in deltas if delta.finish_reason is not None}
        return sum(len(delta.token_ids) for delta in deltas)
