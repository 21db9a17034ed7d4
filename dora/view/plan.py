"""The planner's answer, as a person sees it and as one JSON object."""

from dataclasses import asdict
from textwrap import fill
from typing import Any, Final

from rich.console import Group
from rich.text import Text

from dora.planning.allocation import Split
from dora.planning.layout import Layout
from dora.planning.plan import Plan, Question
from dora.planning.training import Trainers
from dora.sim.units import step_unit
from dora.view.tables import sheet

SHOWN_EACH_SIDE: Final = 4  # candidates beside the best
WIDTH: Final = 100  # characters, of the notes; the table is narrower unless its numbers are very long
HEADINGS: Final = (
    "", "rollout =\nworkers x GPUs", "train =\nTxPxD", "unused", "generation\n{unit}", "training\n{unit}",
    "step\n{unit}", "waits\nfor", "GB\nof {limit:.0f}",
)  # fmt: skip
LEGEND: Final = "T, P, D: tensor, pipeline and data parallel ranks; GB: of an accelerator that trains"


def plan_tree(question: Question, answer: Plan) -> dict[str, Any]:
    """The whole answer: the best split's fields, what it rests on, and every candidate."""
    option = answer.best.generation.option
    return {
        "model": question.model.name,
        "rollout_hardware": question.rollout_hardware.name,
        "train_hardware": question.train_hardware.name,
        "window": question.window,
        **_tree(answer.trainers, answer.best),
        "transfer_s": answer.transfer_s,
        "slots": option.slots,
        "kv_tokens": option.kv_tokens,
        "kv_token_bytes": question.model.kv_token_bytes,
        "weights_bytes": question.model.weights_bytes,
        "cost": {field: getattr(option.cost, field) for field in option.cost.__slots__},
        "n_tokens": question.workload.n_tokens,
        "c_tokens": question.workload.c_tokens,
        "train_s_at": [list(point) for point in question.training.points],
        "train_memory_bytes": answer.trainers.limit_bytes,
        "candidates": [_tree(answer.trainers, split) for split in answer.candidates],
    }


def _tree(trainers: Trainers, split: Split) -> dict[str, Any]:
    generation, layout = split.generation, trainers.layout(split.train_gpus)
    return {
        "gpus": split.gpus,
        "rollout_gpus": generation.gpus,
        "train_gpus": split.train_gpus,
        "engines": generation.engines,
        "gpus_per_engine": generation.option.gpus,
        "layout": asdict(layout.replica) | {"data": layout.data, "memory_bytes": layout.memory_bytes},
        "generation_s": generation.seconds,
        "work_s": generation.work_s,
        "tail_s": generation.tail_s,
        "training_s": split.training_s,
        "training_measured": trainers.measured(split.train_gpus),
        "step_s": split.step_s,
    }


def plan_table(question: Question, answer: Plan) -> Group:
    """The best split among its nearest candidates, and what must be known of them."""
    place = answer.candidates.index(answer.best)
    shown = answer.candidates[max(0, place - SHOWN_EACH_SIDE) : place + SHOWN_EACH_SIDE + 1]
    unit = step_unit(split.step_s / 60.0 for split in shown)
    limit_gb = answer.trainers.limit_bytes / 1e9
    table = sheet((heading.format(unit=unit.name, limit=limit_gb) for heading in HEADINGS), words=0)
    budget = question.gpus or question.rollout_gpus + question.train_gpus
    for split in shown:
        generation, layout, best = split.generation, answer.trainers.layout(split.train_gpus), split is answer.best
        table.add_row(
            "best" if best else "",
            f"{generation.gpus} = {generation.engines} x {generation.option.gpus}",
            f"{split.train_gpus} = {_ranks(layout)}",
            str(budget - split.gpus),
            f"{generation.seconds / unit.seconds:.2f}",
            f"{split.training_s / unit.seconds:.2f}" + ("" if answer.trainers.measured(split.train_gpus) else "*"),
            f"{split.step_s / unit.seconds:.2f}",
            _waits_for(split),
            f"{layout.memory_bytes / 1e9:.1f}",
            style="bold green" if best else None,
        )
    title = f"{question.model.name} on {question.rollout_hardware.name}, window {question.window}"
    if question.train_hardware is not question.rollout_hardware:
        title += f", training on {question.train_hardware.name}"
    layouts = [answer.trainers.layout(split.train_gpus) for split in shown]
    extrapolated = not all(answer.trainers.measured(split.train_gpus) for split in shown)
    notes = [_legend(layouts), _in_words(answer), *_notes(question, answer, extrapolated)]
    return Group(Text(title, "bold"), table, Text("\n" + "\n".join(fill(note, WIDTH) for note in notes), "dim"))


def _ranks(layout: Layout) -> str:
    replica = layout.replica
    ranks = f"{replica.tensor}x{replica.pipeline}x{layout.data}"
    context = f"xc{replica.context}" if replica.context > 1 else ""
    expert = f" e{replica.expert}" if replica.expert > 1 else ""
    return ranks + context + expert + (" r" if replica.recompute else "")


def _legend(layouts: list[Layout]) -> str:
    replicas = [layout.replica for layout in layouts]
    parts = [
        LEGEND,
        *(["c2: 2 ranks for one sequence"] if any(replica.context > 1 for replica in replicas) else []),
        *(["e8: 8 ranks that share the experts"] if any(replica.expert > 1 for replica in replicas) else []),
        *(["r: activations recomputed"] if any(replica.recompute for replica in replicas) else []),
    ]
    return "; ".join(parts) + "."


def _in_words(answer: Plan) -> str:
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


def _notes(question: Question, answer: Plan, extrapolated: bool) -> list[str]:
    notes = ["* extrapolated"] if extrapolated else []
    on_policy = question.window == 1
    if on_policy:
        notes.append("window 1: training runs beside generation only as far as a step's own responses have ended")
    if answer.transfer_s is not None:
        if on_policy:
            where = "within the step"
        elif answer.transfer_s < answer.best.step_s:
            where = "hidden behind the next step"
        else:
            where = "and no step can be shorter"
        notes.append(f"weights cross the link in {answer.transfer_s:.1f} s, {where}")
    return notes


def _waits_for(split: Split) -> str:
    """What a step of this split takes its time for."""
    generation = split.generation
    stages_s = max(generation.seconds, split.training_s)
    if not generation.ready_s and split.link_s > stages_s:
        return "link"
    if generation.seconds <= split.training_s:
        return "train"
    return "tail" if generation.tail_s > max(generation.work_s, split.training_s) else "rollout"
