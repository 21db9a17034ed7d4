"""The time in which engines generate a batch: the bubble-free bound, and the efficiency of a good policy.

It is the bound of one batch on identical engines, times an efficiency, and the time of the longest response, which may
span the window's steps. In a window of 1 no other version's responses keep the engines full, so a batch is simulated to
its end (drain.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from dora.config import CostConfig
from dora.core.forecast.cost import CostModel, read_share
from dora.data.hardware import Hardware
from dora.errors import InvalidValue
from dora.lab.planning.drain import MICRO_BATCHES, ready_s
from dora.lab.planning.hardware import MEMORY_SHARE, RESERVE_BYTES, coefficients, kv_tokens
from dora.lab.planning.models import ModelSpec
from dora.lab.planning.workload import StepWorkload

EFFICIENCY: Final = 1.05  # time of a good policy relative to the bound
# The share of a full engine's batch that runs beside the longest response, which begins on a full engine and is moved
# to emptier ones. With 1, no step of two versions on 128 GPUs could be below 13.5 min; 11.85 was measured.
TAIL_LOAD: Final = 0.5
NODE_SIZES: Final = (1, 2, 4, 8)  # accelerators of one engine
_HALVINGS: Final = 20  # precise to a millionth
MULTI_NODE_SIZES: Final = (16, 32, 64, 128)  # for a model that fits no single node: the smallest that fits


@dataclass(frozen=True, slots=True)
class EngineOption:
    gpus: int
    cost: CostModel
    slots: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Generation:
    """A batch on ``engines`` engines: the time of its tokens, and the share of a step that its longest response needs.

    ``ready_s`` has, in a window of 1, the time when each micro-batch of the step has ended. It is empty in wider ones:
    there, training and generation never wait for each other within a step.
    """

    option: EngineOption
    engines: int
    work_s: float
    tail_s: float
    ready_s: tuple[float, ...] = ()

    @property
    def gpus(self) -> int:
        return self.engines * self.option.gpus

    @property
    def seconds(self) -> float:
        return max(self.work_s, self.tail_s)


def bound_s(
    cost: CostModel | CostConfig, slots: int, kv_tokens: int, n_tokens: float, c_tokens: float, engines: int
) -> float:
    """The least seconds in which ``engines`` engines generate ``n_tokens``, whose contexts sum to ``c_tokens``.

    No schedule is faster: every context token is read, k1 C; every token computed, k3 N; and there are S engine steps
    of k4 each, as a step runs at most ``slots`` requests on ``kv_tokens`` of context: S >= max(N / slots, C / kv). A
    step also reads its weights (k2): all of them, or for a mixture of experts at least those of one request, and over
    all steps at least as much as full batches would. Raises InvalidValue for a value outside its domain.
    """
    _check_engine(cost, slots, kv_tokens)
    _check_positive("engines", engines)
    for field, value in (("n_tokens", n_tokens), ("c_tokens", c_tokens)):
        if not 0.0 <= value < math.inf:
            raise InvalidValue(field, value, "a finite number of 0 or more")
    steps = max(n_tokens / slots, c_tokens / kv_tokens)
    one_read, full_read = (read_share(cost.expert_fraction, cost.shared_fraction, batch) for batch in (1, slots))
    read_s = cost.weights_s * max(one_read * steps, full_read * n_tokens / slots)
    compute_s = cost.request_s * n_tokens * (1.0 + cost.imbalance / slots**0.5)
    state_s = cost.state_s * n_tokens
    gain = 1.0 - cost.draft_acceptance  # steps for a token, if every draft had no end
    return (
        gain * cost.kv_token_s * c_tokens + max(gain * read_s, compute_s) + state_s + gain * cost.step_s * steps
    ) / engines


def generation(
    option: EngineOption,
    engines: int,
    workload: StepWorkload,
    window: int,
    micro_batches: int = MICRO_BATCHES,
    efficiency: float = EFFICIENCY,
    tail_load: float = TAIL_LOAD,
) -> Generation:
    """One batch on ``engines`` engines that all run even batches, as full as slots and KV allow.

    For a dense model ``work_s`` is ``efficiency`` times ``bound_s``. ``tail_s`` is the time of the longest response at
    ``tail_load`` of such a batch, divided by ``window``, as it may take that many steps. If it exceeds the work,
    engines have spare time and run emptier, which speeds up the response: as empty as possible with the work done in
    just that time. In a window of 1, ``tail_s`` is the end of the batch, ``efficiency`` times the time of a simulated
    engine, and ``micro_batches`` are trained on as they end.
    """
    _check_engine(option.cost, option.slots, option.kv_tokens)
    positive = (("engines", engines), ("window", window), ("micro_batches", micro_batches), ("efficiency", efficiency))
    for field, value in positive:
        _check_positive(field, value)
    if not 0.0 <= tail_load <= 1.0:
        raise InvalidValue("tail_load", tail_load, "0 to 1")
    steps = max(workload.n_tokens / option.slots, workload.c_tokens / option.kv_tokens)  # of full batches on one engine
    batch, context = workload.n_tokens / steps, workload.c_tokens / steps

    def work_s(fill: float) -> float:
        return efficiency * steps / fill * _decode_step_s(option.cost, fill * batch, fill * context) / engines

    def tail_s(fill: float) -> float:
        beside = tail_load * fill
        return workload.cap_tokens * _decode_step_s(option.cost, max(1.0, beside * batch), beside * context) / window

    if window == 1:
        ideal_s = ready_s(option.cost, option.slots, option.kv_tokens, workload, engines, micro_batches)
        ready = tuple(efficiency * at_s for at_s in ideal_s)
        return Generation(option, engines, work_s(1.0), ready[-1], ready)
    return Generation(option, engines, work_s(1.0), tail_s(_least_fill(work_s, tail_s)))


def _least_fill(work_s: Callable[[float], float], tail_s: Callable[[float], float]) -> float:
    """Finds the emptiest batches, as a share of full ones, for which the work takes no longer than the tail; else 1.
    Full batches have the shortest work, and empty ones the shortest tail.
    """
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS if work_s(1.0) < tail_s(1.0) else 0):
        middle = (low + high) / 2
        if work_s(middle) > tail_s(middle):
            low = middle
        else:
            high = middle
    return high


def engine_options(
    model: ModelSpec, hardware: Hardware, workload: StepWorkload, slots: int = 256, sizes: Sequence[int] = ()
) -> tuple[EngineOption, ...]:
    """Returns the engines that have room for the model and the KV of one longest response.

    Without ``sizes``, it tries those within a node, or the smallest of several nodes, whose slower links the roofline
    does not model. Raises InvalidValue if the model fits none of them.
    """
    needed = math.ceil(workload.prompt_tokens) + workload.cap_tokens
    for tried in [sizes] if sizes else [NODE_SIZES, *((size,) for size in MULTI_NODE_SIZES)]:
        options = tuple(
            EngineOption(gpus, CostModel.of(coefficients(model, hardware, gpus)), slots, held)
            for gpus in tried
            if (held := kv_tokens(model, hardware, gpus, slots)) >= needed
        )
        if options:
            return options
    needed_bytes = model.weights_bytes + needed * model.kv_token_bytes + slots * model.state_bytes
    least = math.ceil(needed_bytes / (hardware.memory_bytes * MEMORY_SHARE - RESERVE_BYTES))
    raise InvalidValue(
        "gpus_per_engine",
        max(sizes or MULTI_NODE_SIZES),
        f"at least {least}: {model.name} needs {model.weights_bytes / 1e9:.1f} GB of weights and the KV of "
        f"{needed:,} tokens, {needed_bytes / 1e9:.1f} GB; {hardware.name} has {hardware.memory_bytes / 1e9:.0f} GB",
    )


def ways_to_generate(
    gpus: int, model: Callable[[EngineOption, int], Generation], options: Sequence[EngineOption]
) -> tuple[Generation, ...]:
    """Each engine that fits, as often as ``gpus`` accelerators allow (the paper's parallel configurations)."""
    return tuple(model(option, gpus // option.gpus) for option in options if option.gpus <= gpus)


def _decode_step_s(cost: CostModel, batch: float, context: float) -> float:
    below = int(batch)
    share = batch - below
    return (1 - share) * cost.decode_step_s(below, context) + share * cost.decode_step_s(below + 1, context)


def _check_engine(cost: CostModel | CostConfig, slots: int, kv_tokens: int) -> None:
    for field in ("kv_token_s", "weights_s", "request_s", "state_s", "step_s", "imbalance"):
        value = getattr(cost, field)
        if not 0.0 <= value < math.inf:
            raise InvalidValue(f"cost.{field}", value, "a finite number of 0 or more")
    if not 0.0 < cost.expert_fraction <= 1.0:
        raise InvalidValue("cost.expert_fraction", cost.expert_fraction, "above 0, at most 1")
    if not 0.0 <= cost.shared_fraction < 1.0:
        raise InvalidValue("cost.shared_fraction", cost.shared_fraction, "0 or above, below 1")
    _check_positive("slots", slots)
    _check_positive("kv_tokens", kv_tokens)


def _check_positive(field: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise InvalidValue(field, value, "a finite number above 0")
