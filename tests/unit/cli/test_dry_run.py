"""``dora serve --dry-run``: what a start would refuse is refused in the same words, and nothing is left behind."""

import asyncio
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from dora.config import Config, load_config
from dora.errors import InvalidValue
from dora.ops.cli.exits import ExitCode
from dora.orchestrator import setup
from dora.orchestrator.main import serve
from dora.orchestrator.preflight import run_preflight
from dora.orchestrator.recovery.binding import NotOfOneTime
from dora.system.ownership import hold
from tests.owner_token import owner_token
from tests.private_token import with_token
from tests.refusals import refused
from tests.service import configured
from tests.sweeps import some_of
from tests.unit.cli.service import dora

REWARD = "def score(prompt_text, response_text, response_token_ids, verifier):\n    return 1.0\n"
FILTER = "def keep(prompt_text, rewards, verifier):\n    return True\n"


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
        with_token(owner_token("hush")),
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
        "policy", "TLS", "KV tier", "state folder", "token", "run folder", "workers", "model", "weights", "prompts",
        "record", "reward", "filter", "address", "metrics", "dora",
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


async def begun(config: Config) -> None:
    """A service begins a run on this configuration's state folder, and stops. Another process may take its port."""
    stop = asyncio.Event()
    await serve(config, ready=lambda handle: stop.set(), stop=stop, progress=lambda line: None)
    file = Path(config.service.state) / "service.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"address": ""}))


def cut_trajectories(here: Path) -> None:
    (here / "record" / "steps.jsonl").write_text('{"step": 0}\n')


def taken_run(here: Path) -> None:
    (here / "record" / "record.json").write_text(json.dumps({"run": "another", "since": 0}))
    (here / "record" / "cancelled.jsonl").write_text('{"group_id": "g0"}\n')


def damage_log(here: Path) -> None:
    segment = max((here / "state" / "log").glob("*.seg"))
    body = bytearray(segment.read_bytes())
    body[0] ^= 0xFF
    segment.write_bytes(bytes(body))


def remove_log(here: Path) -> None:
    for segment in (here / "state" / "log").glob("*.seg"):
        segment.unlink()


def replace(name: str, text: str) -> Callable[[Path], None]:
    return lambda here: (here / name).write_text(text) and None


Change = tuple[Callable[[Path], object], dict[str, Any], str]  # what happens, settings of the next start, the field
CHANGES: dict[str, Change] = {
    "identity damaged": (replace("state/service.json", "{"), {}, "service.json"),
    "log removed": (remove_log, {}, "service.state"),
    "log damaged": (damage_log, {}, "service.state"),
    "prompts changed": (replace("good.jsonl", '{"prompt": "OTHER"}\n'), {}, "service.state"),
    "reward changed": (replace("dry_reward.py", REWARD + "# changed\n"), {}, "service.state"),
    "filter changed": (replace("dry_filter.py", FILTER + "# changed\n"), {}, "service.state"),
    "model changed": (replace("model/new.json", "{}"), {}, "service.state"),
    "record of another run": (taken_run, {}, "record"),
    "record damaged": (cut_trajectories, {}, "steps.jsonl line 1"),
    "binding damaged": (replace("record/record.json", "{"), {}, "record.json"),
    "setting that is fixed": (lambda here: None, {"rollout__temperature": 0.5}, "rollout.temperature"),
    "carried on from another step": (
        replace("good.jsonl", '{"prompt": "OTHER"}\n'), {"service__carry_on_from": 3}, "service.state"
    ),
    "not how the run began": (lambda here: None, {"service__begin_from": "other@0"}, "service.begin_from"),
}  # fmt: skip


OF_ANOTHER_TIME = [name for name in CHANGES if name.endswith(" changed")] + ["carried on from another step"]


def of_run(folder: Path, **settings: Any) -> Config:
    """The configuration of a run whose parts are all in a folder, the working directory."""
    fields = {
        "prompts": "good.jsonl",
        "reward__function": "dry_reward:score",
        "selection__filter": "dry_filter:keep",
        "record": str(folder / "record"),
        "service__state": str(folder / "state"),
        "service__run_folder": str(folder / "run"),
        "workers__count": 0,
    }
    return fake(folder / "model", **(fields | settings))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, cache: Path, tiny_dense: Path) -> tuple[Path, Path]:
    """The folder of a run that has begun and stopped, and that a dry run would continue; and a copy of it."""
    folder, copy = (tmp_path_factory.mktemp(name) / "run" for name in ("stopped", "copied"))
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.syspath_prepend(folder)
        (folder / "good.jsonl").write_text('{"prompt": "DIGITS"}\n')
        (folder / "dry_reward.py").write_text(REWARD)
        (folder / "dry_filter.py").write_text(FILTER)
        shutil.copytree(tiny_dense, folder / "model")
        asyncio.run(begun(of_run(folder)))
        asyncio.run(run_preflight(of_run(folder), lambda what, found: None))
    shutil.copytree(folder, copy)
    return folder, copy


@pytest.fixture
def stopped(kept: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of ``kept``, to stand in, as it was: a state names the places of what belongs to it."""
    folder, copy = kept
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.parametrize(
    "change",
    some_of(CHANGES, "identity damaged", "prompts changed", "record of another run", "setting that is fixed"),
)
async def test_a_state_and_what_belongs_to_it_are_compared_as_by_a_start(stopped: Path, change: str) -> None:
    happens, settings, field = CHANGES[change]
    happens(stopped)
    before = content(stopped)
    config = of_run(stopped, **settings)
    kind = NotOfOneTime if change in OF_ANOTHER_TIME else InvalidValue
    with refused(kind, field=field) as preflighted:
        await run_preflight(config, lambda what, found: None)
    assert content(stopped) == before, "a dry run writes and locks nothing"
    assert await words_of_a_start(config) == str(preflighted.value)


def content(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


async def test_content_that_is_accepted_deliberately_is_named(here: Path, tiny_dense: Path) -> None:
    (here / "good.jsonl").write_text('{"prompt": "DIGITS"}\n')
    fields: dict[str, Any] = {"prompts": "good.jsonl", "service__state": str(here / "state"), "workers__count": 0}
    await begun(fake(tiny_dense, **fields))
    (here / "good.jsonl").write_text('{"prompt": "OTHER"}\n')
    said: dict[str, str] = {}
    await run_preflight(fake(tiny_dense, **fields, service__carry_on_from=0), said.__setitem__)
    assert "good.jsonl" in said["record and state"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"service__token": "two\nlines"}, "token"),
        ({"kv__host": "203.0.113.7"}, "kv address"),
        ({"kv__pool_mb": 1, "kv__spill_mb": 1, "kv__spill_folder": "file/below"}, "kv.spill_folder"),
    ],
    ids=lambda each: str(each)[:40],
)
async def test_addresses_tokens_and_disks_are_checked_as_by_a_start(
    here: Path, tiny_dense: Path, fields: dict[str, Any], field: str
) -> None:
    (here / "file").write_text("")
    config = fake(tiny_dense, workers__count=0, **fields)
    with refused(InvalidValue, field=field) as preflighted:
        await run_preflight(config, lambda what, found: None)
    assert await words_of_a_start(config) == str(preflighted.value)


async def test_the_run_folder_of_a_state_that_is_in_use_is_refused(here: Path, tiny_dense: Path) -> None:
    config = fake(tiny_dense, service__state=str(here / "state"), workers__count=0)
    await begun(config)
    secret = json.loads((here / "state" / "service.json").read_text())["kv_secret"]
    folder = setup.made_for_state(config, secret)
    folder.mkdir()
    held = hold(folder / setup.LOCK_FILE)
    assert held is not None
    with refused(InvalidValue, field="service.run_folder", value=str(folder)) as preflighted:
        await run_preflight(config, lambda what, found: None)
    assert await words_of_a_start(config) == str(preflighted.value)
    held.close()
    shutil.rmtree(folder)


@pytest.mark.full
@pytest.mark.parametrize("damage", ["missing", "not finite"])
async def test_version_0_is_computed_and_refused_as_by_a_start(here: Path, tiny_dense: Path, damage: str) -> None:
    """The model is a user's own folder."""
    folder = Path(shutil.copytree(tiny_dense, here / "model"))
    tensors = load_file(folder / "model.safetensors")
    if damage == "missing":
        del tensors["model.norm.weight"]
    else:
        tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = configured(folder, workers__count=1)
    said: list[str] = []
    with refused(InvalidValue, field="--model", value=str(folder)) as preflighted:
        await run_preflight(config, lambda what, found: said.append(f"{what}: {found}"))
    assert any("about" in line for line in said)
    assert await words_of_a_start(config) == str(preflighted.value)
