"""Other users of the machine: they read nothing that a service makes, and what they make first is refused."""

import itertools
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dora
from dora.config import validated
from dora.errors import InvalidValue
from dora.host.folder import host_folder
from dora.journal.log import DEFAULT_SIZES
from dora.orchestrator.recovery.state_folder import SERVICE_FILE, reading_state, state_folder_of
from dora.orchestrator.setup import check_record, check_run_folder, made_for_state, run_folder_of
from dora.pool.spill import SpillFolder
from dora.system.private import PRIVATE_UMASK, private_files
from tests.abuse.full import served
from tests.refusals import refused

ANOTHER = 12345  # a user id
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")


@contextmanager
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def in_shared_memory(state: Path) -> Path:
    secret = json.loads((state / SERVICE_FILE).read_text())["kv_secret"]
    return made_for_state(validated({"service": {"state": str(state)}}), secret)


def below(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def exposed(root: Path, model: Path) -> list[str]:
    """Each file and folder below ``root``, and itself, that is another user's or that others can read or write.

    A link to a file of the user's own ``model`` has that file's mode. A service at work may remove a file meanwhile.
    """
    found = []
    own = {file.stat().st_ino for file in model.iterdir()}
    inside = (Path(parent, name) for parent, *names in os.walk(root) for name in itertools.chain(*names))
    for path in itertools.chain([root], inside):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(status.st_mode) or status.st_ino in own:
            continue
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            found.append(f"{stat.filemode(status.st_mode)} {status.st_uid} {path}")
    return found


@pytest.mark.parametrize(
    "named",
    [pytest.param(True, marks=pytest.mark.full, id="run folder named"), pytest.param(False, id="in shared memory")],
)
async def test_everything_that_a_run_makes_is_private_whatever_the_umask(
    tiny_dense: Path, tmp_path: Path, named: bool
) -> None:
    state, record, spill, run = (tmp_path / name for name in ("state", "record", "spill", "run"))
    settings: dict[str, object] = {"service.state": state, "record": record, "service.keep_events": True}
    settings |= {"kv.pool_mb": 16, "kv.spill_mb": 16, "kv.spill_folder": spill, "workers.count": 2}
    if named:
        settings["service.run_folder"] = run
    with open_umask():
        for folder in (state, run):
            folder.mkdir(mode=0o755)  # from an earlier time
        async with (
            served(tiny_dense, tmp_path / "disk", 0, **settings) as service,
            dora.Trainer(service.address, token=service.token) as trainer,
        ):
            async for step in trainer.steps(groups=2):
                assert [group async for group in step]
                await step.commit(weights=tiny_dense, wait=True)
                if step.number == 2:
                    break
            if not named:
                run = in_shared_memory(state)
            for folder in (state, record, run, *below(spill)):
                assert below(folder) and not exposed(folder, tiny_dense), folder
            assert {SERVICE_FILE, "log"} <= {path.name for path in below(state)}
    assert not exposed(state, tiny_dense) and not exposed(record, tiny_dense)


def folders(named: Path) -> dict[str, tuple[str, Callable[[], object]]]:
    """Each way to name a folder: the field that its refusal names, and what uses it."""
    state = validated({"service": {"state": str(named)}})
    run = validated({"service": {"run_folder": str(named)}})
    record = validated({"record": str(named)})

    def entered(context: object) -> object:
        with context as found:  # type: ignore[attr-defined]
            return found

    return {
        "state": ("service.state", lambda: entered(state_folder_of(state, DEFAULT_SIZES))),
        "state, dry": ("service.state", lambda: reading_state(state, DEFAULT_SIZES).__enter__()),
        "run": ("service.run_folder", lambda: entered(run_folder_of(run))),
        "run, dry": ("service.run_folder", lambda: check_run_folder(run)),
        "record, dry": ("record", lambda: check_record(record, carries_on=False)),
        "host": ("--folder", lambda: entered(host_folder(str(named)))),
    }


def as_folder(path: Path) -> None:
    path.mkdir(mode=0o777)
    os.chown(path, ANOTHER, ANOTHER)


def as_link(path: Path) -> None:
    """To a folder of this user, which the other could exchange."""
    target = path.with_name("target")
    target.mkdir()
    path.symlink_to(target)
    os.chown(path, ANOTHER, ANOTHER, follow_symlinks=False)


def as_link_elsewhere(path: Path) -> None:
    target = path.with_name("target")
    as_folder(target)
    path.symlink_to(target)


@as_root
@pytest.mark.parametrize("use", folders(Path()))
@pytest.mark.parametrize("made", [as_folder, as_link, as_link_elsewhere])
def test_a_folder_that_another_user_made_first_is_refused(
    tmp_path: Path, made: Callable[[Path], None], use: str
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    made(shared / "named")
    field, call = folders(shared / "named")[use]
    with refused(InvalidValue, field=field, value=f"{shared / 'named'}", names=(ANOTHER,)):
        call()
    assert not below(shared / "named"), "nothing was written"


@as_root
@pytest.mark.parametrize("use", ["state", "run", "host"])
def test_root_takes_a_mounted_folder_of_another_user(tmp_path: Path, use: str) -> None:
    as_folder(tmp_path / "named")
    folders(tmp_path / "named")[use][1]()


def test_a_run_folder_in_shared_memory_has_a_name_that_follows_from_the_secret(tmp_path: Path) -> None:
    config = validated({"service": {"state": str(tmp_path)}})
    assert made_for_state(config, "a" * 64) == made_for_state(config, "a" * 64)
    assert made_for_state(config, "a" * 64) != made_for_state(config, "b" * 64)


@as_root
def test_what_another_user_leaves_under_the_name_of_a_pool_stays(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "pool.lock").touch()
    (tmp_path / "dora-pool-0").symlink_to(mine)
    SpillFolder(tmp_path, 1 << 20).close()
    assert (mine / "pool.lock").exists()


def test_the_umask_of_before_comes_back() -> None:
    with open_umask():
        with private_files() as before:
            assert before == 0 and os.umask(PRIVATE_UMASK) == PRIVATE_UMASK
        assert os.umask(0) == 0
