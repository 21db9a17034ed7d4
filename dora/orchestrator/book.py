"""The trajectory book: tokens, logprobs, rewards and history of every admitted group. The core counts, the book holds.

The delivered tokens and logprobs here are the truth; KV is a cache of them. When the journal comes, it writes what is
written here.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from dora.config import RolloutConfig
from dora.errors import InvalidValue
from dora.sampling import effective
from dora.trajectory import Trajectory, TrajectoryGroup
from dora.types import Arrival, FinishReason, Prompt, RequestSpec, Reward, SamplingParams, Segment, TokenDelta


class BookError(InvalidValue):
    """A report that does not continue what the book holds: a bug in a worker, which must be replaced."""

    REFUSED = "does not continue what the book holds"


@dataclass(slots=True)
class Entry:
    """One response in the making."""

    request_id: str
    group_id: str
    prompt: Prompt
    sample_index: int
    version: int
    sampling: SamplingParams
    started_at: float
    finished_at: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str = ""  # the stop string that ended it
    reward: Reward | None = None
    arrivals: dict[str, Arrival] = field(default_factory=dict)  # worker -> how the request comes there, not yet seen
    last_token_at: float = 0.0

    def spec(self) -> RequestSpec:
        """What an engine needs to begin, or to go on after the delivered tokens."""
        return RequestSpec(
            self.request_id,
            self.version,
            self.prompt.token_ids,
            self.sampling,
            tuple(self.tokens),
            tuple(self.logprobs),
        )

    def check(self, delta: TokenDelta) -> None:
        """Raises BookError for a gap, another version, or tokens that are held and are others."""
        held = len(self.tokens)
        if delta.version != self.version:
            raise BookError(f"{self.request_id}: version", delta.version, str(self.version))
        if delta.first_token > held:
            raise BookError(f"{self.request_id}: first token", delta.first_token, f"{held} or before")
        if delta.first_token < held:
            repeated = delta.token_ids[: held - delta.first_token]
            if list(repeated) != self.tokens[delta.first_token : delta.first_token + len(repeated)]:
                raise BookError(f"{self.request_id}: tokens from {delta.first_token} on", repeated, "those held")

    def append(self, worker_id: str, delta: TokenDelta, at: float) -> Arrival | None:
        """Takes new tokens over. Returns how the request came to this worker if these are its first tokens there.

        Tokens already held (repeated after a re-prefill) are skipped. Raises BookError as :meth:`check`.
        """
        self.check(delta)
        skip = len(self.tokens) - delta.first_token
        arrival = self.arrivals.pop(worker_id, None)
        fresh = delta.token_ids[skip:]
        if fresh:
            first, last = len(self.tokens), len(self.tokens) + len(fresh) - 1
            if arrival is None and self.segments:
                segment = self.segments.pop()
                first, how = segment.first_token, segment.arrival
            else:
                how = arrival or "new"
            self.segments.append(Segment(worker_id, first, last, how, delta.version))
            self.tokens.extend(fresh)
            self.logprobs.extend(delta.logprobs[skip:])
            self.last_token_at = at
        if delta.finish_reason is not None:
            self.finish_reason, self.finished_at, self.stop = delta.finish_reason, at, delta.stop
        return arrival

    def trajectory(self, step: int, reference_version: int) -> Trajectory:
        """The finished response as the trainer gets it for ``step``."""
        assert self.reward is not None and self.finish_reason is not None, f"{self.request_id} is not finished"
        return Trajectory(
            trajectory_id=self.request_id,
            group_id=self.group_id,
            prompt_id=self.prompt.prompt_id,
            task_id=self.prompt.task_id,
            sample_index=self.sample_index,
            group_size=self.prompt.group_size,
            behaviour_version=self.version,
            reference_version=reference_version,
            trained_step=step,
            staleness=step - self.version,
            prompt_token_ids=np.asarray(self.prompt.token_ids, dtype=np.int32),
            response_token_ids=np.asarray(self.tokens, dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            loss_mask=np.ones(len(self.tokens), dtype=np.uint8),
            sampling=self.sampling,
            reward=self.reward.value if self.reward.valid else math.nan,
            reward_valid=self.reward.valid,
            reward_components=dict(self.reward.components),
            verifier_log=self.reward.log,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason(),
            started_at=self.started_at,
            finished_at=self.finished_at,
            worker_history=tuple(self.segments),
            length_tokens=len(self.tokens),
        )

    def _stop_reason(self) -> str | int | None:
        if self.finish_reason != "stop":
            return None
        last = self.tokens[-1]
        return self.stop or (last if last in self.sampling.stop_token_ids else None)


class Book:
    """Entries by request and by group; forgotten once their group is committed or cancelled."""

    def __init__(self, rollout: RolloutConfig) -> None:
        self._rollout = rollout
        self._entries: dict[str, Entry] = {}
        self._groups: dict[str, tuple[Entry, ...]] = {}
        self._delivered: dict[str, TrajectoryGroup] = {}  # leased groups, as they were sent

    def __getitem__(self, request_id: str) -> Entry:
        return self._entries[request_id]

    def get(self, request_id: str) -> Entry | None:
        return self._entries.get(request_id)

    def groups(self) -> Iterator[tuple[str, tuple[Entry, ...]]]:
        return iter(self._groups.items())

    def sampling(self, prompt: Prompt) -> SamplingParams:
        """How this prompt's responses are sampled, but for their seeds."""
        return sampling_of(self._rollout, prompt)

    def admit(self, group_id: str, prompt: Prompt, version: int, request_ids: tuple[str, ...], at: float) -> None:
        entries = tuple(
            Entry(request_id, group_id, prompt, index, version, self._seeded(prompt, index), at)
            for index, request_id in enumerate(request_ids)
        )
        self._groups[group_id] = entries
        self._entries.update((entry.request_id, entry) for entry in entries)

    def deliver(self, group_id: str, step: int) -> tuple[TrajectoryGroup, bool]:
        """The finished group as the trainer gets it; True where this is its first delivery."""
        first = group_id not in self._delivered
        if first:
            entries = self._groups[group_id]
            trajectories = tuple(entry.trajectory(step, self._rollout.reference_version) for entry in entries)
            self._delivered[group_id] = TrajectoryGroup(group_id, trajectories)
        return self._delivered[group_id], first

    def leased(self) -> list[TrajectoryGroup]:
        """What was delivered and not committed."""
        return list(self._delivered.values())

    def rewards(self, group_id: str) -> list[Reward] | None:
        """The verdicts on a group, in order of its samples; None while one is due."""
        entries = self._groups[group_id]
        rewards = [entry.reward for entry in entries if entry.reward is not None]
        return rewards if len(rewards) == len(entries) else None

    def forget(self, group_id: str) -> tuple[Entry, ...]:
        """Lets a committed or cancelled group go. Returns its entries."""
        self._delivered.pop(group_id, None)
        entries = self._groups.pop(group_id)
        for entry in entries:
            del self._entries[entry.request_id]
        return entries

    def _seeded(self, prompt: Prompt, sample_index: int) -> SamplingParams:
        """The service's defaults, the prompt's overrides, and a seed of its own: siblings of one seed would be equal.

        It follows from run, prompt and index; where the prompt names one, that is the first sibling's.
        """
        rollout, seed = self._rollout, cast(int | None, prompt.sampling.get("seed"))
        origin = f"{rollout.seed}/{prompt.prompt_id}" if seed is None else f"{seed}"
        if seed is None or sample_index:
            digest = hashlib.blake2b(f"{origin}/{sample_index}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "big") >> 2
        return replace(self.sampling(prompt), seed=seed)


def sampling_of(rollout: RolloutConfig, prompt: Prompt) -> SamplingParams:
    """How this prompt's responses are sampled, but for their seeds."""
    chosen = {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p,
        "max_tokens": rollout.max_tokens,
        "presence_penalty": rollout.presence_penalty,
        "frequency_penalty": rollout.frequency_penalty,
        "repetition_penalty": rollout.repetition_penalty,
        "ignore_eos": rollout.ignore_eos,
        "stop": rollout.stop,
        "stop_token_ids": rollout.stop_token_ids,
        **prompt.sampling,
    }
    return effective(SamplingParams(**chosen))  # type: ignore[arg-type]
