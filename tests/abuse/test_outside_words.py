"""Names, numbers and files as people give them: a pipe, a null, a key twice, a name that no terminal should get."""

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dora.client import Operator, Trainer
from dora.client.step import _numbers
from dora.config import PromptsConfig, WorkersConfig
from dora.data.strict_json import read_json
from dora.errors import InvalidValue
from dora.host.launcher import WorkerStartError
from dora.host.processes import Processes
from dora.models import resolve_model
from dora.prompts.check import check_name, checked_messages
from dora.prompts.files import file_source
from dora.prompts.tokenizer import ChatTokenizer
from dora.rewards.function import load_function
from dora.rewards.verdict import verdict
from tests.refusals import refused

ARGUMENTS = ("prompt", "response", [1], {})


@pytest.mark.parametrize("name", ["~nobody-has-this-name/x.jsonl", "x" * 300 + ".jsonl", "a\0b.jsonl"])
def test_a_name_that_no_file_can_have_is_refused(name: str, tokenizer: ChatTokenizer) -> None:
    with refused(InvalidValue, field="--prompts"):
        file_source(PromptsConfig(source=name), tokenizer)
    with refused(InvalidValue, field="--model"):
        resolve_model(name)


def test_a_pipe_is_not_waited_for(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    for suffix in (".jsonl", ".parquet"):
        pipe = tmp_path / f"pipe{suffix}"
        os.mkfifo(pipe)
        with refused(InvalidValue, field="--prompts"):
            file_source(PromptsConfig(source=str(pipe)), tokenizer)


def test_a_null_is_a_field_that_a_row_does_not_have(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    file = tmp_path / "nulls.jsonl"
    file.write_text('{"prompt": null, "token_ids": [1], "group_size": null, "sampling": null, "answer": null}\n')
    (prompt,) = file_source(PromptsConfig(source=str(file)), tokenizer)
    assert (prompt.token_ids, prompt.group_size, prompt.verifier_json) == ((1,), 0, '{"answer": null}')


def test_a_column_that_a_table_has_twice_is_refused(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = [pyarrow.array([text]) for text in "abc"]
    parquet.write_table(
        pyarrow.Table.from_arrays(columns, names=["prompt", "answer", "answer"]), tmp_path / "t.parquet"
    )
    with refused(InvalidValue, field="--prompts"):
        file_source(PromptsConfig(source=str(tmp_path / "t.parquet")), tokenizer)


@pytest.mark.parametrize("text", ['{"max_tokens": 1, "max_tokens": 2}', '[{"a": {"\\n": 1, "\\n": 1}}]'])
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    with refused(InvalidValue, field="sampling_json"):
        read_json(text, "sampling_json", 1000)


@pytest.mark.parametrize("name", ["\x1b[2J", "two\nlines", "\u202e", "\x00"])
def test_an_id_that_changes_a_terminal_or_a_log_is_refused(name: str) -> None:
    with refused(InvalidValue, field="prompt_id"):
        check_name(name, "prompt_id")


def test_a_call_of_a_tool_needs_no_content() -> None:
    assert checked_messages([{"role": "assistant", "tool_calls": []}], "messages")
    with pytest.raises(InvalidValue):
        checked_messages([{"role": "assistant"}], "messages")


@pytest.mark.parametrize(
    ("metrics", "field", "value"),
    [
        ([("loss", 1)], "metrics", [("loss", 1)]),
        (3, "metrics", 3),
        ({"\ud800": 1}, "metrics: name", ascii("\ud800")),
        ({"loss": 1j}, "metrics: loss", 1j),
    ],
)
def test_metrics_that_are_none_are_refused(metrics: Any, field: str, value: object) -> None:
    with refused(InvalidValue, field=field, value=value):
        _numbers(metrics)


@pytest.mark.parametrize("count", [True, 1.5, "3", None, -1, 1 << 40])
async def test_a_count_that_no_message_holds_is_refused(count: Any) -> None:
    async with Trainer("127.0.0.1:1", token="t") as trainer, Operator("127.0.0.1:1", token="t") as operator:
        with refused(InvalidValue, field="groups"):
            await trainer.attach(count)
        with refused(InvalidValue, field="limit"):
            await operator.trajectories(limit=count)
        with refused(InvalidValue, field="period_ms"):
            await anext(operator.watch(period_ms=count))


class ByName:
    def __call__(self, **named: Any) -> float:
        return float(set(named) == {"prompt_text", "response_text", "response_token_ids", "verifier"})


class Yields:
    def __call__(self, *values: Any) -> Any:
        yield 1.0


by_name, yields = ByName(), Yields()


def test_a_function_may_take_its_parameters_by_name() -> None:
    assert load_function(f"{__name__}:by_name", "reward")(*ARGUMENTS) == 1.0


@pytest.mark.parametrize(("name", "keyword"), [("yields", "yield"), ("ByName", "class")])
def test_what_cannot_return_a_reward_is_found_out_at_the_start(name: str, keyword: str) -> None:
    with refused(ValueError, names=(keyword,)):
        load_function(f"{__name__}:{name}", "reward")


class _Ends(float):
    def __float__(self) -> float:
        raise SystemExit(1)


def test_a_value_that_ends_who_reads_it_is_a_failure() -> None:
    assert "failure" in verdict(_Ends(1.0))


async def test_a_worker_that_cannot_be_started_is_a_death_and_not_the_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora.host.processes.RESTART_PAUSE_S", 0.001)
    monkeypatch.setattr("dora.host.processes.RESTART_PAUSE_MAX_S", 0.001)

    def none_left(*_: Any) -> Any:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    def command(worker_id: str) -> list[str]:
        if worker_id == "w0":
            none_left()
        return ["-c", "import sys; sys.stdin.read()"]

    launcher = Processes(WorkersConfig(engine="fake", restarts=2), command, {}, tmp_path)
    launcher.scale(1)
    why = "(Resource temporarily unavailable)"
    with refused(WorkerStartError, field="worker_id", value="w0", names=(3, why)):
        await asyncio.wait_for(launcher.failed, 20)
    assert why in (launcher.early_death() or "")
    await launcher.close()


@pytest.mark.parametrize("closed", ["0<&- 2>&-", "2>&-"])
def test_a_command_without_standard_error_ends_by_its_own_exit_code(closed: str) -> None:
    command = f"DORA_TOKEN=t exec {sys.executable} -m dora status --address 127.0.0.1:1 {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"", b"")
