"""The rules of deploy/prometheus by promtool: each alert fires for its fault alone, and clears."""

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from dora.agents.front.figures import DISTRIBUTIONS as FRONT_DISTRIBUTIONS
from dora.agents.front.figures import FRONT
from dora.orchestrator.metrics.of_hosts import HOST
from dora.orchestrator.metrics.of_service import SERVICE
from dora.orchestrator.rollout.distributions import DISTRIBUTIONS
from tests.prometheus.metrics_of import metrics_of
from tests.snippets import ROOT

RULES: Final = ROOT / "deploy" / "prometheus"
FILES: Final = ("recording.yml", "alerts.yml")
Binary = Callable[[str], Path]

# A healthy service for four hours, by minutes: its series, and the values that each adds.
HOURS: Final = 4
HEALTHY: Final[Mapping[str, str]] = {
    'up{role="service"}': "1",
    'up{role="host"}': "1",
    'up{role="front"}': "1",
    'dora_front_requests_total{route="/v1/models",status="200"}': "0+600",
    'dora_front_requests_total{route="/v1/models",status="429"}': "0+6",
    'dora_front_requests_total{route="/v1/models",status="503"}': "0+6",
    'dora_front_first_token_seconds_bucket{le="2"}': "0+600",
    'dora_front_first_token_seconds_bucket{le="100"}': "0+600",
    'dora_front_first_token_seconds_bucket{le="+Inf"}': "0+600",
    "dora_c1_violations_total": "0",
    "dora_groups_lost": "0",
    "dora_trainer_waiting": "0",
    "dora_trainer_attached": "1",
    "dora_trainer_stalled": "0",
    "dora_draining": "0",
    "dora_window_versions": "4",
    "dora_version_newest": "9",
    "dora_staleness_steps_sum": "0+64",
    "dora_staleness_steps_count": "0+64",
    'dora_version_workers{age="0",state="serving"}': "2",
    'dora_version_workers{age="0",state="loading"}': "0",
    'dora_versions{state="rejected"}': "0",
    'dora_versions{state="unavailable"}': "0",
    'dora_workers{state="ready"}': "4",
    'dora_workers{state="lost"}': "0",
    "dora_workers_lost_total": "0",
    'dora_hosts{state="lost"}': "0",
    'dora_hosts{state="failed"}': "0",
    "dora_kv_pressed_workers": "0",
    "dora_preemptions_total": "0",
    'dora_moves_total{kind="move",reason="update",result="done"}': "0+10",
    'dora_moves_total{kind="move",reason="update",result="refused"}': "0+1",
    "dora_turns_reprefilled_total": "0+1",
    "dora_turns_resumed_total": "0+99",
    "dora_session_idle_longest_seconds": "20",
    'dora_requests{state="idle",age="0"}': "3",
    "dora_environment_drivers": "1",
    "dora_rewards_failed_total": "0+1",
    "dora_trajectories_finished_total": "0+600",
    "dora_prompt_sources_failed_total": "0",
    'dora_storage_fault{place="state folder"}': "0",
    'dora_storage_fault{place="state folder: versions"}': "0",
    'dora_storage_fault{place="record"}': "0",
    "dora_journal_waiting_bytes": "4096",
    'dora_journal_sync_seconds_bucket{le="0.01"}': "0+600",
    'dora_journal_sync_seconds_bucket{le="1"}': "0+600",
    'dora_journal_sync_seconds_bucket{le="+Inf"}': "0+600",
    'dora_storage_free_bytes{place="record"}': "1e12-1e6",
    "dora_clock_ahead_seconds": "0.02",
    "dora_clock_timestamp_seconds": "0+60",
    'dora_loop_late_seconds_bucket{le="0.01"}': "0+120",
    'dora_loop_late_seconds_bucket{le="1"}': "0+120",
    'dora_loop_late_seconds_bucket{le="+Inf"}': "0+120",
    "dora_messages_refused_total": "0",
    "dora_restarts": "0",
    "dora_uptime_seconds": "0+60",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """Values of the second hour in place of the healthy ones, and the labels of the alert."""

    series: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)


FAULTS: Final[Mapping[str, Fault]] = {
    "DoraPromiseBroken": Fault({"dora_groups_lost": "1"}),
    "DoraTrainerWaits": Fault({"dora_trainer_waiting": "1"}),
    "DoraNoHeadWorker": Fault({'dora_version_workers{age="0",state="serving"}': "0"}),
    "DoraVersionRejected": Fault({'dora_versions{state="rejected"}': "1"}, {"state": "rejected"}),
    "DoraVersionUnavailable": Fault({'dora_versions{state="unavailable"}': "1"}, {"state": "unavailable"}),
    "DoraTrainerStalled": Fault({"dora_trainer_stalled": "1"}),
    "DoraTrainerAbsent": Fault({"dora_trainer_attached": "0"}),
    "DoraDown": Fault({'up{role="service"}': "0", 'up{role="host"}': "0"}, {"role": "service"}),
    "DoraFrontDown": Fault({'up{role="front"}': "0"}, {"role": "front"}),
    "DoraFrontErrors": Fault({'dora_front_requests_total{route="/v1/models",status="503"}': "+60"}),
    "DoraFrontBusy": Fault({'dora_front_requests_total{route="/v1/models",status="429"}': "+100"}),
    "DoraFrontQueue": Fault({'dora_front_first_token_seconds_bucket{le="2"}': "+100"}),
    "DoraWorkersLost": Fault({'dora_workers{state="lost"}': "1"}, {"state": "lost"}),
    "DoraWorkersRestart": Fault({"dora_workers_lost_total": "+1"}),
    "DoraHostLost": Fault(
        {'dora_hosts{state="lost"}': "1", 'dora_workers{state="lost"}': "8", 'up{role="host"}': "0"}, {"state": "lost"}
    ),
    "DoraKvPressure": Fault({"dora_kv_pressed_workers": "2"}),
    "DoraPreemptions": Fault({"dora_preemptions_total": "+30"}),
    "DoraMovesFail": Fault({'dora_moves_total{kind="move",reason="update",result="refused"}': "+10"}),
    "DoraPrefixBreaks": Fault({"dora_turns_reprefilled_total": "+50"}),
    "DoraSandboxStuck": Fault({"dora_session_idle_longest_seconds": "900"}),
    "DoraNoEnvironment": Fault({"dora_environment_drivers": "0"}),
    "DoraRewardsFail": Fault({"dora_rewards_failed_total": "+60"}),
    "DoraPromptsFailed": Fault({"dora_prompt_sources_failed_total": "1"}),
    "DoraJournalNotDurable": Fault(
        {f'dora_storage_fault{{place="state folder{part}"}}': "1" for part in ("", ": versions")},
        {"place": "state folder"},
    ),
    "DoraStorageFault": Fault({'dora_storage_fault{place="record"}': "1"}, {"place": "record"}),
    "DoraJournalSlow": Fault({'dora_journal_sync_seconds_bucket{le="0.01"}': "+1"}),
    "DoraDiskFills": Fault({'dora_storage_free_bytes{place="record"}': "-1e10"}, {"place": "record"}),
    "DoraClockOff": Fault({"dora_clock_ahead_seconds": "-7"}),
    "DoraLoopLate": Fault({'dora_loop_late_seconds_bucket{le="0.01"}': "+1"}),
    "DoraMessagesRefused": Fault({"dora_messages_refused_total": "+1"}),
    "DoraRestarted": Fault({"dora_restarts": "1", "dora_uptime_seconds": "60"}),
}


def alerts() -> dict[str, Any]:
    tree = yaml.safe_load((RULES / "alerts.yml").read_text())
    return {rule["alert"]: rule for group in tree["groups"] for rule in group["rules"]}


def named(series: str) -> str:
    """The series of the job and instance that the rules see."""
    name, _, labels = series.rstrip("}").partition("{")
    return f'{name}{{job="dora",instance="s"{"," * bool(labels)}{labels}}}'


def values_of(series: str, fault: Fault) -> str:
    """The values by minutes: an hour of health, one of the fault, and two of health again.

    A counter's fault is what it adds a minute; a gauge's is its value.
    """
    begin, change = _steps(HEALTHY[series])
    if series not in fault.series:
        return _run(begin, change, 60 * HOURS)
    given = fault.series[series]
    if (given[0] in "+-" and change) or given[0] == "+":
        reached, other = begin + 60 * change, float(given)
        ended = reached + 60 * other
        return " ".join((_run(begin, change, 59), _run(reached, other, 59), _run(ended, change, 60 * (HOURS - 2))))
    return " ".join(
        (_run(begin, change, 59), _run(float(given), 0, 59), _run(begin + 120 * change, change, 60 * (HOURS - 2)))
    )


def _steps(values: str) -> tuple[float, float]:
    for sign in "+-":
        begin, found, change = values.rpartition(sign)
        if found and begin and not begin.endswith("e"):
            return float(begin), float(sign + change)
    return float(values), 0.0


def _run(begin: float, change: float, count: int) -> str:
    return f"{begin:f}{change:+f}x{count}"


def case_of(name: str) -> dict[str, Any]:
    fault, rules = FAULTS[name], alerts()

    def expected(alert: str, minute: int) -> dict[str, Any]:
        rule = rules[alert]
        labels = {"job": "dora", "instance": "s", **rule["labels"], **fault.labels}
        fires = minute == 115 and alert == name
        shown = [{"exp_labels": labels, "exp_annotations": rule["annotations"]}] if fires else []
        return {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": shown}

    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": named(each), "values": values_of(each, fault)} for each in HEALTHY],
        "alert_rule_test": [expected(alert, minute) for minute in (55, 115, 230) for alert in rules],
        "promql_expr_test": [no_alert_at("55m")],
    }


def no_alert_at(time: str) -> dict[str, Any]:
    """No alert fires or is about to."""
    return {"expr": "ALERTS", "eval_time": time, "exp_samples": []}


def young_run() -> dict[str, Any]:
    """A demo: its trainer waits, is as stale as the window allows, and each version is seconds old."""
    series = {name: _run(*_steps(values), 4) for name, values in HEALTHY.items()} | {
        "dora_trainer_waiting": _run(1, 0, 4),
        "dora_staleness_steps_sum": _run(0, 1920, 4),
        'dora_version_workers{age="0",state="serving"}': "0 1 0 0 0",
    }
    return {
        "name": "a young run",
        "interval": "1m",
        "input_series": [{"series": named(each), "values": values} for each, values in series.items()],
        "promql_expr_test": [no_alert_at(f"{minute}m") for minute in range(1, 5)],
    }


def promtool(binary: Binary, *arguments: str | Path) -> None:
    done = subprocess.run([binary("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_fault_and_says_what_to_do() -> None:
    assert FAULTS.keys() == alerts().keys()
    for name, rule in alerts().items():
        assert rule["annotations"].keys() == {"summary", "action"}, name
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), name


def test_the_rules_are_valid_and_name_metrics_that_exist(binary: Binary) -> None:
    promtool(binary, "check", "rules", *(RULES / file for file in FILES))
    promtool(binary, "check", "config", "--syntax-only", RULES / "prometheus.yml")
    known = {each.name for each in (*SERVICE, *HOST, *DISTRIBUTIONS, *FRONT, *FRONT_DISTRIBUTIONS)} | {"up"}
    for file in FILES:
        for group in yaml.safe_load((RULES / file).read_text())["groups"]:
            for rule in group["rules"]:
                assert metrics_of(rule["expr"]) <= known, rule


def test_a_fault_fires_its_alert_and_no_other_and_it_clears(binary: Binary, tmp_path: Path) -> None:
    tree = {
        "rule_files": [str(RULES / file) for file in FILES],
        "evaluation_interval": "5m",
        "tests": [young_run(), *(case_of(name) for name in FAULTS)],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump(tree))
    promtool(binary, "test", "rules", file)
