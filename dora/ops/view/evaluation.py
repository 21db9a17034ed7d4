"""The results of an evaluation as a table: pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from rich.text import Text

from dora.client.evaluation import Evaluation
from dora.data.score import Score, score_of, scores_by
from dora.ops.view.numbers import measured, number, percent
from dora.ops.view.tables import Column, Sheet
from dora.rpc.dora_pb2 import EvaluatedVersion, EvaluationStatus

VALUES_MAX: Final = 200  # rows for the values of one column
ALL: Final = "all"
OTHERS: Final = "(others)"


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    evaluation_id: Annotated[str, "its id in the service"]
    version: Annotated[int, "the policy version that sampled every response"]
    prompts: Annotated[int, "prompts requested"]
    missing: Annotated[int, "prompts without a result because of an early end"]
    reason: Annotated[str, "reason of an early end; empty if there was none"]
    refused: Annotated[Mapping[str, str], "refused prompts with the reasons"]
    score: Annotated[Score, "of all responses"]
    by: Annotated[Mapping[str, Mapping[str, Score]], "the same by column value: of task_id, and of `--by`"]

    @property
    def whole(self) -> bool:
        return not (self.missing or self.reason or self.refused)


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    score: Score


COLUMNS: Final[Sequence[Column[_Row]]] = (
    Column("", "all responses, or those with this value of the column", lambda row: row.name, words=True),
    Column("prompts", "prompts whose responses are complete", lambda row: number(row.score.groups), rank=2),
    Column("responses", "their responses", lambda row: number(row.score.responses)),
    Column("reward", "mean reward over valid verdicts", lambda row: measured(row.score.reward_mean)),
    Column("±", "standard error of that mean, over prompts", lambda row: number(row.score.reward_error, 4)),
    Column("tokens", "mean length", lambda row: number(row.score.length_mean_tokens, 1)),
    Column("p90", "90th percentile of the lengths", lambda row: number(row.score.length_p90_tokens, 0), rank=1),
    Column("cut", "share cut at the maximum length", lambda row: percent(_share(row.score.cut, row.score))),
    Column("failed", "responses without a valid verdict", lambda row: number(row.score.verdicts_failed)),
)


def report_of(evaluation: Evaluation, column: str, value_of: Mapping[str, str]) -> EvaluationReport:
    """Builds the report. ``value_of`` gives a prompt's value of ``column``; an empty one was not requested."""
    by = {}
    tasks = scores_by(evaluation.groups, lambda group: group.trajectories[0].task_id)
    if len(tasks) > 1:
        by["task_id"] = tasks
    if column:
        by[column] = scores_by(evaluation.groups, lambda group: value_of.get(group.prompt_id, OTHERS))
    return EvaluationReport(
        evaluation_id=evaluation.evaluation_id,
        version=evaluation.version,
        prompts=evaluation.requested,
        missing=evaluation.missing,
        reason=evaluation.reason,
        refused=evaluation.refused,
        score=score_of(evaluation.groups),
        by=by,
    )


def evaluation_table(report: EvaluationReport) -> Sheet[_Row]:
    rows = [_Row(ALL, report.score)]
    for column, scores in report.by.items():
        rows += [_Row(f"{column} {value}", score) for value, score in list(scores.items())[:VALUES_MAX]]
    notes = [f"{prompt_id} is refused: {why}" for prompt_id, why in report.refused.items()]
    if report.reason:
        notes.append(f"{report.missing:,} of {report.prompts:,} prompts are missing: {report.reason}")
    return Sheet(COLUMNS, rows, f"evaluation of v{report.version}", notes=notes)


def evaluation_line(status: EvaluationStatus, oldest: int = 0) -> Text:
    """Describes a running evaluation in one line. ``oldest`` is the oldest version of the window."""
    share = f"a share of {status.share:g}" if status.share else "idle slots"
    name = f"{status.evaluation_id} {status.name}".strip()
    done = f"{status.prompts_done:,} of {status.prompts:,} prompts done"
    kept = " (kept after it left the window)" if status.version < oldest else ""
    idle = f", {status.idle:,} sessions idle" if status.idle else ""
    requests = f"{status.running:,} running, {status.waiting:,} waiting{idle}"
    return Text(f"{name}: v{status.version}{kept}, {done}, {requests}, {share}")


def evaluated_line(evaluated: EvaluatedVersion) -> str:
    line = f"v{evaluated.version}"
    if evaluated.HasField("reward_mean"):
        line += f": mean reward {evaluated.reward_mean:.4f}"
    if evaluated.HasField("reward_error"):
        line += f" ± {evaluated.reward_error:.4f}"
    line += f", {evaluated.prompts - evaluated.missing - evaluated.refused:,} of {evaluated.prompts:,} prompts"
    return f"{line} ({evaluated.reason})" if evaluated.reason else line


def _share(part: int, score: Score) -> float | None:
    return part / score.responses if score.responses else None
