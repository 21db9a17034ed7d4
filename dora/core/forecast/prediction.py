"""Predictors of response lengths, behind one interface. Dispatch and partition use them.

The online predictors share one model of a response's log length (a linear mixed model, fitted as responses finish):

    log tokens = level + trend(prompt) + prompt effect + noise

``level`` follows the policy: it is the mean of the last responses. The trend is visible in the prompt: its task, or a
regression on its features. The prompt effect is the further contribution of the prompt's own earlier responses, shrunk
according to their number. Its remaining uncertainty is common to a group's siblings, and the noise is not:
``Estimate.group_share``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, Protocol

import numpy as np

from dora.core.forecast.lognormal import Estimate
from dora.errors import InvalidValue

HORIZON = 8192  # responses: the decay of the level; the trend and the variances decay at a quarter of this pace
BLOCK = 64  # responses between two fits of the regression
PROMPTS_MAX = 131_072  # with more, the oldest prompt is removed
TASKS_MAX = 65_536  # likewise
SNAPSHOT_TASKS = 1024  # tasks whose statistics survive a crash
HISTORY_MAX = 128  # responses of one prompt or task that count: later ones replace earlier ones
PRIOR_VARIANCE = 0.5  # of the prompt effect and of the noise each, with the weight of PRIOR_COUNT responses
PRIOR_COUNT = 32.0


@dataclass(frozen=True, slots=True)
class PromptTraits:
    """The properties of a prompt that are known before its responses.

    ``key`` identifies the prompt and stays the same over epochs. ``features`` are any finite numbers (the same ones for
    every prompt). ``known_tokens`` are the lengths of the responses if known: none, one for each sibling, or one for
    all.
    """

    key: str
    task_id: str
    prompt_tokens: int
    max_tokens: int
    group_size: int
    features: tuple[float, ...] = ()
    known_tokens: tuple[int, ...] = ()


class Predictor(Protocol):
    """A deterministic predictor: the same calls in the same order give the same estimates."""

    @property
    def seen(self) -> int:
        """The number of responses that it has observed."""

    def predict(self, prompt: PromptTraits) -> Estimate:
        """The predicted length of one response to ``prompt``."""

    def observe(self, prompt: PromptTraits, tokens: int) -> None:
        """Records a finished response to ``prompt`` with ``tokens`` tokens."""

    def snapshot(self) -> dict[str, Any]:
        """The state that survives a crash, as plain values: global and per-task statistics."""

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restores the state from ``snapshot``."""


class Trend(Protocol):
    """The part of a log length, relative to the level, that a prompt without history predicts."""

    def expected(self, prompt: PromptTraits) -> float: ...

    def learn(self, prompt: PromptTraits, relative: float) -> None: ...

    def snapshot(self) -> dict[str, Any]: ...

    def restore(self, values: Mapping[str, Any]) -> None: ...


class _Means:
    """Running means by name, for a bounded number of names."""

    __slots__ = ("_most", "_values")

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[str, tuple[float, float]] = {}

    def get(self, name: str) -> tuple[float, float]:
        """``(count, mean)``. An unknown name has a count of 0."""
        return self._values.get(name, (0.0, 0.0))

    def add(self, name: str, value: float) -> None:
        count, mean = self._values.get(name, (0.0, 0.0))
        if not count and len(self._values) >= self._most:
            del self._values[next(iter(self._values))]
        count = min(count + 1.0, HISTORY_MAX)
        self._values[name] = (count, mean + (value - mean) / count)

    def snapshot(self) -> dict[str, tuple[float, float]]:
        """The means of the latest names, at most ``SNAPSHOT_TASKS``."""
        return dict(list(self._values.items())[-SNAPSHOT_TASKS:])

    def restore(self, values: Mapping[str, Sequence[float]]) -> None:
        self._values = {name: (count, mean) for name, (count, mean) in values.items()}


class _Forgetting:
    """A mean that decays over ``horizon`` values, exact before that. It starts at ``value`` with weight ``count``."""

    __slots__ = ("_horizon", "count", "value")

    def __init__(self, horizon: int, value: float = 0.0, count: float = 0.0) -> None:
        self._horizon = horizon
        self.value = value
        self.count = count

    def add(self, value: float) -> None:
        self.count = min(self.count + 1.0, self._horizon)
        self.value += (value - self.value) / self.count


class TaskTrend:
    """Each task's mean, shrunk toward the level."""

    def __init__(self) -> None:
        self._tasks = _Means(TASKS_MAX)

    def expected(self, prompt: PromptTraits) -> float:
        count, mean = self._tasks.get(prompt.task_id)
        return mean * count / (count + PRIOR_COUNT)

    def learn(self, prompt: PromptTraits, relative: float) -> None:
        self._tasks.add(prompt.task_id, relative)

    def snapshot(self) -> dict[str, Any]:
        return {"tasks": self._tasks.snapshot()}

    def restore(self, values: Mapping[str, Any]) -> None:
        self._tasks.restore(values["tasks"])


class RegressionTrend:
    """Online ridge regression on (1, features, log prompt tokens), and each task's mean of the residual.

    The normal equations are kept, discounted by ``1 - BLOCK / horizon`` and solved again after every block. Unlike the
    usual covariance recursion this cannot diverge if a feature never varies. Raises InvalidValue for features that are
    not finite or whose number differs from the first prompt's.
    """

    def __init__(self, horizon: int = 4 * HORIZON) -> None:
        self._keep = 1.0 - BLOCK / horizon
        self._tasks = TaskTrend()
        self._weights: tuple[float, ...] = ()
        self._filled = 0

    def expected(self, prompt: PromptTraits) -> float:
        return self._linear(self._row(prompt)) + self._tasks.expected(prompt)

    def learn(self, prompt: PromptTraits, relative: float) -> None:
        row = self._row(prompt)
        self._rows[self._filled] = row
        self._targets[self._filled] = relative
        self._filled += 1
        if self._filled == BLOCK:
            self._fit()
        self._tasks.learn(prompt, relative - self._linear(row))

    def snapshot(self) -> dict[str, Any]:
        """The state without the responses since the last block."""
        fitted = {"weights": self._weights}
        if self._weights:
            fitted |= {"gram": self._gram.tolist(), "moment": self._moment.tolist()}
        return fitted | self._tasks.snapshot()

    def restore(self, values: Mapping[str, Any]) -> None:
        if values["weights"]:
            self._start(len(values["weights"]))
            self._weights = tuple(values["weights"])
            self._gram, self._moment = np.array(values["gram"]), np.array(values["moment"])
        self._tasks.restore(values)

    def _row(self, prompt: PromptTraits) -> tuple[float, ...]:
        row = (1.0, *prompt.features, math.log(max(prompt.prompt_tokens, 1)))
        if not math.isfinite(sum(row)):
            raise InvalidValue("features", prompt.features, "finite numbers")
        if not self._weights:
            self._start(len(row))
        if len(row) != len(self._weights):
            raise InvalidValue("features", prompt.features, f"{len(self._weights) - 2} numbers, as in the first prompt")
        return row

    def _linear(self, row: tuple[float, ...]) -> float:
        return sum(map(mul, self._weights, row))

    def _start(self, width: int) -> None:
        self._weights = (0.0,) * width
        self._rows = np.zeros((BLOCK, width))
        self._targets = np.zeros(BLOCK)
        self._gram = np.zeros((width, width))
        self._moment = np.zeros(width)

    def _fit(self) -> None:
        self._gram = self._keep * self._gram + self._rows.T @ self._rows
        self._moment = self._keep * self._moment + self._rows.T @ self._targets
        ridge = np.eye(len(self._moment))
        self._weights = tuple(np.linalg.solve(self._gram + ridge, self._moment).tolist())
        self._filled = 0


class MixedModel:
    """Level, trend and prompt effect (see the module's docstring), learned only from finished responses.

    Before the first response half of ``max_tokens`` counts as typical. That is rather too long than too short, since an
    underestimate is noticed only when the response is late. Memory: at most PROMPTS_MAX prompts.
    """

    def __init__(self, trend: Trend, horizon: int = HORIZON) -> None:
        self._trend = trend
        self._level = _Forgetting(horizon)
        self._prompts = _Means(PROMPTS_MAX)
        self._noise = _Forgetting(4 * horizon, PRIOR_VARIANCE, PRIOR_COUNT)
        self._residual = _Forgetting(4 * horizon, 2.0 * PRIOR_VARIANCE, PRIOR_COUNT)
        self.seen = 0

    def predict(self, prompt: PromptTraits) -> Estimate:
        level, seen = self._level.value, self._level.count
        start = (math.log(max(prompt.max_tokens, 2) / 2.0) + level * seen) / (1.0 + seen)
        noise = self._noise.value
        between = max(self._residual.value - noise, 0.01 * noise)
        count, mean = self._prompts.get(prompt.key)
        trend = self._trend.expected(prompt)
        weight = count * between / (count * between + noise)
        left = between * (1.0 - weight)
        variance = left + noise
        return Estimate(start + trend + weight * (mean - trend), math.sqrt(variance), left / variance)

    def observe(self, prompt: PromptTraits, tokens: int) -> None:
        trend = self._trend.expected(prompt)  # first, as it may reject the prompt before anything has changed
        log_tokens = math.log(max(tokens, 1))
        self.seen += 1
        self._level.add(log_tokens)
        relative = log_tokens - self._level.value
        self._residual.add((relative - trend) ** 2)
        count, mean = self._prompts.get(prompt.key)
        if count:  # the squared distance to the mean of the others is (n + 1) / n times the variance
            self._noise.add((relative - mean) ** 2 * count / (count + 1.0))
        self._prompts.add(prompt.key, relative)
        self._trend.learn(prompt, relative)

    def snapshot(self) -> dict[str, Any]:
        means = {name: [each.value, each.count] for name, each in self._forgetting().items()}
        return {"seen": self.seen, "means": means, "trend": self._trend.snapshot()}

    def restore(self, values: Mapping[str, Any]) -> None:
        self.seen = values["seen"]
        for name, each in self._forgetting().items():
            each.value, each.count = values["means"][name]
        self._trend.restore(values["trend"])

    def _forgetting(self) -> dict[str, _Forgetting]:
        return {"level": self._level, "noise": self._noise, "residual": self._residual}


class KnownLengths:
    """Known lengths: the simulator's oracle, or the user's own estimates. A prompt without them uses the ``fallback``.

    Raises InvalidValue if the number of lengths is not 0, 1 or the group's size, or if a length is below 1.
    """

    def __init__(self, fallback: Predictor) -> None:
        self._fallback = fallback

    @property
    def seen(self) -> int:
        return self._fallback.seen

    def predict(self, prompt: PromptTraits) -> Estimate:
        known = prompt.known_tokens
        if not known:
            return self._fallback.predict(prompt)
        if len(known) not in (1, prompt.group_size) or min(known) < 1:
            raise InvalidValue("known_tokens", known, f"1 or {prompt.group_size} lengths of at least 1")
        logs = [math.log(tokens) for tokens in known]
        mean = sum(logs) / len(logs)
        sd = math.sqrt(sum((log - mean) ** 2 for log in logs) / len(logs))
        return Estimate(mean, sd, 0.0, known if len(known) == prompt.group_size else known * prompt.group_size)

    def observe(self, prompt: PromptTraits, tokens: int) -> None:
        self._fallback.observe(prompt, tokens)

    def snapshot(self) -> dict[str, Any]:
        return self._fallback.snapshot()

    def restore(self, values: Mapping[str, Any]) -> None:
        self._fallback.restore(values)


PREDICTORS: dict[str, Callable[[], Predictor]] = {
    "statistics": lambda: MixedModel(TaskTrend()),
    "ranker": lambda: MixedModel(RegressionTrend()),
    "oracle": lambda: KnownLengths(MixedModel(TaskTrend())),
}


class Recall:
    """Among the last ``window`` responses or groups: the share of the longest that were also predicted as the longest.

    The measure of StreamRL, Table 4 (0.87 of the longest 20% there). A tie between predictions is broken at random, so
    an uninformed predictor scores ``share`` in any order. Responses as long as the shortest of the longest are
    included, as many may end at the limit.
    """

    def __init__(self, window: int = 8192) -> None:
        if window < 1:
            raise InvalidValue("window", window, "at least 1")
        self._pairs = np.zeros((2, window))
        self._seen = 0

    def add(self, predicted: float, actual: float) -> None:
        self._pairs[:, self._seen % self._pairs.shape[1]] = predicted, actual
        self._seen += 1

    def longest(self, share: float = 0.2) -> float:
        """Recall of the longest ``share`` (0 < share <= 1); NaN before the first pair."""
        if not 0.0 < share <= 1.0:
            raise InvalidValue("share", share, "above 0 and at most 1")
        held = min(self._seen, self._pairs.shape[1])
        if not held:
            return math.nan
        chosen = max(round(share * held), 1)
        predicted, actual = self._pairs[:, :held]
        predicted_least, actual_least = np.partition(self._pairs[:, :held], held - chosen)[:, held - chosen]
        longest = actual >= actual_least
        above, tied = predicted > predicted_least, predicted == predicted_least
        drawn = (chosen - above.sum()) / tied.sum()  # share of the ties that is chosen
        return float((above & longest).sum() + drawn * (tied & longest).sum()) / chosen
