"""How fast a request is parked and resumed, against what the machine can copy, in one run.

Two processes: a worker's data plane, and a pool as the service starts it, with orders that this script gives. Every
round copies a snapshot's bytes with one thread, parks the snapshot, and resumes it; the result is the median of the
rounds' ratios, so that a machine that is busy with other things slows down all three:

    park_vs_memcpy     from the first byte that leaves the worker until the pool has said that it keeps the request
    resume_vs_memcpy   from the order to the pool until the worker has the snapshot, ready to be taken in

Checksums are made and checked at every arrival. The pool's memory has been used before, as it is after some minutes of
a service; ``first_park_vs_memcpy`` is the very first park: memory is taken when the pool is asked for a place, which is
not counted, and mapped by the worker, which is.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table

from dora.data.types import RequestSpec, SamplingParams
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import ANY_MODEL, Identity, Peer, this_host
from dora.kvtransfer.plane import DataPlane, PlaneSettings
from dora.kvtransfer.snapshot import KvLayout, KvSnapshot
from dora.pool.loop import PoolLoop
from dora.pool.store import Store
from dora.rpc import dora_pb2 as pb

SECRET: Final = bytes(range(32))
WAIT_S: Final = 60.0
LAYERS: Final = 30
BLOCK_TOKENS: Final = 32
BLOCK_BYTES: Final = 48 << 10  # of one layer
WORKER, POOL = 1, 2  # epochs


@dataclass(frozen=True, slots=True)
class Row:
    ratio: float
    gb_per_s: float
    limit_gb_per_s: float


def measured(size_bytes: int, part_bytes: int, rounds: int, transport: str) -> dict[str, Row]:
    """By the ratio's name."""
    snapshot = a_snapshot(size_bytes, part_bytes)
    body = np.concatenate([piece.reshape(-1) for pieces in snapshot.blocks.values() for piece in pieces])
    target = np.zeros_like(body)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        a_pool(Path(folder), 2 * body.nbytes, transport) as pool,
    ):
        listener = Listener("127.0.0.1")
        with a_plane(listener, Path(folder), transport) as plane:
            took_s: dict[str, list[float]] = {"memcpy": [], "park": [], "resume": []}
            for _ in range(rounds + 1):
                began_s = time.perf_counter()
                np.copyto(target, body)
                took_s["memcpy"].append(time.perf_counter() - began_s)
                took_s["park"].append(parked(plane, pool, snapshot, body.nbytes))
                took_s["resume"].append(resumed(plane, pool, listener.address, transport))
                pool.obey(remove_request=pb.RemoveRequest(request_id="r"))
    first = {"first_park_vs_memcpy": row(body.nbytes, took_s["memcpy"][:1], took_s["park"][:1])}
    warm = {
        f"{name}_vs_memcpy": row(body.nbytes, took_s["memcpy"][1:], took_s[name][1:]) for name in ("park", "resume")
    }
    return warm | first


def row(size_bytes: int, limits_s: list[float], took_s: list[float]) -> Row:
    return Row(
        statistics.median(limit / took for limit, took in zip(limits_s, took_s, strict=True)),
        size_bytes / statistics.median(took_s) / 1e9,
        size_bytes / statistics.median(limits_s) / 1e9,
    )


def table(rows: dict[str, Row]) -> Table:
    found = Table(title="A request into host memory and back, against one thread's memcpy")
    for heading in ("", "ratio", "GB/s", "memcpy GB/s"):
        found.add_column(heading, justify="left" if not heading else "right")
    for name, each in rows.items():
        found.add_row(name, f"{each.ratio:.2f}", f"{each.gb_per_s:.1f}", f"{each.limit_gb_per_s:.1f}")
    return found


# ------------------------------------------------------------------------------------------------ what is measured


def parked(plane: DataPlane, pool: "PoolProcess", snapshot: KvSnapshot, size_bytes: int) -> float:
    reserve = pb.ReserveSlot(
        request_id="r", version=1, source_epoch=WORKER, kv_bytes=size_bytes, most_bytes=2 * size_bytes
    )
    pool.obey(reserve_slot=reserve)
    began_s = time.perf_counter()
    key = plane.send(pool.peer, "r", snapshot).done.result(WAIT_S).key
    pool.obey(copy_in=pb.CopyIn(request_id="r", version=1, locator=key))
    return time.perf_counter() - began_s


def resumed(plane: DataPlane, pool: "PoolProcess", address: str, transport: str) -> float:
    plane.expect("r", POOL, 1 << 40)
    target = pb.KvPeer(worker_id="w", epoch=WORKER, address=address, transports=[transport])
    began_s = time.perf_counter()
    plane.take(pool.obey(copy_out=pb.CopyOut(request_id="r", target=target)).locator)
    return time.perf_counter() - began_s


def a_snapshot(size_bytes: int, part_bytes: int) -> KvSnapshot:
    """Returns a snapshot of random bytes; a layer's blocks lie in runs of ``part_bytes``, each elsewhere."""
    count = max(1, size_bytes // (LAYERS * BLOCK_BYTES))
    run = max(1, part_bytes // BLOCK_BYTES)
    layout = KvLayout("f", "any", "float32", BLOCK_TOKENS, tuple((f"layer.{i}", BLOCK_BYTES) for i in range(LAYERS)))
    random = np.random.default_rng(0)
    blocks = {
        name: [
            random.integers(0, 256, (min(run, count - first), BLOCK_BYTES), np.uint8) for first in range(0, count, run)
        ]
        for name, _ in layout.layers
    }
    prompt = tuple(range(count * BLOCK_TOKENS))
    request = RequestSpec("r", 1, prompt, SamplingParams(temperature=0.0), (1,), (-1.0,))
    return KvSnapshot(layout, request, len(prompt), 0, blocks)


def settings(folder: Path, transport: str) -> PlaneSettings:
    return PlaneSettings(SECRET, folder, (transport,), memory_bytes=4 << 30, timeout_s=WAIT_S)


@contextmanager
def a_plane(listener: Listener, folder: Path, transport: str) -> Iterator[DataPlane]:
    plane = DataPlane(listener, Identity("w", WORKER, "f", this_host()), settings(folder, transport))
    try:
        yield plane
    finally:
        plane.close()


# --------------------------------------------------------------------------------------------------- the pool's end


class PoolProcess:
    """A pool's loop in another process, ordered about through a pipe."""

    def __init__(self, pipe: Connection, peer: Peer) -> None:
        self.peer = peer
        self._pipe = pipe

    def obey(self, **kind: Any) -> pb.WorkerOutcome:
        self._pipe.send_bytes(pb.WorkerCommand(command_id=1, **kind).SerializeToString())
        while True:
            message = pb.WorkerMessage.FromString(self._pipe.recv_bytes())
            if message.HasField("outcome"):
                assert message.outcome.ok, message.outcome.error
                return message.outcome


class Piped:
    """The pool's side of it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def take(self, timeout_s: float) -> pb.WorkerCommand | None:
        return pb.WorkerCommand.FromString(self._pipe.recv_bytes()) if self._pipe.poll(timeout_s) else None

    def send(self, message: pb.WorkerMessage) -> None:
        self._pipe.send_bytes(message.SerializeToString())


@contextmanager
def a_pool(folder: Path, arena_bytes: int, transport: str) -> Iterator[PoolProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs, str(folder), arena_bytes, transport), daemon=True)
    child.start()
    try:
        yield PoolProcess(ours, Peer("pool", POOL, ours.recv(), (transport,)))
        ours.send_bytes(pb.WorkerCommand(shutdown=pb.Shutdown()).SerializeToString())
    finally:
        child.join(WAIT_S)


def serve(pipe: Connection, folder: str, arena_bytes: int, transport: str) -> None:
    """Runs the loop of ``python -m dora.pool`` once it is connected."""
    import threading

    listener = Listener("127.0.0.1")
    plane = DataPlane(
        listener, Identity("pool", POOL, ANY_MODEL, this_host()), settings(Path(folder), transport), arena_bytes
    )
    assert plane.arena is not None
    store = Store(plane.arena, None, SECRET)
    pipe.send(listener.address)
    PoolLoop(Piped(pipe), plane, store).run(threading.Event())
    store.close()
    plane.close()
