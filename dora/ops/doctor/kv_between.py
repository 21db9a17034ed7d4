"""Proves KV that goes from one GPU's memory to another's (dora.kvtransfer.device), between two processes."""

import hashlib
import multiprocessing
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dora.errors import TransferFailed
from dora.host.proof import write_proof
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import Identity, Peer, this_host
from dora.kvtransfer.plane import DataPlane, PlaneSettings
from dora.kvtransfer.transports.registry import is_installed
from dora.ops.doctor.verdict import Failed, Skipped, Subject

if TYPE_CHECKING:
    from dora.worker.copying.cuda_blocks import DeviceStore

ANSWER_S: Final = 60.0
STALL_S: Final = 20.0
BLOCKS, LAYERS, BLOCK_SHAPE = 64, 4, (16, 4096)
SENT: Final = tuple(range(1, BLOCKS, 2))  # scattered
TICKET: Final = "kv"


def kv_between(subject: Subject) -> dict[str, Any]:
    """Sends blocks between the KV-caches of GPUs, and to a killed process. Writes the proof that lets workers do so."""
    if subject.device != "cuda":
        raise Skipped("on CPUs KV lies in host memory")
    import torch

    if torch.cuda.device_count() < 2:
        raise Skipped(f"{torch.cuda.device_count()} GPUs are visible")
    names = [name for name in ("nccl", "nixl") if is_installed(name)]
    found: dict[str, Any] = {name: prove(subject.folder, "cuda", name) for name in names}
    found["proof"] = str(write_proof("kv", found))
    return found


def prove(folder: Path, device: str, transport: str) -> dict[str, Any]:
    """Runs the proof between two devices of a kind. Raises Failed."""
    secret, context = secrets.token_bytes(32), multiprocessing.get_context("spawn")
    told, its = context.Pipe()
    target = context.Process(target=_receive, args=(folder, device, transport, secret, its), daemon=True)
    target.start()
    try:
        store = _store(device, seed=1)
        with _plane(folder, 1, transport, secret, store) as (plane, _):
            peer = Peer("w2", 2, _answer(told), (transport,))
            rates = [_check_equal(plane, peer, store, told) for _ in range(3)]
            target.kill()
            target.join()
            _check_failed(plane, peer, store)
    finally:
        target.kill()
        target.join()
    return {"gb_per_s": round(max(rates) / 1e9, 2), "device": device}


def _check_equal(plane: DataPlane, peer: Peer, store: "DeviceStore", told: Connection) -> float:
    """Returns bytes per second. Raises Failed if the blocks that arrived differ."""
    began_s = time.monotonic()
    sent = plane.send_parts(peer, TICKET, _parts(store), b"head").done.result(ANSWER_S)
    took_s = time.monotonic() - began_s
    told.send(sent.key)
    if _answer(told) != _digest(store, SENT):
        raise Failed("the blocks that came are not those that were sent")
    return sent.body_bytes / took_s


def _check_failed(plane: DataPlane, peer: Peer, store: "DeviceStore") -> None:
    try:
        plane.send_parts(peer, TICKET, _parts(store), b"head").done.result(ANSWER_S)
    except TransferFailed:
        return
    except Late:
        raise Failed(f"a transfer to a process that was killed has not ended in {ANSWER_S:g} s") from None
    raise Failed("a process that was killed has taken KV")


def _answer(told: Connection) -> str:
    if not told.poll(ANSWER_S):
        raise Failed(f"the target's process did not answer in {ANSWER_S:g} s")
    try:
        answer: str = told.recv()
    except EOFError:
        raise Failed("the target's process has ended") from None
    if answer.startswith("failed: "):
        raise Failed(answer.removeprefix("failed: "))
    return answer


def _receive(folder: Path, device: str, transport: str, secret: bytes, told: Connection) -> None:
    from dora.kvtransfer.device import OnDevice

    if device == "cuda":  # before CUDA starts here: every thread then uses the second GPU
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[1]
    store = _store(device, seed=2)
    ids = [block_id - 1 for block_id in SENT]
    with _plane(folder, 2, transport, secret, store) as (plane, address):
        plane.expect(TICKET, 1, 1 << 30)
        told.send(address)
        while True:
            body = plane.take_rounds(told.recv())[1][0].body
            plane.expect(TICKET, 1, 1 << 30)
            if not isinstance(body, OnDevice):
                told.send("failed: the blocks came by host memory")
                continue
            blocks, at = {}, 0
            for name, block_bytes in store.layers:
                end = at + len(ids) * block_bytes
                blocks[name] = [body[at:end].reshape(len(ids), block_bytes)]
                at = end
            store.write([ids], blocks)
            told.send(_digest(store, ids))


@contextmanager
def _plane(
    folder: Path, epoch: int, transport: str, secret: bytes, store: "DeviceStore"
) -> Iterator[tuple[DataPlane, str]]:
    listener = Listener("127.0.0.1")
    settings = PlaneSettings(secret, folder, (transport,), timeout_s=STALL_S)
    plane = DataPlane(listener, Identity(f"w{epoch}", epoch, "doctor", this_host()), settings)
    plane.use(store.device_memory)
    try:
        yield plane, listener.address
    finally:
        plane.close()


def _store(device: str, seed: int) -> "DeviceStore":
    import torch

    from dora.worker.copying.cuda_blocks import DeviceStore
    from dora.worker.copying.device_memory import LANDING_BYTES

    random = torch.Generator().manual_seed(seed)
    tensors = {
        f"layer.{number}": torch.randint(256, (BLOCKS, *BLOCK_SHAPE), dtype=torch.uint8, generator=random).to(device)
        for number in range(LAYERS)
    }
    return DeviceStore(tensors, dict.fromkeys(tensors, 0), BLOCKS, landing_bytes=LANDING_BYTES)


def _parts(store: "DeviceStore") -> list[Any]:
    return [piece.reshape(-1).data for pieces in store.lend([SENT]).values() for piece in pieces]


def _digest(store: "DeviceStore", block_ids: Sequence[int]) -> str:
    found = hashlib.sha256()
    for pieces in store.show([block_ids]).values():
        for piece in pieces:
            found.update(piece.tobytes())
    return found.hexdigest()
