"""How fast KV moves between two workers, against what the machine can do, in one run.

Two processes, each with a data plane. The source's memory is cut up into runs of blocks, as a prefilled prompt of some
thousand tokens leaves them; parts of 48 KB are a request whose blocks lie anywhere. Every round measures a transport
and its limit one after the other, and the result is the median of the rounds' ratios, so that a machine that is busy
with other things slows down both:

    shm_vs_memcpy    shared memory, checked at both ends, against one thread's copy of the same bytes
    tcp_vs_sendall   TCP, checked at both ends, against a loop of sendall and recv_into
    gloo_vs_gloo_raw the group of torch.distributed, checked at both ends, against the same group without a data plane

All memory has been touched before a round that counts, and no clock runs while the target is told what to expect. The
CPU time of both processes says what a busy machine hides: a transport's wall time is that of its slower end where each
of its threads has a core, and the sum of all where they share one.
"""

import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from rich.table import Table

from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import Identity, Peer, this_host
from dora.kvtransfer.plane import DataPlane, PlaneSettings
from dora.kvtransfer.transports.torch_group import make_group
from dora.tls import Tls
from dora.tls.contexts import Contexts

SECRET: Final = bytes(range(32))
PIECE_BYTES: Final = 1 << 20  # of the bare sockets' loop
MESSAGE_BYTES: Final = 4 << 20  # of the bare group's
WARM_ROUNDS: Final = 2  # after them all memory was touched
WAIT_S: Final = 60.0


@dataclass(frozen=True)
class Spent:
    """The time of moving the body once: on the clock, and of CPU at both ends."""

    wall_s: float
    source_s: float
    target_s: float


@dataclass(frozen=True)
class Row:
    """A transport and its limit: medians over the rounds."""

    ratio: float
    moved: Spent
    limit: Spent
    size_bytes: int


def measured(size_bytes: int, part_bytes: int, rounds: int) -> dict[str, Row]:
    """By the ratio's name. ``part_bytes``: of a run of neighbouring blocks in a layer."""
    body = np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        child = context.Process(target=serve, args=(theirs, str(folder), size_bytes), daemon=True)
        child.start()
        theirs.close()  # the child's death ends what waits for its word
        stack.callback(child.join)
        stack.callback(ours.send, ("end",))
        told = ours.recv()
        cut_up = [body[at : at + part_bytes].data for at in range(0, size_bytes, part_bytes)]
        bare = sendall(stack, body, told["bare"])
        rows = {}
        for name, transport, host, limit in (
            ("shm_vs_memcpy", "shm", "", memcpy(body)),
            ("tcp_vs_sendall", "tcp", "", bare),
            ("tcp_blake3_vs_sendall", "tcp", "another host", bare),
            ("gloo_vs_gloo_raw", "gloo", "", raw_gloo(stack, body, ours)),
        ):
            with a_plane(folder, len(rows) + 10, transport, host) as (plane, _):
                peer = Peer("target", 1, told["address"], (transport,))
                moved = planned(plane, len(rows) + 10, peer, cut_up, ours)
                rows[name] = compared(limit, moved, ours, size_bytes, rounds)
    return rows


def compared(limit: "Way", moved: "Way", child: Connection, size_bytes: int, rounds: int) -> Row:
    pairs = [(spent(limit, child), spent(moved, child)) for _ in range(WARM_ROUNDS + rounds)][WARM_ROUNDS:]
    limits, moves = zip(*pairs, strict=True)
    ratio = statistics.median(least.wall_s / took.wall_s for least, took in pairs)
    return Row(ratio, median(moves), median(limits), size_bytes)


def median(all_spent: tuple[Spent, ...]) -> Spent:
    middle = statistics.median
    return Spent(
        middle(each.wall_s for each in all_spent),
        middle(each.source_s for each in all_spent),
        middle(each.target_s for each in all_spent),
    )


def spent(way: "Way", child: Connection) -> Spent:
    way.ready()
    target_s, source_s, began_s = cpu_s(child), time.process_time(), time.perf_counter()
    way.move()
    wall_s, source_s = time.perf_counter() - began_s, time.process_time() - source_s
    return Spent(wall_s, source_s, cpu_s(child) - target_s)


def cpu_s(child: Connection) -> float:
    child.send(("cpu",))
    return float(child.recv())


# What is measured: each is made once, and moves the body each time.


@dataclass(frozen=True)
class Way:
    """``ready`` is called before each ``move``, off the clock."""

    move: Callable[[], None]
    ready: Callable[[], None] = lambda: None


def planned(plane: DataPlane, epoch: int, peer: Peer, parts: list[memoryview], child: Connection) -> Way:
    arrived: list[str] = []

    def ready() -> None:
        child.send(("expect", epoch, sum(part.nbytes for part in parts), arrived.pop() if arrived else ""))
        assert child.recv() == "ready"

    def move() -> None:
        arrived.append(plane.send_parts(peer, "r", parts, b"head").done.result(WAIT_S).key)

    return Way(move, ready)


def memcpy(body: np.ndarray) -> Way:
    target = np.zeros_like(body)
    return Way(lambda: np.copyto(target, body))


def sendall(stack: ExitStack, body: np.ndarray, address: str) -> Way:
    """The other end says one byte once it has all."""
    host, _, port = address.rpartition(":")
    connected = stack.enter_context(socket.create_connection((host, int(port))))

    def send() -> None:
        for at in range(0, body.nbytes, PIECE_BYTES):
            connected.sendall(body[at : at + PIECE_BYTES].data)
        assert connected.recv(1)

    return Way(send)


def raw_gloo(stack: ExitStack, body: np.ndarray, child: Connection) -> Way:
    """In large messages out of one array: the group's best, though a request's blocks lie in runs."""
    import torch
    import torch.distributed as distributed

    store = distributed.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=WAIT_S), False)
    child.send(("group", store.port))
    group = make_group("gloo", store, 0, "127.0.0.1", WAIT_S)
    tensors = torch.from_numpy(body).split(MESSAGE_BYTES)

    def send() -> None:
        child.send(("receive",))
        for work in [group.send([tensor], 1, 0) for tensor in tensors]:
            work.wait()
        assert child.recv() == "received"

    return Way(send)


# The other process.


def serve(
    parent: Connection, folder: str, size_bytes: int, names: str = "shm,tcp,gloo", tls: Tls | None = None
) -> None:
    with (
        a_plane(Path(folder), 1, names, "", tls) as (plane, address),
        socket.create_server(("127.0.0.1", 0)) as bare,
    ):
        target = np.zeros(size_bytes, np.uint8)
        threading.Thread(target=receive_bare, args=(bare, target), daemon=True).start()
        parent.send({"address": address, "bare": f"127.0.0.1:{bare.getsockname()[1]}"})
        groups: list[Any] = []
        while (order := parent.recv())[0] != "end":
            if order[0] == "expect":
                _, epoch, most_bytes, arrived = order
                if arrived:
                    plane.take_rounds(arrived)
                plane.expect("r", epoch, most_bytes)
                parent.send("ready")
            elif order[0] == "cpu":
                parent.send(time.process_time())
            elif order[0] == "group":
                groups = joined(order[1], target)
            else:
                group, tensors = groups
                for work in [group.recv([tensor], 0, 0) for tensor in tensors]:
                    work.wait()
                parent.send("received")


def joined(port: int, target: np.ndarray) -> list[Any]:
    import torch
    import torch.distributed as distributed

    store = distributed.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=WAIT_S), False)
    group = make_group("gloo", store, 1, "127.0.0.1", WAIT_S)
    return [group, torch.from_numpy(target).split(MESSAGE_BYTES)]


def receive_bare(server: socket.socket, target: np.ndarray) -> None:
    """Each connection's bytes, one connection after the other's end, until ``server`` is closed."""
    while True:
        try:
            connected, _ = server.accept()
        except OSError:
            return
        with connected:
            at = 0
            while taken := connected.recv_into(target[at : at + PIECE_BYTES].data):
                at += taken
                if at == target.nbytes:
                    connected.sendall(b"!")
                    at = 0


@contextmanager
def a_plane(
    folder: Path, epoch: int, transports: str, host: str, tls: Tls | None = None
) -> Iterator[tuple[DataPlane, str]]:
    listener = Listener("127.0.0.1")
    name = "target" if epoch == 1 else f"source{epoch}"
    settings = PlaneSettings(
        SECRET, folder, tuple(transports.split(",")), timeout_s=WAIT_S, tls=Contexts(tls) if tls is not None else None
    )
    plane = DataPlane(listener, Identity(name, epoch, "f", host or this_host()), settings)
    try:
        yield plane, listener.address
    finally:
        plane.close()


def table(rows: dict[str, Row]) -> Table:
    found = Table(title=f"KV from worker to worker: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for heading in ("", "GB/s", "limit", "ratio", "CPU ms/GB", "limit's"):
        found.add_column(heading, justify="left" if not heading else "right")
    for name, row in rows.items():
        gigabytes = row.size_bytes / 1e9
        rates = (f"{gigabytes / each.wall_s:.2f}" for each in (row.moved, row.limit))
        shares = (
            f"{each.source_s / gigabytes * 1e3:.0f} + {each.target_s / gigabytes * 1e3:.0f}"
            for each in (row.moved, row.limit)
        )
        found.add_row(name, *rates, f"{row.ratio:.2f}", *shares)
    return found
