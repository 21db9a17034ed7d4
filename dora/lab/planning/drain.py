"""A step of window 1: one batch from its first token to its last, and concurrent training of streamed micro-batches.

With wider windows the next version's responses use the freed slots, so engines stay full and the bubble-free bound
gives the time of a batch. With window 1 nothing uses them: engines run empty towards the longest response.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from statistics import NormalDist
from typing import Final

import numpy as np

from dora.core.forecast.cost import CostModel
from dora.core.table import Column
from dora.lab.planning.workload import StepWorkload
from dora.lab.sim_engine.engine import SimEngine, SimRequest

MICRO_BATCHES: Final = 16  # per step, each trained on as soon as it is ready: the DORA paper's updates (section 5)
# Limit of simulated requests per engine, a few times its slots; the others are assumed to find a full engine.
SIMULATED: Final = 2048


def ready_s(
    cost: CostModel, slots: int, kv_tokens: int, workload: StepWorkload, engines: int, micro_batches: int
) -> tuple[float, ...]:
    """The times at which micro-batches are ready, in seconds from the first token, ascending.

    Every engine has the same share of the batch, lengths at even quantiles, longest first. Micro-batches fill up as
    responses end, assuming that those of a group end together; if they do not, the last micro-batches are still right.
    """
    count = max(1, ceil(workload.responses / engines))
    simulated = min(count, SIMULATED)
    ends = _ends_s(cost, slots, kv_tokens, workload, simulated)
    before = count - simulated
    if before:
        context = workload.c_tokens / workload.n_tokens
        running = min(slots, kv_tokens / context)
        mean_tokens = workload.n_tokens / workload.responses
        each_s = mean_tokens * cost.decode_step_s(max(1, int(running)), running * context) / running
        ends = np.concatenate([each_s * np.arange(1, before + 1), before * each_s + ends])
    last = np.ceil(np.arange(1, micro_batches + 1) / micro_batches * count - 1e-9).astype(np.int64) - 1
    return tuple(ends[last].tolist())


def streamed_s(ready: Sequence[float], training_s: float) -> float:
    """Returns when a step's last micro-batch is trained on. Each starts once it is ready and the previous is done."""
    done_s = 0.0
    for at_s in ready:
        done_s = max(done_s, at_s) + training_s / len(ready)
    return done_s


@lru_cache(maxsize=1024)
def _ends_s(cost: CostModel, slots: int, kv_tokens: int, workload: StepWorkload, count: int) -> Column:
    """The times at which an engine's responses end, ascending. Read-only."""
    normal = NormalDist()
    scores = np.array([normal.inv_cdf((index + 0.5) / count) for index in reversed(range(count))])
    tokens = np.clip(np.rint(workload.tokens_at(scores)), 1, workload.cap_tokens).astype(np.int64)
    engine = SimEngine(cost, slots, kv_tokens)
    prompt = ceil(workload.prompt_tokens)
    for name, length in enumerate(tokens.tolist()):
        engine.add(SimRequest(str(name), str(name), 0, prompt, 0, length, length))
    ends: list[float] = []
    while engine.requests:
        engine.advance(engine.next_s())
        ends += [engine.clock_s] * len(engine.happened())
    return np.array(ends)
