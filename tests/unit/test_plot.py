"""The timeline of a simulated run: files are made, of a size that shows something, and say what they must."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dora.errors import InvalidValue
from dora.lab.sim.figures.panels import ARROW_GAP, ARROWS_MAX, BESIDE_MAX, ROWS_MAX, bundled
from dora.lab.sim.figures.plot import draw
from dora.lab.sim.figures.report import Arrow, Report, Span, StepSpan, Timeline
from tests.refusals import refused

REPORT = Report(
    preset="dora-64", policy="dora", window=3, window_last=3, window_changes=(), predictor="oracle", seed=0, steps=4,
    engines=6, step_time_min=17.0, rollout_only_fraction=0.22, dp_groups_to_add=2, tokens_per_s=20_000.0,
    generated_tokens_per_s=19_000.0,
    staleness_max=2, staleness_mean=0.8, staleness_groups=(800, 858, 390), step_staleness=(0.7, 0.8, 0.9, 0.8),
    step_took_min=(17.0,) * 4, step_waited_min=(3.7,) * 4,
    bound_min=15.63, bound_consumed_min=15.6, work_done_over_consumed=1.0,
    kv_utilisation=0.8, violations=0, lost=0, duplicated=0, filter_fraction=0.0, redundant_fraction=0.0,
    groups_filtered=0, groups_dropped=0, tokens_wasted_fraction=0.0, migrations_kv=120, migrations_reprefill=0,
    preemptions=3, overhead_balancing=0.004, overhead_transfer=0.01, overhead_reprefill=0.0, recall_longest_20=1.0,
    events=10_000, simulated_s=6120.0, wall_s=2.0, sim_speedup=3060.0,
)  # fmt: skip


def made_up(engines: int, steps: int, step_s: float = 1020.0) -> Timeline:
    """Every DP group goes on to the next version a little later than the one before it, and fills up and empties."""
    rng = np.random.default_rng(engines)
    timeline = Timeline()
    for step in range(steps):
        begin_s = step * step_s
        for worker in range(engines):
            load_s = begin_s + step_s * 0.6 * worker / engines
            end_s = load_s + step_s if step < steps - 1 else steps * step_s
            timeline.spans.append(Span(worker, -1, load_s, load_s + 20.0))
            timeline.spans.append(Span(worker, step, load_s + 20.0, end_s))
            for at_s in np.linspace(load_s + 20.0, end_s, 30):
                timeline.kv.append((float(at_s), worker, float(0.9 * abs(np.sin(at_s / 300.0 + worker)))))
        for at_s in np.sort(rng.uniform(begin_s, begin_s + step_s, 15)):
            source, target = rng.choice(engines, 2, replace=engines < 2)
            timeline.arrows.append(Arrow(float(at_s), int(source), int(target), step))
        busy = ((begin_s + step_s * 0.1, begin_s + step_s * 0.5), (begin_s + step_s * 0.62, begin_s + step_s))
        timeline.steps.append(StepSpan(step, begin_s, begin_s + step_s, busy, (200, 180, 132)))
    timeline.spans.sort(key=lambda span: span.begin_s)
    timeline.kv.sort()
    return timeline


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".html", b"<!doctype html>")])
def test_each_kind_of_file_is_made(tmp_path: Path, suffix: str, magic: bytes) -> None:
    file = tmp_path / f"run{suffix}"
    draw(made_up(6, 6), REPORT, file)
    content = file.read_bytes()
    assert content.startswith(magic)
    assert 20_000 < len(content) < 3_000_000


def test_the_drawing_says_what_it_shows(tmp_path: Path) -> None:
    file = tmp_path / "run.svg"
    draw(made_up(6, 6), REPORT, file)
    text = file.read_text()
    for words in ("dora-64", "window 3", "17.00 min a step", "1.09 x the bubble-free 15.63", "w5", "v5", "warm-up"):
        assert words in text, words


def test_short_steps_are_told_in_seconds(tmp_path: Path) -> None:
    file = tmp_path / "run.svg"
    draw(made_up(2, 3, step_s=9.6), replace(REPORT, step_time_min=0.16, bound_min=0.08), file)
    assert "9.60 s a step, 2.00 x the bubble-free 4.80" in file.read_text()


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    draw(made_up(2, 3), replace(REPORT, preset="<b>"), file)
    text = file.read_text()
    assert "<script" not in text and "<link" not in text and "<b>" not in text
    assert "work_done_over_consumed" in text


def test_the_same_run_draws_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw(made_up(3, 3), REPORT, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("suffix", [".png", ".svg", ".html"])
def test_an_empty_timeline_is_drawn_too(tmp_path: Path, suffix: str) -> None:
    draw(Timeline(), replace(REPORT, steps=0, bound_min=0.0), tmp_path / f"run{suffix}")
    assert (tmp_path / f"run{suffix}").stat().st_size > 5000


def test_of_many_workers_and_moves_some_are_shown_and_the_caption_says_so(tmp_path: Path) -> None:
    file = tmp_path / "run.svg"
    timeline = made_up(200, 2)
    timeline.arrows.extend(Arrow(100.0 + index, 0, 100, 0) for index in range(600))
    draw(timeline, replace(REPORT, engines=200), file)
    text = file.read_text()
    assert f"{ROWS_MAX} of 200 workers shown" in text
    assert re.search(rf"{ARROWS_MAX} arrows at most: \d+ of 630 moves, bundled over 0\.85 minutes", text)


def test_moves_of_about_the_same_time_are_one_arrow() -> None:
    steps = [StepSpan(0, 0.0, 4000.0, (), (8,))]  # so moves within 100 s are taken together
    times = {(0, 1): (1.0, 9.0, 120.0), (1, 0): (14.0,)}
    arrows = [Arrow(at_s, *ends, 0) for ends, each in times.items() for at_s in each]
    bundles = bundled(Timeline(steps=steps, arrows=arrows), [0, 1])
    assert [(bundle.source, bundle.target, bundle.moves) for bundle in bundles] == [(0, 1, 2), (1, 0, 1), (0, 1, 1)]
    first, beside, alone = (bundle.at_s for bundle in bundles)
    assert (first + beside) / 2 == pytest.approx((1.0 + 9.0 + 14.0) / 3)
    assert beside - first == pytest.approx(4000.0 * ARROW_GAP)
    assert alone == 120.0
    assert bundled(Timeline(steps=steps, arrows=arrows), [0]) == []


def test_where_much_moves_the_largest_bundles_are_drawn_a_few_of_one_time_and_not_many_in_all(tmp_path: Path) -> None:
    steps = [StepSpan(0, 0.0, 4000.0, (), (8,))]
    at_once = [Arrow(50.0, 0, target, 0) for target in range(1, 20) for _ in range(target)]
    bundles = bundled(Timeline(steps=steps, arrows=at_once), range(20))
    assert sorted(bundle.moves for bundle in bundles) == list(range(20 - BESIDE_MAX, 20))
    everywhere = [Arrow(at_s, 0, target, 0) for at_s in range(0, 4000, 50) for target in range(1, 6)]
    timeline = Timeline(steps=steps, arrows=[*everywhere, *(Arrow(3950.0, 5, 4, 0) for _ in range(7))])
    bundles = bundled(timeline, range(6))
    assert len(bundles) == ARROWS_MAX
    assert max(bundles, key=lambda bundle: bundle.moves) == bundles[-1]
    draw(timeline, REPORT, tmp_path / "run.svg")
    text = (tmp_path / "run.svg").read_text()
    assert f"{ARROWS_MAX} arrows at most: {sum(bundle.moves for bundle in bundles)} of 407 moves" in text
    assert ">moves<" in text and ">10<" in text and ">17<" in text  # in all, by time


@pytest.mark.parametrize("name", ["run.pdf", "run", "no-such-folder/run.png"])
def test_a_file_that_cannot_be_drawn_is_refused(tmp_path: Path, name: str) -> None:
    with refused(InvalidValue, field="--plot"):
        draw(Timeline(), REPORT, tmp_path / name)
    assert not (tmp_path / name).exists()
