"""One response in the making, as the book holds it: what was delivered of it, byte for byte as it came."""

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dora.data.trajectory import ExpertArray, Float32Array, Int32Array, Trajectory, expert_rows
from dora.data.types import Arrival, FinishReason, Prompt, RequestSpec, Reward, RoutingShape, SamplingParams, Segment
from dora.errors import InvalidValue
from dora.rpc import packed

TOKEN: Final = packed.TOKEN  # as the book holds it


class ReportError(InvalidValue):
    """A report that does not continue what the book holds: a bug in a worker, which must be replaced."""

    REFUSED = "does not continue what the book holds"


@dataclass(slots=True)
class SegmentStart:
    """The tokens of a response from ``first_token`` on, up to its next stay: on one worker, and how it came there."""

    worker_id: str
    first_token: int
    arrival: Arrival


@dataclass(slots=True)
class ResponseState:
    """One response in the making."""

    row: int  # by which the core, and the workers' reports, name it
    request_id: str
    group_id: str
    prompt: Prompt
    sample_index: int
    version: int
    sampling: SamplingParams
    started_at: float
    routing: RoutingShape | None = None  # of the rows that come with its tokens; None: none do
    finished_at: float = 0.0
    delivered: bytearray = field(default_factory=bytearray)  # of each token a TOKEN
    routed: bytearray = field(default_factory=bytearray)  # rows of the tokens that were fed, as they were first told
    segment_starts: list[SegmentStart] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str = ""  # the stop string that ended it
    reward: Reward | None = None
    arrivals: dict[str, Arrival] = field(default_factory=dict)  # worker -> how the request comes there, not yet seen
    window_versions: int = 0  # of the window when it was admitted
    number: int = -1  # in the journal; -1: of an evaluation

    def __len__(self) -> int:
        """Tokens delivered."""
        return len(self.delivered) // TOKEN.itemsize

    @property
    def tokens(self) -> Int32Array:
        """The delivered tokens' ids, a copy."""
        return np.frombuffer(self.delivered, TOKEN)["token_id"].copy()

    @property
    def logprobs(self) -> Float32Array:
        """The delivered tokens' logprobs, a copy."""
        return np.frombuffer(self.delivered, TOKEN)["logprob"].copy()

    def spec(self) -> RequestSpec:
        """What an engine needs to begin, or to go on after the delivered tokens."""
        return RequestSpec(
            self.request_id,
            self.version,
            self.prompt.token_ids,
            self.sampling,
            tuple(self.tokens.tolist()),
            tuple(self.logprobs.tolist()),
        )

    def worker_history(self) -> tuple[Segment, ...]:
        """Which worker sampled which tokens."""
        ends = [*(segment_start.first_token for segment_start in self.segment_starts[1:]), len(self)]
        return tuple(
            Segment(segment_start.worker_id, segment_start.first_token, end - 1, segment_start.arrival, self.version)
            for segment_start, end in zip(self.segment_starts, ends, strict=True)
        )

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
            window_versions=self.window_versions,
            prompt_token_ids=np.asarray(self.prompt.token_ids, dtype=np.int32),
            response_token_ids=self.tokens,
            logprobs=self.logprobs,
            loss_mask=np.ones(len(self), dtype=np.uint8),
            sampling=self.sampling,
            reward=self.reward.value if self.reward.valid else math.nan,
            reward_valid=self.reward.valid,
            reward_components=dict(self.reward.components),
            verifier_log=self.reward.log,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason(),
            started_at=self.started_at,
            finished_at=self.finished_at,
            worker_history=self.worker_history(),
            length_tokens=len(self),
            routed_experts=self._routed_experts(),
        )

    def stop_reason(self) -> str | int | None:
        """The stop string or stop token id that ended it; None: the model's own end, or it was cut."""
        if self.finish_reason != "stop":
            return None
        last = int(np.frombuffer(self.delivered, TOKEN)["token_id"][-1])
        return self.stop or (last if last in self.sampling.stop_token_ids else None)

    def _routed_experts(self) -> ExpertArray | None:
        if self.routing is None:
            return None
        return expert_rows(self.routed, self.routing.layers, self.routing.top_k, self.routing.id_bytes)
