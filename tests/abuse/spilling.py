"""A pool whose disk fills up and is emptied again: ``python -m tests.abuse.spilling DISK FOLDER``, by full.py."""

import sys
from pathlib import Path

from dora.kvtransfer.transports.arena import STEP_BYTES
from dora.models.tiny import make_tiny
from tests.abuse.full import fill_up
from tests.contract.planes import a_plane, until
from tests.contract.pools import a_pool
from tests.contract.test_pool import a_request, drained, loaded, park, resume, sent_on
from tests.contract.test_worker_handoff import Worker, alone, started

KV_BYTES = 2 * STEP_BYTES  # of one snapshot: two rounds
ROOM_BYTES = 3 * STEP_BYTES  # not for two: whoever comes sends the one before to disk


def main(disk: Path, folder: Path) -> None:
    model = make_tiny("dense", folder / "model", seed=1)
    spill = disk / "spill"
    with (
        a_plane(folder, 1, ("shm",)) as one,
        a_plane(folder, 2, ("shm",)) as two,
        a_pool(folder, 3, ("shm",), ROOM_BYTES, spill) as pool,
    ):
        source, target = loaded(Worker(one, model), model), loaded(Worker(two, model), model)

        def goes_on(index: int) -> None:
            resume(pool, target, f"r{index}", source.tokens[f"r{index}"])
            assert target.finish(f"r{index}") == alone(model, a_request(index)), f"r{index} went on with other tokens"

        started(source, [a_request(index) for index in (1, 2, 3, 4)], 5)
        park(source, pool, "r1", KV_BYTES)
        park(source, pool, "r2", KV_BYTES)
        assert len(list(spill.glob("*/*.kv"))) == 1, "r1 is on disk"
        filler = fill_up(disk)
        park(source, pool, "r3", KV_BYTES)
        until(lambda: pool.turn() is None and "r2" in pool.dropped)
        assert "No space left on device" in pool.dropped["r2"], pool.dropped
        assert sent_on(pool, target, "r2").error_kind == "not_movable"
        assert len(list(spill.glob("*/*.kv"))) == 1, "of r2 nothing half-written stays"
        goes_on(1)
        filler.unlink()
        park(source, pool, "r4", KV_BYTES)
        assert len(list(spill.glob("*/*.kv"))) == 1, "r3 is on disk"
        goes_on(3)
        goes_on(4)
        assert list(pool.dropped) == ["r2"]
        until(lambda: drained(pool))
        assert not list(spill.glob("*/*.kv"))
    assert not list(disk.rglob("*.kv")) and not list(spill.iterdir())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
