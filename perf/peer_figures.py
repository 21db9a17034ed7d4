"""The figures of one peer, from the run record that it left."""

import ast
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np

from dora.data.record_content import STEPS_FILE, TRAJECTORIES_FILE
from dora.data.run_record import VERSIONS_FOLDER
from dora.data.trajectory import Trajectory
from dora.ops.verify.check import read_trajectories

LEVEL: Final = 0.5  # the mean reward of LEVEL_STEPS steps in a row that a peer is to reach
LEVEL_STEPS: Final = 5
RECOMPUTED: Final = 96  # trajectories, drawn from all

Used = Sequence[tuple[float, float]]  # seconds since the Unix epoch, and the CPU seconds of all of a peer's processes


def figures_of(record: Path, used: Used) -> dict[str, Any]:
    """All are of the steps after the first one, from its commit on: start-up and the first responses do not count.

    ``error_mean`` and ``error_max`` are differences of logprobs, None where none are recorded.
    """
    committed_s = {line["step"]: line["committed_at"] for line in _lines(record / STEPS_FILE) if "committed_at" in line}
    first_s, last_s = min(committed_s.values()), max(committed_s.values())
    first = min(committed_s)
    found = read_trajectories(record / TRAJECTORIES_FILE)
    trained = [each for each in found if each.trained_step in committed_s and each.trained_step > first]
    seconds = last_s - first_s
    tokens = sum(each.length_tokens for each in trained)
    rewards = rewards_of(trained)
    later_s = [committed_s[step] - first_s for step in sorted(committed_s)[1:]]
    cpu_s = cpu_seconds(used, first_s, last_s)
    mean, largest = logprob_error(trained, record / VERSIONS_FOLDER)
    return {
        "steps": len(rewards),
        "seconds": seconds,
        "samples_s": len(trained) / seconds,
        "tokens_s": tokens / seconds,
        "tokens_mean": tokens / len(trained),
        "rewards": rewards,
        "seconds_to_level": seconds_to_level(rewards, later_s),
        "staleness": fmean(staleness_of(each) for each in trained),
        "mixed_share": fmean(len(versions_of(each)) > 1 for each in trained),
        "error_mean": mean,
        "error_max": largest,
        "cores": cpu_s / seconds,
        "cpu_s_per_sample": cpu_s / len(trained),
    }


def rewards_of(trajectories: Sequence[Trajectory]) -> list[float]:
    """The mean reward of each step."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for each in trajectories:
        by_step[each.trained_step].append(each.reward)
    return [fmean(by_step[step]) for step in sorted(by_step)]


def seconds_to_level(rewards: Sequence[float], committed_s: Sequence[float]) -> float | None:
    """The time of the commit that ends the first LEVEL_STEPS steps with a mean reward of LEVEL; None: never."""
    for end in range(LEVEL_STEPS, len(rewards) + 1):
        if fmean(rewards[end - LEVEL_STEPS : end]) >= LEVEL:
            return committed_s[end - 1]
    return None


def versions_of(trajectory: Trajectory) -> dict[int, np.ndarray[Any, Any]]:
    """For each version that sampled it, which of its tokens (n,)."""
    found: dict[int, np.ndarray[Any, Any]] = {}
    for each in trajectory.worker_history:
        tokens = found.setdefault(each.version, np.zeros(trajectory.length_tokens, np.bool_))
        tokens[each.first_token : each.last_token + 1] = True
    return found


def staleness_of(trajectory: Trajectory) -> float:
    """The mean over the tokens."""
    tokens = {version: int(which.sum()) for version, which in versions_of(trajectory).items()}
    versions = sum(version * count for version, count in tokens.items()) / max(sum(tokens.values()), 1)
    return trajectory.trained_step - versions


def logprob_error(
    trajectories: Sequence[Trajectory], versions: Path, count: int = RECOMPUTED
) -> tuple[float | None, float | None]:
    """The mean and the largest difference of recorded logprobs from those of transformers, whole sequence at once.

    Each token is recomputed under the version that its record names.
    """
    from dora.ops.verify.recompute import Models, recomputed_logprobs

    by_version: dict[int, list[Trajectory]] = defaultdict(list)
    for each in random.Random(0).sample(trajectories, min(count, len(trajectories))):
        for version in versions_of(each):
            by_version[version].append(each)
    models, differences = Models(), [np.zeros(0)]
    for version, members in sorted(by_version.items()):
        module = models.load(versions / str(version))
        for each, logprobs in recomputed_logprobs(module, members):
            differences.append(np.abs(each.logprobs - logprobs)[versions_of(each)[version]])
    found = np.concatenate(differences)
    if not len(found) or np.isnan(found).any():
        return None, None
    return float(found.mean()), float(found.max())


def cpu_seconds(used: Used, first_s: float, last_s: float) -> float:
    """CPU seconds between two times."""
    times, spent = zip(*used, strict=True)
    return float(np.diff(np.interp([first_s, last_s], times, spent))[0])


def code_lines(file: Path, names: Sequence[str]) -> int:
    """Lines of the functions and classes of these names, without blank lines, comments and docstrings."""
    text = file.read_text()
    lines = text.splitlines()
    numbers = {
        number
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in names
        for number in _of_node(node)
    }
    return sum(bool(lines[number - 1].strip()) and not lines[number - 1].strip().startswith("#") for number in numbers)


def _of_node(node: Any) -> Iterator[int]:
    docstrings: set[int] = set()
    for each in ast.walk(node):
        body = getattr(each, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            docstrings |= set(range(body[0].lineno, (body[0].end_lineno or 0) + 1))
    yield from set(range(node.lineno, node.end_lineno + 1)) - docstrings


def _lines(file: Path) -> Iterator[Mapping[str, Any]]:
    yield from map(json.loads, file.read_text().splitlines())
