"""An engine whose steps take a known time, and what a noiseless measurement of it would be."""

from collections.abc import Callable
from pathlib import Path

from dora.core.forecast.cost import CostModel
from dora.data.engine_samples import DecodeSample, PrefillSample
from dora.data.types import RequestSpec, TokenDelta
from dora.worker.fake.engine import FakeEngine

COST = CostModel(kv_token_s=2e-6, weights_s=0.012, request_s=0.003, step_s=0.02, prefill_token_s=5e-4)
SLOTS, KV_TOKENS, CONTEXT = 8, 8192, 512
BATCHES, CONTEXTS = (1, 2, 4, 6, 8), (100, 400, 900)


class TimedEngine(FakeEngine):
    """A fake engine on a clock of its own: each step takes what ``cost`` says, times ``noise()``."""

    def __init__(self, cost: CostModel, noise: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__(slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=CONTEXT)
        self.now_s = 0.0
        self._cost, self._noise = cost, noise
        self._context: dict[str, int] = {}
        self._prefilled: set[str] = set()

    def clock(self) -> float:
        return self.now_s

    def add(self, request: RequestSpec) -> None:
        super().add(request)
        self._context[request.request_id] = len(request.prompt_token_ids)

    def step(self) -> list[TokenDelta]:
        deltas = super().step()
        names = [delta.request_id for delta in deltas]
        new = [name for name in names if name not in self._prefilled]
        self._prefilled.update(new)
        step_s = self._cost.decode_step_s(len(names), sum(self._context[name] for name in names))
        step_s += self._cost.prefill_token_s * sum(self._context[name] for name in new)
        self.now_s += step_s * self._noise()
        for delta in deltas:
            self._context[delta.request_id] += len(delta.token_ids)
        return deltas


def timed_engine(weights: Path, cost: CostModel = COST, noise: Callable[[], float] = lambda: 1.0) -> TimedEngine:
    engine = TimedEngine(cost, noise)
    engine.load_weights(1, weights, None)
    return engine


def samples(cost: CostModel) -> tuple[list[DecodeSample], list[PrefillSample]]:
    """Returns the samples of a noiseless engine."""
    decode = [
        DecodeSample(batch, batch * context, cost.decode_step_s(batch, batch * context))
        for batch in BATCHES
        for context in CONTEXTS
    ]
    prefill = [
        PrefillSample(1, context, cost.decode_step_s(1, context) + cost.prefill_token_s * context)
        for context in CONTEXTS
    ]
    return decode, prefill
