"""Reads a run record, checks its lines and recomputes its logprobs."""

import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np

from dora.data.run_record import TRAJECTORIES_FILE, VERSIONS_FOLDER
from dora.data.trajectory import Float64Array, Trajectory
from dora.errors import InvalidValue
from dora.ops.verify.committed import groups_replayed, missing, whole_lines, without_weights
from dora.ops.verify.invariants import violations
from dora.ops.verify.tolerances import FLOAT32, Tolerance, exactness_of, numerics_of, tolerance_of

Progress = Callable[[float, str], None]  # called with the share done, 0 to 1, and its description

READ_LINES: Final = 1000  # between two reports of progress while the record is read
VIOLATIONS_MAX: Final = 1000  # sentences stored; the rest are counted


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result. Differences are absolute, between recorded and recomputed logprobs, over all tokens."""

    trajectories: Annotated[int, "trajectories checked"]
    tokens: Annotated[int, "tokens whose logprob was recomputed"]
    versions: Annotated[tuple[int, ...], "versions that sampled them"]
    max_abs_diff: Annotated[float, "largest difference of a logprob"]
    mean_abs_diff: Annotated[float, "mean difference"]
    router_ties: Annotated[int, "ties of router logits, within rounding, at which the engine chose the other expert"]
    atol: Annotated[float, "the largest tolerance that was applied"]
    violations: Annotated[tuple[str, ...], "the first 1000 violations"]
    violations_total: Annotated[int, "violations in all"]
    steps: Annotated[int, "committed steps in the record"] = 0
    groups_replayed: Annotated[int, "groups that the trainer trained on once more, in a later step"] = 0
    logprob_mismatches: Annotated[int, "trajectories with a logprob that their version does not reproduce"] = 0
    recomputed: Annotated[int, "trajectories whose logprobs were recomputed"] = 0
    versions_without_weights: Annotated[
        tuple[int, ...], "versions that sampled trajectories, and whose weights the record was not to keep"
    ] = ()
    without_weights: Annotated[int, "trajectories of these versions"] = 0
    rules: Annotated[tuple[str, ...], "each tolerance that was applied, with what decided it"] = ()
    exactness: Annotated[str, "how a moved request's logits compare with an unmoved one's"] = ""

    @property
    def ok(self) -> bool:
        """Whether no violation was found, even if there was nothing to verify."""
        return self.violations_total == 0

    @property
    def verified(self) -> bool:
        """Whether logprobs were recomputed, and no violation was found."""
        return self.ok and self.recomputed > 0


def verify(
    folder: Path,
    *,
    atol: float | None = None,
    sample: int | None = None,
    seed: int = 0,
    window_versions: int | None = None,
    progress: Progress = lambda share, how_far: None,
) -> VerifyReport:
    """Verifies the run record in ``folder``.

    ``atol`` is the largest accepted absolute difference of a logprob; the default is each version's
    (``dora.ops.verify.tolerances``). If the engines quantised a version, the model is quantised in the same way. In a
    mixture of experts, if two experts are tied within rounding (dora/models/routers.py), the logprob of either choice
    is accepted. ``sample`` recomputes the logprobs of only this many trajectories, drawn by ``seed`` evenly over the
    versions; all lines are checked. A version whose weights the service was not asked to keep is no violation; its
    logprobs are not recomputed. ``progress`` is called while the record is read, and after each trajectory. Raises
    InvalidValue if ``folder`` is not a run record.
    """
    if atol is not None and not 0.0 <= atol < math.inf:  # no difference is above NaN or infinity
        raise InvalidValue("atol", atol, "a number from 0 on")
    for name, least in (("sample", sample), ("window", window_versions)):
        if least is not None and least < 1:
            raise InvalidValue(name, least, "1 or more")
    trajectories = read_trajectories(folder / TRAJECTORIES_FILE, progress)
    sentences = _Sentences()
    steps, lacking = missing(folder, trajectories, window_versions)
    left_out = without_weights(folder)
    for sentence in (*violations(trajectories, window_versions), *lacking):
        sentences.add(sentence)
    by_version: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.length_tokens:
            by_version[trajectory.behaviour_version].append(trajectory)
    sampling = tuple(sorted(by_version))
    without = {version: len(by_version.pop(version)) for version in sampling if version in left_out}
    if sample is not None:
        by_version = drawn(by_version, sample, seed)
    differences, router_ties, mismatches = [np.zeros(0)], 0, 0
    pace = _Progress([trajectory for members in by_version.values() for trajectory in members], progress)
    from dora.ops.verify.recompute import Models  # loads torch

    models = Models()
    own = None if atol is None else Tolerance(atol, "as given")
    applied: dict[Tolerance, None] = {}
    engines = []
    for version, members in sorted(by_version.items()):
        weights = folder / VERSIONS_FOLDER / str(version)
        if not weights.is_dir():
            sentences.add(f"version {version} sampled {len(members)} trajectories and is not in the record.")
            pace.passed(members)
            continue
        numerics = numerics_of(weights)
        engines.append(numerics)
        tolerance = own or tolerance_of(weights, numerics)
        applied[tolerance] = None
        module, accepted = models.load(weights, numerics.quantisation), tolerance.atol
        for trajectory, apart, ties in _differences(module, members, accepted, sentences):
            pace.passed([trajectory])
            differences.append(apart)
            router_ties += ties
            mismatches += bool(apart.max() > accepted)
    found = np.concatenate(differences)
    return VerifyReport(
        trajectories=len(trajectories),
        tokens=len(found),
        versions=sampling,
        max_abs_diff=float(found.max(initial=0.0)),
        mean_abs_diff=float(found.mean()) if len(found) else 0.0,
        router_ties=router_ties,
        atol=max(each.atol for each in (*applied, own or FLOAT32)),
        logprob_mismatches=mismatches,
        violations=tuple(sentences.kept),
        violations_total=sentences.total,
        steps=steps,
        groups_replayed=groups_replayed(folder),
        recomputed=len(differences) - 1,
        versions_without_weights=tuple(without),
        without_weights=sum(without.values()),
        rules=tuple(f"{each.atol:g}: {each.rule}" for each in applied),
        exactness=exactness_of(engines),
    )


def read_trajectories(file: Path, progress: Progress = lambda share, how_far: None) -> list[Trajectory]:
    """The record's lines. Raises InvalidValue for a missing file, or the first line that is not a trajectory."""
    found = []
    for number, line in enumerate(whole_lines(file), start=1):
        found.append(_parse(line, number))
        if number % READ_LINES == 0:
            progress(0.0, f"{number:,} trajectories read")
    return found


def drawn(by_version: Mapping[int, Sequence[Trajectory]], count: int, seed: int) -> dict[int, list[Trajectory]]:
    """Draws ``count`` trajectories by ``seed``: of each version as many as of the others, or one more, or all."""
    draw = random.Random(seed)
    orders = {version: draw.sample(members, len(members)) for version, members in sorted(by_version.items())}
    ranked = [(place, draw.random(), version) for version, order in orders.items() for place in range(len(order))]
    found: dict[int, list[Trajectory]] = defaultdict(list)
    for place, _, version in sorted(ranked)[:count]:
        found[version].append(orders[version][place])
    return found


class _Progress:
    """Measures progress by tokens, as a long trajectory takes longer than a short one."""

    def __init__(self, trajectories: Sequence[Trajectory], progress: Progress) -> None:
        self._count = len(trajectories)
        self._tokens = sum(map(_length, trajectories))
        self._done = self._done_tokens = 0
        self._progress = progress

    def passed(self, trajectories: Sequence[Trajectory]) -> None:
        self._done += len(trajectories)
        self._done_tokens += sum(map(_length, trajectories))
        self._progress(self._done_tokens / self._tokens, f"{self._done:,} of {self._count:,} trajectories")


def _length(trajectory: Trajectory) -> int:
    return len(trajectory.prompt_token_ids) + trajectory.length_tokens


class _Sentences:
    def __init__(self) -> None:
        self.kept: list[str] = []
        self.total = 0

    def add(self, sentence: str) -> None:
        self.total += 1
        if len(self.kept) < VIOLATIONS_MAX:
            self.kept.append(sentence)


def _parse(line: bytes, number: int) -> Trajectory:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise InvalidValue(f"{TRAJECTORIES_FILE} line {number}", line[:80], "a JSON object") from error
    if not isinstance(record, dict):
        raise InvalidValue(f"{TRAJECTORIES_FILE} line {number}", line[:80], "a JSON object")
    return Trajectory.from_json_dict(record)


def _differences(
    module: Any, trajectories: Sequence[Trajectory], atol: float, sentences: _Sentences
) -> Iterator[tuple[Trajectory, Float64Array, int]]:
    from dora.ops.verify.recompute import difference, recomputed_logprobs  # loads torch
    from dora.ops.verify.ties import with_choices_turned

    for trajectory, logprobs in recomputed_logprobs(module, trajectories):
        apart, ties = difference(trajectory, logprobs), 0
        if apart.max() > atol and (found := with_choices_turned(module, trajectory, atol)) is not None:
            logprobs, ties = found
            apart = difference(trajectory, logprobs)
        worst = int(np.argmax(apart))
        if apart[worst] > atol:
            sentences.add(
                f"trajectory {trajectory.trajectory_id}, token {worst}: recorded logprob"
                f" {trajectory.logprobs[worst]:.6f}, version {trajectory.behaviour_version} gives"
                f" {logprobs[worst]:.6f}, more than {atol:g} apart."
            )
        yield trajectory, apart, ties
