"""Every table and every help in a terminal of 80 columns: no word is broken, no number cut, no line longer."""

import io
import re
from collections.abc import Callable
from colorsys import rgb_to_hsv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text
from typer.testing import CliRunner

from dora.config import CostConfig
from dora.core import commands as do
from dora.core import events as on
from dora.data.counters import COUNTERS
from dora.data.engine_samples import Experts, Measurement
from dora.lab.planning.profile import Fit, Validation
from dora.lab.sim.partial import strategies
from dora.lab.sim.presets import NAMES, scenario_for
from dora.ops.cli.app import COMMANDS, SIMULATE_COMMANDS, app
from dora.ops.cli.offline.verify import _table as verify_table
from dora.ops.demo.folder import OutFolder
from dora.ops.demo.summary import print_summary, summary_table
from dora.ops.verify import VerifyReport
from dora.ops.view.comparison import comparison, comparison_table
from dora.ops.view.decisions import CONTINUED, block
from dora.ops.view.decisions import summary_table as replay_table
from dora.ops.view.hosts import hosts_table
from dora.ops.view.live import service_view
from dora.ops.view.pools import pools_line, pools_table
from dora.ops.view.profile import profile_table
from dora.ops.view.service import (
    COUNTER_GROUPS,
    PROMISES,
    by_version,
    counter_group,
    status_table,
    trajectories_table,
    versions_table,
    workers_table,
)
from dora.ops.view.simulation import report_table
from dora.ops.view.tables import VERSION_STYLES, WIDEST, Column, Note, Sheet, abbreviated, short_words
from dora.orchestrator.recovery.replay import Decision, Known, KnownWorker, Summary
from dora.rpc import dora_pb2 as pb
from tests.sweeps import some_of
from tests.unit.cli.service import STATUS
from tests.unit.test_plot import REPORT

WIDTH = 80
FRAME = re.compile(r"[─-╿]")  # box drawing
LONG = "rollout-worker-17.cluster-of-the-second-floor.example.org-000017"  # 64 characters, the most that an id may have
LARGE = (1 << 63) - 1
ALSO_SHOWS = " A wider terminal also shows: work done/used "


def words_in_order(text: str) -> list[str]:
    return FRAME.sub(" ", text).split()


def printed(renderable: Any, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False).print(renderable)
    return stream.getvalue()


def words(text: str) -> set[str]:
    return {word.strip(".,") for word in words_in_order(text)}


def broken_words(narrow: str, wide: str) -> set[str]:
    """Words of ``narrow`` that ``wide`` has not, and that are not abbreviated."""
    return {word for word in words(narrow) - words(wide) if "…" not in word}


def check(renderable: Any, width: int = WIDTH) -> str:
    """The text at ``width``: no line is longer, no word is broken, none but words are abbreviated."""
    text = printed(renderable, width)
    too_long = [line for line in text.splitlines() if cell_len(line) > width]
    assert not too_long, text
    assert not broken_words(text, printed(renderable, 4000) + ALSO_SHOWS), text
    assert not [word for word in words(text) if re.fullmatch(r"[\d.,%:/-]*…[\d.,%:/-]*", word)], text
    return text


# ------------------------------------------------------------------------------------------------------- the services


def extreme(**changes: Any) -> pb.Status:
    """1,024 workers with long names, large numbers, and as many metrics as a commit may have."""
    status = pb.Status()
    status.CopyFrom(STATUS)
    status.model = "/home/somebody/a folder with models/" + "very-long-name-" * 8
    status.trainer = "trainer " * 16
    status.newest_version = status.filling_step = LARGE
    status.groups_per_step = status.filling_left = (1 << 32) - 1
    del status.workers[:]
    for number in range(1024):
        status.workers.add(
            worker_id=f"{LONG[:-4]}{number:04}", epoch=number, state=("ready", "vacating", "lost")[number % 3],
            version=LARGE - number % 2, target_version=LARGE, running=4096, waiting=1_000_000, slots=4096, kv_use=1.0,
            tokens_per_s=123_456_789.0, pid=4_194_304, tensor_parallel=8 if number % 2 else 1, pipeline_parallel=64,
            reason="it is silent for 61 s " * 9 if number % 3 == 2 else "",
        )  # fmt: skip
    for name in list(status.counters):
        status.counters[name] = 1e15
    big = (1 << 32) - 1
    status.versions.add(
        version=LARGE,
        deadline_step=LARGE,
        newest=True,
        workers=1024,
        groups_open=big,
        groups_finished=big,
        requests_running=big,
        requests_waiting=big,
        state="rejected",
        reason="the logprobs of the canary differ " * 9,
    )
    status.window_wait.waits_for, status.window_wait.reason = "agents", f"session g{10**9}.0 of group " + LONG * 4
    status.prompts_total, status.step_s, status.agents_wait_s = LARGE, 1e6, 1e6
    status.warnings.add(at=1e9, level="error", text="the\x1b[2J disk " * 20)
    metrics = {f"{'m' * 124}{number:03}": 1e-12 * number for number in range(120)} | {"loss": float("nan")}
    status.steps.add(step=LARGE, mean_reward=-1e300, tokens=LARGE, took_s=1e6, waited_s=1e6, metrics=metrics)
    return status


def trajectories(count: int) -> list[pb.TrajectoryStatus]:
    long = {"version": LARGE, "deadline_step": LARGE, "worker": LONG, "moves": 1 << 31, "age_s": 1e7}
    return [
        pb.TrajectoryStatus(
            trajectory_id=f"g{10**9}.{number}", prompt_id="reasoning-gym:0:" + "x" * 200, state="running",
            tokens=1 << 22, max_tokens=1 << 22, **long,
        )
        for number in range(count)
    ]  # fmt: skip


STATUSES = {"realistic": STATUS, "extreme": extreme()}


def table_of_workers(status: pb.Status) -> Any:
    return workers_table(by_version(status.workers))


@pytest.mark.parametrize("name", STATUSES)
@pytest.mark.parametrize("table", [status_table, table_of_workers, versions_table])
def test_tables_of_a_service_fit(name: str, table: Callable[[pb.Status], Any]) -> None:
    check(table(STATUSES[name]))


@pytest.mark.parametrize("width", [WIDTH, 120])
def test_the_live_view_fits(width: int) -> None:
    for status in STATUSES.values():
        for steps_planned in (0, 60):
            check(service_view(status, "dora 127.0.0.1:7070", steps_planned), width)


def test_the_trajectories_fit() -> None:
    rows = [pb.TrajectoryStatus(trajectory_id="g3.0", prompt_id="p3", state="moving", worker="w0", max_tokens=256)]
    text = check(trajectories_table(rows, 256))
    assert all(heading in text for heading in ("deadline", "age", "moves")) and "1 of 256" in text
    text = check(trajectories_table(trajectories(1000), 100_000))
    assert "A wider terminal also shows: " in text and "g1000000000.999" in text


def test_a_session_has_the_tokens_of_all_its_turns_and_no_maximum_of_one() -> None:
    rows = [pb.TrajectoryStatus(trajectory_id=f"g{n}.0", tokens=25, max_tokens=most) for n, most in enumerate((0, 96))]
    shown = printed(trajectories_table(rows, 2), 120)
    assert re.search(r"g0\.0 .* 25 ", shown) and "25/96" in shown and "25/0" not in shown


@pytest.mark.parametrize("system", [ColorSystem.STANDARD, ColorSystem.EIGHT_BIT, ColorSystem.TRUECOLOR])
def test_no_version_has_the_red_of_what_is_lost(system: ColorSystem) -> None:
    """In any terminal, and no two that follow each other are alike."""
    styles = [Style.parse(each) for each in VERSION_STYLES]
    grounds = [style.bgcolor.downgrade(system).get_truecolor() for style in styles if style.bgcolor is not None]
    assert len(grounds) == len(styles)
    for ground, following in zip(grounds, [*grounds[1:], grounds[0]], strict=True):
        hue, _, _ = rgb_to_hsv(*(part / 255 for part in ground))
        assert 35 <= 360 * hue <= 325 and ground != following


def test_the_least_important_columns_go_first_and_a_wide_terminal_shows_all() -> None:
    table = workers_table(by_version(STATUS.workers))
    assert "pid" in printed(table, 120) and "A wider terminal" not in printed(table, 120)
    headings = [" ".join(printed(table, width).split()).partition("A wider")[0] for width in (90, 76, 70, 60, 52)]
    shown = [{name for name in ("pid", "slots", "waiting", "use", "tokens/s") if name in text} for text in headings]
    assert shown[0] == {"pid", "slots", "waiting", "use", "tokens/s"}
    assert all(after <= before for before, after in pairwise(shown))
    assert shown[-1] < shown[0] and "tokens/s" in shown[-1]


def test_ranks_are_shown_where_a_worker_has_several() -> None:
    one, two = pb.Status(), pb.Status()
    for status, tensor_parallel in ((one, 1), (two, 2)):
        status.workers.add(worker_id="w0", state="ready", tensor_parallel=tensor_parallel, pipeline_parallel=1)
        status.workers.add(worker_id="w1", state="ready", tensor_parallel=1, pipeline_parallel=1)
        status.workers.add(worker_id="w2", state="lost")
    lines = [line.strip("┃│ ").split() for line in check(workers_table(by_version(two.workers))).splitlines()]
    shown = {line[0]: line[-1] for line in lines if line}
    assert (shown["worker"], shown["w0"], shown["w1"], shown["w2"]) == ("ranks", "2x1", "1x1", "-")
    assert "w0 ready (2x1 ranks), w1 ready, w2 lost" in printed(status_table(two), 120)
    assert "ranks" not in printed(workers_table(by_version(one.workers)), 120) + printed(status_table(one), 120)


def test_the_reasons_of_lost_workers_stand_below_the_table_once_each() -> None:
    text = printed(workers_table(by_version(extreme().workers)), WIDTH)
    assert text.count("it is silent") == printed(Note("it is silent for 61 s " * 9), WIDTH).count("it is silent")
    assert "and 333 more:" in text


def test_of_many_workers_the_live_view_counts_those_alike() -> None:
    text = printed(service_view(extreme(), "dora"), 120)
    assert len(text.splitlines()) < 40
    assert "171 workers" in text and "700,416/700,416" in text


def test_the_last_steps_metrics_are_shown_the_loss_first() -> None:
    status = pb.Status()
    status.CopyFrom(STATUS)
    status.steps.add(step=3, metrics={"entropy": 2.5, "kl": float("nan"), "loss": 0.000012, "tokens": 123456.0})
    shown = printed(status_table(status), WIDTH)
    assert re.search(r"last step +│ 3 .*loss +│ 1.2e-05 .*entropy +│ 2.5 .*kl +│ nan .*tokens +│ 123,456", shown, re.S)
    live = " ".join(words_in_order(printed(service_view(status, "dora"), WIDTH)))
    assert "step 3 loss 1.2e-05 entropy 2.5 kl nan tokens 123,456" in live
    assert "loss" not in printed(service_view(STATUS, "dora"), WIDTH)  # a trainer that sends none


def test_signals_of_each_staleness_stand_behind_the_steps_and_alarms_apart() -> None:
    status = pb.Status()
    status.CopyFrom(STATUS)
    parts = {"staleness_0/clip_fraction": 0.25, "staleness_5+/clip_fraction": 0.5, "staleness_0/alone": 1.0}
    status.steps.add(step=3, metrics={"clip_fraction": 0.31, "alarm_clip_fraction": 0.2, "alarm_bell": 7.0, **parts})
    shown = printed(status_table(status), WIDTH)
    assert re.search(r"alarm +│ clip_fraction 0.31 is above 0.2 ", shown)
    assert re.search(r"clip_fraction +│ 0.31  \(0: 0.25, 5\+: 0.5\)", shown)
    assert re.search(r"alarm_bell +│ 7 ", shown) and re.search(r"staleness_0/alone +│ 1 ", shown)
    assert "alarm_clip_fraction" not in shown
    live = " ".join(words_in_order(printed(service_view(status, "dora"), WIDTH)))
    assert "step 3: clip_fraction 0.31 is above 0.2" in live


# ------------------------------------------------------------------------------------------------------------ reports


@pytest.mark.parametrize("preset", NAMES)
def test_a_comparison_and_a_run_fit(preset: str) -> None:
    scenarios = [scenario_for(preset, policy) for policy in strategies()]
    measured = {"step_time_min": 99.99, "bound_min": 88.88, "tokens_per_s": 999_999.0, "work_done_over_consumed": 1.125}
    found = [
        replace(REPORT, preset=preset, policy=each.balance.policy, window=each.window.size, **measured)  # type: ignore[arg-type]
        for each in scenarios
    ]
    text = check(comparison_table(comparison(found, scenarios)))
    assert "99.99" in text and "work done/used" in text  # left out, and named
    check(comparison_table(comparison(found, scenarios)), 100)
    large = replace(REPORT, preset=preset, tokens_per_s=1e15, migrations_kv=LARGE, preemptions=LARGE, bound_min=1e9)
    for report in (REPORT, large):
        check(report_table(report, scenarios[0]))


PLAN = ("plan", "--rollout-gpus", "64", "--train-gpus", "64", "--link-gbps", "80", "--window", "1")
PRESETS = ("simulate", "presets")
LARGE_PLAN = ("plan", "--gpus", "8192", "--model", "longcat-flash", "--hardware", "npu-60gb", "--cap-tokens", "64000")


@pytest.mark.parametrize("arguments", some_of((PLAN, PRESETS, ("plan", "--gpus", "64"), LARGE_PLAN), PLAN, PRESETS))
def test_what_commands_print_fits(arguments: tuple[str, ...]) -> None:
    narrow, wide = (CliRunner(env={"COLUMNS": str(width)}).invoke(app, arguments).stdout for width in (WIDTH, 4000))
    assert narrow and max(map(cell_len, narrow.splitlines())) <= WIDTH, narrow
    assert not broken_words(narrow, wide + ALSO_SHOWS), narrow


def test_a_profile_fits() -> None:
    cost = CostConfig(kv_token_s=1e-9, weights_s=1.23456, request_s=2e-3, step_s=3e-3, prefill_token_s=1e-6)
    for clock in ("wall", "cpu"):
        measured = Measurement(4096, (), (), (), 1.0, (1.0,), 9.0, Experts(128, 8), clock, engines=64)  # type: ignore[arg-type]
        fitted, checked = Fit(cost, 0.123, 0.456, 12345.6, 0.789), Validation(1 << 40, 1.0, 2.0, 1.0)
        check(profile_table("/models/" + "long-name-" * 12, measured, fitted, checked, 0.15))


def test_a_verification_fits() -> None:
    sentence = f"trajectory {'g' * 100}.0, token 5: recorded logprob -1.000000, version 3 gives -2.000000, off. " * 2
    report = VerifyReport(10**9, 10**12, tuple(range(500)), 1e-5, 1e-6, 10**6, 1e-3, (sentence,) * 30, 10**6, 10**9)
    text = check(verify_table(Path("/records/" + "long-folder-name/" * 8), report))
    assert "v0 to v499" in text and "999,980 more violations" in text


def test_a_replay_fits() -> None:
    workers = tuple(
        KnownWorker(f"{LONG}{n}", LARGE, LARGE, LARGE, False, 4096, 4096, 9, 1 << 40, 1 << 39, 1 << 40)
        for n in range(3)
    )
    by_version = dict.fromkeys(range(16), 10**9)
    known = Known(LARGE, 512, LARGE, (), (512,) * 16, by_version, 10**6, by_version, by_version, 10**6, 64, workers)
    commands = tuple(do.RemoveRequest(LONG, 5, f"g{n}.0", 9) for n in range(20))  # type: ignore[call-arg]
    decision = Decision(
        LARGE, 1e6, on.MigrationRequested("g" * 100 + ".0", LONG), known, commands, refusal="it is not " * 30
    )
    for text in (decision, replace(decision, refusal="")):
        check(Note(block(text, 1e6), indent=CONTINUED, widest=WIDEST))
    counted = {f"Event{n}": 10**12 for n in range(30)}
    check(replay_table(f"/logs/{'x' * 100}", Summary(counted, counted, 10**9, counted, LARGE, LARGE, "event 5 " * 40)))


def test_a_summary_of_the_demo_fits() -> None:
    promises = dict.fromkeys(
        ("groups_lost", "groups_duplicated", "c1_violations", "staleness_max", "groups_admitted", "groups_trained",
         "versions_live_max", "migrations_kv", "migrations_reprefill", "tokens_reprefilled", "workers_lost",
         "requests_parked", "requests_resumed", "workers_killed", "turns_ended", "turns_resumed", "sessions_replaced"),
        10**12,
    )  # fmt: skip
    run = {
        "environment": "dora.ops.demo.agent_tasks:Lookup",
        "conversation": "g1000.7",
        "steps": 10,
        "model": "/models/" + "n" * 100,
        "window": 2,
        "failures": ["one"],
        "not_done": ["two " * 40],
    }
    phases = ("total", "model", "start", "first_step", "later_steps", "end")
    run |= {f"seconds_{phase}": 1e6 for phase in phases}
    run |= {
        "tokens_generated": 10**12,
        "two_versions_share": 0.5,
        "engines_idle_share": 0.1,
        "reward_first": 0.123,
        "evaluated": [{"version": 0, "responses": 8, "reward": 0.25}, {"version": 8, "responses": 8, "reward": 0.5}],
        "reward_last": 0.987,
        "groups_replayed": 10**12,
        "answer_first": "1 2 " * 99,
        "answer_last": "1 2 3 " * 20,
    }
    blackouts = {"blackout_ms_p50": 1e9, "blackout_ms_p99": 1e9, "tokens_per_s": 1e9}
    stream = io.StringIO()
    report = {**promises, **run, **blackouts, "mean_reward_by_step": [0.123, None] * 5}
    print_summary(Console(file=stream, width=WIDTH, highlight=False), report, OutFolder(Path("out/demo")))
    assert max(map(cell_len, stream.getvalue().splitlines())) <= WIDTH
    check(summary_table(report))


# --------------------------------------------------------------------------------------------------------- every help


HELPS = [(), ("simulate",), *((name,) for name in COMMANDS), *(("simulate", name) for name in SIMULATE_COMMANDS)]


@pytest.mark.parametrize(
    "command", some_of(HELPS, (), ("serve",), ("status",), ("simulate",), ("simulate", "sweep")), ids=" ".join
)
def test_every_help_fits_and_its_example_is_one_line(command: tuple[str, ...]) -> None:
    narrow, wide = (
        CliRunner(env={"COLUMNS": str(width)}).invoke(app, [*command, "--help"]).stdout for width in (WIDTH, 4000)
    )
    assert max(map(cell_len, narrow.splitlines())) <= WIDTH
    assert not broken_words(narrow, wide), narrow
    examples = [line.strip() for line in narrow.splitlines() if "Example: " in line]
    assert len(examples) == 1 and examples[0].startswith(f"Example: {' '.join(('dora', *command))}")
    assert f"{examples[0]}\n" in re.sub(" +\n", "\n", wide), "the example goes on in another line"


# -------------------------------------------------------------------------------------------------------------- parts


def test_a_long_word_loses_its_middle_and_says_so() -> None:
    assert abbreviated("g12.3", 5).plain == "g12.3"
    assert abbreviated("worker-0017", 7).plain == "wor…017"
    assert cell_len(abbreviated("漢字" * 20, 9).plain) <= 9
    assert short_words("in /a/very/long/path it lies", 8).plain == "in /a/v…ath it lies"
    assert {span.style for span in abbreviated(Text.assemble(("lost-and-found", "red")), 6).spans} == {"red"}


def test_a_note_is_broken_at_words_and_indented() -> None:
    text = printed(Note("one two three four five six", indent=2), 10)
    assert [line.rstrip() for line in text.splitlines()] == ["one two", "  three", "  four", "  five six"]
    assert printed(Note("a\n\nb"), 10).splitlines() == ["a", "", "b"]


def test_a_column_without_room_is_left_out_by_its_rank() -> None:
    ranks = (("a", 0), ("b", 2), ("c", 1))
    columns: list[Column[int]] = [Column(name, "", lambda row: "1" * 10, rank=rank) for name, rank in ranks]
    table = Sheet(columns, [1])
    assert [printed(table, width).count("1" * 10) for width in (40, 30, 24, 12)] == [3, 2, 2, 1]
    assert "also shows: b, c." in " ".join(printed(table, 12).split())


def test_counters_are_grouped_with_their_meanings_and_zeros_are_hidden() -> None:
    status = pb.Status(counters={**dict.fromkeys(COUNTERS, 0.0), "migrations_kv": 5.0, "tokens_generated": 1234.0})
    few, every = printed(status_table(status), 140), printed(status_table(status, everything=True), 140)
    shown = {name for name in COUNTERS if re.search(rf"  {name} ", few)}
    assert shown == {*PROMISES, "migrations_kv", "tokens_generated"}
    assert f"{len(COUNTERS) - len(shown)} counters that are 0 are not shown" in few
    assert all(re.search(rf"  {name} ", every) for name in COUNTERS) and "not shown" not in every
    assert COUNTERS["migrations_kv"] in few
    assert re.search(r"promises .*moves|promises .*tokens .*moves", few, re.S)
    check(status_table(status, everything=True))


def test_every_group_of_counters_has_some_and_every_counter_one() -> None:
    assert {counter_group(name) for name in COUNTERS} == set(COUNTER_GROUPS)
    starts = [start for group in COUNTER_GROUPS.values() for start in group]
    assert [start for start in starts if not any(name.startswith(start) for name in COUNTERS)] == []


def test_who_left_as_was_asked_stands_below_the_table() -> None:
    status = pb.Status(
        workers=[
            pb.WorkerStatus(worker_id="w0", state="ready", tokens_per_s=70.0),
            pb.WorkerStatus(worker_id="w1", state="starting", tokens_per_s=30.0),
            pb.WorkerStatus(worker_id="w2", state="drained"),
        ],
        hosts=[
            pb.HostStatus(name="local", state="ready"),
            pb.HostStatus(name="h1", state="drained", epoch=1),
            pb.HostStatus(name="h2", state="lost", epoch=2, reason="its connection broke"),
        ],
        pools=[
            pb.PoolStatus(pool_id="pool-0", state="ready"),
            pb.PoolStatus(pool_id="h1-pool-0", state="drained"),
            pb.PoolStatus(pool_id="h2-pool-0", state="lost", reason="its connection broke"),
        ],
    )
    pools = pools_table(status)
    assert [row.pool_id for row in pools.rows] == ["pool-0", "h2-pool-0"]
    assert pools.notes == ["h2-pool-0: its connection broke", "left, as was asked: h1-pool-0"]
    assert "h1-pool-0" not in pools_line(status)
    table = workers_table(by_version(status.workers))
    assert [row.worker_id for row in table.rows] == ["w0", "w1"] and table.notes == ["left, as was asked: w2"]
    found = hosts_table(status)
    assert [row.name for row in found.rows] == ["local", "h2"]
    assert found.notes == ["h2: its connection broke", "left, as was asked: h1"]
    text = printed(status_table(status), 120)
    assert "w0 ready, w1 starting; left: w2" in text and "100 tokens/s" in text


def test_the_live_view_says_the_pace_and_the_time_to_go() -> None:
    status = pb.Status(newest_version=2, workers=[pb.WorkerStatus(worker_id="w0", state="ready", tokens_per_s=70.0)])
    assert "to go" not in printed(service_view(status, "dora", steps_planned=5), 120)
    for step, took_s in ((0, 20.0), (1, 40.0)):
        status.steps.add(step=step, took_s=took_s)
    text = printed(service_view(status, "dora", steps_planned=5), 160)
    assert "1 min 30 s to go" in text and "70 tokens/s" in text
    assert "to go" not in printed(service_view(status, "dora", steps_planned=2), 160)
    assert "to go" not in printed(service_view(status, "dora"), 160)
