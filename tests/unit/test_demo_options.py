"""Every option of ``dora demo`` has an effect, and every setting is read."""

import ast
import inspect
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from rich.console import Console
from typer.testing import CliRunner

import dora.cli.demo as command
from dora.cli.app import COMMANDS, app
from dora.config import ColumnsConfig, Config
from dora.demo.options import DemoOptions, service_config
from dora.demo.presets import PRESETS
from dora.demo.report import DemoReport, DemoRun, DemoSeconds, build_report
from dora.demo.run import Strike, busiest
from dora.demo.screen import PlainScreen
from dora.host.launcher import LOCAL
from dora.rpc import dora_pb2 as pb

PACKAGE = Path(command.__file__).parents[1]
SECONDS = DemoSeconds(model=0.5, start=2.5, first_step=3.0, later_steps=5.0, end=1.0)
RUN = DemoRun(
    model="tiny", window=2, workers=2, groups_per_step=2, group_size=2, steps_asked=0, kill_worker_after_s=2.0
)


# -------------------------------------------------------------------------------------------------------- the options


def config_field(name: str) -> Callable[[DemoOptions], object]:
    def read(options: DemoOptions) -> object:
        value: Any = service_config(options, options.out / "record")
        for part in name.split("."):
            value = getattr(value, part)
        return value

    return read


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
    "steps": (["--steps", "7"], lambda options: options.steps_asked, 7),
    "groups": (["--groups", "5"], config_field("window.groups_per_step"), 5),
    "group_size": (["--group-size", "6"], config_field("rollout.group_size"), 6),
    "window": (["--window", "5"], config_field("window.size"), 5),
    "workers": (["--workers", "1"], config_field("workers.count"), 1),
    "max_tokens": (["--max-tokens", "9"], config_field("rollout.max_tokens"), 9),
    "learning_rate": (["--lr", "0.5"], lambda options: options.rate, 0.5),
    "seed": (["--seed", "3"], config_field("rollout.seed"), 3),
    "settings": (["--set", "workers.slots=3"], config_field("workers.slots"), 3),
    "out": (["--out", "elsewhere"], config_field("record"), str(Path("elsewhere/record"))),
    "kill_worker_after_s": (["--kill-worker-after", "2"], kills, 1),
    "as_json": (["--json"], lambda _: "printed", "printed"),  # the output is compared in the test
}


def given_options(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> tuple[DemoOptions, str, int]:
    """What the command makes of its arguments, what it prints, and its exit code, without a run."""
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


# ------------------------------------------------------------------------------------- options and settings of the rest


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from settings(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def read_names() -> set[str]:
    """The attributes that the package reads, apart from the configuration's own checks."""
    names: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        if file.name != "config.py":
            names |= {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
    return names


def test_every_setting_is_read() -> None:
    """Not an effect, but the least of one: a setting that no module reads can have none."""
    read = read_names()
    read |= set(ColumnsConfig.model_fields)  # `Columns.of` reads all of them by iterating over the section
    assert [name for name in settings(Config) if name.rpartition(".")[2] not in read] == []


def commands() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file in sorted((PACKAGE / "cli").rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "typer." in ast.unparse(node.args):
                yield f"{file.stem}.{node.name}", node


def test_every_option_of_every_command_is_used() -> None:
    """Not an effect, but the least of one: a parameter that the command's body names."""
    unused, seen = [], 0
    for name, function in commands():
        body = {node.id for part in function.body for node in ast.walk(part) if isinstance(node, ast.Name)}
        arguments = [*function.args.args, *function.args.kwonlyargs]
        seen += 1
        unused += [
            f"{name}: {argument.arg}" for argument in arguments if argument.arg not in body | {"_version"}
        ]  # a callback
    assert unused == []
    assert seen >= len(COMMANDS) // 2  # so that the search itself cannot go blind
    assert set(PRESETS) >= {"smollm2", "tiny", "tiny-moe"}
