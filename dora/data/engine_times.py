"""The histograms of an engine, under vLLM's names and with vLLM's bounds, so that its dashboards work.

Source: vLLM 0.32, ``vllm/v1/metrics/buckets.py`` and ``loggers.py``. A worker measures them; a turn is a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

FIRST_TOKEN_BOUNDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
LENGTH_BOUNDS: Final = tuple(float(factor * 10**power) for power in range(7) for factor in (1, 2, 5))[:-2]  # to 10^6
ENDS: Final = ("stop", "length")  # a request's finish reasons


@dataclass(frozen=True, slots=True)
class EngineHistogram:
    """A histogram. ``bounds`` are the upper ones, of all buckets but the last."""

    name: str
    meaning: str
    bounds: Sequence[float]


FIRST_TOKEN: Final = EngineHistogram(
    "vllm:time_to_first_token_seconds",
    "Time from a request's start in the engine to its first token.",
    FIRST_TOKEN_BOUNDS,
)
TOKEN: Final = EngineHistogram(
    "vllm:inter_token_latency_seconds", "Time between two steps that give a request tokens.", TOKEN_BOUNDS
)
REQUEST: Final = EngineHistogram(
    "vllm:e2e_request_latency_seconds", "Time of a request in the engine that ends it.", REQUEST_BOUNDS
)
DECODE: Final = EngineHistogram(
    "vllm:request_decode_time_seconds", "Time from a request's first token in the engine to its last.", REQUEST_BOUNDS
)
PROMPT: Final = EngineHistogram(
    "vllm:request_prompt_tokens", "Tokens that a request begins with, those computed again included.", LENGTH_BOUNDS
)
GENERATION: Final = EngineHistogram(
    "vllm:request_generation_tokens", "Tokens that the engine has sampled for a request that ends there.", LENGTH_BOUNDS
)
HISTOGRAMS: Final = (FIRST_TOKEN, TOKEN, REQUEST, DECODE, PROMPT, GENERATION)
BY_NAME: Final = {each.name: each for each in HISTOGRAMS}
