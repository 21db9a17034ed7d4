"""The engine and grid of a measurement, and its execution in this process."""

import os
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Literal

from dora.data.engine_samples import ClockName, Measurement
from dora.worker.engine import RolloutEngine
from dora.worker.profiling import FASTEST, USUAL, Clock, Grid, default_grid, measure

# The thread's own time on a core: what a step takes with a core to itself, however busy the machine is. It says so only
# of an engine that computes in its own thread.
CLOCKS: Final[dict[ClockName, Clock]] = {"wall": time.perf_counter, "cpu": time.thread_time}


@dataclass(frozen=True, slots=True)
class Timing:
    """One engine, its number of batch sizes, and the repetitions of each."""

    model: Path  # a Hugging Face folder
    slots: int
    kv_tokens: int
    max_model_len_tokens: int
    dtype: Literal["float32", "bfloat16"]
    threads: int
    seed: int
    rounds: int
    batches: int
    clock: ClockName

    def grid(self, counted: tuple[float, float]) -> Grid:
        """Raises InvalidValue for an engine that is too small to be measured."""
        return default_grid(self.slots, self.kv_tokens, self.max_model_len_tokens, self.rounds, self.batches, counted)

    def measure(self, engine: RolloutEngine, grid: Grid, place: int = 0) -> Measurement:
        clock = CLOCKS[self.clock]
        return measure(engine, grid, seed=self.seed, clock=clock, wall_clock=time.perf_counter, place=place)

    def start(self) -> RolloutEngine:
        """Starts a vLLM engine with loaded weights in this process, which has none yet."""
        os.environ["OMP_NUM_THREADS"] = str(self.threads)  # vLLM reads it while it is imported
        from dora.worker.vllm.device.port import EngineSettings
        from dora.worker.vllm.engine import VllmEngine

        settings = EngineSettings(self.slots, self.kv_tokens, self.max_model_len_tokens, dtype=self.dtype)
        engine = VllmEngine(self.model, settings)
        engine.load_weights(0, self.model, None)
        return engine

    def arguments(self) -> list[str]:
        """Returns the options of ``dora.worker.profiler``."""
        return [text for each in fields(self) for text in (_option(each.name), str(getattr(self, each.name)))]


def measure_alone(timing: Timing) -> Measurement:
    """Starts the engine in this process, times it and closes it."""
    # refuses what is too small before vLLM is loaded
    grid = timing.grid(FASTEST if timing.clock == "wall" else USUAL)
    engine = timing.start()
    try:
        return timing.measure(engine, grid)
    finally:
        engine.close()


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
