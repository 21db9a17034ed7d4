"""The generated part of docs/convergence.md: tables and bars in Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dora.errors import InvalidValue
from experiments.convergence.intervals import Estimate
from experiments.convergence.report import SOONER_BAR

BEGIN: Final = "<!-- results: written by python -m experiments.convergence -->"
END: Final = "<!-- end of results -->"
REWARD_PLOT: Final = "convergence-reward.svg"
LIMITS_PLOT: Final = "convergence-limits.svg"


def with_results(page: str, results: str, mark: str = BEGIN, end_mark: str = END) -> str:
    """``page`` with ``results`` between the two marks. Raises InvalidValue for a page without them."""
    before, begin, rest = page.partition(mark)
    _, end, after = rest.partition(end_mark)
    if not (begin and end):
        raise InvalidValue("--page", page[:80], f"a page with the lines {mark} and {end_mark}")
    return f"{before}{mark}\n\n{results.strip()}\n\n{end_mark}{after}"


def write_page(path: Path, results: str) -> None:
    path.write_text(with_results(path.read_text(), results))


def markdown(report: Mapping[str, Any]) -> str:
    """Setup, rates, modes, bars, staleness and limits, as far as there are runs of them."""
    setup = report["setup"]
    parts = [
        f"{setup['steps']} steps, learning rate {setup['learning_rate']:g}, mean and 95% interval over seeds (their "
        f"number in brackets). Load average of the machine while it ran: {setup['load']}.",
    ]
    if report["rates"]:
        parts += [
            "**The learning rate**, by the mean reward of sync over all steps, with seeds of its own.",
            _rates(report),
        ]
    if report["modes"]:
        level = "" if setup["level"] is None else f" The level is a reward of {_number(setup['level'])}."
        parts += [f"**By mode.**{level}", _modes(report["modes"])]
        parts += [f"![Reward by samples and by the clock]({REWARD_PLOT})"]
    if report["bars"]:
        parts += ["**Bars.**", _bars(report)]
    if report["limits"]:
        base = report["modes"].get(report["base_of_limits"], {}).get("title", report["base_of_limits"])
        parts += [f"**What limits.** Each row is {base} with one thing changed.", _limits(report)]
    if report["staleness"]:
        parts.append(f"![Staleness, and what it does]({LIMITS_PLOT})")
    if report["failures"]:
        parts += ["**Promises that were broken:**", "\n".join(f"- {each}" for each in report["failures"])]
    return "\n\n".join(parts)


def _rates(report: Mapping[str, Any]) -> str:
    chosen = f"{report['setup']['learning_rate']:g}"
    rows = [[f"**{rate}**" if rate == chosen else rate, estimated(each)] for rate, each in report["rates"].items()]
    return table(["learning rate", "mean reward"], rows)


def _modes(modes: Mapping[str, Mapping[str, Any]]) -> str:
    """Seeds are in brackets; those that did not reach the level are counted at its steps."""
    heads = ["", "staleness", "end reward", "over sync's", "steps to the level", "measured s a step", "trainer waits"]
    heads += ["sooner, measured", "simulated min a step", "sooner, simulated"]
    rows = []
    for row in modes.values():
        missed = "" if row.get("reached", row["seeds"]) == row["seeds"] else f" ({row['reached']} of {row['seeds']})"
        rows.append(
            [
                f"{row['title']} ({row['seeds']})" if row["seeds"] else row["title"],
                estimated(row["staleness_mean"], 2),
                estimated(row["end_reward"]),
                estimated(row["end_difference"], signed=True),
                f"{estimated(row.get('steps_to_level'), 1)}{missed}",
                estimated(row["step_s"], 2),
                _share(row["waited_share"]),
                estimated(row.get("sooner_measured"), 2),
                _number(row["fleet_step_min"], 2),
                estimated(row.get("sooner_fleet"), 2),
            ]
        )
    return table(heads, rows)


def _bars(report: Mapping[str, Any]) -> str:
    heads = ["", "reaches sync's reward", f"{SOONER_BAR:g} times sooner, measured", "simulated"]
    words = {True: "yes", False: "**no**", None: "-"}
    rows = [
        [report["modes"][name]["title"], *(words[met] for bar, met in bars.items() if not bar.startswith("policy"))]
        for name, bars in report["bars"].items()
    ]
    return table(heads, rows)


def _limits(report: Mapping[str, Any]) -> str:
    rows = [report["modes"][report["base_of_limits"]]] if report["base_of_limits"] in report["modes"] else []
    cells = [
        [
            f"{row['title']} ({row['seeds']})",
            estimated(row["staleness_mean"], 2),
            estimated(row["end_reward"]),
            estimated(row["end_difference"], signed=True),
            estimated(row["mean_reward"]),
            estimated(row.get("steps_to_level"), 1),
        ]
        for row in [*rows, *report["limits"].values()]
    ]
    return table(["", "staleness", "end reward", "over sync's", "all steps", "steps to the level"], cells)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def lines() -> Iterator[str]:
        yield f"| {' | '.join(heads)} |"
        yield f"|{'|'.join(['---', *['---:'] * (len(heads) - 1)])}|"
        yield from (f"| {' | '.join(row)} |" for row in rows)

    return "\n".join(lines())


def estimated(found: Estimate | None, digits: int = 3, signed: bool = False) -> str:
    if found is None:
        return "-"
    mean = f"{found.mean:+.{digits}f}" if signed else f"{found.mean:.{digits}f}"
    return mean if found.half is None else f"{mean} ± {found.half:.{digits}f}"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: Estimate | float | None) -> str:
    number = value.mean if isinstance(value, Estimate) else value
    return "-" if number is None else f"{number:.1%}"
