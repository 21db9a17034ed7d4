"""Completion in shells, called as they call it, by the environment that typer's scripts set."""

import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dora.config import Config, load_config
from dora.core.policies import POLICIES
from dora.ops.cli.app import app
from tests.private_token import with_token
from tests.sweeps import some_of
from tests.unit.cli.service import TOKEN, free_port


def completed(line: str, **environment: str) -> list[str]:
    """The values that zsh is offered for ``line``."""
    asked = {"_DORA_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line, **environment}
    answer = CliRunner(env=asked).invoke(app, [], prog_name="dora")
    assert answer.exit_code == 0 and answer.stderr == "", answer.stderr
    return [
        value.replace(r"\\:", ":") for value in re.findall(r'^(?:_arg.*\(\()?"([^"]+)"', answer.stdout, re.MULTILINE)
    ]


def completed_in_bash(*words: str) -> list[str]:
    """The values that bash is offered; it splits words at ``=`` and ``:``."""
    asked = {"_DORA_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    return CliRunner(env=asked).invoke(app, [], prog_name="dora").stdout.split()


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("dora sta", ["status"]),
        ("dora simulate pre", ["presets"]),
        ("dora serve --model t", ["tiny", "tiny-moe", "tiny-hybrid"]),
        ("dora demo --model s", ["smollm2"]),
        ("dora prepare tiny-", ["tiny-moe", "tiny-hybrid"]),
        ("dora profile --model ti", ["tiny", "tiny-moe", "tiny-hybrid"]),
        ("dora profile --clock c", ["cpu"]),
        ("dora serve --set window.si", ["window.size=", "window.size=2", "window.size=auto"]),
        ("dora serve --set window.m", ["window.min=", "window.max="]),
        ("dora serve --set balance.dora.l", ["balance.dora.level_gap=", "balance.dora.level_gap=2"]),
        ("dora serve --set workers.engine=", ["workers.engine=vllm", "workers.engine=fake"]),
        ("dora serve --set rollout.ignore_eos=t", ["rollout.ignore_eos=true"]),
        ("dora serve --set balance.policy=la", ["balance.policy=laxity", "balance.policy=laminar"]),
        ("dora serve --set model=ti", ["model=tiny", "model=tiny-moe"]),
        ("dora serve --set nothing.like=it", []),
        ("dora demo --set workers.dt", ["workers.dtype=", "workers.dtype=float32", "workers.dtype=bfloat16"]),
        ("dora simulate --set cluster.gpus_per", ["cluster.gpus_per_engine="]),
        ("dora simulate --preset dora", ["dora-64", "dora-128"]),
        ("dora simulate --policy pa", ["partial"]),
        ("dora simulate --predictor r", ["ranker"]),
        ("dora simulate sweep --policy al", ["all"]),
        ("dora simulate sweep --faults kill,reo", ["kill,reorder"]),
        ("dora replay log --only StepC", ["StepCommitted"]),
        ("dora replay log --only LoadVersion,StepC", ["LoadVersion,StepCommitted"]),
        ("dora plan --model qwen2.5-3", ["qwen2.5-32b"]),
        ("dora plan --hardware h", ["h800", "h20", "h100", "h200"]),
        ("dora serve --prompts rea", ["reasoning-gym:"]),
        ("dora serve --reward dora.rewards.t", ["dora.rewards.tiny:score"]),
        ("dora serve --kv-tier l", ["lmcache"]),
        ("dora trajectories --state r", ["running"]),
    ],
)
def test_values_are_completed(line: str, values: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = completed(line)
    assert found[: len(values)] == values and (values or not found)


GIVEN_TOGETHER = (
    *("prompts.", "reward.function=", "model=", "balance.cost."),
    *(
        "workers.batch_invariant=true",
        "workers.weights_from=trainer",
        "evaluation.keep_best=true",
        "workers.quantisation=fp8",
    ),
)


@pytest.mark.parametrize("every", some_of((1, 10), 10))
def test_every_setting_is_completed_and_every_value_offered_is_allowed(every: int) -> None:
    names = completed("dora serve --set ")
    assert {"model=", "window.size=", "service.listen=", "selection.filter="} <= set(names)
    assert all(name.endswith("=") for name in names) and len(names) > 50
    for name in names[::every]:
        for value in completed(f"dora serve --set {name}"):
            if not value.startswith(GIVEN_TOGETHER):
                load_config(None, ["workers.max_model_len_tokens=4096", value])
    assert [f"balance.policy={policy}" for policy in POLICIES] == completed("dora serve --set balance.policy=")
    assert set(Config.model_fields) >= {name.partition(".")[0].rstrip("=") for name in names}


def test_workers_and_requests_are_those_of_the_service(address: str) -> None:
    at = f"--address {address} --token-file {with_token(TOKEN)}"
    assert completed(f"dora drain {at} ") == ["w0", "w1", "w2"]
    assert completed(f"dora migrate {at} g3.0 --to w") == ["w0", "w1", "w2"]
    assert completed(f"dora migrate {at} ") == ["g3.0"]
    assert completed("dora drain ", DORA_ADDRESS=address, DORA_TOKEN=TOKEN) == ["w0", "w1", "w2"]


def test_a_service_that_does_not_answer_completes_nothing_and_says_nothing(address: str) -> None:
    assert completed(f"dora drain --address 127.0.0.1:{free_port()} ") == []
    assert completed(f"dora drain --address {address} --token-file {with_token('wrong')} ") == []
    assert completed("dora drain --address nowhere ") == []
    began_s = time.monotonic()
    assert completed("dora migrate --address 192.0.2.1:7070 ") == []  # an address that swallows what is sent to it
    assert time.monotonic() - began_s < 10.0


def test_bash_completes_names() -> None:
    assert completed_in_bash("dora", "sta") == ["status"]
    found = completed_in_bash("dora", "serve", "--set", "window.si")
    assert found == ["window.size=", "window.size=2", "window.size=auto"]
    assert completed_in_bash("dora", "serve", "--listen", "127.0.0.1", ":", "0", "--model", "tiny-") == [
        "tiny-moe",
        "tiny-hybrid",
    ]


def test_the_script_that_shells_load_is_shown() -> None:
    shown = CliRunner(env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}).invoke(app, ["--help"])
    assert "--install-completion" in shown.stdout and "--show-completion" in shown.stdout
    script = CliRunner(env={"_DORA_COMPLETE": "source_bash"}).invoke(app, [], prog_name="dora").stdout
    assert "_DORA_COMPLETE=complete_bash" in script and "complete -o default -F _dora_completion dora" in script
