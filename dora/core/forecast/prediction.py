"""How long will the responses to a prompt be? One interface for every predictor, used by dispatch and partition.

The online predictors share one model of a response's log length (a linear mixed model, fitted as responses finish):

    log tokens = level + trend(prompt) + prompt effect + noise

``level`` follows the policy: it is the mean of the last responses. The trend is what the prompt shows: its task, or a
regression on its features. The prompt effect is what the prompt's own earlier responses add to that, shrunk by how many
they are. What is left of it is common to a group's siblings, the noise is not: ``Estimate.group_share``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, Protocol

import numpy as np

from dora.core.forecast.lognormal import Estimate
from dora.errors import InvalidValue

HORIZON = 8192  # responses: the level forgets at this pace, the trend and the variances at a quarter of it
BLOCK = 64  # responses between two fits of the regression
PROMPTS_MAX = 131_072  # the prompt first seen is forgotten beyond that
TASKS_MAX = 65_536  # likewise
LEARNT_TASKS = 1024  # of which what was learnt outlives a crash
HISTORY_MAX = 128  # responses that count of one prompt or task: later ones push earlier ones out
PRIOR_VARIANCE = 0.5  # of the prompt effect and of the noise each, worth PRIOR_COUNT responses
PRIOR_COUNT = 32.0


@dataclass(frozen=True, slots=True)
class PromptTraits:
    """What is known of a prompt before its responses.

    ``key`` names the prompt and stays the same over epochs, ``features`` are any finite numbers (the same ones for
    every prompt), ``known_tokens`` the lengths of the responses where somebody knows them: empty, one for each sibling,
    or one for all.
    """

    key: str
    task_id: str
    prompt_tokens: int
    max_tokens: int
    group_size: int
    features: tuple[float, ...] = ()
    known_tokens: tuple[int, ...] = ()


class Predictor(Protocol):
    """Deterministic: the same calls in the same order give the same estimates."""

    @property
    def seen(self) -> int:
        """Responses it has learnt from."""

    def predict(self, prompt: PromptTraits) -> Estimate:
        """Belief about one response to ``prompt``."""

    def observe(self, prompt: PromptTraits, tokens: int) -> None:
        """One response to ``prompt`` has finished with ``tokens`` tokens."""

    def learnt(self) -> dict[str, Any]:
        """What outlives a crash, as plain values: of all prompts and of tasks."""

    def learn_again(self, values: Mapping[str, Any]) -> None:
        """Restores the values of ``learnt``."""


class Trend(Protocol):
    """The part of a log length, relative to the level, that a prompt shows before it has a history."""

    def expected(self, prompt: PromptTraits) -> float: ...

    def learn(self, prompt: PromptTraits, relative: float) -> None: ...

    def learnt(self) -> dict[str, Any]: ...

    def learn_again(self, values: Mapping[str, Any]) -> None: ...


class _Means:
    """Running means by name of a bounded number of names."""

    __slots__ = ("_most", "_values")

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[str, tuple[float, float]] = {}

    def get(self, name: str) -> tuple[float, float]:
        """``(count, mean)``; a count of 0 for a name never seen."""
        return self._values.get(name, (0.0, 0.0))

    def add(self, name: str, value: float) -> None:
        count, mean = self._values.get(name, (0.0, 0.0))
        if not count and len(self._values) >= self._most:
            del self._values[next(iter(self._values))]
        count = min(count + 1.0, HISTORY_MAX)
        self._values[name] = (count, mean + (value - mean) / count)

    def learnt(self) -> dict[str, tuple[float, float]]:
        """Of those that came last, ``LEARNT_TASKS`` at most."""
        return dict(list(self._values.items())[-LEARNT_TASKS:])

    def learn_again(self, values: Mapping[str, Sequence[float]]) -> None:
        self._values = {name: (count, mean) for name, (count, mean) in values.items()}


class _Forgetting:
    """Mean that forgets at the pace of ``horizon`` values; exact until then. Starts as ``value`` worth ``count``."""

    __slots__ = ("_horizon", "count", "value")

    def __init__(self, horizon: int, value: float = 0.0, count: float = 0.0) -> None:
        self._horizon = horizon
        self.value = value
        self.count = count

    def add(self, value: float) -> None:
        self.count = min(self.count + 1.0, self._horizon)
        self.value += (value - self.value) / self.count


class TaskTrend:
    """Each task's mean, shrunk towards the level."""

    def __init__(self) -> None:
        self._tasks = _Means(TASKS_MAX)

    def expected(self, prompt: PromptTraits) -> float:
        count, mean = self._tasks.get(prompt.task_id)
        return mean * count / (count + PRIOR_COUNT)

    def learn(self, prompt: PromptTraits, relative: float) -> None:
        self._tasks.add(prompt.task_id, relative)

    def learnt(self) -> dict[str, Any]:
        return {"tasks": self._tasks.learnt()}

    def learn_again(self, values: Mapping[str, Any]) -> None:
        self._tasks.learn_again(values["tasks"])


class RegressionTrend:
    """Online ridge regression on (1, features, log prompt tokens), and each task's mean of what that leaves.

    The normal equations are kept, discounted by ``1 - BLOCK / horizon`` and solved anew after every block: unlike the
    usual covariance recursion this cannot diverge where a feature never varies. Raises InvalidValue for features that
    are not finite, or not as many as the first prompt's.
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

    def learnt(self) -> dict[str, Any]:
        """Without the responses since the last block."""
        fitted = {"weights": self._weights}
        if self._weights:
            fitted |= {"gram": self._gram.tolist(), "moment": self._moment.tolist()}
        return fitted | self._tasks.learnt()

    def learn_again(self, values: Mapping[str, Any]) -> None:
        if values["weights"]:
            self._start(len(values["weights"]))
            self._weights = tuple(values["weights"])
            self._gram, self._moment = np.array(values["gram"]), np.array(values["moment"])
        self._tasks.learn_again(values)

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
    """Level, trend and prompt effect (see the module's docstring), learnt from finished responses alone.

    Before the first response the belief is that half of ``max_tokens`` is typical: too long rather than too short, for
    what is wrongly thought short is noticed only when it is late. Memory: at most PROMPTS_MAX prompts.
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
        trend = self._trend.expected(prompt)  # first: it refuses prompts, and then nothing may have changed
        log_tokens = math.log(max(tokens, 1))
        self.seen += 1
        self._level.add(log_tokens)
        relative = log_tokens - self._level.value
        self._residual.add((relative - trend) ** 2)
        count, mean = self._prompts.get(prompt.key)
        if count:  # the squared distance to the mean of the others is n + 1 over n times the variance
            self._noise.add((relative - mean) ** 2 * count / (count + 1.0))
        self._prompts.add(prompt.key, relative)
        self._trend.learn(prompt, relative)

    def learnt(self) -> dict[str, Any]:
        means = {name: [each.value, each.count] for name, each in self._forgetting().items()}
        return {"seen": self.seen, "means": means, "trend": self._trend.learnt()}

    def learn_again(self, values: Mapping[str, Any]) -> None:
        self.seen = values["seen"]
        for name, each in self._forgetting().items():
            each.value, each.count = values["means"][name]
        self._trend.learn_again(values["trend"])

    def _forgetting(self) -> dict[str, _Forgetting]:
        return {"level": self._level, "noise": self._noise, "residual": self._residual}


class Given:
    """Lengths that are known: the simulator's oracle, or the user's own estimates. Without them: the ``fallback``.

    Raises InvalidValue for a number of lengths that is neither 0, 1 nor the group's size, or for a length below 1.
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

    def learnt(self) -> dict[str, Any]:
        return self._fallback.learnt()

    def learn_again(self, values: Mapping[str, Any]) -> None:
        self._fallback.learn_again(values)


PREDICTORS: dict[str, Callable[[], Predictor]] = {
    "statistics": lambda: MixedModel(TaskTrend()),
    "ranker": lambda: MixedModel(RegressionTrend()),
    "oracle": lambda: Given(MixedModel(TaskTrend())),
}


class Recall:
    """Of the last ``window`` responses or groups: the share of the truly longest that were among the predicted longest.

    The measure of StreamRL, Table 4 (0.87 of the longest 20% there). Among equal predictions the choice is taken to be
    random, so a predictor that knows nothing has ``share``, whatever the order. Whatever is as long as the shortest of
    the longest (many may end at the limit) is among them.
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
        drawn = (chosen - above.sum()) / tied.sum()  # share of the tied that is chosen
        return float((above & longest).sum() + drawn * (tied & longest).sum()) / chosen
