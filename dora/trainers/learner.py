"""The learner: gradients accumulate group by group while a step streams, one optimiser step at its end."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from dora.errors import InvalidValue
from dora.trainers.objectives.batch import Objective, Row, TokenBatch, TokenTerms
from dora.trainers.objectives.presets import OBJECTIVES
from dora.trajectory import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """Hyper-parameters; defaults are DAPO's where it names one."""

    learning_rate: float = 1e-6
    objective: Objective = OBJECTIVES["dapo"]
    weight_decay: float = 0.0
    grad_norm_max: float = 1.0
    micro_batch_tokens: int = 4096  # rows times longest row, prompt included
    autocast: bool = False  # matrix products in bfloat16; weights, gradients, logprobs and optimiser stay as they are

    def __post_init__(self) -> None:
        for name in ("learning_rate", "grad_norm_max", "micro_batch_tokens"):
            if not getattr(self, name) > 0:
                raise InvalidValue(name, getattr(self, name), "above 0")
        if not self.weight_decay >= 0:
            raise InvalidValue("weight_decay", self.weight_decay, "0 or more")


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One training step in numbers; means are over the trained tokens unless named otherwise."""

    loss: float
    reward_mean: float  # over trajectories with a valid reward; NaN where there was none
    rewards_invalid: int
    groups: int
    groups_trained: int  # those whose rewards differ
    tokens_trained: int
    staleness_mean: float  # over trajectories
    ratio_max: float
    clip_fraction: float
    grad_norm: float
    logprob_diff: float  # mean |present - behaviour|: staleness, and how far engine and trainer disagree
    entropy: float  # estimated by -logprob of the sampled tokens
    step_skipped: bool  # loss or gradient was not finite: the weights stay as they were

    def numbers(self) -> dict[str, float]:
        """For operators: finite values only."""
        return {name: float(value) for name, value in asdict(self).items() if math.isfinite(value)}


@dataclass(slots=True)
class _Sums:
    loss: float = 0.0
    units: float = 0.0  # what the step's loss and gradient are divided by
    tokens: int = 0
    tokens_clipped: int = 0
    ratio_max: float = 0.0
    logprob: float = 0.0
    logprob_diff: float = 0.0
    groups: int = 0
    groups_trained: int = 0
    rewards: list[float] = field(default_factory=list)
    rewards_invalid: int = 0
    staleness: list[int] = field(default_factory=list)


class Learner:
    """Owns the model and its optimiser. For one thread at a time."""

    def __init__(self, module: Any, config: LearnerConfig) -> None:
        """``module`` is a causal language model of transformers, trained in place."""
        self.module = module
        self._config = config
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._optimiser = torch.optim.AdamW(self._parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
        needs_reference = config.objective.needs_reference
        self._reference = copy.deepcopy(module).requires_grad_(False) if needs_reference else None
        self._sums = _Sums()

    def add_group(self, group: TrajectoryGroup) -> None:
        """Adds the group's gradient, not yet divided. Groups that teach nothing cost no forward pass."""
        self._sums.groups += 1
        self._sums.rewards.extend(group.rewards[group.rewards_valid].tolist())
        self._sums.rewards_invalid += int((~group.rewards_valid).sum())
        self._sums.staleness.extend(group.staleness.tolist())
        rows = self._config.objective.rows(group)
        self._sums.groups_trained += bool(rows)
        for batch in micro_batches(rows, self._config.micro_batch_tokens):
            self._backward(batch)

    def finish_step(self) -> StepMetrics:
        """Divides the gradient by the step's units, clips it and takes one optimiser step; begins a new step."""
        sums, self._sums = self._sums, _Sums()
        units, tokens = max(sums.units, 1.0), max(sums.tokens, 1)  # a step that taught nothing has a gradient of zero
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(units)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.grad_norm_max))
        skipped = not (math.isfinite(norm) and math.isfinite(sums.loss))
        if sums.tokens and not skipped:
            self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return StepMetrics(
            loss=sums.loss / units,
            reward_mean=float(np.mean(sums.rewards)) if sums.rewards else math.nan,
            rewards_invalid=sums.rewards_invalid,
            groups=sums.groups,
            groups_trained=sums.groups_trained,
            tokens_trained=sums.tokens,
            staleness_mean=float(np.mean(sums.staleness)) if sums.staleness else math.nan,
            ratio_max=sums.ratio_max,
            clip_fraction=sums.tokens_clipped / tokens,
            grad_norm=norm,
            logprob_diff=sums.logprob_diff / tokens,
            entropy=-sums.logprob / tokens,
            step_skipped=skipped,
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
        self._count(batch, terms)

    @torch.no_grad()
    def _count(self, batch: TokenBatch, terms: TokenTerms) -> None:
        sums, mask = self._sums, batch.mask
        sums.tokens += int(mask.sum())
        sums.tokens_clipped += int(terms.clipped.sum())
        sums.ratio_max = max(sums.ratio_max, float(torch.where(mask, terms.ratios, 0.0).max()))
        sums.logprob += float(torch.where(mask, batch.logprobs, 0.0).sum())
        sums.logprob_diff += float(torch.where(mask, batch.logprobs - batch.behaviour, 0.0).abs().sum())

    def _logprobs(self, module: Any, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        device = self._parameters[0].device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self._config.autocast):
            padded = response_logprobs(module, trajectories)
        return torch.cat([row[: each.length_tokens] for row, each in zip(padded, trajectories, strict=True)])


def micro_batches(rows: Sequence[Row], tokens_max: int) -> Iterator[list[Row]]:
    """Rows of similar length together, ``rows * longest`` within ``tokens_max``; a longer row is alone.

    A new batch begins where padding would cost more than reading the prompt once more does.
    """
    batch: list[Row] = []
    padding = 0
    for row in sorted(rows, key=lambda row: (-row.length_tokens, row.trajectory.sample_index)):
        longest = (batch[0] if batch else row).length_tokens
        padding += longest - row.length_tokens
        prompt_tokens = len(row.trajectory.prompt_token_ids)
        if batch and ((len(batch) + 1) * longest > tokens_max or padding > prompt_tokens):
            yield batch
            batch, padding = [], 0
        batch.append(row)
    if batch:
        yield batch


def response_logprobs(module: Any, trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """(rows, longest response): the raw model's log probability of every response token; padding holds anything.

    The trajectories share one prompt, which the model reads once: every row goes on from its keys and values. Rows are
    padded on the right, where causal attention never looks from the left.
    """
    device = next(module.parameters()).device
    prompt = torch.from_numpy(trajectories[0].prompt_token_ids.astype(np.int64)).to(device)[None]
    targets = _padded([each.response_token_ids for each in trajectories], torch.int64).to(device)
    rows, longest = targets.shape
    read = module(input_ids=prompt, use_cache=True, logits_to_keep=1)
    cache = read.past_key_values
    cache.batch_repeat_interleave(rows)
    beside = prompt.shape[1] - 1  # the prompt is attended to as well, and the last token is only a target
    known = [np.ones(beside + each.length_tokens, np.uint8) for each in trajectories]
    logits = read.logits.expand(rows, -1, -1).float()
    if longest > 1:
        attention_mask = _padded(known, torch.int64).to(device)
        rest = module(input_ids=targets[:, :-1], attention_mask=attention_mask, past_key_values=cache)
        logits = torch.cat([logits, rest.logits.float()], dim=1)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return -losses.view(rows, longest)


def multiplies_bfloat16(capability: str | None = None) -> bool:
    """Whether this processor multiplies matrices in bfloat16 itself. ``capability``: torch's name for what it has.

    torch does it through AVX-512 or more. Below, it emulates: on a processor with AVX2 alone a product of the size of
    a SmolLM2 layer's took 58 times as long as in fp32.
    """
    return (capability or torch.backends.cpu.get_cpu_capability()).startswith("AVX512")


def _padded(rows: Sequence[np.ndarray[Any, Any]], dtype: torch.dtype) -> torch.Tensor:
    padded = torch.zeros(len(rows), max(len(row) for row in rows), dtype=dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.from_numpy(row.astype(np.float32 if dtype.is_floating_point else np.int64))
    return padded
