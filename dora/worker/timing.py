"""What is to be timed of which engine, and the engine for it, in this process."""

import os
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from dora.planning.samples import Measurement
from dora.worker.engine import RolloutEngine
from dora.worker.profiling import ALONE, Grid, default_grid, measure


@dataclass(frozen=True, slots=True)
class Timing:
    """One engine, and how often its steps of how many batch sizes are timed."""

    model: Path  # a Hugging Face folder
    slots: int
    kv_tokens: int
    max_model_len_tokens: int
    dtype: Literal["float32", "bfloat16"]
    threads: int
    seed: int
    rounds: int
    batches: int

    def grid(self, counted: tuple[float, float] = ALONE) -> Grid:
        """Raises InvalidValue for an engine that is too small to be measured."""
        return default_grid(self.slots, self.kv_tokens, self.max_model_len_tokens, self.rounds, self.batches, counted)

    def start(self) -> RolloutEngine:
        """A vLLM engine in this process, which has none yet, with its weights loaded."""
        os.environ["OMP_NUM_THREADS"] = str(self.threads)  # vLLM reads it while it is imported
        from dora.worker.vllm_engine import VllmEngine

        engine = VllmEngine(
            self.model,
            slots=self.slots,
            kv_tokens=self.kv_tokens,
            max_model_len_tokens=self.max_model_len_tokens,
            dtype=self.dtype,
        )
        engine.load_weights(0, self.model, None)
        return engine

    def arguments(self) -> list[str]:
        """As options of ``dora.worker.profiler``."""
        return [text for each in fields(self) for text in (_option(each.name), str(getattr(self, each.name)))]


def measure_alone(timing: Timing) -> Measurement:
    """Starts the engine in this process, times it and closes it."""
    grid = timing.grid()  # refuses what is too small before vLLM is loaded
    engine = timing.start()
    try:
        return measure(engine, grid, seed=timing.seed, clock=time.perf_counter)
    finally:
        engine.close()


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
