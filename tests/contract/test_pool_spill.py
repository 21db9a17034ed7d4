"""A pool that is full: to disk, read back, refused, dropped; never a request that nobody knows to be lost."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dora.kvtransfer.transports.arena import STEP_BYTES
from dora.models.tiny import make_tiny
from dora.pool.spill import LOCK_FILE, PREFIX, SpillFolder
from dora.pool.store import WAIT_S
from dora.rpc import dora_pb2 as pb
from tests.contract.planes import a_plane, until
from tests.contract.pools import PoolEnd, a_pool, reserve
from tests.contract.test_pool import a_request, copied_out, drained, loaded, park, resume, sent_on
from tests.contract.test_worker_handoff import Worker, alone, started

KV_BYTES = 2 * STEP_BYTES  # of one snapshot in these tests: two rounds
ROOM_BYTES = 3 * STEP_BYTES  # not for two


@dataclass
class Ends:
    """Two workers and a pool with little memory; a test moves its clock."""

    source: Worker
    target: Worker
    pool: PoolEnd
    model: Path
    clock: list[float] = field(default_factory=lambda: [0.0])

    def start(self, count: int) -> None:
        started(self.source, [a_request(index) for index in range(1, count + 1)], 5)

    def park(self, request_id: str) -> None:
        park(self.source, self.pool, request_id, KV_BYTES)

    def goes_on(self, request_id: str) -> None:
        """As if nothing had happened."""
        resume(self.pool, self.target, request_id, self.source.tokens[request_id])
        assert self.target.finish(request_id) == alone(self.model, a_request(int(request_id[1:])))

    def files(self) -> list[Path]:
        return sorted(self.model.parent.glob("spill/*/*.kv"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny("dense", tmp_path / "model", seed=1)


@pytest.fixture
def ends(tmp_path: Path, model: Path, spill_bytes: int) -> Iterator[Ends]:
    clock = [0.0]
    spill = tmp_path / "spill" if spill_bytes else None
    with (
        a_plane(tmp_path, 1, ("shm",)) as one,
        a_plane(tmp_path, 2, ("shm",)) as two,
        a_pool(tmp_path, 3, ("shm",), ROOM_BYTES, spill, spill_bytes, lambda: clock[0]) as pool,
    ):
        yield Ends(loaded(Worker(one, model), model), loaded(Worker(two, model), model), pool, model, clock)


@pytest.fixture
def spill_bytes() -> int:
    return 1 << 30


def test_the_oldest_goes_to_disk_and_is_read_back(ends: Ends) -> None:
    ends.start(3)
    for request_id in ("r1", "r2", "r3"):
        ends.park(request_id)
    assert len(ends.files()) == 2
    ends.pool.turn()
    assert ends.pool.report.parked == 3 and ends.pool.report.spilled == 2
    assert ends.pool.report.spill_bytes == sum(file.stat().st_size for file in ends.files())
    for request_id in ("r2", "r3", "r1"):
        ends.goes_on(request_id)
    assert ends.target.engine.load().reprefilled_tokens == 0
    until(lambda: drained(ends.pool))
    assert not ends.files()


def test_a_request_on_disk_that_needs_its_kv_no_more_leaves_no_file(ends: Ends) -> None:
    ends.start(2)
    ends.park("r1")
    ends.park("r2")
    for request_id in ("r1", "r2"):
        assert ends.pool.obey(remove_request=pb.RemoveRequest(request_id=request_id)).ok
    until(lambda: drained(ends.pool))
    assert not ends.files()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "too short"),
        (lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]), "chunk 1"),
        (lambda file: file.unlink(), "cannot be read"),
    ],
    ids=["truncated", "flipped", "removed"],
)
def test_a_damaged_file_is_never_sent_on(ends: Ends, damage: Callable[[Path], object], said: str) -> None:
    ends.start(2)
    ends.park("r1")
    ends.park("r2")
    [file] = ends.files()
    damage(file)
    lost = sent_on(ends.pool, ends.target, "r1")
    assert not lost.ok and lost.error_kind == "not_movable" and said in lost.error
    ends.pool.turn()
    assert said in ends.pool.dropped["r1"] and not ends.files()
    ends.goes_on("r2")


def test_a_file_of_another_request_is_not_taken_for_it(ends: Ends) -> None:
    ends.start(3)
    for request_id in ("r1", "r2", "r3"):
        ends.park(request_id)
    first, second = ends.files()
    second.replace(first)
    assert sent_on(ends.pool, ends.target, "r1").error_kind == "not_movable"


@pytest.mark.parametrize("spill_bytes", [0])
def test_a_full_pool_without_a_disk_refuses(ends: Ends) -> None:
    ends.start(2)
    ends.park("r1")
    refused = ends.pool.let_in("r2", 1, KV_BYTES)
    assert not refused.ok and refused.error_kind == "refused" and "room" in refused.error
    failed = copied_out(ends.source, ends.pool, "r2")
    assert not failed.ok and "not expected" in failed.error
    assert ends.source.obey(thaw=pb.Thaw(request_id="r2")).ok
    assert ends.source.finish("r2") == alone(ends.model, a_request(2))
    ends.goes_on("r1")
    assert ends.pool.let_in("r2", 1, KV_BYTES).ok


@pytest.mark.parametrize("spill_bytes", [STEP_BYTES])
def test_a_full_disk_refuses_too(ends: Ends) -> None:
    ends.start(3)
    ends.park("r1")
    ends.park("r2")
    refused = ends.pool.let_in("r3", 1, KV_BYTES)
    assert not refused.ok and "on disk" in refused.error
    for request_id in ("r1", "r2"):
        ends.goes_on(request_id)


def test_room_that_was_kept_is_given_back(ends: Ends) -> None:
    ends.start(2)
    assert ends.pool.let_in("r1", 1, KV_BYTES).ok
    assert not ends.pool.let_in("r2", 1, KV_BYTES).ok, "nothing is there that could be written to disk"
    assert ends.pool.obey(cancel_reservation=pb.CancelReservation(request_id="r1")).ok
    assert ends.pool.let_in("r2", 1, KV_BYTES).ok


def test_more_than_was_said_is_refused_and_goes_on_at_its_worker(ends: Ends) -> None:
    ends.start(2)
    assert ends.pool.let_in("r1", 1, STEP_BYTES).ok and ends.pool.let_in("r2", 1, STEP_BYTES).ok
    assert copied_out(ends.source, ends.pool, "r1").ok
    failed = copied_out(ends.source, ends.pool, "r2")
    assert not failed.ok and "too much is in flight" in failed.error
    assert ends.source.obey(thaw=pb.Thaw(request_id="r2")).ok
    assert ends.source.finish("r2") == alone(ends.model, a_request(2))


# A disk that fails or is slow.


def test_what_cannot_be_written_is_dropped_and_told(ends: Ends) -> None:
    ends.start(2)
    ends.park("r1")
    folder = next(ends.model.parent.glob(f"spill/{PREFIX}*"))
    (folder / LOCK_FILE).unlink()
    folder.rmdir()
    ends.park("r2")
    ends.pool.turn()
    assert "could not be written" in ends.pool.dropped["r1"]
    assert sent_on(ends.pool, ends.target, "r1").error_kind == "not_movable"
    ends.goes_on("r2")


def test_a_slow_disk_keeps_nobody_waiting(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes to a pipe that nobody reads: the oldest after that one makes room."""
    ends.start(3)
    ends.park("r1")
    os.mkfifo(fifo := ends.model.parent / "fifo")
    pipe = os.open(fifo, os.O_RDWR)
    until(lambda: _fill(pipe))
    monkeypatch.setattr("dora.pool.spill.os.open", lambda *_: os.dup(pipe))
    waiting = ends.pool.order(reserve_slot=reserve("r2", 1, KV_BYTES))
    ends.pool.turn()
    assert waiting not in ends.pool.outcomes
    ends.clock[0] += 2 * WAIT_S
    refused = ends.pool.outcome(waiting)
    assert not refused.ok and "room" in refused.error, "the one that is being written cannot be dropped"
    os.set_blocking(pipe, False)
    while _drain(pipe):
        ends.pool.turn()
    os.close(pipe)


def _fill(pipe: int) -> bool:
    os.set_blocking(pipe, False)
    try:
        os.write(pipe, bytes(1 << 16))
    except BlockingIOError:
        os.set_blocking(pipe, True)
        return True
    return False


def _drain(pipe: int) -> bool:
    try:
        return bool(os.read(pipe, 1 << 20))
    except BlockingIOError:
        return False


def test_what_a_killed_pool_left_on_disk_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / f"{PREFIX}0123456789abcdef"
    left.mkdir()
    (left / LOCK_FILE).touch()
    (left / "1.kv").write_bytes(b"kv")
    living = SpillFolder(tmp_path, 1)
    assert not left.exists()
    SpillFolder(tmp_path, 1).close()
    assert living.folder.exists()
    living.close()
    assert list(tmp_path.iterdir()) == []
