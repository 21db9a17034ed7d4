"""The command line: usage errors, exit codes, JSON; operator commands against a real gRPC service on loopback."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from dora.cli.app import COMMANDS, app
from dora.cli.exits import MEANINGS, ExitCode, exit_code_of
from dora.cli.narration import Narrator, news
from dora.cli.output import plain
from dora.cli.settings import overrides_of, toml_of
from dora.cli.tables import duration, number
from dora.cli.token import find_token, left_token, token_file
from dora.cli.view import spark_line
from dora.config import load_config
from dora.errors import CanaryMismatch, Conflict, InvalidValue, NotFound
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import server_interceptors, server_options
from dora.rpc.dora_pb2_grpc import OperatorServicer, add_OperatorServicer_to_server
from dora.rpc.errors import CallFailed, LimitExceeded, ServiceUnavailable, Unauthenticated
from dora.trajectory import Trajectory
from tests.contract.trainer_service import make_trajectory

TOKEN = "correct-horse"

STATUS = pb.Status(
    model="tiny",
    uptime_s=62.0,
    window_versions=2,
    groups_per_step=4,
    filling_step=3,
    filling_left=1,
    newest_version=3,
    trainer="grpo",
    versions=[
        pb.VersionStatus(version=2, deadline_step=3, workers=1, groups_open=1, requests_running=4),
        pb.VersionStatus(version=3, deadline_step=4, newest=True, workers=1, groups_finished=2, requests_waiting=1),
    ],
    workers=[
        pb.WorkerStatus(worker_id="w0", epoch=1, state="ready", version=2, target_version=2, running=4, slots=8, pid=7),
        pb.WorkerStatus(worker_id="w1", epoch=4, state="loading", version=2, target_version=3, slots=8, kv_use=0.25),
        pb.WorkerStatus(worker_id="w2", epoch=2, state="lost", version=-1, target_version=-1, reason="silent for 61 s"),
    ],
    counters={"groups_admitted": 15, "groups_trained": 12, "blackout_ms_p50": 12.25},
    steps=[pb.StepMetrics(step=2, mean_reward=0.5, staleness_mean=0.25, staleness_max=1, tokens=1234)],
    prompts_queued=9,
)
RUNNING = pb.TrajectoryStatus(
    trajectory_id="g3.0", group_id="g3", prompt_id="p3", state="running", version=2, worker="w0", tokens=5, max_tokens=9
)
FINISHED = pb.TrajectoryStatus(trajectory_id="g3.1", group_id="g3", prompt_id="p3", state="finished", version=2)


class CannedOperator(OperatorServicer):
    """A service that always looks the same and knows one request and one worker to move it to."""

    async def GetStatus(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.Status:
        return STATUS

    async def WatchStatus(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.Status]:
        yield STATUS
        yield STATUS

    async def ListTrajectories(
        self, request: pb.TrajectoriesRequest, context: grpc.aio.ServicerContext
    ) -> pb.TrajectoriesReply:
        found = [row for row in (RUNNING, FINISHED) if request.state in ("", row.state)]
        return pb.TrajectoriesReply(trajectories=found[: request.limit], total=len(found))

    async def Migrate(self, request: pb.MigrateRequest, context: grpc.aio.ServicerContext) -> pb.OperatorReply:
        if request.trajectory_id != RUNNING.trajectory_id:
            raise NotFound("request", request.trajectory_id, f"one of {RUNNING.trajectory_id}")
        if request.target_worker != "w1":
            raise Conflict("target_worker", request.target_worker, "a worker of version 2")
        return pb.OperatorReply(message="g3.0 moves to w1", moves=1)

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.OperatorReply:
        return pb.OperatorReply(message=f"{request.worker_id} drains", moves=4)

    async def Rebalance(self, request: pb.RebalanceRequest, context: grpc.aio.ServicerContext) -> pb.OperatorReply:
        return pb.OperatorReply(message="a re-balancing cycle was run", moves=2, loads=1)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A CannedOperator behind the service's own interceptors, in a thread with an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(interceptors=server_interceptors(TOKEN), options=server_options())
        add_OperatorServicer_to_server(CannedOperator(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield f"127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token of this machine's user is found, none is left behind; help is not coloured or cut."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    for name in ("DORA_TOKEN", "DORA_ADDRESS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


def dora(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def at(address: str, *arguments: str) -> Result:
    return dora(*arguments, "--address", address, "--token", TOKEN)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------------------------------------------- usage and help


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_ends_with_an_example(command: str) -> None:
    shown = dora(command, "--help")
    assert shown.exit_code == ExitCode.OK
    last_paragraph = re.split(r"\n\s*\n", shown.stdout.rstrip())[-1]
    assert f"Example: dora {command}" in " ".join(last_paragraph.split())


def test_every_example_is_a_command_line_that_parses() -> None:
    for command, (_, example) in COMMANDS.items():
        name, *arguments = example.split()
        assert (name, arguments[0]) == ("dora", command)
        options = {argument for argument in arguments if argument.startswith("--")}
        assert options <= set(re.findall(r"--[a-z-]+", dora(command, "--help").stdout))


def test_the_help_documents_every_exit_code() -> None:
    words = " ".join(dora("--help").stdout.split())
    for code, meaning in MEANINGS.items():
        assert f"{code.value} {meaning}" in words


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("status", "--nonsense"),
        ("migrate", "g3.0"),
        ("drain",),
        ("trajectories", "--state", "lazy"),
        ("trajectories", "--limit", "0"),
        ("serve", "--window", "two"),
        ("verify",),
    ],
)
def test_bad_usage_is_2_and_nothing_on_stdout(arguments: tuple[str, ...]) -> None:
    failed = dora(*arguments)
    assert failed.exit_code == ExitCode.USAGE
    assert failed.stdout == ""
    assert failed.stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("serve", "--window", "0"), ("window.size", "0")),
        (("serve", "--set", "window.sise=3", "--dry-run"), ("window.sise", "did you mean size")),
        (("serve", "--set", "window", "--dry-run"), ("--set", "section.field=value")),
        (("serve", "--listen", "nowhere", "--dry-run"), ("service.listen", "nowhere")),
        (("serve", "--config", "missing.toml"), ("--config", "missing.toml")),
        (("demo", "--steps", "0"), ("--steps", "0")),
        (("demo", "--lr", "0"), ("--lr", "0")),
        (("demo", "--kill-worker-after", "-1"), ("--kill-worker-after", "-1")),
        (("demo", "--model", "huge"), ("--model", "huge", "smollm2")),
        (("prepare", "huge"), ("--model", "huge")),
        (("status", "--address", "nowhere"), ("address", "nowhere", "host:port")),
    ],
)
def test_a_bad_value_is_one_line_that_names_field_and_value(arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    failed = dora(*arguments)
    assert failed.exit_code == ExitCode.USAGE
    assert failed.stdout == ""
    assert failed.stderr.count("\n") == 1
    for part in parts:
        assert part in failed.stderr


def test_every_expected_error_has_its_exit_code() -> None:
    triple = ("field", "value", "allowed")
    codes = {
        InvalidValue(*triple): 2,
        ServiceUnavailable("gone"): 3,
        Conflict(*triple): 4,
        NotFound(*triple): 4,
        LimitExceeded(*triple): 4,
        Unauthenticated(*triple): 5,
        CallFailed("bug"): 1,
        CanaryMismatch("differs"): 1,
    }
    assert {error: int(exit_code_of(error)) for error in codes} == codes


# -------------------------------------------------------------------------------------------------------------- serve


def test_a_dry_run_prints_a_file_that_loads_back_to_the_same_configuration(tmp_path: Path) -> None:
    given = ("--window", "3", "--workers", "1", "--model", "123", "--set", "rollout.temperature=0.5")
    shown = dora("serve", *given, "--reward", "module:function", "--record", 'a "quoted" \\ folder', "--dry-run")
    assert shown.exit_code == ExitCode.OK
    file = tmp_path / "dora.toml"
    file.write_text(shown.stdout)
    config = load_config(file)
    assert (config.window.size, config.workers.count, config.model) == (3, 1, "123")
    assert (config.rollout.temperature, config.reward.function) == (0.5, "module:function")
    assert config.record == 'a "quoted" \\ folder'
    assert toml_of(config) == shown.stdout


def test_short_options_override_set_and_set_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "dora.toml"
    file.write_text('model = "tiny"\n[window]\nsize = 5\n[workers]\ncount = 5\n')
    settings = ("--set", "window.size=4", "--set", "workers.count=4")
    shown = dora("serve", "--config", str(file), *settings, "--window", "3", "--dry-run", "--json")
    tree = json.loads(shown.stdout)
    assert (tree["model"], tree["window"]["size"], tree["workers"]["count"]) == ("tiny", 3, 4)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_dry_run_does_not_print_the_secret(form: tuple[str, ...]) -> None:
    shown = dora("serve", "--token", "hush-hush", "--dry-run", *form)
    assert shown.exit_code == ExitCode.OK
    assert "hush-hush" not in shown.stdout
    assert load_config(None, ["service.token=hush-hush"]).service.token == "hush-hush"


def test_values_become_toml() -> None:
    overrides = overrides_of({"model": "7", "window.size": 2, "rollout.min_p": 0.5, "record": None, "a.b": True})
    assert [tomllib.loads(f"x={override.partition('=')[2]}")["x"] for override in overrides] == ["7", 2, 0.5, True]


# ---------------------------------------------------------------------------------------------------------- operators


def test_status_prints_a_table_or_json(address: str) -> None:
    table = at(address, "status").stdout
    for words in ("tiny", "2 versions, newest v3", "3, 3 of 4 groups taken", "w1 loading", "1 min 2 s", "12.25"):
        assert words in table
    tree = json.loads(at(address, "status", "--json").stdout)
    assert tree == plain(STATUS)
    assert (tree["newest_version"], tree["counters"]["groups_admitted"], tree["draining"]) == (3, 15.0, False)


def test_versions_prints_the_newest_first_and_json(address: str) -> None:
    table = at(address, "versions").stdout
    assert table.index("v3") < table.index("v2")
    rows = json.loads(at(address, "versions", "--json").stdout)["versions"]
    assert [(row["version"], row["deadline_step"], row["newest"]) for row in rows] == [(2, 3, False), (3, 4, True)]


def test_groups_prints_workers_by_version_and_json(address: str) -> None:
    table = at(address, "groups").stdout
    for words in ("w0", "w1", "v2  to  v3", "25%", "silent for 61 s"):
        assert words in table
    rows = json.loads(at(address, "groups", "--json").stdout)["groups"]
    assert [row["worker_id"] for row in rows] == ["w0", "w1", "w2"]
    assert (rows[0]["pid"], rows[1]["target_version"], rows[2]["version"]) == (7, 3, -1)


def test_trajectories_filters_and_limits(address: str) -> None:
    rows = json.loads(at(address, "trajectories", "--state", "running", "--json").stdout)
    assert [row["trajectory_id"] for row in rows["trajectories"]] == ["g3.0"]
    limited = at(address, "trajectories", "--limit", "1").stdout
    assert "1 of 2" in limited
    assert "5/9" in limited
    assert "g3.1" not in limited


def test_migrate_drain_and_rebalance_say_what_was_begun(address: str) -> None:
    assert at(address, "migrate", "g3.0", "--to", "w1").stdout == "g3.0 moves to w1\n"
    assert json.loads(at(address, "drain", "w0", "--json").stdout) == {"message": "w0 drains", "moves": 4, "loads": 0}
    assert json.loads(at(address, "rebalance", "--json").stdout)["loads"] == 1


def test_what_the_service_refuses_is_4_with_its_own_sentence(address: str) -> None:
    unknown = at(address, "migrate", "g9.9", "--to", "w1")
    assert (unknown.exit_code, unknown.stdout) == (ExitCode.REFUSED, "")
    assert "g9.9" in unknown.stderr and "g3.0" in unknown.stderr
    wrong = at(address, "migrate", "g3.0", "--to", "w0", "--json")
    assert (wrong.exit_code, wrong.stdout) == (ExitCode.REFUSED, "")
    assert "a worker of version 2" in wrong.stderr


def test_a_wrong_token_and_no_token_are_5(address: str) -> None:
    wrong = dora("status", "--address", address, "--token", "nonsense")
    assert wrong.exit_code == ExitCode.UNAUTHENTICATED
    assert "nonsense" not in wrong.stderr
    none = dora("status", "--address", address)
    assert none.exit_code == ExitCode.UNAUTHENTICATED
    assert "DORA_TOKEN" in none.stderr


def test_no_service_is_3_and_names_the_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    failed = at(address, "status", "--json")
    assert (failed.exit_code, failed.stdout) == (ExitCode.UNREACHABLE, "")
    assert address in failed.stderr


def test_the_token_comes_from_the_environment_or_from_the_service_on_this_host(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with left_token(address, TOKEN) as file:
        assert file.stat().st_mode & 0o777 == 0o600
        assert dora("status", "--address", address, "--json").exit_code == ExitCode.OK
    assert not file.exists()
    monkeypatch.setenv("DORA_TOKEN", TOKEN)
    monkeypatch.setenv("DORA_ADDRESS", address)
    assert dora("status", "--json").exit_code == ExitCode.OK


def test_a_token_of_this_host_is_sent_to_no_other(address: str) -> None:
    with left_token(address, TOKEN):
        assert find_token(address) == TOKEN
        assert find_token(f"elsewhere.example:{address.rpartition(':')[2]}") == ""


def test_a_token_that_another_service_left_stays() -> None:
    with left_token("127.0.0.1:7070", "first"):
        token_file("127.0.0.1:7070").write_text("second\n")
    assert find_token("127.0.0.1:7070") == "second"


# -------------------------------------------------------------------------------------------------------------- watch


def test_watch_tells_news_once_where_there_is_no_terminal(address: str) -> None:
    lines = at(address, "watch", "--period-ms", "50").stdout.splitlines()
    assert "step 2 committed: mean reward 0.500, staleness mean 0.25 max 1, 1,234 tokens" in lines
    assert "w2 lost: silent for 61 s" in lines
    assert len(lines) == len(set(lines))


def test_watch_prints_one_json_document_a_line(address: str) -> None:
    shown = at(address, "watch", "--json", "--updates", "1").stdout.splitlines()
    assert [json.loads(line) for line in shown] == [plain(STATUS)]


def test_news_names_what_changed_between_two_statuses() -> None:
    after = pb.Status()
    after.CopyFrom(STATUS)
    after.steps.add(step=3, mean_reward=0.75, tokens=10)
    after.counters["migrations_kv"] = 3
    after.workers[1].version = 3
    after.workers[2].state, after.workers[2].epoch = "ready", 5
    assert news(STATUS, after) == [
        "step 3 committed: mean reward 0.750, staleness mean 0.00 max 0, 10 tokens",
        "w1 now hosts v3",
        "w2 is back (epoch 5)",
        "requests migrated with their KV: 3",
    ]
    assert news(after, after) == []


def test_the_narrator_keeps_its_pace_and_gives_signs_of_life() -> None:
    narrator = Narrator()
    assert len(narrator.tell(STATUS, 0.0)) == 4
    changed = pb.Status()
    changed.CopyFrom(STATUS)
    changed.counters["migrations_kv"] = 1
    assert narrator.tell(changed, 1.0) == []
    assert narrator.tell(changed, 2.0) == ["requests migrated with their KV: 1"]
    assert narrator.tell(changed, 5.0) == []
    assert narrator.tell(changed, 17.0) == ["filling step 3, 3 of 4 groups taken, 4 requests running"]
    changed.counters["migrations_kv"] = 2
    assert narrator.tell(changed, 17.1, last=True) == ["requests migrated with their KV: 1"]


def test_numbers_and_durations_for_people() -> None:
    assert [duration(seconds) for seconds in (1.5, 62, 3725)] == ["1.5 s", "1 min 2 s", "1 h 2 min"]
    assert [number(value) for value in (1234.0, 12.345)] == ["1,234", "12.35"]
    assert spark_line([0.0, 0.5, 1.0]) == "▁▄█"
    assert spark_line([]) == ""


# ------------------------------------------------------------------------------------------------------------- others


def test_version_and_prepare(tmp_path: Path) -> None:
    assert dora("version").stdout.startswith("dora 0.")
    assert set(json.loads(dora("version", "--json").stdout)) == {"dora", "python"}
    prepared = json.loads(dora("prepare", "tiny", "--cache", str(tmp_path), "--json").stdout)
    assert (Path(prepared["folder"]) / "model.safetensors").is_file()


def write_record(folder: Path, tiny: Path, trajectory: Trajectory) -> None:
    (folder / "versions").mkdir(parents=True)
    (folder / "versions" / "0").symlink_to(tiny)
    (folder / "trajectories.jsonl").write_text(json.dumps(trajectory.to_json_dict()) + "\n")


def test_verify_fails_a_record_whose_logprobs_are_not_the_models(tmp_path: Path, tiny_dense: Path) -> None:
    write_record(tmp_path, tiny_dense, make_trajectory(0, 0, 0, group_size=1))
    as_json = dora("verify", str(tmp_path), "--json")
    assert as_json.exit_code == ExitCode.FAILED
    report = json.loads(as_json.stdout)
    assert (report["ok"], report["trajectories"]) == (False, 1)
    table = dora("verify", str(tmp_path))
    assert table.exit_code == ExitCode.FAILED
    assert "violation" in table.stdout


def test_verify_passes_a_record_within_the_tolerance_given(tmp_path: Path, tiny_dense: Path) -> None:
    write_record(tmp_path, tiny_dense, make_trajectory(0, 0, 0, group_size=1))
    passed = dora("verify", str(tmp_path), "--atol", "100")
    assert passed.exit_code == ExitCode.OK
    assert "verified" in passed.stdout


def test_verify_of_no_record_is_a_bad_value(tmp_path: Path) -> None:
    failed = dora("verify", str(tmp_path / "nowhere"))
    assert failed.exit_code == ExitCode.USAGE
    assert "nowhere" in failed.stderr


def test_importing_the_command_line_loads_no_heavy_module() -> None:
    heavy = ("torch", "vllm", "transformers", "matplotlib")
    code = f"import sys, dora.cli.app; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_serve_says_how_to_attach_and_drains_on_sigterm(tmp_path: Path, tiny_dense: Path) -> None:
    options = ["--model", str(tiny_dense), "--prompts", "tiny", "--workers", "0", "--listen", "127.0.0.1:0", "--json"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "dora", "serve", *options], stdout=subprocess.PIPE, text=True, env=environment
    ) as service:
        assert service.stdout is not None
        document = "".join(iter(service.stdout.readline, "}\n")) + "}"
        handle = json.loads(document)
        status = dora("status", "--address", handle["address"], "--token", handle["token"], "--json")
        file = tmp_path / "dora" / f"{handle['address'].rpartition(':')[2]}.token"
        left = file.read_text().strip()
        service.send_signal(signal.SIGTERM)
        assert service.wait() == ExitCode.OK
    assert json.loads(status.stdout)["model"] == handle["model"] == str(tiny_dense)
    assert left == handle["token"]
    assert not file.exists()


def test_serve_on_a_busy_port_is_a_bad_value(address: str, tiny_dense: Path) -> None:
    failed = dora("serve", "--model", str(tiny_dense), "--prompts", "tiny", "--workers", "0", "--listen", address)
    assert failed.exit_code == ExitCode.USAGE
    assert "--listen" in failed.stderr and address in failed.stderr
