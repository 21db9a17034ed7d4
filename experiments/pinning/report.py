"""The tables, findings and figures of docs/pinning.md, from the results that are there."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, get_args

from experiments.convergence.intervals import end_mean, estimate, first_at, mean, running_mean
from experiments.convergence.page import estimated, table
from experiments.convergence.plan import Result
from experiments.convergence.plots import COLOURS, draw_mean, drawn, legend, panel
from experiments.pinning import fleet
from experiments.pinning.cell import (
    FAILED_REGIMES,
    FAILING,
    MAIN,
    MAIN_SEEDS,
    PAUSES,
    RATES,
    RECALL,
    REGIMES,
    SEEDS,
    SLOWER,
    Cell,
    Failures,
    cells,
)

LEVEL: Final = 0.8  # of the reward, as the mean of
LEVEL_STEPS: Final = 5
SLOWER_MAX: Final = 1.03  # of pinned over the best of the others in the fleet, at pauses of a step or longer
ERROR_MAX: Final = 1e-6
HEADS: Final = (
    "regime (seeds)", "steps to the level", "time to it", "end reward", "time of a step", "staleness, oldest", "wasted",
    "prefilled twice", "error, token's version", "error, claimed version", "ratio p99",
)  # fmt: skip
REWARD_PLOT, FLEET_PLOT = "pinning-reward.svg", "pinning-fleet.svg"


@dataclass(frozen=True, slots=True)
class Results:
    """All results that are there."""

    cells: Mapping[Cell, Result]
    fleets: Mapping[fleet.Run, Result]

    def of(self, like: Cell, regime: str) -> list[Result]:
        """Of all seeds."""
        seeds = (replace(like, regime=regime, seed=seed) for seed in range(MAIN_SEEDS))
        return [self.cells[each] for each in seeds if each in self.cells]

    def ended(self, pause: float) -> dict[fleet.Run, Result]:
        """The fleets of a pause that did not stand still."""
        return {run: each for run, each in self.fleets.items() if run.pause == pause and not each["stalled"]}


def steps_to(result: Result) -> int | None:
    """Steps until the mean reward of LEVEL_STEPS is the level."""
    index = first_at(running_mean(result["steps"]["reward"], LEVEL_STEPS), LEVEL)
    return None if index is None else index + 1


def _end_rewards(found: Sequence[Result]) -> list[float]:
    return [end_mean(each["steps"]["reward"]) for each in found]


def _step_times(found: Sequence[Result]) -> list[float]:
    return [each["steps"]["at"][-1] / len(each["steps"]["at"]) for each in found]


def _share(found: Sequence[Result], name: str) -> float:
    return mean(each["totals"][name] / each["totals"]["sampled"] for each in found)


# -------------------------------------------------------------------------------------------------------------- tables


def markdown(of: Results) -> str:
    """Every table, with its findings."""
    regimes = {each.title: name for name, each in REGIMES.items()}
    by_pause = {f"pause {pause:g}": pause for pause in PAUSES}
    others = {"recall": RECALL, f"lookup, rate {RATES[1]:g}": SLOWER}
    handlings = {f"{failing:.0%}, {how}": replace(MAIN, failing=failing, failures=how)
                 for failing in FAILING for how in get_args(Failures)}  # fmt: skip
    failed_regimes = {REGIMES[name].title: name for name in FAILED_REGIMES}
    fleets = {f"{rule}, window {window}": (rule, window) for rule, window in fleet.ROWS}
    parts = [
        f"{len(of.cells)} of {len(list(cells()))} runs and {len(of.fleets)} of {len(list(fleet.runs()))} simulations "
        "made, on two cores that others used too. Intervals are of 95% over seeds (their number in brackets). "
        "The reward of one seed tells little.",
        f"**The main point**: {MAIN.task}, a pause of {MAIN.pause:g}. *Level*: a reward of {LEVEL}; in brackets, the "
        "seeds that reached it. *Error*: of logprobs, in nats: mean and largest.",
        table(HEADS, [_row(title, found) for title, name in regimes.items() if (found := of.of(MAIN, name))]),
        f"![Reward by samples and by the clock]({REWARD_PLOT})",
        "**By the tool's pause**: units of time a step; in brackets, tokens wasted.",
        _grid("regime", regimes, by_pause, lambda name, pause: _wasted(of.of(replace(MAIN, pause=pause), name))),
        "**A harder task, and slower learning**: reward at the end; in brackets, units of time a step.",
        _grid("regime", regimes, others, lambda name, like: _learnt(of.of(like, name))),
        "**Failing environments**: reward at the end; in brackets, groups lost, and units of time a step.",
        _grid("environments that fail", {"none": MAIN, **handlings}, failed_regimes,
              lambda like, name: _failed(of.of(like, name)[:SEEDS])),
        "**The fleet**: minutes a step; in brackets, the staleness of the oldest session.",
        _grid("", fleets, by_pause, lambda row, pause: _fleet(of.fleets.get(fleet.Run(row[0], row[1], pause)))),
        f"![Time of a step in the fleet]({FLEET_PLOT})",
        f"**The fastest pinned fleet beside the others**: times as long a step; bold: missed (at most {SLOWER_MAX:g}). "
        "*As stale*: its oldest session is no staler than the other's; in brackets, the other of the largest ratio.",
        table(["pause", "at any staleness", "as stale"], list(_beside(of))),
        "\n".join(f"- {each}" for each in _findings(of)),
    ]  # fmt: skip
    return "\n\n".join(parts)


def _row(title: str, found: Sequence[Result]) -> list[str]:
    reached = [(each, steps) for each in found if (steps := steps_to(each)) is not None]
    return [
        f"{title} ({len(found)})",
        f"{estimated(estimate([steps for _, steps in reached]), 0)} ({len(reached)})",
        estimated(estimate([each["steps"]["at"][steps - 1] for each, steps in reached]), 0),
        estimated(estimate(_end_rewards(found)), 2),
        estimated(estimate(_step_times(found)), 2),
        f"{mean(each['means']['staleness'] for each in found):.2f}, {max(each['means']['oldest'] for each in found)}",
        f"{_share(found, 'wasted'):.1%}",
        f"{_share(found, 'again'):.1%}",
        _errors(found, "token"),
        _errors(found, "claimed"),
        f"{mean(each['means']['ratio_p99'] for each in found):.2f}",
    ]


def _errors(found: Sequence[Result], kind: str) -> str:
    of_mean = mean(each["errors"][f"{kind}_mean"] for each in found)
    return f"{of_mean:.0e}, {max(each['errors'][f'{kind}_max'] for each in found):.0e}"


def _grid(corner: str, rows: Mapping[str, Any], columns: Mapping[str, Any], cell: Callable[[Any, Any], str]) -> str:
    body = [[title, *(cell(row, column) for column in columns.values())] for title, row in rows.items()]
    return table([corner, *columns], body)


def _wasted(found: Sequence[Result]) -> str:
    return f"{mean(_step_times(found)):.2f} ({_share(found, 'wasted'):.0%})" if found else "-"


def _learnt(found: Sequence[Result]) -> str:
    return f"{mean(_end_rewards(found)):.2f} ({mean(_step_times(found)):.2f})" if found else "-"


def _failed(found: Sequence[Result]) -> str:
    lost = mean(each["groups"]["lost"] / each["groups"]["begun"] for each in found)
    return f"{mean(_end_rewards(found)):.2f} ({lost:.1%}, {mean(_step_times(found)):.2f})" if found else "-"


def _fleet(found: Result | None) -> str:
    return "-" if found is None or found["stalled"] else f"{found['step_s'] / 60:.1f} ({found['oldest']})"


def _findings(of: Results) -> Iterator[str]:
    """What the figures say of the bars of learning, met or missed."""
    pinned = [each for name, regime in REGIMES.items() if regime.rule == "pinned" for each in of.of(MAIN, name)]
    if pinned:
        wasted, bar = _share(pinned, "wasted"), f"at most {ERROR_MAX:g}"
        yield f"Pinned wastes {wasted:.0%} of the tokens: {_verdict(not wasted)}."
        error, largest = (by(each["errors"][f"claimed_{by.__name__}"] for each in pinned) for by in (mean, max))
        yield f"Its logprob error is {error:.0e} in the mean ({bar}: {_verdict(error <= ERROR_MAX)})."
        yield f"Its largest logprob error is {largest:.0e} ({bar}: {_verdict(largest <= ERROR_MAX)})."


def _beside(of: Results) -> Iterator[list[str]]:
    """The fastest pinned fleet beside the fastest other one, and, no staler, beside each other one."""
    for pause in PAUSES[1:]:
        every = of.ended(pause)
        own = [each for run, each in every.items() if run.rule == "pinned"]
        others = [(each["step_s"], run) for run, each in every.items() if run.rule != "pinned"]
        if not own or not others:
            continue
        ratios = [
            (min(allowed) / step_s, run)
            for step_s, run in others
            if run.window > 1
            and (allowed := [each["step_s"] for each in own if each["oldest"] <= every[run]["oldest"]])
        ]
        best_s, best = min(others, key=itemgetter(0))
        row = [f"{pause:g}", _ratio(min(each["step_s"] for each in own) / best_s, best)]
        least, most = (by(ratios, key=itemgetter(0), default=None) for by in (min, max))
        yield [*row, f"{least[0]:.2f} to {_ratio(*most)}" if least and most else "-"]


def _ratio(ratio: float, other: fleet.Run) -> str:
    number = f"{ratio:.2f}" if ratio <= SLOWER_MAX else f"**{ratio:.2f}**"
    return f"{number} ({other.rule}, window {other.window})"


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


# ------------------------------------------------------------------------------------------------------------- figures


def draw(of: Results, folder: Path) -> None:
    """Writes both figures into ``folder``."""

    def reward(figure: Any) -> None:
        for axes, by_clock in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
            title, x_label = ("By the clock", "units of time") if by_clock else ("By samples", "steps")
            panel(axes, title, x_label, "reward")
            for colour, (name, regime) in zip(COLOURS, REGIMES.items(), strict=True):
                steps = [each["steps"] for each in of.of(MAIN, name)]
                curves = [
                    (each["at"] if by_clock else range(1, len(each["at"]) + 1),
                     running_mean(each["reward"], LEVEL_STEPS))
                    for each in steps
                ]  # fmt: skip
                draw_mean(axes, curves, colour, regime.title, band=False)
            legend(axes, fontsize=8)

    def step_time(figure: Any) -> None:
        every = figure.subplots(1, len(fleet.WINDOWS), sharey=True)
        for axes, window in zip(every, fleet.WINDOWS, strict=True):
            panel(axes, f"window {window}", "tools' pause, steps", "minutes a step" if axes is every[0] else "")
            axes.set_xscale("log")
            for colour, rule in zip(COLOURS, fleet.RULES, strict=False):
                found = ((pause, of.ended(pause).get(fleet.Run(rule, window, pause))) for pause in PAUSES)
                points = [(pause, each["step_s"] / 60) for pause, each in found if each]
                if points:
                    axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, label=rule)
        legend(every[0], fontsize=8)

    drawn(reward, (11, 4.2), folder / REWARD_PLOT)
    drawn(step_time, (13, 3.8), folder / FLEET_PLOT)
