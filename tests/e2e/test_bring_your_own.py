"""What docs/bring-your-own.md and its neighbours print, run as it is printed, on a service with fake engines and torch.

What a fake engine cannot do is left out: its weights are not read, so the canary of a module would not be reproduced.
"""

import ast
import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from safetensors.numpy import load_file
from typer.testing import CliRunner

import dora
from dora.client import Operator
from dora.config import Config
from dora.ops.cli.app import app
from dora.orchestrator.main import ServiceHandle
from dora.rpc import dora_pb2 as pb
from tests.service import configured, running, until
from tests.snippets import ROOT, blocks, commands, snippet

PAGE = ROOT / "docs" / "bring-your-own.md"
PRINTED = "127.0.0.1:7070"  # where the page's service listens
STEPS = 2
# Loaded by every Python of the page: nothing but the canary differs from what its reader runs.
WITHOUT_CANARY = """
from dora.client import session

session.Session._skeleton_of = lambda *_: None
session.canary_of = lambda *_: None
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder, with the page's files and her prompts."""
    files = {
        "make_prompts.py": snippet("docs/bring-your-own.md", "WORDS"),
        "my_rewards.py": snippet("docs/bring-your-own.md", "def score"),
        "my_loss.py": snippet("docs/bring-your-own.md", "def grpo_loss"),
        "my_trainer.py": snippet("docs/bring-your-own.md", "rewards_valid"),
        "ddp_loop.py": (ROOT / "examples" / "ddp_loop.py").read_text(encoding="utf-8"),
        "my_prompts.py": snippet("docs/bring-your-own.md", "dora.sync.Prompts"),
    }
    for name, code in files.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    made = (tmp_path / "make_prompts.py").read_text(encoding="utf-8")
    assert "range(320)" in made
    (tmp_path / "make_prompts.py").write_text(made.replace("range(320)", f"range({16 * STEPS})"), encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_CANARY, encoding="utf-8")
    subprocess.run([sys.executable, "make_prompts.py"], cwd=tmp_path, check=True)
    (tmp_path / "of_the_service").mkdir()
    (tmp_path / "of_the_service" / "my_rewards.py").symlink_to(tmp_path / "my_rewards.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(folder: Path, model: Path, **fields: Any) -> Config:
    """As the page's command says, with fake engines."""
    (line,) = [line for line in commands(PAGE) if line.startswith("dora serve --model tiny --prompts prompts.jsonl")]
    words = shlex.split(line)
    given = dict(zip(words[2::2], words[3::2], strict=True))
    settings = dict(each.split("=") for flag, each in zip(words[2::2], words[3::2], strict=True) if flag == "--set")
    assert given["--reward"] == "my_rewards:score" and given["--workers"] == "2"
    read = {key.replace(".", "__"): int(value) for key, value in settings.items()}
    fields = {"prompts": str(folder / "prompts.jsonl"), "reward__function": "my_rewards:score", **read, **fields}
    return configured(model, workers__engine="fake", rollout__group_size=8, **fields)


def addressed(folder: Path, address: str) -> None:
    """The page's service listens on a port of its own; a test's on any that is free."""
    for file in (*folder.glob("my_*.py"), folder / "ddp_loop.py"):
        file.write_text(file.read_text(encoding="utf-8").replace(PRINTED, address), encoding="utf-8")


async def run(handle: ServiceHandle, folder: Path, *argv: str) -> str:
    """Runs one of the reader's files; returns what it printed."""
    addressed(folder, handle.address)
    environment = {**os.environ, "DORA_TOKEN": handle.token, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.fixture
async def service(folder: Path, tiny_dense: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ServiceHandle]:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{folder / 'of_the_service'}")
    async with running(config(folder, tiny_dense)) as handle:
        yield handle


async def test_the_loop_runs_as_printed(service: ServiceHandle, folder: Path) -> None:
    printed = (await run(service, folder, "my_trainer.py")).splitlines()
    assert len(printed) == STEPS
    for number, line in enumerate(printed):
        assert re.fullmatch(rf"step {number}: reward [01]\.\d{{3}}, '<bos>(DIGITS|LATE)' -> .*", line), line
    async with Operator(service.address, service.token) as operator:
        counters = (await operator.status()).counters
    assert counters["groups_trained"] == 16 * STEPS
    assert counters["rewards_failed"] == counters["groups_lost"] == 0


@pytest.mark.full
async def test_the_ranks_run_as_printed(service: ServiceHandle, folder: Path) -> None:
    (line,) = re.findall(r"^torchrun (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    await run(service, folder, "-m", "torch.distributed.run", *shlex.split(line))
    async with Operator(service.address, service.token) as operator:
        assert (await operator.status()).counters["groups_trained"] == 16 * STEPS


async def test_prompts_are_submitted_as_printed(folder: Path, tiny_dense: Path) -> None:
    """By the client, and by what the page says to another language: its JSON, method and metadata."""
    async with running(
        config(folder, tiny_dense, prompts="none", reward__function="dora.rewards.tiny:score")
    ) as handle:
        await run(handle, folder, "my_prompts.py")
        page = ROOT / "dora" / "rpc" / "README.md"
        (line,) = [each for block in blocks(page, "sh") for each in block.splitlines() if "grpcurl" in each]
        header_line = await _header(line, handle)
        words = shlex.split(re.sub(r"\$\(.*?\)", header_line, line))
        folder_of_proto, proto, header, body, address, method = (
            *(words[words.index(flag) + 1] for flag in ("-import-path", "-proto", "-H", "-d")),
            *words[-2:],
        )
        assert (folder_of_proto, address) == ("path/to/dora", PRINTED) and (ROOT / proto).is_file()
        name, _, value = header.partition(": ")
        async with grpc.aio.insecure_channel(handle.address) as channel:
            call = channel.unary_unary(f"/{method}", pb.SubmitRequest.SerializeToString, pb.SubmitReply.FromString)
            request = json_format.ParseDict(json.loads(body), pb.SubmitRequest())
            assert (await call(request, metadata=((name, value),))).accepted == 1
        async with dora.Trainer(handle.address, token=handle.token) as trainer:
            step = await anext(trainer.steps(groups=4))
            assert "q1" in {group.prompt_id async for group in step}


async def _header(line: str, handle: ServiceHandle) -> str:
    """Returns the output of the command within the printed line, for this service."""
    (command,) = re.findall(r"\$\(dora (.*?)\)", line)
    argv, environment = [*command.split(), "--address", handle.address], {"DORA_TOKEN": handle.token}
    result = await asyncio.to_thread(CliRunner(env=environment).invoke, app, argv)
    assert result.exit_code == 0, result.output
    return str(result.stdout.strip())


async def test_a_worker_joins_by_hand_as_printed(folder: Path, tiny_dense: Path) -> None:
    (line,) = [each for block in blocks(PAGE, "sh") for each in block.splitlines() if "dora.worker" in each]
    words = shlex.split(line.replace('"$(dora prepare tiny)"', str(tiny_dense)))
    settings = {"workers__max_model_len_tokens": 512, "workers__engine": "fake", "workers__kv_tokens": 32768}
    async with (
        running(configured(tiny_dense, workers__slots=16, **settings)) as handle,
        Operator(handle.address, handle.token) as operator,
    ):
        argv = [handle.address if word == PRINTED else word for word in words[1:]]
        token = CliRunner(env={"DORA_TOKEN": handle.token}).invoke(app, ["token", "worker"]).stdout.strip()
        environment = {**os.environ, "DORA_TOKEN": token}
        worker = await asyncio.create_subprocess_exec(sys.executable, *argv, "--engine", "fake", env=environment)
        await until(operator, lambda status: any(each.worker_id == "mine" for each in status.workers))
        await operator.drain("mine")
        assert await worker.wait() == 0


async def test_the_loops_of_the_other_documents_run(
    folder: Path, tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr("dora.client.session.TrainerSession._skeleton_of", lambda *_: None)
    monkeypatch.setattr("dora.client.session.canary_of", lambda *_: None)
    weight = torch.zeros((), requires_grad=True)
    prompts = [{"prompt": "LATE", "prompt_id": f"p{index}", "group_size": 2} for index in range(32)]
    (folder / "few.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in prompts))
    few = {"prompts": str(folder / "few.jsonl"), "reward__function": "dora.rewards.tiny:score"}
    async with running(configured(tiny_dense, workers__engine="fake", **few)) as handle:
        monkeypatch.setenv("DORA_TOKEN", handle.token)
        loop = snippet("docs/attach-a-trainer.md", "async def main")
        names: dict[str, Any] = {"my_loss": lambda model, group: weight * len(group), "__name__": "page"}
        await asyncio.to_thread(exec, loop.replace(PRINTED, handle.address), names)
        async with Operator(handle.address, handle.token) as operator:
            assert (await operator.status()).counters["groups_trained"] == 32
    async with running(configured(tiny_dense, workers__engine="fake", **few)) as handle:
        monkeypatch.setenv("DORA_TOKEN", handle.token)
        names = {
            "loss": lambda tokens, logprobs, advantages, mask: weight * len(tokens),
            "optimizer": torch.optim.SGD([weight]),
            "model": load_file(tiny_dense / "model.safetensors"),
        }
        await asyncio.to_thread(exec, snippet("README.md", "step.commit").replace(PRINTED, handle.address), names)
        async with Operator(handle.address, handle.token) as operator:
            assert (await operator.status()).counters["groups_trained"] == 32
    async with (
        running(configured(tiny_dense, workers__engine="fake", **few)) as handle,
        dora.Trainer(handle.address, token=handle.token) as trainer,
        Operator(handle.address, handle.token) as operator,
    ):
        await trainer.attach(groups=16)
        names |= {"my_loss": lambda model, group: weight * len(group), "trainer": trainer}
        code = compile(
            snippet("docs/attach-a-trainer.md", "trainer.republish"), "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        await types.FunctionType(code, names)()
        assert (await operator.status()).counters["groups_trained"] == 32
