"""Every option of ``dora demo`` has an effect. tests/unit/effects has the other commands, and the settings."""

import inspect
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import dora.ops.cli.demo as command
from dora.errors import InvalidValue
from dora.host.launcher import LOCAL
from dora.ops.cli.app import app
from dora.ops.demo.folder import OutFolder
from dora.ops.demo.options import DemoOptions, service_config
from dora.ops.demo.report import DemoReport, DemoRun, DemoSeconds, build_report
from dora.ops.demo.run import Strike, busiest, trainer_arguments
from dora.ops.demo.screen import PlainScreen
from dora.rpc import dora_pb2 as pb
from tests.refusals import refused

SECONDS = DemoSeconds(model=0.5, start=2.5, first_step=3.0, later_steps=5.0, end=1.0)
RUN = DemoRun(
    model="tiny", window=2, workers=2, groups_per_step=2, group_size=2, steps_planned=0, kill_worker_after_s=2.0
)


# -------------------------------------------------------------------------------------------------------- the options


def config_field(name: str) -> Callable[[DemoOptions], object]:
    def read(options: DemoOptions) -> object:
        value: Any = service_config(options, OutFolder(options.out))
        for part in name.split("."):
            value = getattr(value, part)
        return value

    return read


def trainer_argument(name: str) -> Callable[[DemoOptions], object]:
    def read(options: DemoOptions) -> str:
        arguments = trainer_arguments(options, service_config(options, OutFolder(options.out)), "127.0.0.1:1")
        return arguments[arguments.index(name) + 1] if name in arguments else ""

    return read


def test_an_engine_that_samples_without_the_model_is_refused() -> None:
    with refused(InvalidValue, field="workers.engine", value="fake"):
        service_config(DemoOptions("tiny", Path("out"), settings=("workers.engine=fake",)), OutFolder(Path("out")))


def kills(options: DemoOptions) -> int:
    strike = Strike(options.kill_worker_after_s, PlainScreen(Console(quiet=True)))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        strike.look(status_of(process.pid), 2.0)
        if not strike.workers_killed:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    return strike.workers_killed


# option -> what it is given, what shows its effect, and what that must be
EFFECTS: dict[str, tuple[list[str], Callable[[DemoOptions], object], object]] = {
    "model": (["--model", "tiny-moe"], config_field("model"), "tiny-moe"),
    "agent": (["--agent"], config_field("environment.spec"), "dora.ops.demo.agent_tasks:Lookup"),
    "steps": (["--steps", "7"], trainer_argument("--steps"), "7"),
    "groups": (["--groups", "5"], config_field("window.groups_per_step"), 5),
    "group_size": (["--group-size", "6"], config_field("rollout.group_size"), 6),
    "window": (["--window", "5"], config_field("window.size"), 5),
    "workers": (["--workers", "1"], config_field("workers.count"), 1),
    "max_tokens": (["--max-tokens", "9"], config_field("rollout.max_tokens"), 9),
    "speculation": (["--speculation", "history"], config_field("workers.speculation"), "history"),
    "learning_rate": (["--lr", "0.5"], trainer_argument("--lr"), "0.5"),
    "replay_share": (["--replay-share", "0.25"], trainer_argument("--replay-share"), "0.25"),
    "replay_by": (
        ["--replay-share", "0.25", "--replay-by", "priority"],
        trainer_argument("--replay-by"),
        "priority",
    ),
    "evaluate_every": (["--evaluate-every", "3"], config_field("evaluation.every"), 3),
    "seed": (["--seed", "3"], config_field("rollout.seed"), 3),
    "settings": (["--set", "workers.slots=3"], config_field("workers.slots"), 3),
    "out": (["--out", "elsewhere"], config_field("record"), str(Path("elsewhere/record"))),
    "kill_worker_after_s": (["--kill-worker-after", "2"], kills, 1),
    "as_json": (["--json"], lambda _: "printed", "printed"),  # the output is compared in the test
}


def given_options(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> tuple[DemoOptions, str, int]:
    """Returns the command's parsed arguments, its output and its exit code, without a run."""
    seen: list[DemoOptions] = []

    async def no_run(options: DemoOptions, *_: object) -> DemoReport:
        seen.append(options)
        return report_of(replace(RUN, kill_worker_after_s=None))

    monkeypatch.setattr(command, "_run", no_run)
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert len(seen) == 1, result.output
    return seen[0], result.stdout, result.exit_code


@pytest.mark.parametrize("option", inspect.signature(command.demo).parameters)
def test_every_option_of_the_demo_has_an_effect(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, effect, expected = EFFECTS[option]  # an option without an entry fails here
    without, text_without, _ = given_options(monkeypatch, ["--model", "tiny"] if option != "model" else [])
    asked, text, _ = given_options(monkeypatch, [*(["--model", "tiny"] if option != "model" else []), *arguments])
    assert effect(asked) == expected
    assert option == "as_json" or effect(without) != expected
    assert text.startswith("{") == (option == "as_json") and not text_without.startswith("{")


# --------------------------------------------------------------------------------------------------------- the killing


def status_of(pid: int, host: str = LOCAL, running: int = 3) -> pb.Status:
    return pb.Status(workers=[pb.WorkerStatus(worker_id="w0", pid=pid, host=host, running=running)])


def report_of(run: DemoRun) -> DemoReport:
    return build_report([], {}, {}, SECONDS, run)


@pytest.mark.parametrize(
    ("status", "now_s"),
    [(status_of(1), 1.9), (status_of(1, running=0), 9.0), (status_of(1, host="elsewhere"), 9.0), (pb.Status(), 9.0)],
)
def test_nothing_is_killed_too_early_or_elsewhere(status: pb.Status, now_s: float) -> None:
    strike = Strike(2.0, PlainScreen(Console(quiet=True)))
    strike.look(status, now_s)
    assert strike.workers_killed == 0


def test_the_busiest_worker_is_chosen() -> None:
    status = pb.Status(
        workers=[pb.WorkerStatus(worker_id=f"w{n}", pid=9, host=LOCAL, running=n) for n in (1, 4, 2)],
    )
    victim = busiest(status)
    assert victim is not None and victim.worker_id == "w4"


def test_a_kill_that_did_not_happen_is_said_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(RUN)
    assert report["failures"] == []
    assert len(report["not_done"]) == 1 and report["not_done"][0].startswith("--kill-worker-after = 2 killed no worker")
    assert report_of(replace(RUN, workers_killed=1))["not_done"] == []

    async def no_kill(*_: object) -> DemoReport:
        return report

    monkeypatch.setattr(command, "_run", no_kill)
    result = CliRunner().invoke(app, ["demo", "--model", "tiny", "--kill-worker-after", "2"])
    assert result.exit_code == 1
    assert "an option had no effect" in " ".join(result.stdout.split())
