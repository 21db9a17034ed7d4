"""How many accelerators generate and how many train: StreamRL's Algorithm 1 (paper 002, section 4.2).

Generation is modelled by the bubble-free bound of one batch on identical engines, times an efficiency, and by the time
of the longest response, which has the window's steps to end in. Training is interpolated between measured points.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from dora.errors import InvalidValue
from dora.orchestrator.core.cost import CostModel
from dora.planning.hardware import MEMORY_SHARE, RESERVE_BYTES, Hardware, coefficients, kv_tokens
from dora.planning.models import ModelSpec
from dora.planning.workload import StepWorkload
from dora.sim.scenario import Coefficients

EFFICIENCY: Final = 1.05  # time of a good policy over the bound
# Share of a full engine's batch beside which the longest response runs: such responses begin on a full engine and are
# moved to emptier ones. With 1 no step of two versions on the facts' 128 GPUs could be below 13.5 min; 11.85 was found.
TAIL_LOAD: Final = 0.5
NODE_SIZES: Final = (1, 2, 4, 8)  # accelerators of one engine
MULTI_NODE_SIZES: Final = (16, 32, 64, 128)  # for a model that fits no node: the first that it fits


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One way to build an engine."""

    gpus: int
    cost: CostModel
    slots: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Generation:
    """A batch on ``engines`` engines: the time of its tokens, and the share of a step its longest response needs."""

    option: EngineOption
    engines: int
    work_s: float
    tail_s: float

    @property
    def gpus(self) -> int:
        return self.engines * self.option.gpus

    @property
    def seconds(self) -> float:
        return max(self.work_s, self.tail_s)


@dataclass(frozen=True, slots=True)
class Split:
    """One division of the accelerators; a step takes as long as the slower stage."""

    generation: Generation
    train_gpus: int
    training_s: float

    @property
    def gpus(self) -> int:
        return self.generation.gpus + self.train_gpus

    @property
    def step_s(self) -> float:
        return max(self.generation.seconds, self.training_s)

    @property
    def rank(self) -> tuple[float, int]:
        """Smaller is better: the shorter step, then the fewer accelerators."""
        return self.step_s, self.gpus


@dataclass(frozen=True, slots=True)
class TrainingTime:
    """Seconds a step by accelerators, from measured ``points`` (accelerators, seconds).

    One point scales linearly; between several the time is linear in 1 / accelerators, and so on beyond the outermost
    two, unless they scale better than linearly. ``multiple``: a trainer can only have so many accelerators or a
    multiple of it. Raises InvalidValue for points that are not numbers, or where more accelerators take longer.
    """

    points: tuple[tuple[int, float], ...]
    multiple: int = 4

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise InvalidValue("train_multiple", self.multiple, "1 or above")
        if not self.points:
            raise InvalidValue("train_s_at", self.points, "at least one measured point")
        for gpus, seconds in self.points:
            if gpus < 1 or not 0.0 < seconds < math.inf:
                raise InvalidValue("train_s_at", f"{gpus}={seconds}", "1 or more GPUs, seconds finite and above 0")
        for (fewer, slower), (more, faster) in pairwise(self.points):
            if more <= fewer or faster > slower:
                raise InvalidValue("train_s_at", f"{more}={faster:g}", f"more GPUs than {fewer}, at most {slower:g} s")

    def scaled(self, factor: float) -> "TrainingTime":
        """A trainer like this with ``factor`` times the work.

        Less work takes proportionally less time; more work takes as long on as many times more accelerators, as the
        part that accelerators do not shorten hardly grows with it.
        """
        if factor <= 1.0:
            points = tuple((gpus, seconds * factor) for gpus, seconds in self.points)
        else:
            points = tuple((round(gpus * factor), seconds) for gpus, seconds in self.points)
        return TrainingTime(points, self.multiple)

    def seconds(self, gpus: int) -> float:
        """Time of one step on ``gpus`` accelerators."""
        if len(self.points) == 1:
            first, seconds = self.points[0]
            return seconds * first / gpus
        index = min(max(bisect_left([point[0] for point in self.points], gpus), 1), len(self.points) - 1)
        (fewer, slower), (more, faster) = self.points[index - 1 : index + 1]
        slope = (slower - faster) / (1 / fewer - 1 / more)
        fixed = faster - slope / more
        if fixed < 0.0 and not fewer <= gpus <= more:
            nearest, seconds = (fewer, slower) if gpus < fewer else (more, faster)
            return seconds * nearest / gpus
        return fixed + slope / gpus

    def measured(self, gpus: int) -> bool:
        """Whether ``gpus`` lies within the measured points, so that its time is not extrapolated."""
        return self.points[0][0] <= gpus <= self.points[-1][0]


def bound_s(
    cost: CostModel | Coefficients, slots: int, kv_tokens: int, n_tokens: float, c_tokens: float, engines: int
) -> float:
    """Least seconds in which ``engines`` engines generate ``n_tokens``, whose contexts sum up to ``c_tokens``.

    No schedule is faster: every context token is read, k1 C; every token computed, k3 N; and there are S engine steps
    of k4 each, as a step runs at most ``slots`` requests on ``kv_tokens`` of context: S >= max(N / slots, C / kv).
    A step also reads its weights (k2): all of them, or for a mixture of experts at least those of one request, and
    over all steps at least what full batches would read. Raises InvalidValue for a value outside its domain.
    """
    _check_engine(cost, slots, kv_tokens)
    _check_positive("engines", engines)
    for field, value in (("n_tokens", n_tokens), ("c_tokens", c_tokens)):
        if not 0.0 <= value < math.inf:
            raise InvalidValue(field, value, "a finite number, 0 or above")
    steps = max(n_tokens / slots, c_tokens / kv_tokens)
    full_read = 1.0 - (1.0 - cost.expert_fraction) ** slots
    read_s = cost.weights_s * max(cost.expert_fraction * steps, full_read * n_tokens / slots)
    compute_s = cost.request_s * n_tokens * (1.0 + cost.imbalance / slots**0.5)
    return (cost.kv_token_s * c_tokens + max(read_s, compute_s) + cost.step_s * steps) / engines


def generation(
    option: EngineOption,
    engines: int,
    workload: StepWorkload,
    window: int,
    efficiency: float = EFFICIENCY,
    tail_load: float = TAIL_LOAD,
) -> Generation:
    """One batch on ``engines`` engines that all run even batches, as full as slots and KV allow.

    For a dense model ``work_s`` is ``efficiency`` times ``bound_s``. ``tail_s`` is the time of the longest response at
    ``tail_load`` of such a batch, a ``window``-th of it, as it may take that many steps.
    """
    _check_engine(option.cost, option.slots, option.kv_tokens)
    for field, value in (("engines", engines), ("window", window), ("efficiency", efficiency)):
        _check_positive(field, value)
    if not 0.0 <= tail_load <= 1.0:
        raise InvalidValue("tail_load", tail_load, "0 to 1")
    steps = max(workload.n_tokens / option.slots, workload.c_tokens / option.kv_tokens)
    batch, context = workload.n_tokens / steps, workload.c_tokens / steps
    work_s = steps * _decode_step_s(option.cost, batch, context)
    longest_step_s = _decode_step_s(option.cost, max(1.0, tail_load * batch), tail_load * context)
    return Generation(option, engines, efficiency * work_s / engines, workload.cap_tokens * longest_step_s / window)


def engine_options(
    model: ModelSpec, hardware: Hardware, workload: StepWorkload, slots: int = 256, sizes: Sequence[int] = ()
) -> tuple[EngineOption, ...]:
    """The engines on which the model fits with the KV of one longest response; ``sizes`` empty: those within a node,
    or the smallest of several nodes, whose slower links the roofline does not know.

    Raises InvalidValue where it fits none of them.
    """
    needed = math.ceil(workload.prompt_tokens) + workload.cap_tokens
    for tried in [sizes] if sizes else [NODE_SIZES, *((size,) for size in MULTI_NODE_SIZES)]:
        options = tuple(
            EngineOption(gpus, coefficients(model, hardware, gpus).model(), slots, held)
            for gpus in tried
            if (held := kv_tokens(model, hardware, gpus)) >= needed
        )
        if options:
            return options
    needed_bytes = model.weights_bytes + needed * model.kv_token_bytes
    least = math.ceil(needed_bytes / (hardware.memory_bytes * MEMORY_SHARE - RESERVE_BYTES))
    raise InvalidValue(
        "gpus_per_engine",
        max(sizes or MULTI_NODE_SIZES),
        f"at least {least}: {model.name} needs {model.weights_bytes / 1e9:.1f} GB of weights and the KV of "
        f"{needed:,} tokens, {needed_bytes / 1e9:.1f} GB; {hardware.name} has {hardware.memory_bytes / 1e9:.0f} GB",
    )


def best_generation(
    gpus: int, model: Callable[[EngineOption, int], Generation], options: Sequence[EngineOption]
) -> Generation | None:
    """The fastest way to use at most ``gpus`` accelerators (the paper's parallel configuration); None: none fits."""
    ways = [model(option, gpus // option.gpus) for option in options if option.gpus <= gpus]
    return min(ways, key=lambda way: (way.seconds, way.gpus), default=None)


def allocate(
    gpus: int, generate: Callable[[int], Generation | None], training: TrainingTime
) -> tuple[Split, tuple[Split, ...]]:
    """Single datacentre: the split of ``gpus`` with the shortest step, ties to fewer accelerators; and all candidates.

    Candidates are in order of rollout accelerators, each with the fewest for training that do not lengthen its step.
    Raises InvalidValue where the budget holds no engine beside a trainer.
    """
    trainers = range(training.multiple, gpus + 1, training.multiple)
    candidates: dict[int, Split] = {}
    for rollout_gpus in range(1, gpus - training.multiple + 1):
        way = generate(rollout_gpus)
        if way is not None and way.gpus not in candidates:
            largest = (gpus - way.gpus) // training.multiple
            candidates[way.gpus] = _with_fewest(way, trainers[:largest], training)
    if not candidates:
        raise InvalidValue("gpus", gpus, f"room for one engine and a trainer of {training.multiple}")
    best = min(candidates.values(), key=lambda split: split.rank)
    return best, tuple(candidates[key] for key in sorted(candidates))


def allocate_across(
    rollout_gpus: int, train_gpus: int, generate: Callable[[int], Generation | None], training: TrainingTime
) -> tuple[Split, tuple[Split, ...]]:
    """Two datacentres: the faster stage gives accelerators back until the two times differ least; and all candidates.

    Raises InvalidValue where a budget holds no engine, or no trainer.
    """
    whole = generate(rollout_gpus)
    if whole is None:
        raise InvalidValue("rollout_gpus", rollout_gpus, "room for one engine")
    trainers = range(training.multiple, train_gpus + 1, training.multiple)
    if not trainers:
        raise InvalidValue("train_gpus", train_gpus, f"room for a trainer of {training.multiple}")
    training_s = training.seconds(trainers[-1])
    if whole.seconds < training_s:
        ways = {way.gpus: way for gpus in range(1, rollout_gpus + 1) if (way := generate(gpus)) is not None}
        candidates = tuple(Split(ways[key], trainers[-1], training_s) for key in sorted(ways))
    else:
        candidates = tuple(Split(whole, gpus, training.seconds(gpus)) for gpus in trainers)
    best = min(candidates, key=lambda split: (abs(split.generation.seconds - split.training_s), split.gpus))
    return best, candidates


def transfer_s(weights_bytes: float, link_bits_per_s: float) -> float:
    """Seconds one version's weights take over the link between two datacentres, to one engine, which passes them on.

    Asynchronous training hides them behind the next step. Qwen2.5-72B in bf16 takes 14.5 s on 80 Gb/s by this; the
    "less than 10 seconds" of StreamRL section 7.3 needs fewer bytes or a faster link than the paper states.
    """
    if not 0.0 < link_bits_per_s < math.inf:
        raise InvalidValue("link_gbps", link_bits_per_s / 1e9, "a finite number above 0")
    return weights_bytes * 8 / link_bits_per_s


def _with_fewest(way: Generation, trainers: Sequence[int], training: TrainingTime) -> Split:
    """``way`` with the fewest accelerators for training that give the step of the most."""
    target_s = max(way.seconds, training.seconds(trainers[-1]))
    index = bisect_left(trainers, -target_s, key=lambda gpus: -training.seconds(gpus))
    return Split(way, trainers[index], training.seconds(trainers[index]))


def _decode_step_s(cost: CostModel, batch: float, context: float) -> float:
    """A step of ``batch`` requests on average: of the whole numbers on both sides of it, in proportion."""
    below = int(batch)
    share = batch - below
    return (1 - share) * cost.decode_step_s(below, context) + share * cost.decode_step_s(below + 1, context)


def _check_engine(cost: CostModel | Coefficients, slots: int, kv_tokens: int) -> None:
    for field in ("kv_token_s", "weights_s", "request_s", "step_s", "imbalance"):
        value = getattr(cost, field)
        if not 0.0 <= value < math.inf:
            raise InvalidValue(f"cost.{field}", value, "a finite number, 0 or above")
    if not 0.0 < cost.expert_fraction <= 1.0:
        raise InvalidValue("cost.expert_fraction", cost.expert_fraction, "above 0, at most 1")
    _check_positive("slots", slots)
    _check_positive("kv_tokens", kv_tokens)


def _check_positive(field: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise InvalidValue(field, value, "a finite number above 0")
