"""A question to the planner and its answer: from a model, accelerators and a workload to a split."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final

from dora.config import ServiceConfig
from dora.core.forecast.cost import CostModel
from dora.data.hardware import HARDWARE, Hardware
from dora.errors import InvalidValue
from dora.lab.planning.allocation import Split, TrainingTime, allocate, allocate_across, transfer_s
from dora.lab.planning.generation import (
    EFFICIENCY,
    EngineOption,
    Generation,
    engine_options,
    generation,
    ways_to_generate,
)
from dora.lab.planning.hardware import kv_tokens
from dora.lab.planning.models import MODELS, ModelSpec
from dora.lab.planning.training import Trainers
from dora.lab.planning.workload import StepWorkload

# Training time implied by the DORA paper's fractions (12.9 min on 40 H800, 7.95 min on 88), for 8,192 responses of
# 2,400 tokens of a 32B model.
ANCHOR: Final = TrainingTime(((40, 774.0), (88, 477.0)), even=True)
ANCHOR_TOKENS: Final = 8192 * 2400.0
ANCHOR_MODEL: Final = MODELS["qwen2.5-32b"]
ANCHOR_HARDWARE: Final = HARDWARE["h800"]

EVALUATION_VERSIONS: Final[int] = ServiceConfig().evaluation_versions
GPUS_MAX: Final = 1 << 16  # a search over all splits of more would take minutes


@dataclass(frozen=True, slots=True)
class Question:
    """The planner's input. One datacentre: ``gpus``; two: ``rollout_gpus`` and ``train_gpus``; the others are 0."""

    model: ModelSpec
    rollout_hardware: Hardware
    train_hardware: Hardware
    workload: StepWorkload
    training: TrainingTime
    window: int
    gpus: int = 0
    rollout_gpus: int = 0
    train_gpus: int = 0
    link_bits_per_s: float = 0.0  # between two datacentres; 0: not considered
    slots: int = 256
    gpus_per_engine: int = 0  # 0: the planner chooses
    cost: CostModel | None = None  # measured cost of an engine of ``gpus_per_engine``; None: the roofline's
    efficiency: float = EFFICIENCY
    draft_acceptance: float = 0.0  # of a drafted token (``CostModel``); 0: engines draft none, or as ``cost`` says

    @property
    def host_versions(self) -> int:
        """The versions that each host's weight store holds at most, with the default of evaluations."""
        return self.window + 1 + EVALUATION_VERSIONS


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The best split and its trainer, and all splits that were compared, ordered by the accelerators that differ."""

    best: Split
    candidates: tuple[Split, ...]
    trainers: Trainers
    transfer_s: (
        float | None
    )  # of the weights between two datacentres: overlaps with the next step, except in a window of 1


def make_plan(question: Question) -> SplitPlan:
    """Runs Algorithm 1 for either deployment. Raises InvalidValue for a cluster that cannot run the model."""
    apart = question.rollout_gpus, question.train_gpus
    if any(apart) if question.gpus else not all(apart):
        shown = f"{question.gpus}, {question.rollout_gpus}, {question.train_gpus}"
        raise InvalidValue("gpus, rollout_gpus, train_gpus", shown, "either gpus, or both of the others, above 0")
    if question.gpus and question.link_bits_per_s:
        raise InvalidValue("link_gbps", question.link_bits_per_s / 1e9, "0 in one datacentre")
    for field in ("gpus", "rollout_gpus", "train_gpus"):
        if getattr(question, field) > GPUS_MAX:
            raise InvalidValue(field, getattr(question, field), f"at most {GPUS_MAX}")
    time = partial(generation, workload=question.workload, window=question.window, efficiency=question.efficiency)
    options = _options(question)
    trainers = Trainers(question.model, question.train_hardware, question.workload, question.training)
    _check_room(question, min(option.gpus for option in options), trainers.least)

    @cache
    def ways(gpus: int) -> tuple[Generation, ...]:
        return ways_to_generate(gpus, time, options)

    if question.gpus:
        return SplitPlan(*allocate(question.gpus, ways, trainers), trainers, transfer_s=None)
    link = question.link_bits_per_s
    crossing_s = transfer_s(question.model.weights_bytes, link) if link else None
    gpus = question.rollout_gpus, question.train_gpus
    return SplitPlan(*allocate_across(*gpus, ways, trainers, crossing_s or 0.0), trainers, crossing_s)


def default_training(model: ModelSpec, hardware: Hardware, workload: StepWorkload, multiple: int) -> TrainingTime:
    """Scales ``ANCHOR`` to this work: tokens, active parameters, and the accelerators' FLOP/s."""
    work = workload.n_tokens / ANCHOR_TOKENS * model.active_parameters / ANCHOR_MODEL.active_parameters
    return replace(ANCHOR, multiple=multiple).scaled(work * ANCHOR_HARDWARE.flops / hardware.flops)


def _check_room(question: Question, engine_gpus: int, trainer_gpus: int) -> None:
    """Raises InvalidValue for a budget without room for the smallest engine, or the smallest trainer that fits."""
    engine = f"an engine of {engine_gpus}"
    trainer = f"a trainer of {trainer_gpus}, the smallest with a layout that fits into memory"
    for field, least, parts in (
        ("gpus", engine_gpus + trainer_gpus, f"{engine} and {trainer}"),
        ("rollout_gpus", engine_gpus, engine),
        ("train_gpus", trainer_gpus, trainer),
    ):
        if 0 < getattr(question, field) < least:
            raise InvalidValue(field, getattr(question, field), f"at least {least}, to have room for {parts}")


def _options(question: Question) -> tuple[EngineOption, ...]:
    options = _engines(question)
    if not question.draft_acceptance:
        return options
    drafting = [replace(option.cost, draft_acceptance=question.draft_acceptance) for option in options]
    return tuple(replace(option, cost=cost) for option, cost in zip(options, drafting, strict=True))


def _engines(question: Question) -> tuple[EngineOption, ...]:
    gpus = question.gpus_per_engine
    sizes = (gpus,) if gpus else ()
    options = engine_options(question.model, question.rollout_hardware, question.workload, question.slots, sizes)
    if question.cost is None:
        return options
    if not gpus:
        raise InvalidValue("gpus_per_engine", gpus, "that of the engine whose cost was measured")
    held = kv_tokens(question.model, question.rollout_hardware, gpus, question.slots)
    return (EngineOption(gpus, question.cost, question.slots, held),)
