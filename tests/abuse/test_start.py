"""A start on a full disk: it goes without what it can go without, and else is refused with the place."""

import asyncio
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from dora.config import WorkersConfig
from dora.data.run_record import CancelledGroup, CommittedStep, Recorder
from dora.errors import InvalidValue
from dora.host.processes import Processes
from dora.models.tiny import make_tiny
from dora.ops.demo.folder import OutFolder
from dora.ops.stored_token import left_token, token_file
from dora.orchestrator.recording.storage import RUN_FOLDER, Storage
from dora.orchestrator.setup import recorder_of, run_folder_of
from dora.prompts.tokenizer import ChatTokenizer
from dora.weights.store import WeightStore
from tests.abuse.full import files_up_to, has_namespaces
from tests.contract.trainer_service import make_group
from tests.refusals import refused
from tests.service import configured


def test_a_token_that_cannot_be_left_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with files_up_to(3), left_token("127.0.0.1:7", "secret") as file:
        assert file is None
    assert not token_file("127.0.0.1:7").exists() and not list((tmp_path / "dora").iterdir()), "nothing half written"


@pytest.mark.full
def test_a_tokenizer_is_read_though_the_cache_has_no_room(tmp_path: Path, tiny_dense: Path) -> None:
    """Without root: the cache is a small disk of the reading process's own."""
    if not has_namespaces():
        pytest.skip("this kernel gives a user no mounts of its own")
    cache = tmp_path / "cache"
    cache.mkdir()
    script = (
        "import sys; from pathlib import Path; from dora.prompts.tokenizer import ChatTokenizer; "
        "cache = Path(sys.argv[1]); print(ChatTokenizer(Path(sys.argv[2]), cache).encode('12')); "
        "print(list(cache.rglob('*.json')))"
    )
    mount = 'mount -t tmpfs -o size=8k tmpfs "$0" && exec "$@"'
    argv = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(cache)]
    argv += [sys.executable, "-c", script, str(cache), str(tiny_dense)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    expected = ChatTokenizer(tiny_dense, tmp_path / "other").encode("12")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(expected), "[]"]


def test_a_run_folder_without_room_is_refused_and_leaves_nothing(tmp_path: Path, tiny_dense: Path) -> None:
    config = configured(tiny_dense, service__run_folder=str(tmp_path / "file" / "run"))
    (tmp_path / "file").write_text("")
    with refused(InvalidValue, field="service.run_folder"), run_folder_of(config):
        pass


async def test_a_record_without_room_for_the_first_version_is_refused(tmp_path: Path, tiny_dense: Path) -> None:
    config = configured(tiny_dense, record=str(tmp_path / "record"))
    store = WeightStore(tmp_path / "store", tiny_dense)
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "versions").write_text("no folder")
    async with AsyncExitStack() as stack:
        with refused(InvalidValue, field="record"):
            await recorder_of(config, store, stack, carries_on=False)


async def test_every_leaving_of_an_earlier_record_is_seen(tmp_path: Path, tiny_dense: Path) -> None:
    """Ids begin anew: its cancelled groups and its versions would be taken for the new service's."""
    out = OutFolder(tmp_path)
    config = configured(tiny_dense, record=str(out.record))
    store = WeightStore(tmp_path / "store", tiny_dense)
    with Recorder(out.record) as recorder:
        recorder.append(make_group(0, 0).trajectories)
        recorder.append_cancelled(CancelledGroup("g1", "p1", "task", 0, "asked for", (1,), (None,), 1.0))
        recorder.commit(CommittedStep(0, 1, {"g0": 1}, 1.0), tiny_dense)
    left = sorted(out.record.iterdir())
    assert len(left) == 4
    async with AsyncExitStack() as stack:
        for kept in left:
            for other in left:
                os.rename(other, tmp_path / other.name) if other != kept and other.exists() else None
            with refused(InvalidValue, field="record"):
                await recorder_of(config, store, stack, carries_on=False)
            for other in left:
                os.rename(tmp_path / other.name, other) if other != kept else None
        out.clear()
        assert await recorder_of(config, store, stack, carries_on=False) is not None, "a demo's second run"


async def test_a_start_that_came_to_nothing_leaves_a_record_that_the_next_one_takes(
    tmp_path: Path, tiny_dense: Path
) -> None:
    """With its own model, whichever the first one had."""
    config = configured(tiny_dense, record=str(tmp_path / "record"))
    with Recorder(tmp_path / "record") as recorder:
        recorder.keep_version(0, make_tiny("dense", tmp_path / "another", seed=7))
    async with AsyncExitStack() as stack:
        await recorder_of(config, WeightStore(tmp_path / "store", tiny_dense), stack, carries_on=False)
    kept = tmp_path / "record/versions/0/model.safetensors"
    assert kept.read_bytes() == (tiny_dense / "model.safetensors").read_bytes()


async def test_a_worker_whose_log_cannot_be_made_runs_all_the_same(tmp_path: Path) -> None:
    faults: list[str] = []
    storage = Storage()
    storage.tell(faults.append)
    (tmp_path / "logs").write_text("no folder")
    lives = ["-c", "print('words'); import signal; signal.pause()"]
    launcher = Processes(
        WorkersConfig(),
        lambda _: lives,
        lambda _: {},
        tmp_path / "logs",
        lambda error: storage.failed(RUN_FOLDER, error),
    )
    launcher.scale(1)
    async with asyncio.timeout(60):
        while launcher._workers["w0"].process is None:
            await asyncio.to_thread(lambda: None)
    assert faults == ["run folder: File exists"] and not launcher.failed.done()
    await launcher.close()
