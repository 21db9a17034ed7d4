"""``dora plan``"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dora.cli.options import JsonOption, given_options
from dora.cli.output import print_json, stdout
from dora.errors import InvalidValue

if TYPE_CHECKING:
    from dora.orchestrator.core.cost import CostModel
    from dora.planning.allocation import Split, TrainingTime
    from dora.planning.plan import Plan, Question
    from dora.planning.workload import StepWorkload

EXAMPLE = "dora plan --model qwen2.5-32b --hardware h800 --gpus 64"
SHOWN_EACH_SIDE = 4  # candidates beside the best
ADJUSTMENT = ("--generation-s", "--training-s", "--engines")
TWO_DATACENTRES = ("--rollout-gpus", "--train-gpus", "--rollout-hardware", "--link-gbps")

Model = Annotated[str, typer.Option(help="qwen2.5-7b, -14b, -32b, -72b, qwen3-30b-a3b or longcat-flash.")]
HardwareName = Annotated[str, typer.Option(help="h800, h20 or npu-60gb.")]
Gpus = Annotated[int, typer.Option(min=0, help="All accelerators of one datacentre.")]
RolloutGpus = Annotated[int, typer.Option(min=0, help="Two datacentres: the budget for rollout.")]
TrainGpus = Annotated[int, typer.Option(min=0, help="Two datacentres: the budget for training.")]
RolloutHardware = Annotated[str, typer.Option(help="Two datacentres: that of rollout; by default --hardware.")]
LinkGbps = Annotated[float, typer.Option(min=0.0, help="Two datacentres: Gbit/s between them.")]
TrainSAt = Annotated[
    list[str] | None, typer.Option(metavar="GPUS=SECONDS", help="A measured training step; may be repeated.")
]
TrainMultiple = Annotated[int, typer.Option(help="A trainer has a multiple of so many accelerators.")]
Window = Annotated[int, typer.Option(help="Policy versions that may be live.")]
Groups = Annotated[int, typer.Option(help="Prompt groups a step.")]
GroupSize = Annotated[int, typer.Option(help="Responses to one prompt.")]
PromptTokens = Annotated[float, typer.Option(help="Mean prompt length.")]
MeanTokens = Annotated[float, typer.Option(help="Mean response length.")]
CapTokens = Annotated[int, typer.Option(help="Longest response.")]
LengthsOption = Annotated[
    str, typer.Option(metavar="lognormal:MU,SIGMA,CAP", help="Response lengths, instead of mean and cap.")
]
Slots = Annotated[int, typer.Option(help="Requests that one engine decodes at once.")]
GpusPerEngine = Annotated[int, typer.Option(min=0, help="Accelerators of one engine; 0: chosen.")]
Cost = Annotated[
    Path | None, typer.Option(help="Cost of such an engine, as `dora profile --out` writes it; else a roofline's.")
]
Efficiency = Annotated[float, typer.Option(help="Generation time over its bubble-free bound.")]
GenerationS = Annotated[float | None, typer.Option(help="Measured: say how many DP groups to add.")]
TrainingS = Annotated[float | None, typer.Option(help="Measured, with --generation-s and --engines.")]
Engines = Annotated[int, typer.Option(min=0, help="DP groups that generate at present.")]


def plan(
    context: typer.Context,
    model: Model = "qwen2.5-32b",
    hardware: HardwareName = "h800",
    gpus: Gpus = 0,
    rollout_gpus: RolloutGpus = 0,
    train_gpus: TrainGpus = 0,
    rollout_hardware: RolloutHardware = "",
    link_gbps: LinkGbps = 0.0,
    train_s_at: TrainSAt = None,
    train_multiple: TrainMultiple = 4,
    window: Window = 3,
    groups: Groups = 512,
    group_size: GroupSize = 16,
    prompt_tokens: PromptTokens = 120.0,
    mean_tokens: MeanTokens = 2400.0,
    cap_tokens: CapTokens = 30_000,
    lengths: LengthsOption = "",
    slots: Slots = 256,
    gpus_per_engine: GpusPerEngine = 0,
    cost: Cost = None,
    efficiency: Efficiency = 1.05,
    generation_s: GenerationS = None,
    training_s: TrainingS = None,
    engines: Engines = 0,
    as_json: JsonOption = False,
) -> None:
    """Split accelerators between rollout and training; or say how many DP groups generation needs more.

    StreamRL's Algorithm 1: the split whose slower stage is fastest, with the fewest accelerators that reach it; in two
    datacentres the faster stage gives accelerators back until the two differ least; in a window of 1, where the stages
    overlap only as a step is streamed, the one with the shortest step.
    """
    from dora.planning.hardware import find_hardware
    from dora.planning.models import find_model
    from dora.planning.plan import Question, default_training, make_plan

    _refuse_ignored(given_options(context))
    if generation_s is not None or training_s is not None:
        _adjust(generation_s, training_s, engines, as_json)
        return
    spec = find_model(model)
    workload = _workload(lengths, mean_tokens, cap_tokens, groups, group_size, prompt_tokens)
    question = Question(
        model=spec,
        rollout_hardware=find_hardware(rollout_hardware, "--rollout-hardware")
        if rollout_hardware
        else find_hardware(hardware),
        workload=workload,
        training=_measured(train_s_at, train_multiple)
        or default_training(spec, find_hardware(hardware), workload, train_multiple),
        window=window,
        gpus=gpus,
        rollout_gpus=rollout_gpus,
        train_gpus=train_gpus,
        link_bits_per_s=link_gbps * 1e9,
        slots=slots,
        gpus_per_engine=gpus_per_engine,
        cost=None if cost is None else read_cost(cost),
        efficiency=efficiency,
    )
    answer = make_plan(question)
    if as_json:
        print_json(report(question, answer))
    else:
        stdout().print(_table(question, answer))


def _refuse_ignored(given: Mapping[str, Any]) -> None:
    """Raises InvalidValue for an option that the others given leave without any meaning."""
    adjusts = "--generation-s" in given or "--training-s" in given
    measured = "--train-s-at" in given and "--rollout-hardware" in given
    ignored: tuple[tuple[bool, Sequence[str], str], ...] = (
        (adjusts, [each for each in given if each not in (*ADJUSTMENT, "--json")], "with --generation-s"),
        (not adjusts, ["--engines"], "without --generation-s and --training-s"),
        (bool(given.get("--gpus")), TWO_DATACENTRES, "with --gpus, the accelerators of one datacentre"),
        ("--lengths" in given, ["--mean-tokens", "--cap-tokens"], "with --lengths"),
        (measured, ["--hardware"], "with --train-s-at and --rollout-hardware, which leave it nothing to say"),
    )
    for applies, options, reason in ignored:
        for option in options:
            if applies and option in given:
                raise InvalidValue(option, given[option], f"left out {reason}")


def read_cost(file: Path) -> "CostModel":
    """The coefficients of a file that ``dora profile --out`` wrote. Raises InvalidValue, naming the field."""
    from dora.planning.profile import coefficients_of

    try:
        text = file.read_text()
        tree = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidValue("--cost", str(file), f"a readable TOML or JSON file ({error})") from error
    cluster = tree.get("cluster") if isinstance(tree, dict) else None
    section = cluster.get("cost") if isinstance(cluster, dict) else None
    if not isinstance(section, dict):
        raise InvalidValue("--cost", str(file), "a file with a table cluster.cost")
    return coefficients_of(section).model()


def report(question: "Question", answer: "Plan") -> dict[str, Any]:
    """The whole answer as one JSON object: the best split's fields, what it rests on, and every candidate."""
    option = answer.best.generation.option
    return {
        "model": question.model.name,
        "rollout_hardware": question.rollout_hardware.name,
        "window": question.window,
        **_row(question.training, answer.best),
        "transfer_s": answer.transfer_s,
        "slots": option.slots,
        "kv_tokens": option.kv_tokens,
        "kv_token_bytes": question.model.kv_token_bytes,
        "weights_bytes": question.model.weights_bytes,
        "cost": {field: getattr(option.cost, field) for field in option.cost.__slots__},
        "n_tokens": question.workload.n_tokens,
        "c_tokens": question.workload.c_tokens,
        "train_s_at": [list(point) for point in question.training.points],
        "candidates": [_row(question.training, split) for split in answer.candidates],
    }


def _row(training: "TrainingTime", split: "Split") -> dict[str, int | float | bool]:
    generation = split.generation
    return {
        "gpus": split.gpus,
        "rollout_gpus": generation.gpus,
        "train_gpus": split.train_gpus,
        "engines": generation.engines,
        "gpus_per_engine": generation.option.gpus,
        "generation_s": generation.seconds,
        "work_s": generation.work_s,
        "tail_s": generation.tail_s,
        "training_s": split.training_s,
        "training_measured": training.measured(split.train_gpus),
        "step_s": split.step_s,
    }


def _table(question: "Question", answer: "Plan") -> Table:
    from dora.sim.units import step_unit

    place = answer.candidates.index(answer.best)
    shown = answer.candidates[max(0, place - SHOWN_EACH_SIDE) : place + SHOWN_EACH_SIDE + 1]
    title = f"{question.model.name} on {question.rollout_hardware.name}, window {question.window}"
    table = Table(title=title, title_justify="left", header_style="bold")
    unit = step_unit(split.step_s / 60.0 for split in shown)
    times = (f"generation {unit.name}", f"training {unit.name}", f"step {unit.name}")
    for column in ("", "rollout", "train", "unused", "engines", *times, "waits for"):
        table.add_column(column, justify="right")
    budget = question.gpus or question.rollout_gpus + question.train_gpus
    for split in shown:
        generation, best = split.generation, split is answer.best
        table.add_row(
            "best" if best else "",
            str(generation.gpus),
            str(split.train_gpus),
            str(budget - split.gpus),
            f"{generation.engines} x {generation.option.gpus}",
            f"{generation.seconds / unit.seconds:.2f}",
            f"{split.training_s / unit.seconds:.2f}" + ("" if question.training.measured(split.train_gpus) else "*"),
            f"{split.step_s / unit.seconds:.2f}",
            _waits_for(split),
            style="bold green" if best else None,
        )
    notes = [] if all(question.training.measured(split.train_gpus) for split in shown) else ["* extrapolated"]
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
    table.caption = "; ".join(notes) or None
    return table


def _waits_for(split: "Split") -> str:
    """What a step of this split takes its time for."""
    generation = split.generation
    stages_s = max(generation.seconds, split.training_s)
    if not generation.ready_s and split.link_s > stages_s:
        return "link"
    if generation.seconds <= split.training_s:
        return "train"
    return "tail" if generation.tail_s > max(generation.work_s, split.training_s) else "rollout"


def _workload(
    lengths: str, mean_tokens: float, cap_tokens: int, groups: int, group_size: int, prompt_tokens: float
) -> "StepWorkload":
    from dora.planning.workload import Lognormal, lognormal_of_mean, step_workload

    if lengths:
        kind, _, numbers = lengths.partition(":")
        try:
            mu, sigma, cap = numbers.split(",")
            drawn = Lognormal(float(mu), float(sigma), int(cap))
        except ValueError as error:
            raise InvalidValue("--lengths", lengths, "lognormal:MU,SIGMA,CAP") from error
        if kind != "lognormal":
            raise InvalidValue("--lengths", lengths, "lognormal:MU,SIGMA,CAP")
    else:
        drawn = lognormal_of_mean(mean_tokens, cap_tokens)
    return step_workload(drawn, groups, group_size, prompt_tokens)


def _measured(points: list[str] | None, multiple: int) -> "TrainingTime | None":
    """The measured points, by number of accelerators; None where none is given."""
    from dora.planning.allocation import TrainingTime

    measured = []
    for point in points or []:
        gpus, _, seconds = point.partition("=")
        try:
            measured.append((int(gpus), float(seconds)))
        except ValueError as error:
            raise InvalidValue("--train-s-at", point, "GPUS=SECONDS, e.g. 40=774") from error
    return TrainingTime(tuple(sorted(measured)), multiple) if measured else None


def _adjust(generation_s: float | None, training_s: float | None, engines: int, as_json: bool) -> None:
    """Dynamic adjustment, from times measured in a run."""
    from dora.orchestrator.core.adjustment import groups_to_add

    for option, value in (("--generation-s", generation_s), ("--training-s", training_s), ("--engines", engines)):
        if not value:
            raise InvalidValue(option, value, "above 0: all of --generation-s, --training-s and --engines")
    assert generation_s is not None and training_s is not None
    added = groups_to_add(generation_s, training_s, engines)
    expected_s = generation_s * engines / (engines + added)
    if as_json:
        lag = {"lag_s": generation_s - training_s, "lag_after_s": expected_s - training_s}
        print_json({"groups_to_add": added, "engines": engines + added, "generation_s": expected_s, **lag})
    else:
        stdout().print(f"add {added} DP groups: {engines + added} would generate in {expected_s:.1f} s")
