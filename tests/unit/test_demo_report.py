"""The demo's audit and report: pure functions that must notice every broken promise."""

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dora.config import Config
from dora.data.types import Segment
from dora.errors import InvalidValue
from dora.ops.demo.audit import audit, read_record, step_summaries
from dora.ops.demo.folder import DEFAULT_OUT, OutFolder
from dora.ops.demo.moves import MoveArc, MoveWatch
from dora.ops.demo.options import DemoOptions, service_config
from dora.ops.demo.presets import AGENT_PRESETS, PRESETS, DemoPreset
from dora.ops.demo.report import DemoRun, DemoSeconds, VersionEvaluation, build_report
from dora.ops.demo.run import trainer_spans
from dora.ops.demo.series import Sample, Shares, WorkerSample, read_series, sample_json, sample_of, shares, stretches
from dora.ops.demo.summary import print_summary, show_command
from dora.ops.demo.timeline import ARCS_MAX, Arc, TrainerSpan, arcs_of, draw_timeline, moved_requests
from dora.ops.demo.trainer_process import TrainedStep
from dora.rpc import dora_pb2 as pb
from tests.contract.trainer_service import make_trajectory
from tests.owner_token import owner_token
from tests.refusals import refused

STEPS, GROUPS, GROUP_SIZE, WINDOW = 3, 2, 2, 2
REPORT_KEYS = {
    *("steps", "groups_admitted", "groups_trained", "groups_lost", "groups_duplicated"),
    *("two_versions_share", "engines_idle_share"),
    *("staleness_max", "versions_live_max", "c1_violations", "migrations_kv", "migrations_reprefill"),
    *("tokens_reprefilled", "blackout_ms_p50", "mean_reward_by_step", "reward_first", "reward_last", "tokens_per_s"),
    *("seconds_model", "seconds_start", "seconds_first_step", "seconds_later_steps", "seconds_end", "seconds_total"),
}
SECONDS = DemoSeconds(model=0.5, start=2.5, first_step=3.0, later_steps=5.0, end=1.0)
RUN = DemoRun(
    model="tiny",
    window=WINDOW,
    workers=2,
    groups_per_step=GROUPS,
    group_size=GROUP_SIZE,
    steps_planned=STEPS,
    groups_open_at_end=1,
)


EVALUATED: tuple[VersionEvaluation, ...] = (
    {"version": 0, "responses": 8, "reward": 0.25},
    {"version": 2, "responses": 8, "reward": None},
    {"version": 4, "responses": 8, "reward": 0.5},
)


def row_of(step: int, group: int, sample: int, **changes: Any) -> dict[str, Any]:
    """Trained in ``step`` and sampled by the version before it, as in a window of two."""
    version = max(step - 1, 0)
    segment = Segment("w0", 0, 2 + sample, "new", version)
    base = {"behaviour_version": version, "staleness": step - version, "worker_history": (segment,)}
    return make_trajectory(step, group, sample, GROUP_SIZE, **{**base, **changes}).to_json_dict()


def healthy() -> tuple[list[dict[str, Any]], dict[str, float], dict[int, list[str]]]:
    """Record, counters and the trainer's list of a run in which every promise held."""
    rows = [row_of(s, g, i) for s in range(STEPS) for g in range(GROUPS) for i in range(GROUP_SIZE)]
    trained = {step: [f"s{step}-g{group}" for group in range(GROUPS)] for step in range(STEPS)}
    counters = {
        "groups_admitted": 7.0,
        "groups_taken": 6.0,
        "groups_trained": 6.0,
        "staleness_max": 1.0,
        "versions_live_max": 2.0,
        "migrations_kv": 5.0,
        "tokens_generated": 400.0,
        "blackout_ms_p50": 12.5,
    }
    return rows, counters, trained


def test_a_healthy_run_has_every_key_and_no_failure() -> None:
    report = build_report(*healthy(), SECONDS, RUN)
    assert report.keys() >= REPORT_KEYS
    assert (report["failures"], report["disagreements"]) == ([], [])
    assert (report["steps"], report["groups_admitted"], report["groups_trained"]) == (3, 7, 6)
    assert (report["groups_lost"], report["groups_duplicated"], report["c1_violations"]) == (0, 0, 0)
    assert (report["staleness_max"], report["migrations_kv"], report["blackout_ms_p50"]) == (1, 5, 12.5)
    assert report["mean_reward_by_step"] == [0.5, 0.5, 0.5]
    assert (report["tokens_per_s"], report["seconds_total"]) == (50.0, 12.0)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert [report[f"seconds_{part}"] for part in ("model", "start", "first_step", "later_steps", "end")] == [
        *(0.5, 2.5, 3.0, 5.0, 1.0)
    ]


def words_of(report: Mapping[str, Any]) -> str:
    """The summary as a terminal of 80 columns shows it, in one line."""
    console = Console(width=80, file=io.StringIO(), record=True)
    print_summary(console, report, OutFolder(Path("out")))
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    return " ".join(text.split())


def test_the_summary_says_what_was_seen() -> None:
    rows, counters, trained = healthy()
    rewards = {0: 0.1, 1: 0.2, 2: 0.7}
    rows = [
        {**row, "reward": rewards[row["trained_step"]], "verifier_log": f"step {row['trained_step']}"} for row in rows
    ]
    text = words_of(build_report(rows, counters, trained, SECONDS, RUN))
    for part in (
        "3 steps of tiny in 12.0 s: every promise held",
        "0 groups lost, 0 delivered twice, 0 responses with mixed versions",
        "at most 1 (allowed: 1)",
        "2 live at once",
        "5 requests moved to another worker with their KV",
        "0.10 in the first quarter of the steps, 0.70 in the last: 0.10, 0.20, 0.70",
        "first step step 0 last step step 2",
        "first step 3.0 s, the others 5.0 s",
    ):
        assert part in text
    broken = words_of(build_report(rows[1:], counters, trained, SECONDS, RUN))
    assert "a promise was broken" in broken and "FAILED groups_lost = 1" in broken


def test_first_and_last_quarter_of_the_steps_are_compared() -> None:
    rows = [row_of(step, 0, sample, reward=step / 8) for step in range(8) for sample in range(GROUP_SIZE)]
    report = build_report(rows, {}, {step: [f"s{step}-g0"] for step in range(8)}, SECONDS, RUN)
    assert (report["reward_first"], report["reward_last"]) == (0.5 / 8, 6.5 / 8)


def test_the_answer_shown_is_of_a_middling_reward() -> None:
    run = [
        row_of(0, 0, sample, reward=reward, verifier_log=str(reward)) for sample, reward in enumerate((0.9, 0.1, 0.5))
    ]
    assert step_summaries(run, {0: ["s0-g0"]})[0].answer == "0.5"


def test_a_trained_group_that_is_not_recorded_is_lost() -> None:
    rows, counters, trained = healthy()
    report = build_report([row for row in rows if row["group_id"] != "s1-g0"], counters, trained, SECONDS, RUN)
    assert report["groups_lost"] == 1
    assert any("groups_lost = 1" in sentence for sentence in report["failures"])


def test_a_group_that_is_recorded_in_part_is_lost() -> None:
    rows, counters, trained = healthy()
    assert build_report(rows[1:], counters, trained, SECONDS, RUN)["groups_lost"] == 1


def test_a_group_delivered_for_a_committed_step_and_not_trained_is_lost() -> None:
    rows, _, trained = healthy()
    trained[2].remove("s2-g1")
    assert audit(rows, trained).groups_lost == ("s2-g1",)


def test_a_group_delivered_for_a_step_that_is_not_committed_is_no_loss() -> None:
    rows, counters, trained = healthy()
    early = [row_of(STEPS, 0, sample) for sample in range(GROUP_SIZE)]
    counters["groups_taken"] += 1
    report = build_report([*rows, *early], counters, trained, SECONDS, RUN)
    assert report["failures"] == []


def test_an_admitted_group_that_nobody_holds_is_lost() -> None:
    rows, counters, trained = healthy()
    counters["groups_admitted"] += 1
    report = build_report(rows, counters, trained, SECONDS, RUN)
    assert report["groups_lost"] == 1
    assert any("groups_admitted: 1 more" in sentence for sentence in report["disagreements"])


def test_a_cancelled_group_is_not_lost() -> None:
    rows, counters, trained = healthy()
    counters["groups_admitted"] += 1
    counters["groups_cancelled"] = 1
    assert build_report(rows, counters, trained, SECONDS, RUN)["failures"] == []


def test_an_open_group_whose_deadline_has_passed_is_lost() -> None:
    report = build_report(*healthy(), SECONDS, replace(RUN, groups_overdue_at_end=1))
    assert report["groups_lost"] == 1


def test_a_trajectory_delivered_twice_makes_one_duplicate() -> None:
    rows, counters, trained = healthy()
    report = build_report([*rows, rows[0]], counters, trained, SECONDS, RUN)
    assert (report["groups_duplicated"], report["groups_lost"]) == (1, 0)
    assert report["failures"]


@pytest.mark.parametrize("again_in", [0, 1])
def test_a_group_trained_twice_makes_one_duplicate(again_in: int) -> None:
    rows, counters, trained = healthy()
    trained[again_in].append("s0-g0")
    report = build_report(rows, counters, trained, SECONDS, RUN)
    assert (report["groups_duplicated"], report["groups_lost"]) == (1, 0)


def test_mixed_versions_in_one_trajectory_violate_c1() -> None:
    rows, counters, trained = healthy()
    halves = (Segment("w0", 0, 0, "new", 1), Segment("w1", 1, 2, "migrated", 2))
    rows[-2] = row_of(2, 1, 0, worker_history=halves)
    report = build_report(rows, counters, trained, SECONDS, RUN)
    assert report["c1_violations"] == 1
    assert any(sentence.startswith("c1_violations: the service counts 0") for sentence in report["disagreements"])


def test_staleness_past_the_window_fails_whatever_the_service_says() -> None:
    rows, counters, trained = healthy()
    segments = (Segment("w0", 0, 2, "new", 0),)
    rows[-2] = row_of(2, 1, 0, behaviour_version=0, staleness=1, worker_history=segments)
    report = build_report(rows, counters, trained, SECONDS, RUN)
    assert report["staleness_max"] == 2
    assert any("staleness_max = 2: it must be at most window - 1 = 1" in sentence for sentence in report["failures"])
    assert any("s2-g1-0" in sentence for sentence in report["disagreements"])


@pytest.mark.parametrize(("name", "value"), [("groups_trained", 5.0), ("staleness_max", 0.0), ("c1_violations", 1.0)])
def test_a_counter_that_disagrees_with_the_record_fails(name: str, value: float) -> None:
    rows, counters, trained = healthy()
    counters[name] = value
    report = build_report(rows, counters, trained, SECONDS, RUN)
    assert any(sentence.startswith(f"{name}: the service counts {value:g}") for sentence in report["disagreements"])
    assert any("disagree" in sentence for sentence in report["failures"])


def test_the_service_may_have_counted_the_staleness_of_a_step_not_yet_committed() -> None:
    rows, counters, _ = healthy()
    first = {0: ["s0-g0", "s0-g1"]}
    counters |= {"groups_admitted": 4.0, "groups_taken": 3.0, "groups_trained": 2.0}
    of_first = [row for row in rows if row["trained_step"] == 0]
    run = replace(RUN, steps_planned=1, groups_open_at_end=2)
    report = build_report(of_first, counters, first, SECONDS, run)
    assert (report["staleness_max"], report["failures"]) == (0, [])


def test_fewer_steps_than_asked_fail() -> None:
    report = build_report(*healthy(), SECONDS, replace(RUN, steps_planned=4))
    assert report["failures"] == ["steps = 3, must be 4"]


def test_rewards_that_are_not_valid_are_left_out_of_the_mean() -> None:
    rows, _, trained = healthy()
    rows[0] = row_of(0, 0, 0, reward=float("nan"), reward_valid=False)
    rows[1] = row_of(0, 0, 1, reward=100.0, reward_valid=False)
    assert [summary.mean_reward for summary in step_summaries(rows, trained)] == [0.5, 0.5, 0.5]
    none_valid = [{**row, "reward_valid": False} for row in rows]
    assert step_summaries(none_valid, trained)[0].mean_reward is None


def test_a_run_of_no_steps_is_reported() -> None:
    report = build_report([], {}, {}, SECONDS, replace(RUN, groups_open_at_end=0))
    assert (report["steps"], report["staleness_max"], report["mean_reward_by_step"]) == (0, 0, [])
    assert report["failures"] == ["steps = 0, must be 3"]


# ----------------------------------------------------------------------------------------------------- files and plot


def test_a_record_is_read_and_a_torn_line_named(tmp_path: Path) -> None:
    rows, _, _ = healthy()
    file = tmp_path / "trajectories.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_record(file) == rows
    file.write_text(json.dumps(rows[0]) + '\n{"trajectory_id": ')
    with refused(InvalidValue, field="trajectories.jsonl line 2", value='{"trajectory_id": '):
        read_record(file)
    with refused(InvalidValue, field="record"):
        read_record(tmp_path / "nowhere")


def samples() -> list[Sample]:
    """One worker: joins, hosts version 0 in two samples, loads, hosts version 1."""
    lives = [("joining", -1), ("ready", 0), ("ready", 0), ("loading", 0), ("ready", 1)]
    return [
        Sample(float(t), max(version, 0), 4, 1, 2, None, (WorkerSample("w0", state, version, version, 4, 1),), {})
        for t, (state, version) in enumerate(lives)
    ]


def test_a_sample_is_reduced_from_a_status_and_survives_its_line(tmp_path: Path) -> None:
    status = pb.Status(
        newest_version=2,
        workers=[pb.WorkerStatus(worker_id="w0", state="ready", version=2, target_version=2, running=3, waiting=1)],
        versions=[pb.VersionStatus(version=2, groups_finished=5)],
        steps=[pb.StepMetrics(step=1, mean_reward=0.25)],
        counters={"groups_admitted": 8},
    )
    sample = sample_of(status, 1.23456)
    assert (sample.t_s, sample.step, sample.running, sample.waiting, sample.finished) == (1.235, 2, 3, 1, 5)
    assert sample.reward == 0.25
    file = tmp_path / "series.jsonl"
    file.write_text(sample_json(sample) + "\n" + sample_json(samples()[0]) + "\n")
    assert read_series(file) == [sample, samples()[0]]


def test_stretches_join_samples_alike_and_leave_no_gap() -> None:
    assert stretches(samples(), "w0") == [
        (0.0, 1.0, -1, "joining"),
        (1.0, 3.0, 0, "ready"),
        (3.0, 4.0, 0, "loading"),
        (4.0, 4.0, 1, "ready"),
    ]
    assert stretches(samples(), "w9") == []


def engines(step: int, *rows: tuple[int, int]) -> Sample:
    """A sample of engines that host a version and run requests."""
    workers = tuple(
        WorkerSample(f"w{number}", "ready" if version >= 0 else "loading", version, version, running, 0)
        for number, (version, running) in enumerate(rows)
    )
    return Sample(float(step), step, sum(running for _, running in rows), 0, 0, None, workers, {})


@pytest.mark.parametrize(
    ("seen", "two_versions", "idle"),
    [
        ([], None, None),
        ([engines(0)], None, None),
        ([engines(0, (0, 4), (0, 4))], 0.0, 0.0),
        ([engines(0, (0, 4), (1, 4)), engines(0, (0, 4), (0, 4)), engines(1, (1, 4), (1, 0))], 0.5, 0.0),
        ([engines(0, (0, 4), (1, 0)), engines(1, (1, 0), (1, 0))], 0.0, 0.5),  # a version that only loads is no second
        ([engines(0, (-1, 0), (1, 4)), engines(0, (0, 1), (1, 1)), engines(1, (1, 9))], 0.5, 0.25),
        ([engines(3, (2, 1), (1, 1), (3, 1)), engines(3, (3, 1), (3, 1), (3, 0))], 0.5, 1 / 6),  # no step committed
    ],
)
def test_shares_are_of_the_samples_up_to_the_last_commit(
    seen: list[Sample], two_versions: float | None, idle: float | None
) -> None:
    assert shares(seen) == Shares(two_versions, idle)


def test_report_and_summary_say_the_shares() -> None:
    rows, counters, trained = healthy()
    report = build_report(rows, counters, trained, SECONDS, RUN, Shares(0.612345, 0.04))
    assert (report["two_versions_share"], report["engines_idle_share"]) == (0.6123, 0.04)
    assert "two versions at once in 61% of the samples, 4% idle" in words_of(report)
    without = build_report(rows, counters, trained, SECONDS, RUN)
    assert (without["two_versions_share"], without["engines_idle_share"]) == (None, None)
    assert "two versions at once" not in words_of(without)


# --------------------------------------------------------------------------------------- the moves and the trainer


def row(number: int, state: str, worker: str = "", version: int = 0) -> pb.TrajectoryStatus:
    return pb.TrajectoryStatus(trajectory_id=f"g0.{number}", state=state, worker=worker, version=version)


def test_moves_are_found_between_lists_of_trajectories() -> None:
    watch = MoveWatch()

    def seen(at_s: float, *rows: pb.TrajectoryStatus) -> tuple[MoveArc, ...]:
        return watch.seen(rows, {"w0", "w1"}, at_s)

    assert seen(0.0, row(0, "running", "w0"), row(1, "moving", "w0"), row(2, "waiting")) == ()
    direct = [row(0, "running", "w1"), row(1, "running", "w1"), row(2, "running", "w0")]
    assert seen(0.25, *direct) == (MoveArc(0.0, 0.25, "w0", "w1", 0, 2),)
    away = [row(0, "parked", "pool-0"), row(1, "moving", "pool-0"), row(2, "running", "w0")]
    assert seen(0.5, *away) == ()
    back = [row(0, "waiting"), row(1, "running", "w0"), row(2, "finished")]
    assert seen(0.75, *back) == (MoveArc(0.25, 0.75, "w1", "w0", 0, 1),)
    assert seen(1.0, row(0, "running", "w1"), row(1, "running", "w0")) == (MoveArc(0.25, 1.0, "w1", "w1", 0, 1),)
    assert seen(1.25) == ()
    assert seen(1.5, row(0, "running", "w0")) == ()  # it is forgotten once its group has ended


def moving() -> list[Sample]:
    """Two workers, and moves in both directions and back to the same worker."""
    moves = (
        (MoveArc(0.5, 1.0, "w1", "w0", 3, 2), MoveArc(0.0, 1.0, "w0", "w1", 3, 8)),
        (MoveArc(1.0, 2.0, "w1", "w1", 3, 1),),
    )
    return [replace(engines(step, (step, 4), (step, 4)), moves=moves[step - 1] if step else ()) for step in range(3)]


def test_arcs_join_the_rows_of_the_moves() -> None:
    rows = {"w0": 0, "w1": 1}
    assert arcs_of(moving(), rows) == [
        Arc((0.0, 0), (1.0, 1), 3, 8),
        Arc((0.5, 1), (1.0, 0), 3, 2),
        Arc((1.0, 1), (2.0, 1), 3, 1),
    ]
    assert arcs_of(moving(), {"w1": 0}) == [Arc((1.0, 0), (2.0, 0), 3, 1)]  # a worker without a row has no arc
    assert arcs_of([], rows) == []
    assert moved_requests([]) == (0, 0)
    counted = {"migrations_kv": 4.0, "migrations_reprefill": 1.0, "requests_resumed": 8.0, "requests_parked": 9.0}
    assert moved_requests([*moving(), replace(moving()[-1], moves=(), counters=counted)]) == (11, 13)


def test_of_too_many_arcs_the_largest_are_drawn() -> None:
    moves = tuple(MoveArc(0.0, float(at), "w0", "w1", 0, 1 + at % 7) for at in range(3 * ARCS_MAX))
    arcs = arcs_of([replace(engines(0, (0, 1), (0, 1)), moves=moves)], {"w0": 0, "w1": 1})
    assert len(arcs) == ARCS_MAX
    assert sum(arc.requests for arc in arcs) == sum(sorted(move.requests for move in moves)[-ARCS_MAX:])
    assert arcs == sorted(arcs, key=lambda arc: arc.end)


def test_moves_survive_the_series_and_older_series_have_none(tmp_path: Path) -> None:
    file = tmp_path / "series.jsonl"
    lines = [sample_json(sample) for sample in moving()]
    file.write_text("\n".join(lines) + "\n")
    assert read_series(file) == moving()
    older = json.loads(lines[1])
    del older["moves"]
    file.write_text(json.dumps(older) + "\n")
    assert read_series(file) == [replace(moving()[1], moves=())]


def test_the_trainers_row_has_a_span_for_each_step() -> None:
    steps = [TrainedStep(0, 11.0, 3.0, 2.0), TrainedStep(1, 13.0, 1.0, 0.5), TrainedStep(2, 13.0, 0.0, 0.0)]
    spans = trainer_spans(steps, 10.0)
    assert spans == [TrainerSpan(0, -2.0, 1.0, 1.0), TrainerSpan(1, 1.0, 3.0, 0.5), TrainerSpan(2, 3.0, 3.0, 0.0)]
    assert [span.busy_share for span in spans] == [pytest.approx(1 / 3), 0.25, 1.0]
    assert trainer_spans([], 10.0) == []


@pytest.mark.parametrize("empty", [False, True])
def test_the_timeline_is_drawn_even_of_nothing(tmp_path: Path, empty: bool) -> None:
    rows, _, trained = healthy()
    file = tmp_path / "timeline.png"
    steps = step_summaries(rows, trained)
    seen = [] if empty else moving()
    spans = [] if empty else [TrainerSpan(0, -1.0, 1.0, 0.5), TrainerSpan(1, 1.0, 1.0, 0.0)]
    draw_timeline(seen, [] if empty else steps, spans, "a run", replace(RUN, evaluated=EVALUATED), file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_clearing_removes_what_a_demo_makes_and_nothing_else(tmp_path: Path) -> None:
    folder = OutFolder(tmp_path / "demo")
    folder.clear()
    (folder.record / "versions" / "3").mkdir(parents=True)
    made = [
        folder.report,
        folder.series,
        folder.timeline,
        folder.page,
        folder.trained,
        folder.trajectories,
        folder.trainer_log,
    ]
    mine = [folder.root / "notes.txt", folder.record / "notes.txt", folder.record / "versions" / "readme"]
    for file in made + mine:
        file.write_text("x")
    folder.clear()
    assert not any(file.exists() for file in made)
    assert not (folder.record / "versions" / "3").exists()
    assert all(file.exists() for file in mine)


def test_an_out_folder_that_cannot_be_made_is_a_bad_value(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with refused(InvalidValue, field="--out"):
        OutFolder(tmp_path / "file" / "demo").clear()


# ------------------------------------------------------------------------------------------------------------ presets


def configured(**changes: Any) -> Config:
    return service_config(DemoOptions(**{"model": "tiny", "out": Path("out"), **changes}), OutFolder(Path("out")))


def test_evaluations_are_in_the_report_and_the_summary() -> None:
    report = build_report(*healthy(), SECONDS, replace(RUN, evaluated=EVALUATED))
    assert report["evaluated"] == list(EVALUATED)
    assert "0.25 at version 0, - at version 2, 0.50 at version 4 (reward on 8 responses)" in words_of(report)
    assert "held-out" not in words_of(build_report(*healthy(), SECONDS, RUN))


def test_a_demo_evaluates_prompts_of_its_own_source_unless_it_is_told_otherwise() -> None:
    assert (configured().evaluation.prompts, configured(steps=40).evaluation.every) == ("out/held-out.jsonl", 10)
    assert configured(evaluate_every=3).evaluation.every == 3
    assert configured(steps=2).evaluation.every == 1
    for without in ({"evaluate_every": 0}, {"settings": ("prompts.source=mine.jsonl",)}):
        assert configured(**without).evaluation.prompts == ""
    own = configured(settings=("evaluation.prompts=mine.jsonl", "evaluation.every=2")).evaluation
    assert (own.prompts, own.every) == ("mine.jsonl", 2)
    with refused(InvalidValue, field="--evaluate-every", value=-1):
        configured(evaluate_every=-1)


def test_the_demo_serves_under_the_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    token = owner_token("demo")
    monkeypatch.setenv("DORA_TOKEN", token)
    assert configured().service.token == token
    monkeypatch.setenv("DORA_TOKEN", "")
    assert configured().service.token != token


def test_a_run_of_sessions_names_one_to_look_at() -> None:
    rows, counters, trained = healthy()
    counters |= {"turns_ended": 36.0, "turns_resumed": 24.0}
    run = replace(RUN, environment="dora.ops.demo.agent_tasks:Lookup")
    report = build_report(rows, counters, trained, SECONDS, run)
    assert report["conversation"] == f"s{STEPS - 1}-g0-1", "of median reward, in the last step"
    text = words_of(report)
    assert "36 turns with dora.ops.demo.agent_tasks:Lookup, 24 of them resumed" in text
    assert "dora trajectories --show s2-g0-1 --record out/record" in text
    assert show_command("g1.0", OutFolder(DEFAULT_OUT)) == "dora trajectories --show g1.0"
    assert build_report(rows, counters, trained, SECONDS, RUN)["conversation"] == ""


@pytest.mark.parametrize(("model", "presets"), [(model, each) for each in (PRESETS, AGENT_PRESETS) for model in each])
def test_every_preset_fits_its_workers(model: str, presets: Mapping[str, DemoPreset]) -> None:
    config = configured(model=model, is_agent=presets is AGENT_PRESETS)
    assert (config.window.size, config.environment.spec) == (presets[model].window, presets[model].environment)
    assert config.rollout.max_tokens < config.workers.max_model_len_tokens
    assert config.workers.kv_tokens >= config.workers.max_model_len_tokens


def test_options_override_settings_and_settings_override_the_preset() -> None:
    assert configured().balance.policy == "dora"
    settings = ("window.size=4", "rollout.group_size=4", "workers.slots=3", "balance.policy=laxity")
    config = configured(settings=settings, window=3, workers=1, groups=5, max_tokens=7, seed=9)
    assert (config.window.size, config.rollout.group_size, config.workers.slots) == (3, 4, 3)
    assert (config.workers.count, config.window.groups_per_step) == (1, 5)
    assert config.balance.policy == "laxity"
    assert (config.rollout.max_tokens, config.rollout.seed) == (7, 9)


def test_a_model_folder_gets_the_real_models_preset() -> None:
    assert DemoOptions(model="some/folder", out=Path("out")).preset == PRESETS["smollm2"]
    with refused(InvalidValue, field="--model", value="huge"):
        configured(model="huge")
