"""What every transport of snapshots does."""

import multiprocessing
import stat
from pathlib import Path

import numpy as np
import pytest

from dora.errors import InvalidValue, NotFound, SnapshotRefused
from dora.kvtransfer.shm import ShmTransport
from dora.kvtransfer.snapshot import KvLayout, KvSnapshot, KvTransport
from dora.types import RequestSpec, SamplingParams


@pytest.fixture
def transport(tmp_path: Path) -> KvTransport:
    return ShmTransport(tmp_path)


def make_snapshot() -> KvSnapshot:
    layout = KvLayout("fingerprint", "cpu/vec", "float32", 4, (("layer.0", 96), ("layer.1", 40)))
    request = RequestSpec("r1", 7, (1, 2, 3), SamplingParams(seed=5), (4, 5, 6), (-0.5, -1.25, -0.1))
    blocks = {name: np.arange(2 * size, dtype=np.uint8).reshape(2, size) for name, size in layout.layers}
    return KvSnapshot(layout, request, 5, 3, blocks)


def assert_same(found: KvSnapshot, expected: KvSnapshot) -> None:
    assert (found.layout, found.request) == (expected.layout, expected.request)
    assert (found.kv_tokens, found.rng_draws) == (expected.kv_tokens, expected.rng_draws)
    assert found.blocks.keys() == expected.blocks.keys()
    for name, blocks in expected.blocks.items():
        np.testing.assert_array_equal(found.blocks[name], blocks)


def test_a_snapshot_comes_out_as_it_went_in_as_often_as_it_is_got(transport: KvTransport) -> None:
    locator = transport.put(make_snapshot())
    for _ in range(2):
        assert_same(transport.get(locator), make_snapshot())


def test_what_was_got_outlives_its_release_and_cannot_be_written(transport: KvTransport) -> None:
    locator = transport.put(make_snapshot())
    got = transport.get(locator)
    transport.release(locator)
    transport.release(locator)
    assert_same(got, make_snapshot())
    with pytest.raises(ValueError, match="read-only"):
        got.blocks["layer.0"][0, 0] = 1
    with pytest.raises(NotFound, match=locator):
        transport.get(locator)


def test_each_put_has_a_locator_of_its_own(transport: KvTransport) -> None:
    locators = {transport.put(make_snapshot()) for _ in range(5)}
    assert len(locators) == 5
    transport.release(locators.pop())
    for locator in locators:
        assert_same(transport.get(locator), make_snapshot())


def test_a_locator_is_never_a_path(transport: KvTransport) -> None:
    for locator in ("", "..", "/etc/hostname", "../" + "0" * 32 + ".kv", "0" * 32):
        for use in (transport.get, transport.release):
            with pytest.raises(InvalidValue, match="locator"):
                use(locator)


def test_files_are_private_whole_and_gone_once_released(tmp_path: Path) -> None:
    transport = ShmTransport(tmp_path)
    locator = transport.put(make_snapshot())
    (file,) = tmp_path.iterdir()
    assert file.name == locator
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    transport.release(locator)
    assert list(tmp_path.iterdir()) == []


def test_what_a_writer_left_that_died_is_swept(tmp_path: Path) -> None:
    dead, alive = ShmTransport(tmp_path, "7"), ShmTransport(tmp_path, "8")
    kept, left, its = dead.put(make_snapshot()), dead.put(make_snapshot()), alive.put(make_snapshot())
    unfinished = tmp_path / f".7-{'0' * 32}.kv"
    unfinished.write_bytes(b"as far as it came")
    (tmp_path / "another's").write_bytes(b"")
    alive.sweep({"8"}, {kept})
    assert {file.name for file in tmp_path.iterdir()} == {kept, its, "another's"}
    with pytest.raises(NotFound):
        alive.get(left)


def test_an_owner_is_never_a_path(tmp_path: Path) -> None:
    for owner in ("", "..", "a/b", "A", "7-8"):
        with pytest.raises(InvalidValue, match="owner"):
            ShmTransport(tmp_path, owner)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    transport = ShmTransport(tmp_path)
    for damage, name in ((b"", "total bytes"), (b"x" * 300, "magic")):
        locator = transport.put(make_snapshot())
        (tmp_path / locator).write_bytes(damage)
        with pytest.raises(SnapshotRefused, match=name):
            transport.get(locator)


def test_a_full_file_system_refuses_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    # A process of its own, so that the limit on the size of its files ends with it.
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_put_with_little_room, args=(str(folder),))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert list(folder.iterdir()) == []


def _put_with_little_room(folder: str) -> None:
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    with pytest.raises(SnapshotRefused, match="no room"):
        ShmTransport(Path(folder)).put(make_snapshot())


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="snapshot directory"):
        ShmTransport(tmp_path / "nowhere")
