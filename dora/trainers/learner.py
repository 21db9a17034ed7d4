"""The learner: gradients accumulate group by group while a step streams, one optimiser step at its end."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from dora.errors import InvalidValue
from dora.trainers.loss import clipped_token_loss, kl_sum
from dora.trajectory import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """Hyper-parameters; defaults are DAPO's where it names one."""

    learning_rate: float = 1e-6
    eps_low: float = 0.2
    eps_high: float = 0.28
    kl_coefficient: float = 0.0  # 0: no reference policy is held
    weight_decay: float = 0.0
    grad_norm_max: float = 1.0
    micro_batch_tokens: int = 4096  # rows times longest row, prompt included
    autocast: bool = False  # matrix products in bfloat16; weights, gradients, logprobs and optimiser stay as they are

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps_low", "eps_high", "grad_norm_max", "micro_batch_tokens"):
            if not getattr(self, name) > 0:
                raise InvalidValue(name, getattr(self, name), "above 0")
        for name in ("kl_coefficient", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise InvalidValue(name, getattr(self, name), "0 or more")
        if self.eps_low >= 1:
            raise InvalidValue("eps_low", self.eps_low, "below 1")


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
        self._reference = copy.deepcopy(module).requires_grad_(False) if config.kl_coefficient else None
        self._sums = _Sums()

    def add_group(self, group: TrajectoryGroup) -> None:
        """Adds the group's gradient, summed over its tokens. Groups that teach nothing cost no forward pass."""
        self._sums.groups += 1
        self._sums.rewards.extend(group.rewards[group.rewards_valid].tolist())
        self._sums.rewards_invalid += int((~group.rewards_valid).sum())
        self._sums.staleness.extend(group.staleness.tolist())
        advantages = group.advantages()
        rows = [
            (trajectory, float(advantage))
            for trajectory, advantage, valid in zip(group.trajectories, advantages, group.rewards_valid, strict=True)
            if valid and trajectory.length_tokens
        ]
        if not advantages.any():
            return
        self._sums.groups_trained += 1
        for batch in micro_batches(rows, self._config.micro_batch_tokens):
            self._backward([trajectory for trajectory, _ in batch], [advantage for _, advantage in batch])

    def finish_step(self) -> StepMetrics:
        """Divides the gradient by the step's tokens, clips it and takes one optimiser step; begins a new step."""
        sums, self._sums = self._sums, _Sums()
        tokens = max(sums.tokens, 1)  # a step that taught nothing has a gradient of zero
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(tokens)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.grad_norm_max))
        skipped = not (math.isfinite(norm) and math.isfinite(sums.loss))
        if sums.tokens and not skipped:
            self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return StepMetrics(
            loss=sums.loss / tokens,
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

    def _backward(self, trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> None:
        device = self._parameters[0].device
        behaviour = _padded([trajectory.logprobs for trajectory in trajectories], torch.float32).to(device)
        mask = _padded([trajectory.loss_mask for trajectory in trajectories], torch.bool).to(device)
        logprobs = self._logprobs(self.module, trajectories)
        weight = torch.tensor(advantages, dtype=torch.float32, device=device)
        limits = {"eps_low": self._config.eps_low, "eps_high": self._config.eps_high}
        found = clipped_token_loss(logprobs, behaviour, weight, mask, **limits)
        loss = found.loss_sum
        if self._reference is not None:
            with torch.no_grad():
                reference = self._logprobs(self._reference, trajectories)
            loss = loss + self._config.kl_coefficient * kl_sum(logprobs, reference, mask)
        loss.backward()
        sums = self._sums
        sums.loss += float(loss.detach())
        sums.tokens += found.tokens
        sums.tokens_clipped += found.tokens_clipped
        sums.ratio_max = max(sums.ratio_max, found.ratio_max)
        sums.logprob += found.logprob_sum
        sums.logprob_diff += found.logprob_diff_sum

    def _logprobs(self, module: Any, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        device = self._parameters[0].device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self._config.autocast):
            return response_logprobs(module, trajectories)


def micro_batches(
    rows: Sequence[tuple[Trajectory, float]], tokens_max: int
) -> Iterator[list[tuple[Trajectory, float]]]:
    """Rows of similar length together, ``rows * longest`` within ``tokens_max``; a longer row is alone.

    A new batch begins where padding would cost more than reading the prompt once more does.
    """
    batch: list[tuple[Trajectory, float]] = []
    padding = 0
    for row in sorted(rows, key=lambda row: (-_length(row[0]), row[0].sample_index)):
        longest = _length(batch[0][0]) if batch else _length(row[0])
        padding += longest - _length(row[0])
        if batch and ((len(batch) + 1) * longest > tokens_max or padding > len(row[0].prompt_token_ids)):
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
    known = [np.ones(_length(each) - 1, np.uint8) for each in trajectories]  # the last token is only a target
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


def _length(trajectory: Trajectory) -> int:
    return len(trajectory.prompt_token_ids) + trajectory.length_tokens


def _padded(rows: Sequence[np.ndarray[Any, Any]], dtype: torch.dtype) -> torch.Tensor:
    padded = torch.zeros(len(rows), max(len(row) for row in rows), dtype=dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.from_numpy(row.astype(np.float32 if dtype.is_floating_point else np.int64))
    return padded
