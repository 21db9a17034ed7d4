"""How fast KV moves between two workers, against what the machine can do, in one run.

    python perf/kv_migration.py --json

Two processes, each with a data plane. The source's memory is cut up into runs of blocks, as a prefilled prompt of some
thousand tokens leaves them; ``--part-kilobytes 48`` is a request whose blocks lie anywhere. Every round measures a
transport and its limit one after the other, and the result is the median of the rounds' ratios, so that a machine that
is busy with other things slows down both:

    shm_vs_memcpy    shared memory, checked at both ends, against one thread's copy of the same bytes
    tcp_vs_sendall   TCP, checked at both ends, against a loop of sendall and recv_into
    gloo_vs_gloo_raw the group of torch.distributed, checked at both ends, against the same group without a data plane
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from rich.console import Console
from rich.table import Table

from dora.kvtransfer.door import Door
from dora.kvtransfer.peer import Identity, Peer, this_host
from dora.kvtransfer.plane import DataPlane, PlaneSettings
from dora.kvtransfer.torch_pair import TorchSender, make_group

BARS: Final = {"shm_vs_memcpy": 0.60, "tcp_vs_sendall": 0.90, "gloo_vs_gloo_raw": 0.90}
SECRET: Final = bytes(range(32))
PIECE_BYTES: Final = 1 << 20  # of the bare loops
WAIT_S: Final = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=96, help="of one snapshot")
    parser.add_argument("--part-kilobytes", type=int, default=1440, help="of a run of neighbouring blocks in a layer")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        rows = measured(Path(folder), options.megabytes << 20, options.part_kilobytes << 10, options.rounds)
    if options.json:
        print(json.dumps({name: round(row["ratio"], 3) for name, row in rows.items()}))
    else:
        show(rows)


def measured(folder: Path, size_bytes: int, part_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """By the ratio's name: the ratio, and both ends' gigabytes a second."""
    body = np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs, str(folder), size_bytes), daemon=True)
    child.start()
    with ExitStack() as stack:
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
                rows[name] = compared(limit, planned(plane, len(rows) + 10, peer, cut_up, ours), size_bytes, rounds)
    return rows


def compared(
    limit: Callable[[], object], transfer: Callable[[], object], size_bytes: int, rounds: int
) -> dict[str, float]:
    """Medians over rounds that measure both, after one that warms both up."""
    pairs = [(timed(limit), timed(transfer)) for _ in range(rounds + 1)][1:]
    limit_s, took_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "ratio": statistics.median(limited / took for limited, took in pairs),
        "gb_per_s": size_bytes / took_s / 1e9,
        "limit_gb_per_s": size_bytes / limit_s / 1e9,
    }


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


# What is measured: each is made once, and moves the body each time it is called.


def planned(
    plane: DataPlane, epoch: int, peer: Peer, parts: list[memoryview], child: Connection
) -> Callable[[], object]:
    def transfer() -> None:
        child.send(("expect", epoch, sum(part.nbytes for part in parts)))
        assert child.recv() == "ready"
        key = plane.send_parts(peer, "r", parts, b"head").done.result(WAIT_S).key
        child.send(("taken", key))

    return transfer


def memcpy(body: np.ndarray) -> Callable[[], object]:
    target = np.zeros_like(body)
    return lambda: np.copyto(target, body)


def sendall(stack: ExitStack, body: np.ndarray, address: str) -> Callable[[], object]:
    """The other end says one byte once it has all."""
    host, _, port = address.rpartition(":")
    connected = stack.enter_context(socket.create_connection((host, int(port))))

    def send() -> None:
        for at in range(0, body.nbytes, PIECE_BYTES):
            connected.sendall(body[at : at + PIECE_BYTES].data)
        assert connected.recv(1)

    return send


def raw_gloo(stack: ExitStack, body: np.ndarray, child: Connection) -> Callable[[], object]:
    import torch
    import torch.distributed as distributed

    store = distributed.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=WAIT_S), False)
    child.send(("group", store.port))
    group = make_group("gloo", store, 0, "127.0.0.1", WAIT_S)
    tensors = torch.from_numpy(body).split(TorchSender.chunk_bytes)

    def send() -> None:
        child.send(("receive",))
        for work in [group.send([tensor], 1, 0) for tensor in tensors]:
            work.wait()
        assert child.recv() == "received"

    return send


# The other process.


def serve(parent: Connection, folder: str, size_bytes: int) -> None:
    with (
        a_plane(Path(folder), 1, "shm,tcp,gloo", "") as (plane, address),
        socket.create_server(("127.0.0.1", 0)) as bare,
    ):
        import threading

        target = np.zeros(size_bytes, np.uint8)
        threading.Thread(target=receive_bare, args=(bare, target), daemon=True).start()
        parent.send({"address": address, "bare": f"127.0.0.1:{bare.getsockname()[1]}"})
        groups: list[Any] = []
        while (order := parent.recv())[0] != "end":
            if order[0] == "expect":
                plane.expect("r", order[1], order[2])
                parent.send("ready")
            elif order[0] == "taken":
                plane.take_parts(order[1])
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
    return [group, torch.from_numpy(target).split(TorchSender.chunk_bytes)]


def receive_bare(server: socket.socket, target: np.ndarray) -> None:
    """Each connection's bytes, one connection after the other's end."""
    while True:
        connected, _ = server.accept()
        with connected:
            at = 0
            while taken := connected.recv_into(target[at : at + PIECE_BYTES].data):
                at += taken
                if at == target.nbytes:
                    connected.sendall(b"!")
                    at = 0


@contextmanager
def a_plane(folder: Path, epoch: int, transports: str, host: str) -> Iterator[tuple[DataPlane, str]]:
    door = Door("127.0.0.1")
    name = "target" if epoch == 1 else f"source{epoch}"
    settings = PlaneSettings(SECRET, folder, tuple(transports.split(",")), timeout_s=WAIT_S)
    plane = DataPlane(door, Identity(name, epoch, "f", host or this_host()), settings)
    try:
        yield plane, door.address
    finally:
        plane.close()


def show(rows: dict[str, dict[str, float]]) -> None:
    table = Table(title="KV from worker to worker")
    for heading in ("", "GB/s", "limit, GB/s", "ratio", "bar"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, row in rows.items():
        bar = BARS.get(name)
        table.add_row(
            name,
            f"{row['gb_per_s']:.2f}",
            f"{row['limit_gb_per_s']:.2f}",
            f"{row['ratio']:.2f}",
            "-" if bar is None else f"{bar:.2f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
