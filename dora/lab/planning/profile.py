"""Fits an engine's cost model to its step times, and predicts a run with it (StaleFlow appendix B.1)."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final

import numpy as np

from dora.config import CostConfig
from dora.core.forecast.cost import CostModel
from dora.data.engine_samples import DecodeSample, DraftSample, Experts, Measurement, MixedRequest, PrefillSample
from dora.data.validation import validated_as
from dora.errors import InvalidValue
from dora.lab.planning.experts import ROUNDING, DecodeSteps, fit_mixture
from dora.lab.planning.least_squares import Matrix, non_negative_least_squares

KINKS: Final = 129  # tried in addition to the sampled numbers
QUIET_SLOWDOWN: Final = 1.05  # limit for a quiet machine: its time relative to the steps that count


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients and their deviation from the samples."""

    coefficients: CostConfig
    decode_error: float  # mean relative error over the decode samples
    prefill_error: float  # the same over the prefill samples; 0 without any
    kink: float  # requests above which a step is compute-bound; 0: always
    dense_error: float | None = None  # for a mixture of experts: the decode error of a dense model's fit


@dataclass(frozen=True, slots=True)
class Validation:
    """A fitted model against a mixed workload that it was not fitted to."""

    tokens: int  # generated
    measured_s: float  # of the steps that count: the fastest, or the usual ones
    wall_s: float  # of the median run, including other load of the machine
    predicted_s: float

    @property
    def ratio(self) -> float:
        """Predicted over measured throughput."""
        return self.measured_s / self.predicted_s

    @property
    def wall_ratio(self) -> float:
        """Predicted throughput relative to the wall clock's."""
        return self.wall_s / self.predicted_s

    @property
    def slowdown(self) -> float:
        """Wall-clock time relative to that of the steps that count."""
        return self.wall_s / self.measured_s

    @property
    def held(self) -> dict[str, float]:
        """The ratios that must be near 1, by name; the wall clock's only if the machine was quiet."""
        by_clock = {"wall": self.wall_ratio} if self.slowdown <= QUIET_SLOWDOWN else {}
        return {"measured": self.ratio} | by_clock

    def passed(self, tolerance: float) -> bool:
        return all(abs(ratio - 1.0) <= tolerance for ratio in self.held.values())


def fit(
    decode: Sequence[DecodeSample],
    prefill: Sequence[PrefillSample] = (),
    experts: Experts | None = None,
    drafts: Sequence[DraftSample] = (),
) -> Fit:
    """The non-negative coefficients of least squared relative error.

    k1, k3 and k4 are linear in (kv, max(kink, n), 1), k2 is k3 * kink; the kink is searched between the sampled numbers
    of requests. The terms of a mixture of experts (``fit_mixture``) are considered only if ``experts`` is given. Drafts
    cost what their tokens do and, as a median, what remains. Raises InvalidValue for times or sizes that are not above
    0, and for samples of fewer than two numbers of requests or two contexts, which do not determine the coefficients.
    """
    _check(decode, prefill)
    steps = DecodeSteps(
        running=np.array([sample.running for sample in decode], dtype=np.float64),
        kv=np.array([sample.kv_tokens for sample in decode]),
        times_s=np.array([sample.step_s for sample in decode]),
    )
    if len(np.unique(steps.running)) < 2 or len(np.unique(np.round(steps.kv / steps.running))) < 2:
        raise InvalidValue("decode samples", len(decode), "of at least two numbers of requests and two contexts")
    dense, kink = _fit_dense(steps)
    cost = dense if experts is None else fit_mixture(steps, experts, dense)
    cost = replace(cost, prefill_token_s=_prefill_token_s(cost, prefill), draft_verify_s=_verify_s(cost, drafts))
    return Fit(
        coefficients=CostConfig(**asdict(cost)),
        decode_error=_decode_error(cost, decode),
        prefill_error=_mean_error((_prefill_step_s(cost, s), s.step_s) for s in prefill),
        kink=kink if cost.dense else _last_bound_by_weights(cost, decode),
        dense_error=None if experts is None else _decode_error(dense, decode),
    )


def _fit_dense(steps: DecodeSteps) -> tuple[CostModel, float]:
    best: tuple[float, float, Matrix] | None = None
    for kink in _kinks(np.unique(steps.running)):
        columns = np.stack([steps.kv, np.maximum(kink, steps.running), np.ones_like(steps.kv)], axis=1)
        solution, loss = non_negative_least_squares(columns / steps.times_s[:, None], np.ones_like(steps.times_s))
        if best is None or loss < best[0] - ROUNDING:
            best = loss, float(kink), solution
    assert best is not None
    _, kink, (k1, k3, k4) = best
    return CostModel(float(k1), float(k3) * kink, float(k3), float(k4)), kink


def predicted_s(cost: CostModel, requests: Sequence[MixedRequest], slots: int) -> float:
    """Returns the seconds in which an engine completes ``requests``, in order, at most ``slots`` at once.

    It simulates steps: a new request's prompt is computed in the step of its first token, beside the others' decoding.
    """
    waiting = deque(requests)
    running: list[tuple[int, int]] = []  # context, remaining tokens
    elapsed_s = 0.0
    while waiting or running:
        arrived = [waiting.popleft() for _ in range(min(len(waiting), slots - len(running)))]
        running += [(request.prompt_tokens, request.response_tokens) for request in arrived]
        elapsed_s += cost.decode_step_s(len(running), sum(context for context, _ in running))
        elapsed_s += cost.prefill_token_s * sum(request.prompt_tokens for request in arrived)
        running = [(context + 1, left - 1) for context, left in running if left > 1]
    return elapsed_s


def validate(coefficients: CostConfig, measurement: Measurement) -> Validation:
    """The prediction for the measured mixed workload. Raises InvalidValue if none was measured."""
    if not measurement.mixed_wall_s:
        raise InvalidValue("mixed workload", len(measurement.mixed_wall_s), "at least one measured run")
    return Validation(
        tokens=sum(request.response_tokens for request in measurement.mixed),
        measured_s=measurement.mixed_s,
        wall_s=median(measurement.mixed_wall_s),
        predicted_s=predicted_s(CostModel.of(coefficients), measurement.mixed, measurement.slots),
    )


def coefficients_of(tree: Mapping[str, Any]) -> CostConfig:
    """Returns checked coefficients from a mapping written by ``dora profile``.

    Raises InvalidValue for the first field that is unknown (with the nearest name), negative or not a finite number.
    """
    cost = validated_as(CostConfig, tree, section="cluster.cost")
    cost.check("cluster.cost")
    return cost


def _check(decode: Iterable[DecodeSample], prefill: Iterable[PrefillSample]) -> None:
    sizes = [(sample.running, sample.kv_tokens, sample.step_s) for sample in decode]
    sizes += [(sample.running, sample.prompt_tokens, sample.step_s) for sample in prefill]
    for running, tokens, step_s in sizes:
        if not (running >= 1 and 0.0 < tokens < math.inf and 0.0 < step_s < math.inf):
            raise InvalidValue(
                "sample (requests, tokens, seconds)", (running, tokens, step_s), "finite numbers above 0"
            )


def _last_bound_by_weights(cost: CostModel, decode: Sequence[DecodeSample]) -> float:
    reading = replace(cost, request_s=0.0)
    sizes = {sample.running for sample in decode}
    return float(max((n for n in sizes if cost.weights_s and cost.matmul_s(n) == reading.matmul_s(n)), default=0))


def _kinks(running: Matrix) -> list[float]:
    """Returns request counts to try between the sampled ones: a kink can be detected beyond at most one of them."""
    if len(running) < 3:
        return [0.0]
    between = np.unique([*np.linspace(running[0], running[-2], KINKS), *running[1:-1]])
    return [0.0, *between[1:].tolist()]


def _decode_error(cost: CostModel, samples: Iterable[DecodeSample]) -> float:
    return _mean_error((cost.decode_step_s(s.running, s.kv_tokens), s.step_s) for s in samples)


def _verify_s(cost: CostModel, samples: Sequence[DraftSample]) -> float:
    rest = [s.step_s - cost.kv_token_s * s.kv_tokens - cost.computed_s(s.running * (1 + s.drafted)) for s in samples]
    return max(0.0, median(rest)) if rest else 0.0


def _prefill_token_s(cost: CostModel, samples: Sequence[PrefillSample]) -> float:
    rest = [(s.step_s - cost.decode_step_s(s.running, s.prompt_tokens)) / s.prompt_tokens for s in samples]
    return max(0.0, median(rest)) if rest else 0.0


def _prefill_step_s(cost: CostModel, sample: PrefillSample) -> float:
    return cost.decode_step_s(sample.running, sample.prompt_tokens) + cost.prefill_token_s * sample.prompt_tokens


def _mean_error(pairs: Iterable[tuple[float, float]]) -> float:
    errors = [abs(predicted - measured) / measured for predicted, measured in pairs]
    return sum(errors) / len(errors) if errors else 0.0
