"""An endless stream of prompts with the true lengths of their responses, as the simulated policy would generate them.

A prompt set is drawn once, and every epoch visits it in a new order. A prompt keeps its difficulty z, and with it its
mean log length, its features and its own length. The responses are drawn again each time. Response lengths are a
function of standard normal scores (a Gaussian copula), whatever their distribution:

    score = sqrt(r) * z + sqrt(1 - r) * own        r: correlation of log lengths within a group
    log length = mu + sigma * score                lognormal; else the histogram's or trace's quantile at that score

A prompt belongs to one task, which may have its own lengths, prompts and turns (tasks.py). Prompt lengths are in
prompt_lengths.py.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora.core.forecast.cost import context_work
from dora.errors import InvalidValue
from dora.lab.sim.prompt_lengths import INTEGRAL_SCORES, normal_grid
from dora.lab.sim.scenario import Lengths, SimTurns, Workload
from dora.lab.sim.tasks import TaskShape, shapes_of, task_of_prompts
from dora.lab.sim.traces import FloatColumn, IntColumn
from dora.lab.sim_engine.request import EngineTurn

FEATURES = 4
BLOCK = 512  # prompts drawn at once, so that calls of any size see the same stream
FILTERED = "filtered: it teaches nothing"  # reason of a filtered group's cancellation
ELSEWHERE = 0.3  # share of the forks that follow another branch than the present one


@dataclass(frozen=True, slots=True)
class SimPrompt:
    """One draw of one prompt. ``prompt_id`` identifies the draw and ``key`` the prompt, which returns every epoch.

    ``lengths`` has response tokens of each sibling, 1 .. max_tokens. ``turns`` is empty for single-turn workloads;
    otherwise it has the turns of each sibling's response. Their tokens sum to its length, and no environment call
    follows the last turn.
    """

    prompt_id: str
    key: str
    task_id: str
    prompt_tokens: int
    group_size: int
    max_tokens: int
    features: tuple[float, ...]
    lengths: tuple[int, ...]
    turns: tuple[tuple[EngineTurn, ...], ...]
    sessions: bool = False  # the core knows the turns: a response's tokens include the answers
    is_from_environment: bool = False  # of sessions: their environments give the prompt
    forks: float = 0.0  # of sessions: the share of turns that follow an earlier place
    group_size_min: int = 0  # responses that start at once; 0: all

    @property
    def at_once(self) -> int:
        return self.group_size_min or self.group_size

    def tokens_left(self, index: int, turn: int) -> int:
        """Returns the response tokens that the turn after this one leaves by a fork, of one session; 0 if it does not
        fork. It gives as many more, so that lengths stay.
        """
        drawn = Random(f"fork {self.key} {index} {turn}")
        most = self.spans(index)[turn][1] - 1  # the first token stays
        return drawn.randint(1, most) if drawn.random() < self.forks and most else 0

    def forks_elsewhere(self, index: int, turn: int) -> bool:
        """Whether the turn after this one, if it forks, follows another branch than the present one."""
        return Random(f"branch {self.key} {index} {turn}").random() < ELSEWHERE

    def spans(self, index: int) -> tuple[tuple[int, int], ...]:
        """The first and the last position, exclusive, of each turn's sampled tokens in one session."""
        spans, begin = [], 0
        for turn in self.turns_of(index):
            spans.append((begin, begin + turn.tokens))
            begin += turn.tokens + environment_tokens(turn)
        return tuple(spans)

    def turns_of(self, index: int) -> tuple[EngineTurn, ...]:
        return self.turns[index] if self.turns else (EngineTurn(self.lengths[index], 0.0, 0),)

    def response_tokens(self, index: int) -> int:
        """The tokens of one response as the core counts them."""
        return self.spans(index)[-1][1] if self.sessions else self.lengths[index]

    def context_work(self) -> float:
        """Cached tokens read over all decode steps of its responses: prompt, response and previous answers."""
        if not self.turns:
            return sum(context_work(length, self.prompt_tokens) for length in self.lengths)
        work = 0.0
        for turns in self.turns:
            context = self.prompt_tokens
            for turn in turns:
                work += context_work(turn.tokens, context)
                context += turn.tokens + turn.answer_tokens
        return work


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and mean square of one response's tokens, after the cut; the prompt's and the answers' tokens before one
    token.

    The latter two are means over sampled tokens, so they are weighted by response length.
    """

    mean_tokens: float
    mean_square_tokens: float
    prompt_tokens: float
    answer_tokens: float = 0.0  # of the environment

    def generated_tokens(self, responses: float) -> float:
        """N: the tokens to sample."""
        return responses * self.mean_tokens

    def context_tokens(self, responses: float) -> float:
        """C: the cached tokens read over all decode steps, of prompt, response and previous answers."""
        before_tokens = self.prompt_tokens + self.answer_tokens
        return responses * (0.5 * self.mean_square_tokens + before_tokens * self.mean_tokens)


class WorkloadStream:
    """The prompts of one run, deterministic by ``seed``.

    Lengths depend only on the seed and the length settings, not on the features, so predictors compete on equal
    prompts. Every ``groups_per_step`` prompts are one step of drift. Raises InvalidValue or NotFound if the lengths'
    file is not usable.
    """

    def __init__(self, workload: Workload, seed: int, groups_per_step: int) -> None:
        if groups_per_step < 1:
            raise InvalidValue("groups_per_step", groups_per_step, "at least 1")
        self._workload = workload
        self._groups_per_step = groups_per_step
        self._shapes = shapes_of(workload)
        self._order, self._draw, self._clock = (np.random.default_rng([seed, stream]) for stream in range(3))
        prompts, rng = workload.prompts, np.random.default_rng([seed, 3])
        self._difficulty = rng.standard_normal(prompts)
        of_tasks, of_lines = (np.random.default_rng([seed, stream]) for stream in (4, 5))
        self._task = task_of_prompts([shape.share for shape in self._shapes], prompts, of_tasks)
        self._prompt_tokens = self._draw_prompts(rng.standard_normal(prompts), of_lines)
        self._features = _features(self._difficulty, workload.feature_correlation, rng)
        self._permutation = np.arange(prompts)
        self._drawn = 0
        self._ready: deque[SimPrompt] = deque()

    def take(self, count: int) -> list[SimPrompt]:
        while len(self._ready) < count:
            self._draw_block()
        return [self._ready.popleft() for _ in range(count)]

    def _rows(self, tasks: IntColumn) -> Iterator[tuple[TaskShape, IntColumn]]:
        for index, shape in enumerate(self._shapes):
            yield shape, np.flatnonzero(tasks == index)

    def _draw_prompts(self, scores: FloatColumn, rng: np.random.Generator) -> IntColumn:
        tokens = np.empty(len(scores), dtype=np.int64)
        for shape, rows in self._rows(self._task):
            tokens[rows] = shape.prompts.draw(self._difficulty[rows], scores[rows], rng)
        return tokens

    def _draw_block(self) -> None:
        workload, group_size = self._workload, self._workload.group_size
        epoch, position = divmod(self._drawn, workload.prompts)
        if position == 0:
            self._permutation = self._order.permutation(workload.prompts)
        chosen = self._permutation[position : position + BLOCK]
        steps = (self._drawn + np.arange(len(chosen))) // self._groups_per_step
        lengths = self._lengths(chosen, steps)
        turns = self._turns(chosen, lengths)
        self._drawn += len(chosen)
        columns = (chosen, self._task[chosen], self._prompt_tokens[chosen], self._features[chosen], lengths)
        drawn = zip(*(column.tolist() for column in columns), turns, strict=True)
        for prompt, task, prompt_tokens, features, tokens, parts in drawn:
            self._ready.append(
                SimPrompt(
                    prompt_id=f"p{prompt}.e{epoch}",
                    key=f"p{prompt}",
                    task_id=self._shapes[task].name,
                    prompt_tokens=prompt_tokens,
                    group_size=group_size,
                    max_tokens=workload.lengths.cap_tokens,
                    features=tuple(features),
                    lengths=tuple(tokens),
                    turns=parts,
                    sessions=workload.sessions,
                    is_from_environment=workload.sessions and workload.prompts_given,
                    forks=workload.forks if workload.sessions else 0.0,
                    group_size_min=workload.group_size_min,
                )
            )

    def _lengths(self, chosen: IntColumn, steps: IntColumn) -> IntColumn:
        lengths = self._workload.lengths
        common = math.sqrt(lengths.group_correlation) * self._difficulty[chosen, None]
        own = self._draw.standard_normal((len(chosen), self._workload.group_size))
        scores = common + math.sqrt(1.0 - lengths.group_correlation) * own
        tokens = np.empty(scores.shape)
        for shape, rows in self._rows(self._task[chosen]):
            tokens[rows] = shape.tokens(scores[rows])
        # Beyond e^60 every length is cut. The exponent is limited so that it stays finite in any run.
        growth = np.exp(np.clip(steps * math.log1p(lengths.drift_per_step), -60.0, 60.0))
        return _whole(tokens * growth[:, None], lengths.cap_tokens)

    def _turns(self, chosen: IntColumn, lengths: IntColumn) -> list[tuple[tuple[EngineTurn, ...], ...]]:
        turns: list[tuple[tuple[EngineTurn, ...], ...]] = [()] * len(chosen)
        for shape, rows in self._rows(self._task[chosen]):
            if shape.turns.most > 1:
                for row, parts in zip(rows.tolist(), _cut(lengths[rows], shape.turns, self._clock), strict=True):
                    turns[row] = parts
        return turns


def _cut(lengths: IntColumn, turns: SimTurns, rng: np.random.Generator) -> list[tuple[tuple[EngineTurn, ...], ...]]:
    counts = np.minimum(rng.integers(1, turns.most + 1, size=lengths.shape), lengths)
    weights = rng.standard_exponential((*lengths.shape, turns.most))
    weights *= np.arange(turns.most) < counts[..., None]
    shares = np.cumsum(weights, axis=-1) / weights.sum(axis=-1, keepdims=True)
    ends = np.rint(shares * (lengths - counts)[..., None]).astype(np.int64)
    tokens = 1 + np.diff(ends, axis=-1, prepend=0)
    mean_log = math.log(turns.environment_mean_s or 1.0) - 0.5 * turns.environment_sigma**2
    latency_s = np.exp(mean_log + turns.environment_sigma * rng.standard_normal(tokens.shape))
    latency_s *= turns.environment_mean_s > 0.0
    return [
        tuple(_split(*response, turns.answer_tokens) for response in zip(*group, strict=True))
        for group in zip(counts.tolist(), tokens.tolist(), latency_s.tolist(), strict=True)
    ]


class Filter:
    """A user's filter, for services with ``selection.filter``. It drops a share of the groups after all their responses
    are scored, as DAPO does if all rewards are equal.

    The seed and the prompt's draw determine the dropped groups. Their prompts come again in the next epoch.
    """

    def __init__(self, fraction: float, seed: int) -> None:
        self._fraction, self._seed = fraction, seed

    def lets_go(self, prompt_id: str) -> bool:
        if not self._fraction:
            return False
        return Random(f"filter {self._seed} {prompt_id}").random() < self._fraction


class SimVerifier:
    """A reward function that returns 1 or 0. A share of the prompts is settled: all responses to it get the same."""

    def __init__(self, settled_fraction: float, seed: int) -> None:
        self._settled, self._seed = settled_fraction, seed

    def reward(self, prompt_id: str, response: int) -> float:
        """Returns the reward. ``response`` is a number that depends on the response."""
        random = Random(f"verdict {self._seed} {prompt_id}")
        is_settled, is_right = random.random() < self._settled, random.random() < 0.5
        return float(is_right if is_settled else response % 2)


def moments(workload: Workload, shapes: Sequence[TaskShape] = ()) -> Moments:
    """Returns the moments of one response before any drift. With the ``shapes`` of its tasks, files are read once."""
    shapes = shapes or shapes_of(workload)
    each = [_moments_of(shape, workload.lengths) for shape in shapes]
    mean = sum(shape.share * of_task.mean_tokens for shape, of_task in zip(shapes, each, strict=True))
    sampled = [shape.share * of_task.mean_tokens / mean for shape, of_task in zip(shapes, each, strict=True)]
    return Moments(
        mean,
        sum(shape.share * of_task.mean_square_tokens for shape, of_task in zip(shapes, each, strict=True)),
        sum(share * of_task.prompt_tokens for share, of_task in zip(sampled, each, strict=True)),
        sum(share * of_task.answer_tokens for share, of_task in zip(sampled, each, strict=True)),
    )


def _moments_of(shape: TaskShape, lengths: Lengths) -> Moments:
    """Integrates quantile functions over the normal density."""

    def cut(scores: FloatColumn) -> IntColumn:
        return _whole(shape.tokens(scores), lengths.cap_tokens)

    scores, weights = normal_grid(INTEGRAL_SCORES)
    tokens = cut(scores)
    prompt_tokens = shape.prompts.in_context_tokens(cut, lengths.group_correlation)
    # with 1 .. most equally long turns on average, half of the other turns were answered before a token
    answer_tokens = shape.turns.answer_tokens * (shape.turns.most - 1) / 4
    return Moments(float(weights @ tokens), float(weights @ tokens**2), prompt_tokens, answer_tokens)


def longest_context_tokens(workload: Workload) -> tuple[int, int]:
    """The most context of the longest response, with its prompt and its environment's answers; and that prompt."""
    context, prompt_tokens = max(
        (
            shape.prompts.longest_tokens + (shape.turns.most - 1) * shape.turns.answer_tokens,
            shape.prompts.longest_tokens,
        )
        for shape in shapes_of(workload)
    )
    return workload.lengths.cap_tokens + context, prompt_tokens


def _whole(tokens: NDArray[np.number[Any]], cap_tokens: int) -> IntColumn:
    return np.rint(np.clip(tokens, 1.0, cap_tokens)).astype(np.int64)


def _features(difficulty: FloatColumn, correlation: float, rng: np.random.Generator) -> FloatColumn:
    """FEATURES noisy observations of the difficulty, shape (prompts, FEATURES), each standard normal.

    Their best linear combination (the mean) has ``correlation`` with the difficulty.
    """
    square = correlation**2
    each = square / (FEATURES - (FEATURES - 1) * square)  # squared correlation of one feature
    noise = rng.standard_normal((len(difficulty), FEATURES))
    return math.sqrt(each) * difficulty[:, None] + math.sqrt(1.0 - each) * noise


def environment_tokens(turn: EngineTurn) -> int:
    """The tokens that a session's environment gives after a turn: at least one."""
    return max(1, turn.answer_tokens)


def _split(count: int, tokens: list[int], latency_s: list[float], answer_tokens: int) -> tuple[EngineTurn, ...]:
    calls = [EngineTurn(tokens[turn], latency_s[turn], answer_tokens) for turn in range(count - 1)]
    return (*calls, EngineTurn(tokens[count - 1], 0.0, 0))
