"""The facts of a learning run, computed from its record: by step, and by evaluated version.

Trajectories are read line by line; of their texts only each step's samples are kept.
"""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from dora.data.mismatch import Mismatch, by_version
from dora.data.record_content import EVALUATIONS_FILE, REPUBLISHED, STEPS_FILE, TRAJECTORIES_FILE, WITHDRAWN
from dora.errors import InvalidValue
from dora.system.line_file import whole_lines

SAMPLE_TOKENS_MAX: Final = 512  # of a shown response


@dataclass(slots=True)
class SampledResponse:
    """One response of a step: the first of its kind."""

    kind: str  # "best" or "worst" of the step
    trajectory_id: str
    reward: float
    version: int
    length_tokens: int
    prompt_token_ids: list[int]
    response_token_ids: list[int]  # at most SAMPLE_TOKENS_MAX
    verifier_log: str


@dataclass(slots=True)
class StepFacts:
    step: int
    committed_at: float  # seconds since the Unix epoch
    groups: int
    seconds: float | None = None  # since the previous commit; None for the first
    waited_s: float | None = None  # the trainer's wait for groups, a part of ``seconds``; None: unknown
    staleness_groups: list[int] = field(default_factory=list)  # by staleness, from 0
    groups_replayed: int = 0  # groups of earlier steps that the step trained on once more
    drafts: list[int] = field(default_factory=list)  # drafted and accepted tokens; empty: none, or unknown
    responses: int = 0
    tokens: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)  # as the trainer tells
    rewards: int = 0  # valid ones
    reward_sum: float = 0.0
    samples: dict[str, SampledResponse] = field(default_factory=dict)

    @property
    def reward_mean(self) -> float | None:
        return self.reward_sum / self.rewards if self.rewards else None


@dataclass(frozen=True, slots=True)
class Learning:
    """A run. ``evaluations`` are the lines of evaluations.jsonl, by version."""

    steps: list[StepFacts]
    evaluations: list[dict[str, Any]]

    @property
    def seconds(self) -> float:
        """The seconds from the first commit to the last."""
        return self.steps[-1].committed_at - self.steps[0].committed_at if self.steps else 0.0

    @property
    def waited_s(self) -> float:
        return sum(each.waited_s or 0.0 for each in self.steps[1:])

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.steps)

    @property
    def drafts(self) -> tuple[int, int]:
        """The tokens that engines drafted and accepted."""
        found = [each.drafts for each in self.steps if each.drafts]
        return sum(drafted for drafted, _ in found), sum(accepted for _, accepted in found)

    @property
    def staleness_mean(self) -> float | None:
        """The mean over groups; None without any."""
        counts = [count for each in self.steps for count in each.staleness_groups]
        ages = [age * count for each in self.steps for age, count in enumerate(each.staleness_groups)]
        return sum(ages) / sum(counts) if sum(counts) else None

    @property
    def best(self) -> dict[str, Any] | None:
        """The complete evaluation of the highest mean reward."""
        complete = [each for each in self.evaluations if not each["missing"] and each["reward_mean"] is not None]
        return max(complete, key=lambda each: each["reward_mean"], default=None)

    @property
    def mismatches(self) -> list[Mismatch]:
        """One of each version that a trainer has measured, the newest first."""
        return by_version(found for each in self.steps for found in each.mismatches)

    def quarter(self, last: bool) -> float | None:
        """The mean reward of the first or last quarter of the steps."""
        count = max(1, len(self.steps) // 4)
        chosen = self.steps[-count:] if last else self.steps[:count]
        means = [each.reward_mean for each in chosen if each.reward_mean is not None]
        return fmean(means) if means else None


def learning_of(record: Path) -> Learning:
    """Reads a record, whose service may still run. Raises InvalidValue if it is none, or a line is malformed."""
    if not (record / STEPS_FILE).is_file():
        raise InvalidValue("DIR", str(record), "a folder written by --record DIR")
    steps: dict[int, StepFacts] = {}
    for where, tree in _lines(record / STEPS_FILE):
        if WITHDRAWN in tree or REPUBLISHED in tree:
            continue
        with _named(where, tree):
            steps[int(tree["step"])] = StepFacts(
                int(tree["step"]),
                float(tree["committed_at"]),
                len(tree["groups"]),
                waited_s=tree.get("waited_s"),
                staleness_groups=[int(count) for count in tree.get("staleness_groups", ())],
                groups_replayed=len(tree.get("replayed", ())),
                drafts=[int(count) for count in tree.get("drafts", ())],
                mismatches=[Mismatch(**each) for each in tree.get("mismatches", ())],
            )
    ordered = [steps[number] for number in sorted(steps)]
    for before, after in itertools.pairwise(ordered):
        after.seconds = after.committed_at - before.committed_at
    for where, tree in _lines(record / TRAJECTORIES_FILE):
        with _named(where, tree):
            if (facts := steps.get(int(tree["trained_step"]))) is not None:
                _add(facts, tree)
    evaluations: dict[int, dict[str, Any]] = {}
    for where, tree in _lines(record / EVALUATIONS_FILE):
        with _named(where, tree):
            evaluations[int(tree["version"])] = {
                **tree,
                "missing": int(tree["missing"]),
                "reward_mean": tree["reward_mean"],
            }
    return Learning(ordered, [evaluations[version] for version in sorted(evaluations)])


def _add(facts: StepFacts, tree: dict[str, Any]) -> None:
    facts.responses += 1
    facts.tokens += int(tree["length_tokens"])
    reward = tree["reward"]
    if not tree["reward_valid"] or reward is None or not math.isfinite(reward):
        return
    facts.rewards += 1
    facts.reward_sum += reward
    for kind, sign in (("best", 1.0), ("worst", -1.0)):
        if kind not in facts.samples or sign * reward > sign * facts.samples[kind].reward:
            facts.samples[kind] = SampledResponse(
                kind,
                str(tree["trajectory_id"]),
                float(reward),
                int(tree["behaviour_version"]),
                int(tree["length_tokens"]),
                [int(token) for token in tree["prompt_token_ids"]][-SAMPLE_TOKENS_MAX:],
                [int(token) for token in tree["response_token_ids"][:SAMPLE_TOKENS_MAX]],
                str(tree["verifier_log"]),
            )


class _named:
    def __init__(self, where: str, tree: object) -> None:
        self._where, self._tree = where, tree

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, (KeyError, TypeError, ValueError, AttributeError)):
            raise InvalidValue(self._where, str(self._tree)[:80], f"as a service writes it ({error!r})") from error


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(whole_lines(file) if file.exists() else (), start=1):
        where = f"{file.name} line {number}"
        try:
            tree = json.loads(line)
        except ValueError as error:
            raise InvalidValue(where, line[:80], "a JSON object") from error
        if not isinstance(tree, dict):
            raise InvalidValue(where, line[:80], "a JSON object")
        yield where, tree
