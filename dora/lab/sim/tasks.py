"""The resolved tasks of a workload, from its own fields, those of each task, and the files."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from dora.errors import InvalidValue
from dora.lab.sim.prompt_lengths import PromptLengths, SpreadPrompts, Tokens, TracedPrompts, normal_grid
from dora.lab.sim.scenario import SimTask, SimTurns, Workload
from dora.lab.sim.traces import LENGTHS_FILE, FloatColumn, IntColumn, LengthTable, load_histogram, load_trace

TASK = "synthetic"  # the task of a workload without tasks: features and history distinguish its prompts
LOG_MAX = 500.0  # of a length: such a length is always cut, and stays finite with any scale and drift
MIXED_SCORES = 8193  # points at which the lengths of tasks are mixed


@dataclass(frozen=True, slots=True)
class TaskShape:
    """The properties of one task's prompts, and their share. ``tokens`` are of responses, neither rounded nor cut."""

    name: str
    share: float
    tokens: Tokens
    prompts: PromptLengths
    turns: SimTurns


@dataclass(frozen=True, slots=True)
class _Source:
    lengths: LengthTable
    prompts: PromptLengths | None = None


def shapes_of(workload: Workload) -> tuple[TaskShape, ...]:
    """The workload's tasks in order, or a single one. Raises InvalidValue if a file is missing or malformed."""
    sources: dict[str, _Source] = {}

    def source_of(task: SimTask, place: str) -> _Source | None:
        file, field = (task.file, f"{place}.file") if task.file else (workload.lengths.file, LENGTHS_FILE)
        if workload.lengths.kind == "lognormal":
            return None
        if file not in sources:
            sources[file] = _read(workload, file, field)
        return sources[file]

    tasks = workload.tasks or (SimTask(name=TASK, share=1.0),)
    return tuple(_shape(workload, task, source_of(task, f"workload.tasks.{index}")) for index, task in enumerate(tasks))


def task_of_prompts(shares: Sequence[float], prompts: int, rng: np.random.Generator) -> IntColumn:
    """The task of each prompt, by index: according to the shares, to within one prompt, in random order."""
    exact = np.array(shares) / sum(shares) * prompts
    counts = np.floor(exact + 1e-9).astype(np.int64)
    most_left = np.argsort(counts - exact, kind="stable")
    counts[most_left[: prompts - int(counts.sum())]] += 1
    return rng.permutation(np.repeat(np.arange(len(counts)), counts))


def mixed_tokens(shapes: Sequence[TaskShape]) -> Tokens:
    """Returns response tokens of all tasks at standard normal scores, as one distribution."""
    if len(shapes) == 1:
        return shapes[0].tokens
    scores, weights = normal_grid(MIXED_SCORES)
    tokens = np.concatenate([shape.tokens(scores) for shape in shapes])
    order = np.argsort(tokens, kind="stable")
    tokens, below = tokens[order], np.cumsum(np.concatenate([shape.share * weights for shape in shapes])[order])
    cdf = NormalDist().cdf

    def at(scores: FloatColumn) -> FloatColumn:
        shares = np.array([cdf(score) for score in scores.ravel().tolist()]).reshape(scores.shape)
        found: FloatColumn = tokens[np.minimum(np.searchsorted(below, shares * below[-1]), len(tokens) - 1)]
        return found

    return at


def _shape(workload: Workload, task: SimTask, source: _Source | None) -> TaskShape:
    own = task.prompt_tokens if task.prompt_tokens is not None else workload.prompt_tokens
    prompts = source.prompts if source is not None and source.prompts is not None else SpreadPrompts(own)
    return TaskShape(task.name, task.share, _tokens(workload, task, source), prompts, task.turns or workload.turns)


def _tokens(workload: Workload, task: SimTask, source: _Source | None) -> Tokens:
    lengths, scale = workload.lengths, workload.lengths.scale * task.scale
    if source is not None:
        table = source.lengths
        return lambda scores: table.at(scores) * scale
    sigma = task.sigma if task.sigma is not None else lengths.sigma
    return lambda scores: np.exp(np.minimum(lengths.mu + sigma * scores, LOG_MAX)) * scale


def _read(workload: Workload, file: str, field: str) -> _Source:
    kind, traced = workload.lengths.kind, workload.prompt_lengths == "trace"
    if not file:
        of_each = ", or one for each task" if workload.tasks else ""
        raise InvalidValue(field, file, f"a {kind} file{of_each}")
    if kind == "histogram":
        return _Source(load_histogram(file, field))
    trace = load_trace(file, field, prompts=traced)
    return _Source(trace.lengths(), TracedPrompts(trace) if traced else None)
