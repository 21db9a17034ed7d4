"""The tables, findings and figures of docs/pinning.md, from the results that are there, in short form."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Final, get_args

from experiments.convergence.intervals import estimate, first_at, running_mean
from experiments.convergence.page import estimated, table
from experiments.convergence.plots import COLOURS, draw_mean, drawn, legend, panel
from experiments.pinning.cell import BY_NAME, REGIMES, Cell, Failures
from experiments.pinning.fleet import PAUSES as FLEET_PAUSES
from experiments.pinning.fleet import RULES, WIDE, WINDOWS, runs
from experiments.pinning.grid import FAILED_REGIMES, FAILING, MAIN, PAUSES, RATES, RECALL, SEEDS, SLOWER, Result, cells

LEVEL: Final = 0.8  # of the reward, as the mean of
LEVEL_STEPS: Final = 5
SLOWER_MAX: Final = 1.03  # of pinned over the best of the others in the fleet, at pauses of a step or longer
ERROR_MAX: Final = 1e-6
HEADS: Final = (
    "regime (seeds)", "steps to the level", "time to it", "end reward", "time of a step", "staleness, oldest", "wasted",
    "prefilled twice", "error, token's version", "error, claimed version", "ratio p99",
)  # fmt: skip
MISSING: Final = "Not run yet."
REWARD_PLOT, FLEET_PLOT = "pinning-reward.svg", "pinning-fleet.svg"


def shortened(result: Result) -> Result:
    """Time and reward of each step, and the means of all other signals."""
    if "means" in result:
        return result
    steps = result["steps"]
    means = {name: _mean(values) for name, values in steps.items() if name not in ("at", "reward")}
    means |= {"oldest": max(steps["oldest"]), "ratio_max": max(each for each in steps["ratio_max"] if each == each)}
    return {**result, "steps": {name: steps[name] for name in ("at", "reward")}, "means": means}


def _mean(values: Iterable[float]) -> float:
    """Without NaN: a step without a learning signal has no ratios. 0 of nothing."""
    found = [each for each in values if each == each]
    return fmean(found) if found else 0.0


class Results:
    """All short results, by cell."""

    def __init__(self, results: Sequence[Result], fleets: Sequence[Result]) -> None:
        self.cells = {tuple(each["cell"].values()): shortened(each) for each in results}
        self.fleets = {(run["rule"], run["window"], run["pause"]): each for each in fleets for run in (each["run"],)}

    def of(self, like: Cell, regime: str) -> list[Result]:
        """Of all seeds."""
        seeds = (tuple(replace(like, regime=regime, seed=seed).specification.values()) for seed in range(100))
        return [self.cells[each] for each in seeds if each in self.cells]

    def fleet(self, rule: str, window: int, pause: float) -> Result | None:
        found = self.fleets.get((rule, window, pause))
        return None if found is None or found["stalled"] else found


def steps_to(result: Result) -> int | None:
    """Steps until the mean reward of LEVEL_STEPS is the level."""
    index = first_at(running_mean(result["steps"]["reward"], LEVEL_STEPS), LEVEL)
    return None if index is None else index + 1


def end_reward(result: Result) -> float:
    """The mean of the last quarter of the steps."""
    rewards = result["steps"]["reward"]
    return fmean(rewards[-max(1, len(rewards) // 4) :])


def step_time(result: Result) -> float:
    return float(result["steps"]["at"][-1] / len(result["steps"]["at"]))


def _share(found: Sequence[Result], name: str) -> float:
    return _mean(each["totals"][name] / each["totals"]["sampled"] for each in found)


# -------------------------------------------------------------------------------------------------------------- tables


def markdown(of: Results) -> str:
    """Every table that has results, with its findings."""
    pauses = [(f"pause {pause:g}", replace(MAIN, pause=pause)) for pause in PAUSES]
    others = [("recall", RECALL), (f"lookup, rate {RATES[1]:g}", SLOWER)]
    parts = [
        f"{len(of.cells)} of {len(list(cells()))} runs and {len(of.fleets)} of {len(list(runs()))} simulations made, "
        "on two cores that others used too. Intervals are of 95% over seeds (their number in brackets). "
        "The reward of one seed tells little.",
        f"**The main point**: {MAIN.task}, a pause of {MAIN.pause:g}. *Level*: a reward of {LEVEL}; in brackets, the "
        "seeds that reached it. *Error*: of logprobs, in nats: mean and largest.",
        table(HEADS, [_row(each.title, found) for each in REGIMES if (found := of.of(MAIN, each.name))]),
        f"![Reward by samples and by the clock]({REWARD_PLOT})",
        "**By the tool's pause**: units of time a step; in brackets, tokens wasted.",
        _grid(of, pauses, lambda found: f"{_mean(map(step_time, found)):.2f} ({_share(found, 'wasted'):.0%})"),
        "**A harder task, and slower learning**: reward at the end; in brackets, units of time a step.",
        _grid(of, others, lambda found: f"{_mean(map(end_reward, found)):.2f} ({_mean(map(step_time, found)):.2f})"),
        "**Failing environments**: reward at the end; in brackets, groups lost, and units of time a step.",
        _failures(of),
        "**The fleet**: minutes a step; in brackets, the staleness of the oldest session.",
        _fleet(of),
        f"![Time of a step in the fleet]({FLEET_PLOT})",
        f"**The fastest pinned fleet beside the others**: times as long a step; bold: missed (at most {SLOWER_MAX:g}). "
        "*As stale*: its oldest session is no staler than the other's; in brackets, the other of the largest ratio.",
        _beside(of),
        "\n".join(f"- {each}" for each in _findings(of)),
    ]
    return "\n\n".join(parts)


def _row(title: str, found: Sequence[Result]) -> list[str]:
    reached = [(each, steps) for each in found if (steps := steps_to(each)) is not None]
    return [
        f"{title} ({len(found)})",
        f"{estimated(estimate([steps for _, steps in reached]), 0)} ({len(reached)})",
        estimated(estimate([each["steps"]["at"][steps - 1] for each, steps in reached]), 0),
        estimated(estimate([end_reward(each) for each in found]), 2),
        estimated(estimate([step_time(each) for each in found]), 2),
        f"{_mean(each['means']['staleness'] for each in found):.2f}, {max(each['means']['oldest'] for each in found)}",
        f"{_share(found, 'wasted'):.1%}",
        f"{_share(found, 'again'):.1%}",
        _errors(found, "token"),
        _errors(found, "claimed"),
        f"{_mean(each['means']['ratio_p99'] for each in found):.2f}",
    ]


def _errors(found: Sequence[Result], kind: str) -> str:
    mean = _mean(each["errors"][f"{kind}_mean"] for each in found)
    return f"{mean:.0e}, {max(each['errors'][f'{kind}_max'] for each in found):.0e}"


def _grid(of: Results, columns: Sequence[tuple[str, Cell]], cell: Callable[[list[Result]], str]) -> str:
    there = [(head, like) for head, like in columns if any(of.of(like, each.name) for each in REGIMES)]
    rows = [
        [each.title, *(cell(found) if (found := of.of(like, each.name)) else "-" for _, like in there)]
        for each in REGIMES
    ]
    return table(["regime", *(head for head, _ in there)], rows) if there else MISSING


def _failures(of: Results) -> str:
    handlings = [(0.0, "replaced"), *((failing, how) for failing in FAILING for how in get_args(Failures))]
    rows = []
    for failing, how in handlings:
        like, row = replace(MAIN, failing=failing, failures=how), [f"{failing:.0%}, {how}" if failing else "none"]
        for found in (of.of(like, regime)[:SEEDS] for regime in FAILED_REGIMES):
            lost = _mean(each["groups"]["lost"] / each["groups"]["begun"] for each in found)
            figures = f"{_mean(map(end_reward, found)):.2f} ({lost:.1%}, {_mean(map(step_time, found)):.2f})"
            row.append(figures if found else "-")
        rows += [row] if set(row[1:]) != {"-"} else []
    return table(["environments that fail", *(BY_NAME[each].title for each in FAILED_REGIMES)], rows)


def _fleet(of: Results) -> str:
    rows = []
    for rule in RULES:
        for window in sorted((*WINDOWS, WIDE)):
            found = [of.fleet(rule, window, pause) for pause in sorted(FLEET_PAUSES)]
            cells = (f"{each['step_s'] / 60:.1f} ({each['oldest']})" if each else "-" for each in found)
            rows += [[f"{rule}, window {window}", *cells]] if any(found) else []
    return table(["", *(f"pause {pause:g}" for pause in sorted(FLEET_PAUSES))], rows)


def _findings(of: Results) -> Iterator[str]:
    """What the figures say of the bars of learning, met or missed."""
    pinned = [each for regime in REGIMES if regime.rule == "pinned" for each in of.of(MAIN, regime.name)]
    if pinned:
        wasted, largest = _share(pinned, "wasted"), max(each["errors"]["claimed_max"] for each in pinned)
        yield f"Pinned wastes {wasted:.0%} of the tokens: {_verdict(not wasted)}."
        mean, bar = _mean(each["errors"]["claimed_mean"] for each in pinned), f"at most {ERROR_MAX:g}"
        yield f"Its logprob error is {mean:.0e} in the mean ({bar}: {_verdict(mean <= ERROR_MAX)})."
        yield f"Its largest logprob error is {largest:.0e} ({bar}: {_verdict(largest <= ERROR_MAX)})."


def _beside(of: Results) -> str:
    """The fastest pinned fleet beside the fastest other one, and, no staler, beside each other one."""
    rows = []
    for pause in (each for each in sorted(FLEET_PAUSES) if each >= 1.0):
        every = [each for rule in RULES for window in (*WINDOWS, WIDE) if (each := of.fleet(rule, window, pause))]
        own = [each for each in every if each["run"]["rule"] == RULES[0]]
        others = [each for each in every if each not in own]
        if own and others:
            best = min(others, key=_step_s)
            row = [f"{pause:g}", _ratio(min(map(_step_s, own)) / _step_s(best), best)]
            ratios = [
                (min(allowed) / _step_s(each), each)
                for each in others
                if each["run"]["window"] > 1
                and (allowed := [_step_s(found) for found in own if found["oldest"] <= each["oldest"]])
            ]
            least, most = (by(ratios, key=itemgetter(0), default=None) for by in (min, max))
            rows.append([*row, f"{least[0]:.2f} to {_ratio(*most)}" if least and most else "-"])
    return table(["pause", "at any staleness", "as stale"], rows) if rows else MISSING


def _step_s(found: Result) -> float:
    return float(found["step_s"])


def _ratio(ratio: float, other: Result) -> str:
    run, number = other["run"], f"{ratio:.2f}" if ratio <= SLOWER_MAX else f"**{ratio:.2f}**"
    return f"{number} ({run['rule']}, window {run['window']})"


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


# ------------------------------------------------------------------------------------------------------------- figures


def draw(of: Results, folder: Path) -> None:
    """Writes both figures into ``folder``."""

    def reward(figure: Any) -> None:
        for axes, by_clock in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
            title, x_label = ("By the clock", "units of time") if by_clock else ("By samples", "steps")
            panel(axes, title, x_label, "reward")
            for colour, regime in zip(COLOURS, REGIMES, strict=True):
                curves = [
                    (each["steps"]["at"] if by_clock else range(1, len(each["steps"]["at"]) + 1),
                     running_mean(each["steps"]["reward"], LEVEL_STEPS))
                    for each in of.of(MAIN, regime.name)
                ]  # fmt: skip
                draw_mean(axes, curves, colour, regime.title, band=False)
            legend(axes, fontsize=8)

    def fleet(figure: Any) -> None:
        every = figure.subplots(1, len(WINDOWS), sharey=True)
        for axes, window in zip(every, sorted(WINDOWS), strict=True):
            panel(axes, f"window {window}", "tools' pause, steps", "minutes a step" if axes is every[0] else "")
            axes.set_xscale("log")
            for colour, rule in zip(COLOURS, RULES, strict=False):
                points = [(p, each["step_s"] / 60) for p in sorted(FLEET_PAUSES) if (each := of.fleet(rule, window, p))]
                if points:
                    axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, label=rule)
        legend(every[0], fontsize=8)

    drawn(reward, (11, 4.2), folder / REWARD_PLOT)
    drawn(fleet, (13, 3.8), folder / FLEET_PLOT)
