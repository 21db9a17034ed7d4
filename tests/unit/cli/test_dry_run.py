"""``dora serve --dry-run``: what a start would refuse is refused in the same words, and nothing is left behind."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora.cli.exits import ExitCode
from dora.config import Config, load_config
from dora.errors import InvalidValue
from dora.orchestrator import setup
from dora.orchestrator.main import serve
from dora.orchestrator.preflight import run_preflight
from dora.system.ownership import hold
from tests.private_token import with_token
from tests.service import configured
from tests.unit.cli.service import dora


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all of these tests: a tokenizer is read once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def here(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return folder


@pytest.fixture
def taken() -> Iterator[str]:
    """An address at which somebody listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


async def words_of_a_start(config: Config) -> str:
    """The words with which a start refuses. Its workers never come to start."""
    with pytest.raises(InvalidValue) as refused:
        await serve(config, ready=pytest.fail, stop=asyncio.Event(), progress=lambda line: None)  # type: ignore[arg-type]
    return str(refused.value)


async def words_of_a_preflight(config: Config) -> str:
    with pytest.raises(InvalidValue) as refused:
        await run_preflight(config, lambda what, found: None)
    return str(refused.value)


def fake(model: Path | str, **fields: Any) -> Config:
    return configured(Path(model), workers__engine="fake", workers__start_timeout_s=1, **fields)


def files(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*")}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "tyny"}, "did you mean tiny?"),
        ({"model": "."}, "a folder with config.json"),
        ({"balance__policy": "lamniar"}, "did you mean laminar?"),
        ({"prompts": "nowhere.jsonl"}, "--prompts = 'nowhere.jsonl'"),
        ({"prompts": "bad.jsonl"}, "bad.jsonl:2: "),
        ({"prompts": "nonsense"}, "--prompts = 'nonsense'"),
        ({"prompts": "good.jsonl", "reward__function": "no_such_module:score"}, "cannot be imported"),
        ({"reward__function": "json:nothing"}, "names no function of json: nothing"),
        ({"reward__function": "json:loads"}, "too many positional arguments"),
        ({"selection__filter": "json:loads"}, "takes (s, "),
        ({"prompts": "none"}, "reward.function"),
        ({"record": "file/below"}, "a writable folder (Not a directory)"),
        ({"record": "old"}, "a folder without an earlier record"),
        ({"service__run_folder": "file"}, "a folder to write in (File exists)"),
        ({"service__run_folder": "foreign"}, "no service has made foreign/weights"),
        (
            {"service__keep_events": True},
            "service.state = '' is not valid: it must be a folder, because service.keep_events is set",
        ),
        (
            {"service__state": "file"},
            "service.state = 'file' is not valid: it must be a folder to write in",
        ),
    ],
    ids=lambda each: str(each)[:60],
)
async def test_what_a_start_refuses_a_dry_run_refuses_in_the_same_words(
    here: Path, tiny_dense: Path, fields: dict[str, Any], words: str
) -> None:
    (here / "file").write_text("")
    (here / "good.jsonl").write_text('{"prompt": "DIGITS"}\n')
    (here / "bad.jsonl").write_text('{"prompt": "DIGITS"}\n{"promt": "DIGITS"}\n')
    (here / "old").mkdir()
    (here / "old" / "steps.jsonl").write_text("{}\n")
    (here / "foreign" / "weights").mkdir(parents=True)
    before = files(here)
    config = fake(fields.pop("model", tiny_dense), **fields)
    preflighted = await words_of_a_preflight(config)
    assert words in preflighted
    assert files(here) == before, "a dry run leaves nothing"
    assert await words_of_a_start(config) == preflighted


async def test_an_address_that_is_taken_is_refused_in_the_same_words(here: Path, tiny_dense: Path, taken: str) -> None:
    config = fake(tiny_dense, service__listen=taken)
    preflighted = await words_of_a_preflight(config)
    assert "a free address of this host" in preflighted
    assert await words_of_a_start(config) == preflighted


async def test_a_run_folder_of_a_running_service_is_refused(here: Path, tiny_dense: Path) -> None:
    folder = here / "run"
    folder.mkdir()
    held = hold(folder / setup.LOCK_FILE)
    assert held is not None
    config = fake(tiny_dense, service__run_folder=str(folder))
    preflighted = await words_of_a_preflight(config)
    assert "a folder that no running service has" in preflighted
    assert await words_of_a_start(config) == preflighted


async def test_an_engine_that_is_not_installed_is_refused(
    here: Path, tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "find_spec", lambda name: None)
    config = configured(tiny_dense)
    preflighted = await words_of_a_preflight(config)
    assert "pip install" in preflighted
    assert await words_of_a_start(config) == preflighted
    await run_preflight(fake(tiny_dense), lambda what, found: None)


async def test_a_context_that_the_model_has_not_is_refused(here: Path, tiny_dense: Path) -> None:
    config = configured(tiny_dense, workers__max_model_len_tokens=4096)
    preflighted = await words_of_a_preflight(config)
    assert "at most 512" in preflighted
    assert await words_of_a_start(config) == preflighted


def test_a_good_configuration_is_printed_and_what_was_checked_is_said(here: Path, tiny_dense: Path) -> None:
    (here / "some.jsonl").write_text('{"prompt": "DIGITS"}\n')
    before = files(here)
    arguments = (
        "--model",
        str(tiny_dense),
        "--prompts",
        "some.jsonl",
        "--record",
        "new/record",
        "--token-file",
        with_token("hush"),
    )
    settings = ("workers.engine=fake", "service.run_folder=new/run", "service.state=new/state")
    shown = dora(
        "serve", "--dry-run", *arguments, "--listen", "127.0.0.1:0", "--reward", "dora.rewards.tiny:score",
        *(part for setting in settings for part in ("--set", setting)),
    )  # fmt: skip
    assert shown.exit_code == ExitCode.OK, shown.stderr
    assert files(here) == before
    file = here / "dora.toml"
    file.write_text(shown.stdout)
    assert load_config(file).record == "new/record"
    lines = [line.removeprefix("dora: checked ").partition(":")[0] for line in shown.stderr.splitlines()]
    assert lines == [
        "policy", "workers", "KV tier", "model", "weights", "state folder", "run folder", "record", "prompts", "reward",
        "filter", "address", "token", "dora",
    ]  # fmt: skip
    assert "some.jsonl, the first has" in shown.stderr and "hush" not in shown.stderr


def test_a_model_that_has_yet_to_be_made_is_not_made(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here.parent / "cache"))
    shown = dora("serve", "--dry-run", "--model", "tiny", "--listen", "127.0.0.1:0", "--json")
    assert shown.exit_code == ExitCode.OK, shown.stderr
    assert json.loads(shown.stdout)["model"] == "tiny"
    assert "`dora prepare tiny`" in shown.stderr
    assert not list((here.parent / "cache").rglob("*"))


def test_a_model_that_could_not_be_made_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "file").write_text("")
    refused = dora("serve", "--dry-run", "--model", "tiny", "--listen", "127.0.0.1:0", "--set", "cache=file/cache")
    assert (refused.exit_code, refused.stdout) == (ExitCode.USAGE, "")
    assert "a writable cache folder" in refused.stderr
