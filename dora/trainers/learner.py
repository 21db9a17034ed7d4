"""The learner: gradients accumulate while a step's groups come, with one optimiser step at its end."""

import copy
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from dora.errors import InvalidValue
from dora.trainers.batches import packed_batches
from dora.trainers.objectives.batch import Objective, Row, TokenBatch
from dora.trainers.objectives.presets import OBJECTIVES
from dora.trainers.packing import packed_logprobs, packs, prepare
from dora.trainers.padding import padded_batches, padded_logprobs
from dora.trainers.signals import (
    ByStaleness,
    Signals,
    added,
    alarm,
    numbers_by_staleness,
    response_sums,
    token_sums,
    whole,
)
from dora.trajectory import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """Hyper-parameters; defaults are DAPO's where it names one."""

    learning_rate: float = 1e-6
    objective: Objective = OBJECTIVES["dapo"]
    weight_decay: float = 0.0
    grad_norm_max: float = 1.0
    # Of one micro-batch: the tokens of a pack; of padded rows, their number times the longest. Prompts are counted.
    micro_batch_tokens: int = 4096
    packing: bool = True  # where the model takes it; else rows of one group are padded
    clip_alarm: float = 0.2  # of the trained tokens: where more are clipped, operators are told; 1: never
    autocast: bool = False  # matrix products in bfloat16; weights, gradients, logprobs and optimiser stay as they are

    def __post_init__(self) -> None:
        for name in ("learning_rate", "grad_norm_max", "micro_batch_tokens"):
            if not getattr(self, name) > 0:
                raise InvalidValue(name, getattr(self, name), "above 0")
        if not self.weight_decay >= 0:
            raise InvalidValue("weight_decay", self.weight_decay, "0 or more")
        if not 0.0 <= self.clip_alarm <= 1.0:
            raise InvalidValue("clip_alarm", self.clip_alarm, "0 to 1")


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One training step in numbers."""

    loss: float
    grad_norm: float
    step_skipped: bool  # loss or gradient was not finite: the weights stay as they were
    groups: int
    groups_trained: int  # those whose rewards differ
    rewards_invalid: int
    staleness_mean: float  # over trajectories
    signals: Signals
    by_staleness: dict[str, float]  # the same signals, as signals.numbers_by_staleness names them
    alarms: dict[str, float]  # by what was passed, with the bounds

    def numbers(self) -> dict[str, float]:
        """For operators: finite values only."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        numbers = {name: float(value) for name, value in own.items() if isinstance(value, int | float)}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        return finite | self.signals.numbers() | self.by_staleness | self.alarms


@dataclass(slots=True)
class _Sums:
    loss: float = 0.0
    units: float = 0.0  # what the step's loss and gradient are divided by
    groups: int = 0
    groups_trained: int = 0
    rewards_invalid: int = 0
    staleness: list[int] = field(default_factory=list)
    signals: ByStaleness = field(default_factory=dict)


class Learner:
    """Owns the model and its optimiser. For one thread at a time, but for :meth:`add_group`.

    Gradients are sums until the step's end, and the objective says what they are divided by: so they are those of the
    whole step in one batch, up to rounding, in whatever order groups come and however they are cut.
    """

    def __init__(self, module: Any, config: LearnerConfig) -> None:
        """``module`` is a causal language model of transformers, trained in place."""
        self.module = module
        self.busy_s = 0.0  # at work since it was made
        self._config = config
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._optimiser = torch.optim.AdamW(self._parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
        packing = config.packing and packs(module)
        if packing:
            prepare(module)
        self._cut = packed_batches if packing else padded_batches
        self._forward = packed_logprobs if packing else padded_logprobs
        needs_reference = config.objective.needs_reference
        self._reference = copy.deepcopy(module).requires_grad_(False) if needs_reference else None
        self._come: deque[tuple[TrajectoryGroup, float]] = deque()  # at most a step's groups, and when they came
        self._rows: list[Row] = []
        self._sums = _Sums()

    def add_group(self, group: TrajectoryGroup) -> None:
        """Leaves the group for :meth:`work`. Any thread may call it, also while another one works."""
        self._come.append((group, time.time()))

    def work(self) -> None:
        """Adds the gradients of all groups that are there, and of those that come meanwhile, not yet divided."""
        while self.work_once():
            pass

    def work_once(self) -> bool:
        """One micro-batch of what is there; False where there is nothing. It does not wait until one is full.

        Groups that teach nothing cost no forward pass.
        """
        began_s = time.monotonic()
        self._take_in()
        if not self._rows:
            return False
        batch, *others = self._cut(self._rows, self._config.micro_batch_tokens)
        self._rows = [row for other in others for row in other]
        self._backward(batch)
        self.busy_s += time.monotonic() - began_s
        return True

    def _take_in(self) -> None:
        while self._come:
            group, taken_at = self._come.popleft()
            self._sums.groups += 1
            self._sums.rewards_invalid += int((~group.rewards_valid).sum())
            self._sums.staleness.extend(group.staleness.tolist())
            self._sums.signals = added(self._sums.signals, response_sums(group.trajectories, taken_at))
            rows = self._config.objective.rows(group)
            self._sums.groups_trained += bool(rows)
            self._rows.extend(rows)

    def finish_step(self) -> StepMetrics:
        """Works off what is there, divides the gradient by the step's units, clips it, and takes one optimiser step.

        Begins a new step.
        """
        self.work()
        sums, self._sums = self._sums, _Sums()
        signals, units = whole(sums.signals), max(sums.units, 1.0)  # a step that taught nothing has a gradient of zero
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(units)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.grad_norm_max))
        skipped = not (math.isfinite(norm) and math.isfinite(sums.loss))
        if signals.tokens_trained and not skipped:
            self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return StepMetrics(
            loss=sums.loss / units,
            grad_norm=norm,
            step_skipped=skipped,
            groups=sums.groups,
            groups_trained=sums.groups_trained,
            rewards_invalid=sums.rewards_invalid,
            staleness_mean=float(np.mean(sums.staleness)) if sums.staleness else math.nan,
            signals=signals,
            by_staleness=numbers_by_staleness(sums.signals),
            alarms=alarm(signals.clip_fraction, self._config.clip_alarm),
        )

    def _backward(self, rows: Sequence[Row]) -> None:
        trajectories = [row.trajectory for row in rows]
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = self._logprobs(self._reference, trajectories)
        batch = TokenBatch.of(rows, self._logprobs(self.module, trajectories), reference=reference)
        terms = self._config.objective.terms(batch)
        loss, units = self._config.objective.sum(batch, terms)
        loss.backward()
        self._sums.loss += float(loss.detach())
        self._sums.units += units
        of_rows = [each.staleness for each in trajectories]
        self._sums.signals = added(self._sums.signals, token_sums(batch, terms.clipped, of_rows))

    def _logprobs(self, module: Any, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        device = self._parameters[0].device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self._config.autocast):
            return self._forward(module, trajectories)


def multiplies_bfloat16(capability: str | None = None) -> bool:
    """Whether this processor multiplies matrices in bfloat16 itself. ``capability``: torch's name for what it has.

    torch does it through AVX-512 or more. Below, it emulates: on a processor with AVX2 alone a product of the size of
    a SmolLM2 layer's took 58 times as long as in fp32.
    """
    return (capability or torch.backends.cpu.get_cpu_capability()).startswith("AVX512")
