"""The command line: help, usage errors, exit codes, configuration, and the commands that ask no service."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from typer.testing import Result

from dora.config import load_config, overrides_of
from dora.data.trajectory import Trajectory
from dora.errors import CanaryMismatch, Conflict, InvalidValue, NotFound
from dora.ops.cli.app import COMMANDS
from dora.ops.cli.control import service
from dora.ops.cli.exits import ASKING, MEANINGS, ExitCode, checked_output, exit_code_of
from dora.ops.view.settings import toml_of
from dora.rpc.errors import CallFailed, LimitExceeded, NoAnswer, PermissionDenied, ServiceUnavailable, Unauthenticated
from tests.contract.trainer_service import make_trajectory
from tests.owner_token import owner_token
from tests.private_token import with_token
from tests.refusals import data_words, refused
from tests.sweeps import some_of
from tests.unit.cli.service import dora

# ---------------------------------------------------------------------------------------------------- usage and help


@cache
def help_of(command: str) -> Result:
    return dora(command, "--help")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_ends_with_an_example(command: str) -> None:
    shown = help_of(command)
    assert shown.exit_code == ExitCode.OK
    last_paragraph = re.split(r"\n\s*\n", shown.stdout.rstrip())[-1]
    assert f"Example: dora {command}" in " ".join(last_paragraph.split())


def test_every_example_is_a_command_line_that_parses() -> None:
    for command, (_, example) in COMMANDS.items():
        name, *arguments = example.split()
        assert (name, arguments[0]) == ("dora", command)
        options = {argument for argument in arguments if argument.startswith("--")}
        assert options <= set(re.findall(r"--[a-z-]+", help_of(command).stdout))


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
        PermissionDenied(*triple): 5,
        NoAnswer("busy"): 6,
        CallFailed("bug"): 1,
        CanaryMismatch("differs", 0.5): 1,
    }
    assert {error: int(exit_code_of(error)) for error in codes} == codes
    assert service.COMMANDS.keys() | {"eval"} == ASKING


def test_only_a_service_refuses_with_4(tmp_path: Path, tiny_dense: Path) -> None:
    """An id that occurs twice in a file, or a folder of something else, does not fit what is there: a bad value."""
    (tmp_path / "twice.jsonl").write_text('{"prompt": "DIGITS", "prompt_id": "a"}\n' * 2)
    settings = ("--set", "workers.engine=fake", "--set", "workers.max_model_len_tokens=512", "--listen", "127.0.0.1:0")
    prompts = ("--prompts", str(tmp_path / "twice.jsonl"), "--model", str(tiny_dense))
    for mode in ((), ("--dry-run",)):
        refused = dora("serve", *mode, *prompts, *settings)
        assert (refused.exit_code, "twice.jsonl:2" in refused.stderr) == (ExitCode.USAGE, True)
    (tmp_path / "tiny-r1").mkdir()
    assert dora("prepare", "tiny", "--cache", str(tmp_path)).exit_code == ExitCode.USAGE


# ------------------------------------------------------------------------------------- standard output that is no use


PRINTING = some_of(
    [("--help",), ("version",), ("plan", "--gpus", "64"), ("plan", "--gpus", "64", "--json")], ("--help",), ("version",)
)


def dora_process(*arguments: str, stdout: int, inside: Sequence[str] = ()) -> tuple[int, str]:
    """Exit code and stderr of the command in a process of its own. ``inside``: the command that begins it."""
    command = [*inside, sys.executable, "-m", "dora", *arguments]
    ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("arguments", PRINTING)
def test_an_output_that_is_full_is_one_line_and_a_failure(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        code, stderr = dora_process(*arguments, stdout=full.fileno())
    assert (code, stderr.count("\n")) == (ExitCode.FAILED, 1)
    assert stderr.startswith("dora: standard output cannot be written: ") and "No space left" in stderr


@pytest.mark.parametrize("arguments", PRINTING)
def test_an_output_that_nobody_reads_ends_the_command_without_a_word(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert dora_process(*arguments, stdout=writer) == (ExitCode.UNREAD, "")
    os.close(writer)


def test_an_output_that_is_closed_is_one_line_and_a_failure() -> None:
    closes = ("sh", "-c", 'exec "$@" >&-', "sh")
    ended = dora_process("version", stdout=subprocess.DEVNULL, inside=closes)
    assert ended == (ExitCode.FAILED, "dora: standard output is closed\n")


def test_the_failure_of_another_file_is_not_the_outputs() -> None:
    elsewhere = OSError("elsewhere")
    with pytest.raises(OSError) as caught, checked_output():
        raise elsewhere
    assert caught.value is elsewhere


# -------------------------------------------------------------------------------------------------------------- serve


ANYWHERE = ("--listen", "127.0.0.1:0")


def test_a_dry_run_prints_a_file_that_loads_back_to_the_same_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_dense: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "123").symlink_to(tiny_dense)  # a text that looks like a number
    given = ("--window", "3", "--workers", "1", "--model", "123", "--set", "rollout.temperature=0.5", *ANYWHERE)
    given += ("--set", "workers.max_model_len_tokens=512", "--prompts", "tiny")
    reward = "dora.rewards.answer:score"
    shown = dora("serve", *given, "--reward", reward, "--record", 'a "quoted" \\ folder', "--dry-run")
    assert shown.exit_code == ExitCode.OK
    file = tmp_path / "dora.toml"
    file.write_text(shown.stdout)
    config = load_config(file)
    assert (config.window.size, config.workers.count, config.model) == (3, 1, "123")
    assert (config.rollout.temperature, config.reward.function) == (0.5, reward)
    assert config.record == 'a "quoted" \\ folder'
    assert toml_of(config) == shown.stdout


def test_short_options_override_set_and_set_overrides_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "dora.toml"
    file.write_text('model = "tiny"\n[window]\nsize = 5\n[workers]\ncount = 5\n')
    settings = ("--set", "window.size=4", "--set", "workers.count=4")
    shown = dora("serve", "--config", str(file), *settings, "--window", "3", *ANYWHERE, "--dry-run", "--json")
    assert shown.exit_code == ExitCode.OK, shown.stderr
    tree = json.loads(shown.stdout)
    assert (tree["model"], tree["window"]["size"], tree["workers"]["count"]) == ("tiny", 3, 4)


def test_numbers_are_no_truth_values_and_lengths_leave_room_for_a_prompt() -> None:
    """Python would take ``true`` for 1."""
    for setting, message in (
        ("window.size=true", "window.size = True is not valid: it must be a whole number"),
        ("balance.period_s=false", "balance.period_s = False is not valid: it must be a number"),
        ("rollout.max_tokens=32768", "rollout.max_tokens = 32768 .*below workers.kv_tokens 32768"),
        ("workers.max_model_len_tokens=256", "rollout.max_tokens = 256 .*below workers.max_model_len_tokens 256"),
        ("workers.max_model_len_tokens=15", "workers.max_model_len_tokens = 15 .*at least 16, or 0"),
        ("balance.cost={kv_token_s=0,weights_s=0,request_s=0,step_s=0}", "balance.cost.step_s = 0.0 .*above 0"),
        ("window.groups_per_step=2000000", "window.groups_per_step = 2000000"),
    ):
        with refused(InvalidValue, names=data_words(message)):
            load_config(None, [setting])
    assert load_config(None, ["rollout.ignore_eos=true"]).rollout.ignore_eos


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfemodel = 'tiny'", "UTF-8"), (b"model = ", "valid TOML"), (b"seed = " + 5000 * b"9", "valid TOML")],
)
@pytest.mark.parametrize(
    ("arguments", "option"),
    [(("serve", "--dry-run"), "--config"), (("simulate", "--preset", "small"), "--file")],
)
def test_a_file_that_is_no_toml_is_named_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], option: str, content: bytes, words: str
) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    refused = dora(*arguments, option, str(file))
    assert (refused.exit_code, refused.stdout) == (ExitCode.USAGE, "")
    assert refused.stderr.startswith(f"dora: {option} = '{file}' is not valid: it must be ") and words in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_number_of_more_digits_than_can_be_read_is_no_number() -> None:
    with refused(InvalidValue, field="window.size"):
        load_config(None, ["window.size=" + 5000 * "9"])


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_dry_run_does_not_print_the_secret(
    form: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shown = dora(
        "serve", "--model", "tiny", "--token-file", with_token(owner_token("hush")), *ANYWHERE, "--dry-run", *form
    )
    assert shown.exit_code == ExitCode.OK, shown.stderr
    assert owner_token("hush") not in shown.output
    assert load_config(None, ["service.token=hush-hush"]).service.token == "hush-hush"


@pytest.mark.parametrize(("name", "words"), [("lamniar", "did you mean laminar?"), ("partial", "one of dora, laxity")])
def test_a_dry_run_refuses_a_strategy_that_a_start_would_refuse(name: str, words: str) -> None:
    refused = dora("serve", "--dry-run", "--set", f"balance.policy={name}")
    assert (refused.exit_code, refused.stdout) == (ExitCode.USAGE, "")
    assert words in refused.stderr


@pytest.mark.parametrize(("policy", "window", "allowed"), [("sync", "4", "1, by"), ("streamrl", "3", "1 to 2, by")])
def test_a_dry_run_refuses_a_window_that_a_start_would_refuse(policy: str, window: str, allowed: str) -> None:
    refused = dora("serve", "--dry-run", "--set", f"balance.policy={policy}", "--window", window)
    assert (refused.exit_code, refused.stdout) == (ExitCode.USAGE, "")
    assert f"window.size = {window}" in refused.stderr and f"{allowed} the definition of {policy}" in refused.stderr


def test_profile_refuses_a_folder_that_does_not_exist_before_it_times_anything(tmp_path: Path) -> None:
    refused = dora("profile", "--model", "tiny", "--out", str(tmp_path / "nowhere" / "cost.toml"))
    assert (refused.exit_code, refused.stdout) == (ExitCode.USAGE, "")
    assert "--out" in refused.stderr and "timing" not in refused.stderr


def test_options_that_were_given_override_and_keep_their_kind() -> None:
    options = {"model": "7", "window.size": 3, "rollout.min_p": 0.5, "record": None, "rollout.ignore_eos": True}
    config = load_config(None, ["record='here'", *overrides_of(options)])
    assert (config.model, config.window.size, config.rollout.min_p) == ("7", 3, 0.5)
    assert (config.record, config.rollout.ignore_eos) == ("here", True)


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
    code = f"import sys, dora.ops.cli.app; print([name for name in {heavy} if name in sys.modules])"
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
        status = dora("status", "--address", handle["address"], "--token-file", with_token(handle["token"]), "--json")
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


@pytest.mark.parametrize("arguments", [("-h",), ("workers", "-h"), ("simulate", "-h"), ("simulate", "sweep", "-h")])
def test_a_short_h_is_the_help_everywhere(arguments: tuple[str, ...]) -> None:
    result = dora(*arguments)
    assert result.exit_code == ExitCode.OK
    assert "Usage:" in result.stdout


def test_the_version_is_an_option_too() -> None:
    assert dora("--version").stdout == dora("version").stdout


@pytest.mark.parametrize(
    "given", [("--token", "hush-hush"), ("--token=hush-hush",), ("--set", "service.token=hush-hush")]
)
def test_a_token_is_no_argument(given: tuple[str, ...]) -> None:
    """Other users can read arguments, so it is refused there, without being repeated."""
    result = dora("serve", "--model", "tiny", *ANYWHERE, *given, "--dry-run")
    assert result.exit_code == ExitCode.USAGE and "hush-hush" not in result.output


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("hush-hush\n")
    file.chmod(0o644)
    result = dora("status", "--address", "127.0.0.1:1", "--token-file", str(file))
    assert result.exit_code == ExitCode.USAGE and "0644" in result.output and "hush-hush" not in result.output


def test_a_command_that_is_interrupted_while_it_loads_says_so_in_a_line() -> None:
    program = """
import os, signal, sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "dora.ops.cli.app":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupted())
from dora.ops.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (ExitCode.INTERRUPTED, "dora: interrupted\n")
