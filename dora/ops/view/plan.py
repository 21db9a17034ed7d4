"""The planner's answer, as a table and as one JSON object."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

from rich.console import Group
from rich.text import Text

from dora.lab.planning.allocation import Split
from dora.lab.planning.generation import Generation
from dora.lab.planning.layout import Replica, ReplicaLayout
from dora.lab.planning.plan import Question, SplitPlan
from dora.lab.planning.training import Trainers
from dora.lab.sim.figures.report import StepUnit, step_unit
from dora.ops.view.tables import SHEET, Column, Note, Sheet

SHOWN_EACH_SIDE: Final = 4  # candidates on each side of the best
LEGEND: Final = "T, P, D: tensor, pipeline and data parallel ranks; GB: memory of one training accelerator"


@dataclass(frozen=True, slots=True)
class TrainerLayout(Replica):
    """The partition of the model over a trainer's accelerators."""

    data: Annotated[int, "copies of the model"]
    memory_bytes: Annotated[float, "memory use of the trainer's fullest accelerator"]


@dataclass(frozen=True, slots=True)
class SplitReport:
    """One split: the accelerators of both roles, and the times of a step."""

    gpus: Annotated[int, "accelerators of both roles; the table shows the rest of the budget as *unused*"]
    rollout_gpus: Annotated[int, "accelerators that generate"]
    train_gpus: Annotated[int, "accelerators that train"]
    engines: Annotated[int, "workers, one engine each"]
    gpus_per_engine: Annotated[
        int, "accelerators per worker: its `workers.tensor_parallel` times its `workers.pipeline_parallel`"
    ]
    layout: Annotated[TrainerLayout, "partition of the model over the training accelerators"]
    generation_s: Annotated[float, "generation time of a batch: the longer of the next two"]
    work_s: Annotated[float, "time of its work: the bubble-free bound times `--efficiency`"]
    tail_s: Annotated[
        float,
        "time of the longest response over the steps that the window allows it, on engines as empty as possible; in a "
        "window of 1, after the batch that empties the engines",
    ]
    training_s: Annotated[float, "one training step"]
    training_measured: Annotated[bool, "whether measured training times enclose `train_gpus`; else extrapolated (*)"]
    step_s: Annotated[
        float,
        "the longer of generation and training; in a window of 1, until the last micro-batch is trained and the "
        "weights are across",
    ]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The question, the assumptions of the answer, and all candidate splits. The best split's fields are added."""

    model: Annotated[str, "the model"]
    rollout_hardware: Annotated[str, "accelerator that generates"]
    train_hardware: Annotated[str, "accelerator that trains"]
    window: Annotated[int, "maximum number of live policy versions"]
    transfer_s: Annotated[
        float | None,
        "two datacentres: time to send a version's weights over the link, during the next step, which cannot be "
        "shorter; in a window of 1 part of the step",
    ]
    slots: Annotated[int, "concurrent requests per engine"]
    kv_tokens: Annotated[int, "KV cache of one engine"]
    kv_token_bytes: Annotated[float, "KV size of one token"]
    weights_bytes: Annotated[float, "the model's weights"]
    host_versions: Annotated[int, "versions that a host keeps in its memory: the window's, the next, an evaluation's"]
    host_weights_bytes: Annotated[float, "host memory that they take, on each host"]
    cost: Annotated[dict[str, float], "cost of an engine's step, like a scenario's `cluster.cost`"]
    n_tokens: Annotated[float, "response tokens per step"]
    c_tokens: Annotated[float, "total context tokens attended to, summed over the response tokens"]
    train_s_at: Annotated[list[list[float]], "training times used by the plan: accelerators, seconds per step"]
    train_memory_bytes: Annotated[float, "memory limit of a training accelerator: 95% of its memory less 5 GB"]
    candidates: Annotated[list[SplitReport], "all candidate splits, each with its best layout"]


@dataclass(frozen=True, slots=True)
class Adjustment:
    """The number of workers to add, from times measured in a run (`--generation-s`, `--training-s`, `--engines`)."""

    groups_to_add: Annotated[int, "workers to add"]
    engines: Annotated[int, "workers with them"]
    generation_s: Annotated[float, "generation with them"]
    lag_s: Annotated[float, "measured generation time less training time"]
    lag_after_s: Annotated[float, "the same with the added workers"]


@dataclass(frozen=True, slots=True)
class _Shown:
    split: Split
    layout: ReplicaLayout
    best: bool
    measured: bool
    unused: int
    unit: StepUnit

    def time(self, seconds: float) -> str:
        return f"{seconds / self.unit.seconds:.2f}"


COLUMNS: Final[Sequence[Column[_Shown]]] = (
    Column("", "marks the best split", lambda row: "best" if row.best else ""),
    Column(
        "rollout =\nworkers x GPUs",
        "generating accelerators = workers x accelerators per worker",
        lambda row: _workers(row.split.generation),
    ),
    Column(
        "train =\nTxPxD",
        "training accelerators = tensor x pipeline x data parallel ranks; c2: 2 ranks share a sequence; e8: 8 ranks "
        "share the experts; r: activations recomputed",
        lambda row: f"{row.split.train_gpus} = {_ranks(row.layout)}",
    ),
    Column("unused", "unused accelerators of the budget", lambda row: f"{row.unused:,}", rank=3),
    Column("generation\n{unit}", "`generation_s`", lambda row: row.time(row.split.generation.seconds)),
    Column(
        "training\n{unit}",
        "`training_s`; *: extrapolated",
        lambda row: row.time(row.split.training_s) + ("" if row.measured else "*"),
    ),
    Column("step\n{unit}", "`step_s`", lambda row: row.time(row.split.step_s)),
    Column(
        "waits\nfor",
        "bottleneck of the step: `rollout` (its work), its `tail`, `train`, or the `link` between datacentres",
        lambda row: _waits_for(row.split),
        rank=1,
    ),
    Column(
        "GB\nof {limit}",
        "memory of the trainer's fullest accelerator, out of its limit",
        lambda row: f"{row.layout.memory_bytes / 1e9:.1f}",
        rank=2,
    ),
)


def plan_tree(question: Question, answer: SplitPlan) -> dict[str, Any]:
    """Returns the whole answer: the best split's fields, its assumptions, and every candidate."""
    option = answer.best.generation.option
    report = PlanReport(
        model=question.model.name,
        rollout_hardware=question.rollout_hardware.name,
        train_hardware=question.train_hardware.name,
        window=question.window,
        transfer_s=answer.transfer_s,
        slots=option.slots,
        kv_tokens=option.kv_tokens,
        kv_token_bytes=question.model.kv_token_bytes,
        weights_bytes=question.model.weights_bytes,
        host_versions=question.host_versions,
        host_weights_bytes=question.host_versions * question.model.weights_bytes,
        cost={field: getattr(option.cost, field) for field in option.cost.__slots__},
        n_tokens=question.workload.n_tokens,
        c_tokens=question.workload.c_tokens,
        train_s_at=[list(point) for point in question.training.points],
        train_memory_bytes=answer.trainers.limit_bytes,
        candidates=[_split_report(answer.trainers, split) for split in answer.candidates],
    )
    return asdict(report) | asdict(_split_report(answer.trainers, answer.best))


def _split_report(trainers: Trainers, split: Split) -> SplitReport:
    generation, layout = split.generation, trainers.layout(split.train_gpus)
    return SplitReport(
        gpus=split.gpus,
        rollout_gpus=generation.gpus,
        train_gpus=split.train_gpus,
        engines=generation.engines,
        gpus_per_engine=generation.option.gpus,
        layout=TrainerLayout(**asdict(layout.replica), data=layout.data, memory_bytes=layout.memory_bytes),
        generation_s=generation.seconds,
        work_s=generation.work_s,
        tail_s=generation.tail_s,
        training_s=split.training_s,
        training_measured=trainers.measured(split.train_gpus),
        step_s=split.step_s,
    )


def plan_table(question: Question, answer: SplitPlan) -> Group:
    place = answer.candidates.index(answer.best)
    near = answer.candidates[max(0, place - SHOWN_EACH_SIDE) : place + SHOWN_EACH_SIDE + 1]
    unit = step_unit(split.step_s / 60.0 for split in near)
    budget = question.gpus or question.rollout_gpus + question.train_gpus
    limit = f"{answer.trainers.limit_bytes / 1e9:.0f}"
    rows = [
        _Shown(
            split,
            answer.trainers.layout(split.train_gpus),
            split is answer.best,
            answer.trainers.measured(split.train_gpus),
            budget - split.gpus,
            unit,
        )
        for split in near
    ]
    title = f"{question.model.name} on {question.rollout_hardware.name}, window {question.window}"
    if question.train_hardware is not question.rollout_hardware:
        title += f", training on {question.train_hardware.name}"
    extrapolated = not all(row.measured for row in rows)
    notes = [_legend([row.layout for row in rows]), _in_words(answer), *_notes(question, answer, extrapolated)]
    table = Sheet(
        COLUMNS,
        rows,
        title,
        looks=(SHEET,),
        headings=[column.heading.format(unit=unit.name, limit=limit) for column in COLUMNS],
        style=lambda row: "bold green" if row.best else "",
    )
    return Group(table, Text(), *(Note(note, "dim") for note in notes))


def _workers(generation: Generation) -> str:
    return f"{generation.gpus} = {generation.engines} x {generation.option.gpus}"


def _ranks(layout: ReplicaLayout) -> str:
    replica = layout.replica
    ranks = f"{replica.tensor}x{replica.pipeline}x{layout.data}"
    context = f"xc{replica.context}" if replica.context > 1 else ""
    expert = f" e{replica.expert}" if replica.expert > 1 else ""
    return ranks + context + expert + (" r" if replica.recompute else "")


def _legend(layouts: list[ReplicaLayout]) -> str:
    replicas = [layout.replica for layout in layouts]
    parts = [
        LEGEND,
        *(["c2: 2 ranks share a sequence"] if any(replica.context > 1 for replica in replicas) else []),
        *(["e8: 8 ranks share the experts"] if any(replica.expert > 1 for replica in replicas) else []),
        *(["r: activations recomputed"] if any(replica.recompute for replica in replicas) else []),
    ]
    return "; ".join(parts) + "."


def _in_words(answer: SplitPlan) -> str:
    layout = answer.trainers.layout(answer.best.train_gpus)
    replica = layout.replica
    ways = [f"tensor {replica.tensor}", f"pipeline {replica.pipeline}", f"data {layout.data}"]
    ways += [f"context {replica.context}"] if replica.context > 1 else []
    ways += [f"expert {replica.expert}"] if replica.expert > 1 else []
    return (
        f"Best trainer: {', '.join(ways)} parallel, micro-batches of {replica.micro_batch_tokens:,} tokens, "
        f"activations {'recomputed' if replica.recompute else 'kept'}: {layout.memory_bytes / 1e9:.1f} of "
        f"{answer.trainers.limit_bytes / 1e9:.1f} GB an accelerator."
    )


def _notes(question: Question, answer: SplitPlan, extrapolated: bool) -> list[str]:
    notes = ["* extrapolated"] if extrapolated else []
    versions, version_bytes = question.host_versions, question.model.weights_bytes
    notes.append(
        f"each host keeps {versions} versions of {version_bytes / 1e9:.1f} GB in memory: "
        f"{versions * version_bytes / 1e9:.1f} GB"
    )
    on_policy = question.window == 1
    if on_policy:
        notes.append("window 1: training overlaps generation only as responses of the same step finish")
    if answer.transfer_s is not None:
        if on_policy:
            where = "within the step"
        elif answer.transfer_s < answer.best.step_s:
            where = "hidden behind the next step"
        else:
            where = "which bounds the step from below"
        notes.append(f"weights cross the link in {answer.transfer_s:.1f} s, {where}")
    return notes


def _waits_for(split: Split) -> str:
    generation = split.generation
    stages_s = max(generation.seconds, split.training_s)
    if not generation.ready_s and split.link_s > stages_s:
        return "link"
    if generation.seconds <= split.training_s:
        return "train"
    return "tail" if generation.tail_s > max(generation.work_s, split.training_s) else "rollout"
