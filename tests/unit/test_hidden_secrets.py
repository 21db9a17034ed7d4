"""Secrets stay out of what is printed: representations, refused values, arguments."""

import ast
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import dora
from dora.config import load_config, validated
from dora.errors import InvalidValue
from dora.host.supervised import SupervisedProcess
from dora.ops.cli.exits import ExitCode
from dora.ops.cli.options import check_no_secret
from tests.refusals import refused
from tests.unit.cli.service import dora as command

SECRET = "s3cret-0123456789"
NAMES = {"token", "tokens", "secret", "kv_secret", "owner_token"}
KINDS = ("str", "bytes", "Mapping[Role, str]")


@cache
def trees() -> dict[Path, ast.Module]:
    """The files of ``dora/``, read once."""
    return {file: ast.parse(file.read_text()) for file in sorted(Path(dora.__file__).parent.rglob("*.py"))}


def declared() -> Iterator[tuple[str, str]]:
    """Fields of classes that hold a token or another secret, with their declarations."""
    for file, tree in trees().items():
        for each in ast.walk(tree):
            if not isinstance(each, ast.ClassDef):
                continue
            is_data = any("dataclass" in ast.unparse(decorator) for decorator in each.decorator_list) or each.bases
            for field in each.body if is_data else ():
                is_named = isinstance(field, ast.AnnAssign) and ast.unparse(field.target) in NAMES
                if is_named and ast.unparse(field.annotation) in KINDS:
                    yield f"{file.name}: {each.name}.{ast.unparse(field.target)}", ast.unparse(field)


def started() -> Iterator[tuple[str, set[str | None]]]:
    """The calls that start a process, with their keywords."""
    starts = {"asyncio.create_subprocess_exec", "subprocess.run", "subprocess.Popen", "subprocess.check_call"}
    for file, tree in trees().items():
        for each in ast.walk(tree):
            if isinstance(each, ast.Call) and ast.unparse(each.func) in starts:
                yield f"{file.name}:{each.lineno}", {keyword.arg for keyword in each.keywords}


def test_each_process_gets_a_stated_environment() -> None:
    """One that inherits everything has the owner's token in its own environment."""
    found = dict(started())
    missing = [place for place, keywords in found.items() if "env" not in keywords]
    assert len(found) >= 10 and not missing
    inheriting = {file.name for file in trees() if "**os.environ" in file.read_text()}
    assert inheriting == {"trainer_process.py"}, "which replaces DORA_TOKEN by a trainer's"


def test_no_representation_shows_a_secret() -> None:
    found = dict(declared())
    assert len(found) >= 8
    assert not [name for name, field in found.items() if "repr=False" not in field]
    assert SECRET not in repr(load_config(None, [("service.token", SECRET)]))


@pytest.mark.parametrize(
    "tree",
    [
        {"service": {"token": [SECRET]}},
        {"service": {"token": {"value": SECRET}}},
        {"service": {"tokne": SECRET}},
        {"service": {"Token": SECRET}},
        {"token": SECRET},
        {"servce": {"token": SECRET}},
        {"servce": {"token": SECRET, "listen": "x:1"}},
        {"service": [{"token": SECRET}]},
        {"model": {"token": SECRET}},
    ],
    ids=json.dumps,
)
def test_a_refused_configuration_does_not_show_it(tree: dict[str, Any]) -> None:
    with refused(InvalidValue) as error:
        validated(tree)
    assert SECRET not in str(error.value) and SECRET not in repr(error.value.value)


@pytest.mark.parametrize(
    "setting",
    [f"service.token={SECRET}", f" service.token = {SECRET}", f'service={{token="{SECRET}"}}'],
)
def test_an_argument_with_it_is_refused(setting: str) -> None:
    with refused(InvalidValue, field="service.token", value="an argument"):
        check_no_secret([setting])
    for name in ("serve", "demo"):
        said = command(name, "--set", setting, *(["--dry-run"] if name == "serve" else []))
        assert said.exit_code == ExitCode.USAGE and SECRET not in said.output


def environ_of(process_id: int) -> bytes:
    return Path(f"/proc/{process_id}/environ").read_bytes()


@pytest.mark.parametrize(
    "argv",
    [
        ("dora", "environment", "no_module:Class", "--service", "127.0.0.1:1"),
        ("dora", "host", "--join", "127.0.0.1:1"),
        pytest.param(("dora", "front", "--service", "127.0.0.1:1", "--http", "127.0.0.1:0"), marks=pytest.mark.full),
        pytest.param(("dora.trainers.grpo", "--address", "127.0.0.1:1"), marks=pytest.mark.full),
    ],
)
def test_no_other_process_of_its_user_reads_a_token_from_a_process_s_variables(argv: tuple[str, ...]) -> None:
    """User code reads ``/proc/PARENT/environ``. Each command waits for a service that is not there."""
    environment = {**os.environ, "DORA_TOKEN": SECRET}
    with subprocess.Popen([sys.executable, "-m", *argv], env=environment, stderr=subprocess.PIPE) as process:
        try:
            while not (begun := environ_of(process.pid)):  # its program is not loaded yet
                assert process.poll() is None
            assert SECRET.encode() in begun
            deadline = time.monotonic() + 120
            while SECRET.encode() in environ_of(process.pid):
                assert process.poll() is None and time.monotonic() < deadline, "it shows its token"
            assert process.poll() is None
            assert b"PATH=" in environ_of(process.pid), "the other variables are as before"
        finally:
            process.kill()


async def test_a_child_gets_its_secrets_in_no_variable(tmp_path: Path) -> None:
    """From its start on: there is no moment at which they can be read."""
    said = tmp_path / "said"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        "pathlib.Path(os.environ['SAID']).write_bytes(pathlib.Path('/proc/self/environ').read_bytes())\n"
    )
    environment = {**os.environ, "DORA_TOKEN": SECRET, "PYTHONPATH": str(tmp_path), "SAID": str(said)}
    kept = SupervisedProcess(
        "a child", ["-m", "dora", "environment", "no:Class", "--service", "127.0.0.1:1"], environment
    )
    try:
        async with asyncio.timeout(60):
            while not said.exists() or b"PATH=" not in said.read_bytes():  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # until Python has begun
        assert SECRET.encode() not in said.read_bytes()
    finally:
        await kept.stop()
