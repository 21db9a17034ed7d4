"""The learner: accumulates gradients while a step's groups arrive, and takes one optimiser step at its end.

On several ranks it is one learner with a part on each. The leader's part is used as if it were alone, and sends orders
to the others, which run :meth:`Learner.follow`.
"""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.data.types import Canary
from dora.errors import MISSING, Conflict, InvalidValue
from dora.trainers.batches import packed_batches
from dora.trainers.checkpoint import CheckpointPosition, moments_of, save, set_moments
from dora.trainers.checks import check_group, check_step, vocab_size_of
from dora.trainers.dealing import dealt, rows_from_bytes, rows_to_bytes
from dora.trainers.movement import Probe
from dora.trainers.objectives.batch import Objective, Row, TokenBatch, without_routing
from dora.trainers.objectives.presets import DEFAULT, OBJECTIVES
from dora.trainers.packing import packed_logprobs, packs, prepare
from dora.trainers.padding import padded_batches, padded_logprobs, whole_row_logprobs
from dora.trainers.ranks import Order, Ranks
from dora.trainers.router_replay import RouterReplay
from dora.trainers.sharding import checkpoint_of, gathered, shard, whole_tensor
from dora.trainers.signals import (
    ByStaleness,
    Signals,
    added,
    alarm,
    numbers_by_staleness,
    over_ranks,
    response_sums,
    token_sums,
    whole,
)


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """Hyper-parameters; defaults are those of DAPO if it names one."""

    learning_rate: float = 1e-6
    objective: Objective = OBJECTIVES[DEFAULT]
    weight_decay: float = 0.0
    grad_norm_max: float = 1.0
    # Limit of one micro-batch: the tokens of a pack; for padded rows, their number times the longest. Includes prompts.
    micro_batch_tokens: int = 4096
    packing: bool = True  # if the model supports it; otherwise rows of one group are padded
    clip_alarm: float = 0.2  # share of trained tokens; operators are notified if more are clipped; 1: never
    router_replay: bool = True  # sends tokens to the routed experts in the record, if any
    autocast: bool = False  # matrix products in bfloat16; weights, gradients, logprobs and optimiser keep their dtype

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
    loss: float
    grad_norm: float
    groups: int
    groups_trained: int  # groups whose rewards differ
    rewards_invalid: int
    staleness_mean: float  # over trajectories
    signals: Signals
    by_staleness: dict[str, float]  # the same signals, named by signals.numbers_by_staleness
    alarms: dict[str, float]  # exceeded limits, by name
    movement: float = math.nan  # KL of the version before the step from the one after it, nats a token; NaN: unknown
    groups_replayed: int = 0  # not counted above; their tokens are in the token signals
    replay_staleness_mean: float = math.nan  # over replayed groups

    def numbers(self) -> dict[str, float]:
        """Returns finite values only, for operators."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        numbers = {name: float(value) for name, value in own.items() if isinstance(value, int | float)}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        return finite | self.signals.numbers() | self.by_staleness | self.alarms


@dataclass(slots=True)
class StepSums:
    """Running sums of a step: of this rank's micro-batches, and of the groups given to it."""

    loss: float = 0.0
    units: float = 0.0  # divisor of the step's loss and gradient
    groups: int = 0
    groups_trained: int = 0
    rewards_invalid: int = 0
    staleness: list[int] = field(default_factory=list)
    replays: list[int] = field(default_factory=list)  # staleness of each replayed group
    signals: ByStaleness = field(default_factory=dict)

    def take(self, group: TrajectoryGroup, taken_at: float | None, objective: Objective) -> list[Row]:
        """Counts ``group``. Returns its rows to train on. If ``taken_at`` is None, it is a replay, and not fresh."""
        if taken_at is None:
            self.replays.append(int(group.staleness.max(initial=0)))
            return objective.rows(group)
        self.groups += 1
        self.rewards_invalid += int((~group.rewards_valid).sum())
        self.staleness.extend(group.staleness.tolist())
        self.signals = added(self.signals, response_sums(group.trajectories, taken_at))
        rows = objective.rows(group)
        self.groups_trained += bool(rows)
        return rows

    def metrics(
        self, loss: float, grad_norm: float, by_staleness: ByStaleness, clip_alarm: float, movement: float = math.nan
    ) -> StepMetrics:
        signals = whole(by_staleness)
        return StepMetrics(
            loss=loss,
            grad_norm=grad_norm,
            groups=self.groups,
            groups_trained=self.groups_trained,
            rewards_invalid=self.rewards_invalid,
            staleness_mean=float(np.mean(self.staleness)) if self.staleness else math.nan,
            signals=signals,
            by_staleness=numbers_by_staleness(by_staleness),
            alarms=alarm(signals.clip_fraction, clip_alarm),
            movement=movement,
            groups_replayed=len(self.replays),
            replay_staleness_mean=float(np.mean(self.replays)) if self.replays else math.nan,
        )


class AnyLearner(Protocol):
    """The interface of a learner. :class:`Learner` implements it, and describes it."""

    busy_s: float

    def add_group(self, group: TrajectoryGroup, *, is_replay: bool = False) -> None: ...

    def work(self) -> None: ...

    def finish_step(self) -> StepMetrics: ...

    def weights(self) -> Any: ...

    def canary(self) -> Canary | None: ...

    def save(self, folder: Path, reference_version: int, weights: Any, replay: bytes = b"") -> None: ...

    def follow(self) -> None: ...


class Learner:
    """Owns the model and its optimiser. Not thread-safe, except for :meth:`add_group`.

    Gradients are summed until the step's end and then divided as the objective defines. They equal those of the whole
    step in one batch, up to rounding, regardless of the order of groups, the cut into micro-batches, and the number of
    ranks.
    """

    def __init__(
        self,
        module: Any,
        config: LearnerConfig,
        *,
        reference: Any = None,
        reference_version: int = 0,
        ranks: Ranks | None = None,
        step: int = 0,
    ) -> None:
        """``module`` is a causal language model of transformers, trained in place; each rank passes it whole, and it is
        sharded here. ``reference`` is another one, with the weights of ``reference_version``, for the KL term. ``step``
        is the first step to train. Raises Conflict if the objective needs a reference and there is none.
        """
        self.module = module
        self.step = step  # the next step to finish
        self.busy_s = 0.0  # working time since creation
        self._config = config
        self._ranks = ranks or Ranks()
        self._vocab_size = vocab_size_of(getattr(module, "config", None))
        self._reference_version = reference_version if config.objective.needs_reference else None
        if config.objective.needs_reference and reference is None:
            raise Conflict("reference", MISSING, "the reference version's model, as kl_coefficient is above 0")
        self._routers = RouterReplay(module) if config.router_replay else None
        packing = config.packing and packs(module)
        self._cut = packed_batches if packing else padded_batches
        padded = padded_logprobs if self._ranks.count == 1 else whole_row_logprobs
        self._forward = packed_logprobs if packing else padded
        self._reference = reference.requires_grad_(False) if config.objective.needs_reference else None
        for each in (module, self._reference) if self._reference is not None else (module,):
            if packing:
                prepare(each)
            if self._ranks.count > 1:
                shard(each)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._optimiser = torch.optim.AdamW(self._parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
        # At most a step's groups and replays, with their arrival times; a replay has none.
        self._come: deque[tuple[TrajectoryGroup, float | None]] = deque()
        self._rows: list[Row] = []
        self._sums = StepSums()
        self._probe: Probe | None = None  # of this rank's latest micro-batch

    def add_group(self, group: TrajectoryGroup, *, is_replay: bool = False) -> None:
        """Queues the group for :meth:`work`. Thread-safe, also while another thread works.

        A replay is of an earlier step; the step's means of rewards, lengths and staleness leave it out. Raises
        InvalidValue for a group that cannot be trained on, Conflict if its routed experts do not fit this model.
        """
        check_group(group, self._vocab_size, self._reference_version)
        if self._routers is not None:
            for trajectory in group.trajectories:
                self._routers.check(trajectory)
        self._come.append((group, None if is_replay else time.time()))

    def work(self) -> None:
        """Adds the undivided gradients of all queued groups, including those that arrive meanwhile."""
        while self.work_once():
            pass

    def work_once(self) -> bool:
        """Trains on one micro-batch of the queued rows, even if it is not full. Returns False if there are none.

        Groups without a learning signal cost no forward pass.
        """
        began_s = time.monotonic()
        rows = self._taken_in()
        if self._ranks.count > 1:
            parts = dealt(rows, self._ranks.count)
            self._ranks.tell("work", [rows_to_bytes(part) for part in parts])
            rows = parts[0]
        worked = self._work_on(rows)
        self.busy_s += (time.monotonic() - began_s) * worked
        return worked

    def _taken_in(self) -> list[Row]:
        rows: list[Row] = []
        while self._come:
            group, taken_at = self._come.popleft()
            found = self._sums.take(group, taken_at, self._config.objective)
            rows.extend(found if self._routers is not None else map(without_routing, found))
        return rows

    def _work_on(self, rows: list[Row]) -> bool:
        self._rows.extend(rows)
        if not self._ranks.any(bool(self._rows)):
            return False
        if self._rows:
            batch, *others = self._cut(self._rows, self._config.micro_batch_tokens)
            self._rows = [row for other in others for row in other]
            self._backward(batch)
        else:
            self._backward_of_nothing()
        return True

    def finish_step(self) -> StepMetrics:
        """Works off the queue, divides the gradient by the step's units, clips it, and takes one optimiser step.

        Begins a new step. Raises InvalidValue, with unchanged weights, if loss or gradient are not finite;
        RanksDisagree if the ranks differ in the step or its result.
        """
        self.work()
        self._ranks.tell("finish")
        return self._finish()

    def _finish(self) -> StepMetrics:
        sums, self._sums = self._sums, StepSums()
        loss, units = self._ranks.sum(np.array([sums.loss, sums.units])).tolist()
        by_staleness = over_ranks(sums.signals, self._ranks)
        units = max(units, 1.0)  # a step without a learning signal has a gradient of zero
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(units / self._ranks.count)  # FSDP averages over the ranks
        norm = float(whole_tensor(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.grad_norm_max)))
        tokens = whole(by_staleness).tokens_trained
        self._ranks.agree({"step": self.step, "loss": loss, "grad_norm": norm, "tokens": tokens})
        movement = math.nan
        try:
            check_step(loss, norm)
            if tokens:
                self._optimiser.step()
                movement = self._movement()
        finally:
            self._optimiser.zero_grad(set_to_none=True)
            self._probe = None
        self.step += 1
        return sums.metrics(loss / units, norm, by_staleness, self._config.clip_alarm, movement)

    @torch.no_grad()
    def _movement(self) -> float:
        moved, tokens = 0.0, 0
        if self._probe is not None:
            trajectories = [row.trajectory for row in self._probe.rows]
            moved, tokens = self._probe.moved(self._logprobs(self.module, trajectories, self._routers))
        else:
            self._pass_of_nothing()
        moved, tokens = self._ranks.sum(np.array([moved, tokens])).tolist()
        return moved / tokens if tokens else math.nan

    def weights(self) -> Any:
        """Returns a commit's argument: the module, or on several ranks its gathered tensors by Hugging Face names."""
        if self._ranks.count == 1:
            return self.module
        self._ranks.tell("weights")
        return checkpoint_of(self.module, self._ranks)

    def canary(self) -> Canary | None:
        """Returns None: the commit computes a module's own."""
        return None

    def moments(self) -> dict[str, torch.Tensor]:
        """Returns the optimiser's complete state, on the leader: see :func:`dora.trainers.checkpoint.moments_of`."""
        self._ranks.tell("moments")
        return gathered(moments_of(self.module, self._optimiser), self._ranks)

    def save(self, folder: Path, reference_version: int, weights: Any, replay: bytes = b"") -> None:
        """Writes a checkpoint, once. ``weights`` is the result of :meth:`weights`, ``replay`` of a replay buffer."""
        whole_weights = weights if isinstance(weights, Mapping) else checkpoint_of(self.module, self._ranks)
        position = CheckpointPosition(self.step, reference_version)
        save(folder, position, whole_weights, self.moments(), self.module.config, replay)

    def set_moments(self, moments: Mapping[str, torch.Tensor]) -> None:
        """Sets the result of :meth:`moments`; called by every rank. Raises InvalidValue for another model's moments."""
        set_moments(self.module, self._optimiser, moments)

    def follow(self) -> None:
        """Executes the leader's orders on another rank, until the end."""
        self._ranks.follow(self._obey)

    def _obey(self, order: Order) -> None:
        match order.name:
            case "work":
                self._work_on(rows_from_bytes(order.content))
            case "finish":
                self._finish()
            case "weights":
                checkpoint_of(self.module, self._ranks)
            case "moments":
                gathered(moments_of(self.module, self._optimiser), self._ranks)
            case other:
                raise InvalidValue("order", other, "known to this rank: check that all ranks run the same version")

    def _backward_of_nothing(self) -> None:
        """Makes a pass without a loss, so that a rank without rows joins the collectives of the others."""
        if self._reference is not None:
            with torch.no_grad():
                self._reference(input_ids=self._one_token(), use_cache=False)
        (self._pass_of_nothing() * 0.0).backward()

    def _pass_of_nothing(self) -> torch.Tensor:
        return self.module(input_ids=self._one_token(), use_cache=False).logits.sum()

    def _one_token(self) -> torch.Tensor:
        return torch.zeros(1, 1, dtype=torch.int64, device=self._parameters[0].device)

    def _backward(self, rows: Sequence[Row]) -> None:
        trajectories = [row.trajectory for row in rows]
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = self._logprobs(self._reference, trajectories)  # another policy: its own routers choose
        logprobs = self._logprobs(self.module, trajectories, self._routers)
        self._probe = Probe.of(rows, logprobs)
        batch = TokenBatch.of(rows, logprobs, reference=reference)
        terms = self._config.objective.terms(batch)
        loss, units = self._config.objective.sum(batch, terms)
        loss.backward()
        self._sums.loss += float(loss.detach())
        self._sums.units += units
        of_rows = [each.staleness for each in trajectories]
        self._sums.signals = added(self._sums.signals, token_sums(batch, terms.clipped, of_rows))

    def _logprobs(
        self, module: Any, trajectories: Sequence[Trajectory], routers: RouterReplay | None = None
    ) -> torch.Tensor:
        device = self._parameters[0].device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self._config.autocast):
            return self._forward(module, trajectories, routers)
