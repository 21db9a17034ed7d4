"""State folders that cannot be used, whose disk has no room, or whose service has other settings now."""

import asyncio
import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dora.config import Config, validated
from dora.core import events as on
from dora.data.types import Prompt
from dora.errors import InvalidValue
from dora.journal import records
from dora.journal.log import DEFAULT_SIZES
from dora.orchestrator.recording.storage import Storage
from dora.orchestrator.recovery.state_folder import LOCK_FILE, SERVICE_FILE, StateFolder, reading_state, state_folder_of
from dora.orchestrator.starting import journal_of
from tests.abuse.full import faults, files_up_to
from tests.refusals import data_words, refused
from tests.unit.test_runtime import Shell


def configured(folder: Path, **sections: object) -> Config:
    return validated({"service": {"state": str(folder), "listen": "127.0.0.1:0"}, **sections})


BAD_SECRETS = (
    {"kv_secret": "not hexadecimal"},
    {"kv_secret": "ab"},
    {"kv_secret": None},
    {"kv_secret": 7},
    {"token": 7},
    {"workers": "3"},
)


async def begun(folder: Path) -> None:
    """A first life of a service with the default settings."""
    config = configured(folder)
    with state_folder_of(config, DEFAULT_SIZES) as state:
        assert state is not None and state.found.is_new
        state.check_settings(config)
        state.remember(address="127.0.0.1:4711", token="correct-horse")
        journal = journal_of(config, state, Storage())
        journal.note(records.Begun(0, 1.0, 2.0, config.model_dump_json(exclude={"service": {"token"}})))
        await journal.close()


def found(folder: Path, **sections: object) -> StateFolder:
    """Opens a state folder as a later start does, and closes it again."""
    config = configured(folder, **sections)
    with state_folder_of(config, DEFAULT_SIZES) as state:
        assert state is not None
        state.check_settings(config)
        return state


async def test_without_room_nothing_is_admitted_and_nothing_is_lost(tmp_path: Path, tiny_dense: Path) -> None:
    shell, config = Shell(tmp_path, tiny_dense, None), configured(tmp_path / "state")
    runtime = shell.runtime
    with state_folder_of(config, DEFAULT_SIZES) as state:
        assert state is not None
        journal = runtime.journal = journal_of(config, state, runtime.storage)
        runtime.core.post(on.Tick())
        await journal.settled()
        with files_up_to(10):
            journal.note(records.Submitted([1], [records.prompt_values(Prompt("p0", "echo", (1, 2, 3)))]))
            waiting = asyncio.create_task(journal.settled())
            await shell.until(lambda: shell.state.window.closed)
            assert faults(shell) == {"state folder": "File too large"}
            assert not waiting.done(), "nobody is told that it was taken in"
        await runtime.look_at_storage()
        await waiting
        await shell.until(lambda: not shell.state.window.closed)
        assert not faults(shell)
        await runtime.close()
        await journal.close()
    with state_folder_of(config, DEFAULT_SIZES) as state:
        assert state is not None
        assert [prompt.prompt_id for _, prompt in state.found.queued] == ["p0"]


async def test_a_later_start_has_address_and_token_of_before_unless_it_names_others(tmp_path: Path) -> None:
    await begun(tmp_path)
    assert (tmp_path / SERVICE_FILE).stat().st_mode & 0o077 == 0
    state = found(tmp_path)
    carried_on = state.carried_on(configured(tmp_path)).service
    assert (carried_on.listen, carried_on.token) == ("127.0.0.1:4711", "correct-horse")
    named = validated({"service": {"listen": "127.0.0.1:7", "token": "battery-staple"}})
    assert state.carried_on(named) == named


async def test_a_later_start_has_the_workers_of_an_operators_order_until_the_setting_changes(tmp_path: Path) -> None:
    await begun(tmp_path)
    state, default = found(tmp_path), configured(tmp_path).workers.count
    assert state.carried_on(configured(tmp_path)).workers.count == default
    state.remember(workers=0)
    again = found(tmp_path)
    assert again.carried_on(configured(tmp_path)).workers.count == 0
    assert again.carried_on(configured(tmp_path, workers={"count": 7})).workers.count == 7
    assert again.carried_on(configured(tmp_path)).workers.count == default, "the order was for another setting"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"seed": 7}}, r"rollout\.seed = 7 has changed: it must be 0, as"),
        ({"rollout": {"temperature": 0.5}}, r"rollout\.temperature = 0.5 has changed: it must be 1.0, as"),
        ({"rollout": {"reference_version": 3}}, r"rollout\.reference_version = 3 has changed: it must be 0, as"),
        ({"selection": {"redundant_fraction": 0.1}}, r"selection\.redundant_fraction = 0.1 has changed"),
        ({"workers": {"dtype": "bfloat16"}}, r"workers\.dtype = 'bfloat16' has changed"),
        ({"workers": {"quantisation": "int8"}}, r"workers\.quantisation = 'int8' has changed"),
        ({"reward": {"function": "json:loads"}}, r"reward\.function = 'json:loads' has changed"),
        ({"model": "tiny"}, r"model = 'tiny' has changed"),
    ],
    ids=str,
)
async def test_settings_that_matter_must_not_change(tmp_path: Path, sections: dict[str, object], words: str) -> None:
    await begun(tmp_path)
    with refused(InvalidValue, names=data_words(words)):
        found(tmp_path, **sections)
    found(tmp_path, workers={"count": 7, "slots": 3}, balance={"policy": "dora"}, record="elsewhere")
    found(tmp_path, window={"size": 3, "groups_per_step": 5}, prompts="tiny")
    found(tmp_path, rollout={"group_size": 2, "max_tokens": 9}, workers={"max_model_len_tokens": 64})


async def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    await begun(tmp_path / "good")
    for opened in (reading_state, state_folder_of):
        with refused(InvalidValue, field="service.state"):
            opened(configured(tmp_path / "file"), DEFAULT_SIZES).__enter__()
        with refused(InvalidValue, field="service.state", value="", names=("service.keep_events",)):
            opened(validated({"service": {"keep_events": True}}), DEFAULT_SIZES).__enter__()
        with state_folder_of(configured(tmp_path / "good"), DEFAULT_SIZES) as state:
            assert state is not None
            with refused(InvalidValue, field="service.state"):
                opened(configured(tmp_path / "good"), DEFAULT_SIZES).__enter__()
    with files_up_to(10), refused(InvalidValue, field="service.state"):
        state_folder_of(configured(tmp_path / "new"), DEFAULT_SIZES).__enter__()


@pytest.mark.parametrize(("module", "call", "reason"), [(fcntl, "flock", "has no locks"), (os, "fsync", "Invalid")])
async def test_a_file_system_without_locks_or_fsync_is_refused(
    module: Any, call: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some network file systems are: two services could have one state, or lose what they have acknowledged."""
    await begun(tmp_path)

    def fails(*_: Any) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(module, call, fails)
    for opened in (reading_state, state_folder_of):
        with refused(InvalidValue, field="service.state", value=tmp_path, names=("locks and fsync", reason)):
            opened(configured(tmp_path), DEFAULT_SIZES).__enter__()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        json.dumps({"address": "x", "colour": "red"}),
        json.dumps({"kv_secret": "no hex"}),
        json.dumps({"kv_secret": 7}),
        json.dumps({"token": None}),
        json.dumps({"content": []}),
        json.dumps({"content": {"model": 1}}),
        "[" * 100_000,
        *map(json.dumps, BAD_SECRETS),
    ],
)
async def test_what_says_where_the_service_was_may_be_damaged(tmp_path: Path, content: str) -> None:
    await begun(tmp_path)
    (tmp_path / SERVICE_FILE).write_text(content)
    with refused(InvalidValue, field="service.json"):
        found(tmp_path)


@pytest.mark.parametrize("removed", [False, True])
async def test_the_message_names_the_process_that_has_the_folder(tmp_path: Path, removed: bool) -> None:
    """A removed lock file lets nobody in: the folder itself is locked."""
    await begun(tmp_path)
    config = configured(tmp_path)
    with state_folder_of(config, DEFAULT_SIZES) as state:
        assert state is not None
        if removed:
            (tmp_path / LOCK_FILE).unlink()
        known = {"why": "is in use by a running process"} if removed else {"names": (os.getpid(),)}
        known |= {"field": "service.state", "value": tmp_path, "allowed": "a folder that no running service has"}
        for opened in (reading_state, state_folder_of):
            with refused(InvalidValue, **known):
                opened(config, DEFAULT_SIZES).__enter__()
