"""``dora simulate``"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from dora.config import DEFAULT_POLICY
from dora.errors import MISSING, InvalidValue, one_of
from dora.ops.cli import completion
from dora.ops.cli.exits import ExitCode
from dora.ops.cli.options import WINDOW_METAVAR, JsonOption, passed_options, refuse_options, window_size
from dora.ops.cli.output import print_json, progress_bar, stderr, stdout

if TYPE_CHECKING:
    from dora.config import WindowSize
    from dora.lab.sim.figures.report import BrokenReport, Report, Timeline
    from dora.lab.sim.scenario import Scenario

EXAMPLE = "dora simulate --preset dora-64 --window 3 --steps 8 --compare"


class SplitChoice(StrEnum):
    """Source of the split of accelerators between training and rollout."""

    PRESET = "preset"
    PLAN = "plan"


Preset = Annotated[
    str,
    typer.Option(
        autocompletion=completion.presets,
        help="A cluster and its workload, such as dora-64; see `dora simulate presets`.",
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        autocompletion=completion.simulated_policies,
        help=f"Strategy; default: the scenario's, which is {DEFAULT_POLICY} in presets.",
    ),
]
Window = Annotated[
    str | None,
    typer.Option(metavar=WINDOW_METAVAR, help="Maximum number of live policy versions; auto adapts it."),
]
Steps = Annotated[int, typer.Option(min=1, help="Measured training steps.")]
Warmup = Annotated[int, typer.Option(min=0, help="Training steps before the measurement.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed for prompts and lengths.")]
Predictor = Annotated[
    str | None,
    typer.Option(autocompletion=completion.predictors, help="Length predictor: oracle, statistics or ranker."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        autocompletion=completion.scenario_settings,
        help="Override one field; may be repeated.",
    ),
]
File = Annotated[Path | None, typer.Option(help="A scenario file (TOML); its fields override the preset's.")]
Split = Annotated[SplitChoice, typer.Option(help="plan: split the accelerators as `dora plan` does.")]
Compare = Annotated[bool, typer.Option("--compare", metavar="", help="Compare all policies.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a timeline of the run: .png, .svg or .html.")]


class Origin(TypedDict):
    """The command line that a report came from."""

    warmup: Annotated[int, "steps before the measured ones"]
    settings: Annotated[list[str], "the values of `--set`"]
    split: Annotated[str, "source of the split of accelerators: `preset` or `plan`"]


class ComparisonTree(Origin):
    """A comparison of all policies on one preset (`--compare`)."""

    preset: Annotated[str, "name of the preset, or `custom`"]
    seed: Annotated[int, "seed of prompts and lengths"]
    steps: Annotated[int, "measured steps, after the warm-up"]
    policies: Annotated[list[dict[str, Any]], "each policy"]


@dataclass(frozen=True, slots=True)
class SimulateInputs:
    """Inputs that are equal for all policies of one command. ``options`` define the scenario."""

    steps: int
    warmup: int
    seed: int
    options: tuple[str, ...]
    settings: tuple[str, ...]
    split: SplitChoice
    as_json: bool

    def origin(self) -> Origin:
        """The inputs that a report does not contain."""
        return {"warmup": self.warmup, "settings": list(self.settings), "split": self.split.value}

    def replay(self, scenario: "Scenario") -> str:
        """Returns the command that runs this scenario alone."""
        chosen = {"policy": scenario.balance.policy, "window": scenario.window.size}
        if self.split is SplitChoice.PLAN and not scenario.cluster.colocated:
            chosen["split"] = self.split.value
        length = {"steps": self.steps, "warmup": self.warmup, "seed": self.seed}
        named = [part for name, value in (chosen | length).items() for part in (f"--{name}", str(value))]
        return shlex.join(["dora", "simulate", *self.options, *named])


app = typer.Typer(
    invoke_without_command=True,
    epilog=f"Example: {EXAMPLE}",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback()
def simulate(
    context: typer.Context,
    preset: Preset = "",
    policy: Policy = "",
    window: Window = None,
    steps: Steps = 8,
    warmup: Warmup = 2,
    seed: Seed = 0,
    predictor: Predictor = None,
    settings: Settings = None,
    file: File = None,
    split: Split = SplitChoice.PRESET,
    compare: Compare = False,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Run the real orchestrator core in virtual time, with simulated engines, links and trainer.

    The command exits with 1 if a guarantee was violated: a response mixed versions, staleness exceeded its bound, or a
    group was lost or delivered twice.
    """
    if context.invoked_subcommand is not None:
        reason = f"before {context.invoked_subcommand}, which has its own options"
        refuse_options(context, passed_options(context), reason)
        return
    from dora.config import merged, settings_tree, tree_of, value_at
    from dora.lab.sim.effect import check_effect
    from dora.lab.sim.partial import strategies
    from dora.orchestrator.plugins import load_strategies

    load_strategies()
    over = settings_tree(file, settings or (), option="--file")
    if predictor is not None:
        over = merged(over, tree_of("balance.predictor", predictor))
    if not preset and not over:
        from dora.lab.sim.presets import LISTED_BY

        raise InvalidValue(
            "--preset",
            MISSING,
            f"given, or replaced by a --file, a --set, or a preset of `{LISTED_BY}`, such as dora-64",
        )
    if compare:
        if policy or plot:
            raise InvalidValue("--policy" if policy else "--plot", policy or str(plot), "left out with --compare")
        policy_named = value_at(over, "balance.policy")
        if policy_named is not None:
            raise InvalidValue("balance.policy", policy_named, "left out with --compare, which runs all of them")
        chosen = list(strategies())
    else:
        chosen = [_known_policy(policy or str(value_at(over, "balance.policy") or DEFAULT_POLICY), tuple(strategies()))]
    size = window_size(window)
    scenarios = [_scenario(over, preset, each, size, split, compare) for each in chosen]
    check_effect(scenarios, over)
    options = _scenario_options(preset, file, settings or (), predictor)
    inputs = SimulateInputs(steps, warmup, seed, options, tuple(settings or ()), split, as_json)
    if compare:
        _compare(scenarios, inputs)
    else:
        _run_one(scenarios[0], inputs, plot)


def _scenario_options(
    preset: str, file: Path | None, settings: Sequence[str], predictor: str | None
) -> tuple[str, ...]:
    named = (
        ("--preset", preset),
        ("--file", file),
        ("--predictor", predictor),
        *(("--set", each) for each in settings),
    )
    return tuple(part for name, value in named if value for part in (name, str(value)))


def _scenario(
    over: Mapping[str, Any], preset: str, policy: str, window: "WindowSize | None", split: SplitChoice, compare: bool
) -> "Scenario":
    """Returns the scenario for one policy.

    In a comparison, each policy has the nearest window that it allows, and colocated ones have their own split. With
    ``auto``, a policy that supports only fixed windows gets the one nearest to the default.
    """
    from dora.config import merged, tree_of, value_at
    from dora.core.policies import allows_any, nearest_window
    from dora.lab.sim.partial import strategies
    from dora.lab.sim.presets import composed, planned
    from dora.lab.sim.scenario import Scenario

    size = value_at(over, "window.size") if window is None else window
    if compare and size == "auto" and not allows_any(policy, strategies()):
        size = Scenario().window.size
    if compare and isinstance(size, int):
        window = nearest_window(policy, size, strategies())
        over = merged(over, tree_of("window.size", window))
    scenario = composed(over, preset, policy, window, shared=True)
    if split is SplitChoice.PRESET or (compare and scenario.cluster.colocated):
        return scenario
    return planned(scenario)


def _run_one(scenario: "Scenario", inputs: SimulateInputs, plot: Path | None) -> None:
    from dora.lab.sim.figures.report import Timeline
    from dora.ops.view.simulation import report_table, report_tree

    if plot is None:
        report = _report(scenario, inputs)
    else:
        from dora.lab.sim.figures.plot import check_plot, draw

        check_plot(plot)
        timeline = Timeline()
        report = _report(scenario, inputs, timeline=timeline)
        draw(timeline, report, plot)
    if inputs.as_json:
        print_json(_finite(report_tree(report, scenario) | inputs.origin() | {"replay": inputs.replay(scenario)}))
    else:
        stdout().print(report_table(report, scenario))
        if plot is not None:
            stdout().print(f"timeline: {plot}", markup=False, soft_wrap=True)
    _exit_if_broken([report])


def _compare(scenarios: list["Scenario"], inputs: SimulateInputs) -> None:
    from dora.ops.view.comparison import comparison, comparison_table

    reports = [
        _report(scenario, inputs, f" ({number} of {len(scenarios)})")
        for number, scenario in enumerate(scenarios, start=1)
    ]
    rows = comparison(reports, scenarios)
    if inputs.as_json:
        tree = ComparisonTree(
            preset=scenarios[0].name,
            seed=inputs.seed,
            steps=inputs.steps,
            policies=[asdict(row) for row in rows],
            **inputs.origin(),
        )
        print_json(_finite(tree))
    else:
        stdout().print(comparison_table(rows))
    _exit_if_broken(reports)


def _report(
    scenario: "Scenario", inputs: SimulateInputs, place: str = "", timeline: "Timeline | None" = None
) -> "Report":
    """Simulates with a progress bar. If a guarantee is violated or a bug found, prints all that is known and exits."""
    from dora.lab.sim.run import BrokenRun
    from dora.lab.sim.run import simulate as run

    try:
        with progress_bar(stderr(), f"{scenario.name}, {scenario.balance.policy}{place}") as tell:
            return run(
                scenario, steps=inputs.steps, warmup=inputs.warmup, seed=inputs.seed, timeline=timeline, progress=tell
            )
    except BrokenRun as error:
        _show_broken(error.report, inputs.replay(scenario), inputs.as_json)
        raise typer.Exit(ExitCode.FAILED) from error


def _show_broken(report: "BrokenReport", replay: str, as_json: bool) -> None:
    if as_json:
        print_json(asdict(report) | {"replay": replay})
        return
    out = stderr()
    run = f"{report.preset}, {report.policy}, window {report.window}, seed {report.seed}"
    what = "an exception was raised" if report.raised else "a promise was broken"
    out.print(f"dora: {run}: {what} after {report.at_s:.3f} s of simulated time", markup=False, soft_wrap=True)
    out.print(f"  {report.violation}", markup=False, soft_wrap=True)
    out.print(f"  {replay}", markup=False, soft_wrap=True)


def _known_policy(policy: str, known: Sequence[str]) -> str:
    if policy not in known:
        raise InvalidValue("--policy", policy, one_of(policy, known))
    return policy


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not abs(tree) < float("inf") else tree


def _exit_if_broken(reports: list["Report"]) -> None:
    if any(report.violations or report.lost or report.duplicated for report in reports):
        raise typer.Exit(ExitCode.FAILED)
