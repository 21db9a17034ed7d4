"""Reports of the reference trainer's steps, as JSON and as text."""

import json
import math
from dataclasses import asdict, dataclass

from dora.data.types import ALARM
from dora.trainers.learner import StepMetrics


@dataclass(frozen=True, slots=True)
class StepReport:
    step: int
    metrics: StepMetrics
    group_ids: tuple[str, ...]  # in order of arrival
    seconds: float
    waited_s: float  # part of it without anything to train on
    replayed_ids: tuple[str, ...] = ()  # groups of earlier steps that were trained on once more

    def numbers(self) -> dict[str, float]:
        return {**self.metrics.numbers(), "step_s": self.seconds, "waited_s": self.waited_s}


@dataclass(frozen=True, slots=True)
class TrainerReport:
    steps: tuple[StepReport, ...]
    seconds: float


def step_line(report: StepReport) -> str:
    metrics, signals = report.metrics, report.metrics.signals
    reward, clipped = _shown(signals.reward_mean, ".3f"), _shown(signals.clip_fraction, ".1%")
    ratio_max, effective = _shown(signals.ratio_max, ".3f"), _shown(signals.effective_sample, ".1%")
    replayed = f"  replayed {len(report.replayed_ids)}" if report.replayed_ids else ""
    return (
        f"step {report.step:4d}  reward {reward}  loss {metrics.loss:+.4f}  tokens {signals.tokens_trained}"
        f"  stale {metrics.staleness_mean:.2f}  ratio max {ratio_max}  clipped {clipped}  effective {effective}"
        f"  grad {metrics.grad_norm:.3f}{replayed}  {report.seconds:.1f} s"
    )


def alarm_lines(report: StepReport) -> list[str]:
    """Returns warnings about a step for operators, in sentences; usually none."""
    numbers = report.metrics.numbers()
    return [
        f"step {report.step}: {name.removeprefix(ALARM)} {numbers[name.removeprefix(ALARM)]:.3g} is above {bound:g}"
        for name, bound in report.metrics.alarms.items()
    ]


def _shown(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def step_json(report: StepReport) -> str:
    """Returns a step as one JSON object: ``step``, ``metrics`` (finite numbers), ``group_ids``, ``seconds``,
    ``waited_s``, ``replayed_ids``.
    """
    return json.dumps({**asdict(report), "metrics": report.metrics.numbers()})
