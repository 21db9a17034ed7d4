"""Scores of an evaluation's responses."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, NamedTuple, Self

import numpy as np

from dora.data.trajectory import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Score:
    """Statistics of responses. NaN means that no response gives the value."""

    groups: Annotated[int, "prompts whose responses are complete"]
    responses: Annotated[int, "their responses"]
    reward_mean: Annotated[float, "mean reward, over valid verdicts"]
    reward_error: Annotated[float, "standard error of that mean, with each prompt's mean as one sample"]
    verdicts_failed: Annotated[int, "responses without a valid verdict of the reward function"]
    length_mean_tokens: Annotated[float, "mean length of the responses"]
    length_p90_tokens: Annotated[float, "90th percentile of the lengths"]
    stopped: Annotated[int, "responses ended by the model, a stop string or a stop token"]
    cut: Annotated[int, "responses cut at their maximum length"]


class Response(NamedTuple):
    """The part of a response that its score needs."""

    reward: float
    is_valid: bool
    length_tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One ended evaluation of the service's own series."""

    version: int
    prompts: int  # asked for
    missing: int  # without a result because of an early end
    refused: int  # prompts
    reason: str  # of an early end; empty if there was none
    begun_at: float  # seconds since the Unix epoch
    ended_at: float
    score: Score

    def to_json_dict(self) -> dict[str, Any]:
        """Returns one flat object. A value that no response gives is null."""
        tree = asdict(self) | asdict(self.score)
        del tree["score"]
        return {name: None if isinstance(each, float) and math.isnan(each) else each for name, each in tree.items()}

    @classmethod
    def from_json_dict(cls, tree: Mapping[str, Any]) -> Self:
        """The inverse of ``to_json_dict``. Raises KeyError if a field is missing."""
        known: dict[str, Any] = {name: math.nan if value is None else value for name, value in tree.items()}
        score = Score(**{each.name: known[each.name] for each in fields(Score)})
        return cls(**{each.name: known[each.name] for each in fields(cls) if each.name != "score"}, score=score)


def responses_of(group: TrajectoryGroup) -> list[Response]:
    """Returns the group's responses. A session that forked counts once, by its last branch."""
    return list(
        {
            each.sample_index: Response(each.reward, each.reward_valid, each.length_tokens, each.finish_reason)
            for each in group.trajectories
        }.values()
    )


def score_of(groups: Iterable[TrajectoryGroup]) -> Score:
    return score_of_responses([responses_of(group) for group in groups])


def score_of_responses(groups: list[list[Response]]) -> Score:
    responses = [each for group in groups for each in group]
    tokens = np.asarray([each.length_tokens for each in responses], np.float64)
    means = [mean for group in groups if not math.isnan(mean := _mean(_rewards(group)))]
    return Score(
        groups=len(groups),
        responses=len(responses),
        reward_mean=_mean(_rewards(responses)),
        reward_error=float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan,
        verdicts_failed=sum(not each.is_valid for each in responses),
        length_mean_tokens=_mean(tokens.tolist()),
        length_p90_tokens=float(np.quantile(tokens, 0.9)) if len(tokens) else math.nan,
        stopped=sum(each.finish_reason == "stop" for each in responses),
        cut=sum(each.finish_reason == "length" for each in responses),
    )


def scores_by(groups: Iterable[TrajectoryGroup], column: Callable[[TrajectoryGroup], str]) -> dict[str, Score]:
    parts: dict[str, list[TrajectoryGroup]] = {}
    for group in groups:
        parts.setdefault(column(group), []).append(group)
    return {key: score_of(parts[key]) for key in sorted(parts)}


def _rewards(responses: Iterable[Response]) -> list[float]:
    return [each.reward for each in responses if each.is_valid]


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else math.nan
