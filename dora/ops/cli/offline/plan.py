"""``dora plan``"""

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dora.errors import InvalidValue
from dora.ops.cli import completion
from dora.ops.cli.options import JsonOption, passed_options, refuse_options
from dora.ops.cli.output import print_result

if TYPE_CHECKING:
    from dora.core.forecast.cost import CostModel
    from dora.lab.planning.allocation import TrainingTime
    from dora.lab.planning.workload import StepWorkload

EXAMPLE = "dora plan --model qwen2.5-32b --hardware h800 --gpus 64"
ADJUSTMENT = ("--generation-s", "--training-s", "--engines")
TWO_DATACENTRES = ("--rollout-gpus", "--train-gpus", "--rollout-hardware", "--link-gbps")

Model = Annotated[
    str,
    typer.Option(
        metavar="NAME|DIR|CONFIG.JSON",
        autocompletion=completion.planned_models,
        help="qwen2.5-7b, -14b, -32b, -72b, qwen3-30b-a3b, longcat-flash, or any model's folder or config.json.",
    ),
]
HardwareName = Annotated[
    str,
    typer.Option(
        autocompletion=completion.hardware,
        help="Accelerator: h800, h20, npu-60gb, a100-80gb, h100, h200, b200 or mi300x. With two datacentres: the "
        "accelerator for training.",
    ),
]
Gpus = Annotated[int, typer.Option(min=0, help="Number of accelerators in one datacentre.")]
RolloutGpus = Annotated[int, typer.Option(min=0, help="Two datacentres: accelerators available for rollout.")]
TrainGpus = Annotated[int, typer.Option(min=0, help="Two datacentres: accelerators available for training.")]
RolloutHardware = Annotated[
    str,
    typer.Option(
        autocompletion=completion.hardware, help="Two datacentres: the accelerator for rollout; default: --hardware."
    ),
]
LinkGbps = Annotated[float, typer.Option(min=0.0, help="Two datacentres: bandwidth between them, in Gbit/s.")]
TrainSAt = Annotated[
    list[str] | None, typer.Option(metavar="GPUS=SECONDS", help="A measured training step; may be repeated.")
]
TrainMultiple = Annotated[int, typer.Option(help="The trainer's accelerator count is a multiple of this.")]
Window = Annotated[int, typer.Option(help="Maximum number of live policy versions.")]
Groups = Annotated[int, typer.Option(help="Prompt groups a step.")]
GroupSize = Annotated[int, typer.Option(help="Responses per prompt.")]
PromptTokens = Annotated[float, typer.Option(help="Mean prompt length.")]
MeanTokens = Annotated[float, typer.Option(help="Mean response length.")]
CapTokens = Annotated[int, typer.Option(help="Longest response.")]
LengthsOption = Annotated[
    str, typer.Option(metavar="lognormal:MU,SIGMA,CAP", help="Distribution of response lengths; replaces mean and cap.")
]
Slots = Annotated[int, typer.Option(help="Concurrent requests per engine.")]
GpusPerEngine = Annotated[int, typer.Option(min=0, help="Accelerators per engine; 0: chosen automatically.")]
Cost = Annotated[
    Path | None,
    typer.Option(help="File with an engine's cost, from `dora profile --out`; default: a roofline model."),
]
DraftAcceptance = Annotated[
    float,
    typer.Option(
        min=0.0, max=0.99, help="Share of drafted tokens that are accepted (workers.speculation); 0: none are drafted."
    ),
]
Efficiency = Annotated[float, typer.Option(help="Ratio of generation time to its bubble-free bound.")]
GenerationS = Annotated[
    float | None, typer.Option(help="Measured generation time of a step: computes how many workers to add.")
]
TrainingS = Annotated[
    float | None, typer.Option(help="Measured training time of a step, with --generation-s and --engines.")
]
Engines = Annotated[int, typer.Option(min=0, help="Number of workers that generate now.")]


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
    draft_acceptance: DraftAcceptance = 0.0,
    generation_s: GenerationS = None,
    training_s: TrainingS = None,
    engines: Engines = 0,
    as_json: JsonOption = False,
) -> None:
    """Split accelerators between rollout and training, or compute how many workers generation needs in addition.

    This is StreamRL's Algorithm 1. Each role uses its best parallel configuration that fits into memory. In one
    datacentre, it chooses the split whose slower stage is fastest, with the fewest accelerators. In two datacentres,
    the faster stage releases accelerators until the stages differ least. With a window of 1, where the stages overlap
    only while a step is streamed, it chooses the split with the shortest step.
    """
    from dora.data.hardware import find_hardware
    from dora.lab.planning.plan import Question, default_training, make_plan
    from dora.ops.cli.offline.model_architecture import planned_model
    from dora.ops.view.plan import plan_table, plan_tree

    _refuse_ignored(context)
    if generation_s is not None or training_s is not None:
        _adjust(generation_s, training_s, engines, as_json)
        return
    spec = planned_model(model)
    workload = _workload(lengths, mean_tokens, cap_tokens, groups, group_size, prompt_tokens)
    question = Question(
        model=spec,
        rollout_hardware=find_hardware(rollout_hardware, "--rollout-hardware")
        if rollout_hardware
        else find_hardware(hardware),
        train_hardware=find_hardware(hardware),
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
        draft_acceptance=draft_acceptance,
    )
    answer = make_plan(question)
    print_result(plan_tree(question, answer), plan_table(question, answer), as_json)


def _refuse_ignored(context: typer.Context) -> None:
    passed = passed_options(context)
    if "--generation-s" in passed or "--training-s" in passed:
        others = [option for option in passed if option not in (*ADJUSTMENT, "--json")]
        refuse_options(context, others, "with --generation-s")
    else:
        refuse_options(context, ["--engines"], "without --generation-s and --training-s")
    if passed.get("--gpus"):
        refuse_options(context, TWO_DATACENTRES, "with --gpus, the accelerators of one datacentre")
    if "--lengths" in passed:
        refuse_options(context, ["--mean-tokens", "--cap-tokens"], "with --lengths")


def read_cost(file: Path) -> "CostModel":
    """Reads the coefficients from a file of ``dora profile --out``. Raises InvalidValue, naming the field."""
    from dora.core.forecast.cost import CostModel
    from dora.lab.planning.profile import coefficients_of

    try:
        text = file.read_text(encoding="utf-8")
        tree = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidValue("--cost", str(file), f"a readable TOML or JSON file ({error})") from error
    cluster = tree.get("cluster") if isinstance(tree, dict) else None
    section = cluster.get("cost") if isinstance(cluster, dict) else None
    if not isinstance(section, dict):
        raise InvalidValue("--cost", str(file), "a file with a table cluster.cost")
    return CostModel.of(coefficients_of(section))


def _workload(
    lengths: str, mean_tokens: float, cap_tokens: int, groups: int, group_size: int, prompt_tokens: float
) -> "StepWorkload":
    from dora.lab.planning.workload import Lognormal, lognormal_of_mean, step_workload

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
    from dora.lab.planning.allocation import TrainingTime

    measured = []
    for point in points or []:
        gpus, _, seconds = point.partition("=")
        try:
            measured.append((int(gpus), float(seconds)))
        except ValueError as error:
            raise InvalidValue("--train-s-at", point, "GPUS=SECONDS, e.g. 40=774") from error
    return TrainingTime(tuple(sorted(measured)), multiple) if measured else None


def _adjust(generation_s: float | None, training_s: float | None, engines: int, as_json: bool) -> None:
    from dora.core.forecast.adjustment import groups_to_add
    from dora.ops.view.plan import Adjustment

    for option, value in (("--generation-s", generation_s), ("--training-s", training_s), ("--engines", engines)):
        if not value:
            raise InvalidValue(option, value, "above 0: give all of --generation-s, --training-s and --engines")
    assert generation_s is not None and training_s is not None
    added = groups_to_add(generation_s, training_s, engines)
    expected_s = generation_s * engines / (engines + added)
    found = Adjustment(added, engines + added, expected_s, generation_s - training_s, expected_s - training_s)
    said = f"add {added} workers: {engines + added} would generate in {expected_s:.1f} s"
    print_result(asdict(found), said, as_json)
