"""The simulated fleet's table for docs/convergence.md: an adaptive window beside fixed ones, by regime of learning."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from experiments.staleness.fleet import AUTO, ROWS, SYNC, Outcome
from experiments.staleness.regimes import mean_ratio

AUTO_MAX: Final = 1.02  # of auto's time to the level, over that of the best fixed row and over sync's
SOONER_MIN: Final = 1.5  # of windows 2 and 3 over sync, in FINE
SAMPLES_MAX: Final = 1.03
FINE: Final = "fine-tuning"
BARRED: Final = (2, 3)

ByRow = Mapping[int | str, Sequence[Outcome]]  # of one split and regime: each row's outcomes in the order of seeds


def fleet_markdown(outcomes: Sequence[Outcome]) -> str:
    """A table for each split, and the bars; empty without outcomes. Rows without all seeds are left out."""
    parts = []
    for name in dict.fromkeys(each.split for each in outcomes):
        of_split = [each for each in outcomes if each.split == name]
        by_regime = {regime: _by_row(of_split, regime) for regime in dict.fromkeys(each.regime for each in of_split)}
        parts += [f"**Split {name}.**", _table(by_regime), _bars(by_regime)]
    return "\n\n".join(each for each in parts if each)


def _by_row(outcomes: Sequence[Outcome], regime: str) -> ByRow:
    own = sorted((each for each in outcomes if each.regime == regime), key=lambda each: each.seed)
    seeds = {each.seed for each in own}
    rows = {row: [each for each in own if each.row == row] for row in ROWS}
    return {row: found for row, found in rows.items() if len(found) == len(seeds)}


def _table(by_regime: Mapping[str, ByRow]) -> str:
    rows = [row for row in ROWS if any(row in of_regime for of_regime in by_regime.values())]
    heads = [row if isinstance(row, str) else f"window {row}" for row in rows]
    lines = [f"| regime | {' | '.join(heads)} | auto / best | auto / sync |", f"|---|{'---:|' * (len(rows) + 2)}"]
    for name, of_regime in by_regime.items():
        cells = [_cell(of_regime.get(row, ())) for row in rows]
        lines.append(
            f"| {name} | {' | '.join(cells)} | {_ratio(_to_best(of_regime))} | {_ratio(_to_sync(of_regime))} |"
        )
    return "\n".join(lines)


def _cell(of: Sequence[Outcome]) -> str:
    if not of:
        return "-"
    return f"{fmean(_hours(of)):.1f} h ({fmean(each.reached.steps for each in of):.0f})"


def _hours(of: Sequence[Outcome]) -> list[float]:
    return [each.reached.hours for each in of]


def _to_best(rows: ByRow) -> float | None:
    fixed = [found for row, found in rows.items() if row != AUTO]
    if AUTO not in rows or not fixed:
        return None
    return max(mean_ratio(_hours(rows[AUTO]), _hours(found)) for found in fixed)


def _to_sync(rows: ByRow) -> float | None:
    return mean_ratio(_hours(rows[AUTO]), _hours(rows[SYNC])) if {AUTO, SYNC} <= rows.keys() else None


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _bars(by_regime: Mapping[str, ByRow]) -> str:
    """One sentence for each bar: what was measured, and whether it is met."""
    lines = []
    for words, ratio_of in (("the best of the others", _to_best), ("sync", _to_sync)):
        found = {name: ratio for name, rows in by_regime.items() if (ratio := ratio_of(rows)) is not None}
        over = [f"{name} ({ratio:.3f})" for name, ratio in found.items() if ratio > AUTO_MAX]
        if found:
            missed = f"**missed** in {', '.join(over)}" if over else "met in every regime"
            lines.append(f"- Auto takes at most {AUTO_MAX - 1:.0%} longer than {words}: {missed}.")
    fine = by_regime.get(FINE, {})
    for row in BARRED:
        if {row, SYNC} <= fine.keys():
            sooner = mean_ratio(_hours(fine[SYNC]), _hours(fine[row]))
            samples = mean_ratio(*([each.reached.steps for each in fine[name]] for name in (row, SYNC)))
            lines.append(
                f"- Window {row}, {FINE}: {sooner:.2f} times sooner than sync ({_word(sooner >= SOONER_MIN)}: "
                f"{SOONER_MIN:g}), {samples:.3f} times its samples ({_word(samples <= SAMPLES_MAX)}: {SAMPLES_MAX:g})."
            )
    return "\n".join(lines)


def _word(is_met: bool) -> str:
    return "met" if is_met else "**missed**"
