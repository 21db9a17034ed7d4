"""NIXL between two workers: the source writes into the target's memory, by the transport that UCX selects.

Requires the optional extra ``nixl``. The target registers the memory of each body, on the host or on a device; the
source writes chunks there from memory of its own and announces each chunk after it was written. Only descriptors
travel, as numbers: no pickle.
"""

import contextlib
import importlib
import importlib.util
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from dora.errors import DoraError, SnapshotRefused, TransferFailed
from dora.kvtransfer.checksum import Digest
from dora.kvtransfer.device import DeviceMemory, OnDevice, whole
from dora.kvtransfer.memory import Memory
from dora.kvtransfer.transports.transport import (
    DeviceDigest,
    Landing,
    Receiver,
    Sender,
    Sum,
    copied,
    pool_landing,
    send_chunk,
)
from dora.kvtransfer.wire import Frame, Stream

STAGES: Final = 4
POLL_S: Final = 1e-4
_DEVICES: Final = ("cpu", "cuda")


def _agent() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # NIXL logs to standard output
    api = importlib.import_module(f"{nixl_package()}._api")
    return api.nixl_agent(secrets.token_hex(16), api.nixl_agent_config(backends=["UCX"]))


class _Place(NamedTuple):
    """Memory as NIXL names it."""

    at: tuple[int, int, int]  # address, bytes, device
    kind: str


def _place(memory: np.ndarray) -> _Place:
    return _Place((memory.ctypes.data, memory.nbytes, 0), "DRAM")


def _device_place(tensor: Any) -> _Place:
    kind = "VRAM" if tensor.is_cuda else "DRAM"
    return _Place((tensor.data_ptr(), tensor.nbytes, max(0, tensor.get_device())), kind)


def _body_place(body: np.ndarray | OnDevice) -> _Place:
    return _device_place(body.tensor()) if isinstance(body, OnDevice) else _place(body)


_WHEELS: Final = ("nixl_cu12", "nixl_cu13", "nixl")  # packages of the same library


def nixl_package() -> str:
    """The name of the installed NIXL package, or an empty text."""
    return next((name for name in _WHEELS if importlib.util.find_spec(name) is not None), "")


class NixlSender(Sender):
    name = "nixl"
    chunk_bytes: ClassVar = 4 << 20
    devices = _DEVICES

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._agent: Any = None
        self._peer = ""
        self._address = 0
        self._there = ("DRAM", 0)  # kind and device of the target's memory
        self._stages: list[np.ndarray] = []
        self._device_stages: list[Any] = []  # made with the first body on a device
        self._registered: list[Any] = []
        self._next = 0
        self._pending: deque[tuple[Any, Stream, dict[str, Any]]] = deque()
        self._pause = threading.Event()

    def attach(self, ask: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        with _failing():
            self._agent = _agent()
            memory = np.zeros(STAGES * self.chunk_bytes, np.uint8)
            self._register(_place(memory))
            self._stages = np.split(memory, STAGES)
        ask({})

    def begun(self, answer: dict[str, Any]) -> None:
        address, metadata = answer.get("address"), answer.get("agent")
        if not isinstance(address, int) or not isinstance(metadata, bytes):
            raise TransferFailed("nixl: the other end named no memory")
        with _failing():
            self._peer = self._agent.add_remote_agent(metadata)
            self._peer = self._peer.decode() if isinstance(self._peer, bytes) else self._peer
        self._address = address
        self._there = str(answer.get("kind", "DRAM")), int(answer.get("device", 0))

    def chunk(self, stream: Stream, head: dict[str, Any], parts: Sequence[memoryview], digest: Digest) -> Sum:
        while len(self._pending) >= STAGES:
            self._announce()
        shown = self._stages[self._next][: head["size"]]
        self._next = (self._next + 1) % STAGES
        found = digest(copied(shown, parts))
        self._write(stream, head, _place(shown))
        return found

    def device_chunk(
        self, stream: Stream, head: dict[str, Any], parts: Sequence[OnDevice], digest: DeviceDigest
    ) -> Sum:
        while len(self._pending) >= STAGES:
            self._announce()
        with _failing():
            if not self._device_stages:
                memory = parts[0].room(STAGES * self.chunk_bytes)
                self._register(_device_place(memory))
                self._device_stages = list(memory.split(self.chunk_bytes))
            shown = self._device_stages[self._next][: head["size"]]
            self._next = (self._next + 1) % STAGES
            at = 0
            for part in parts:
                part.fill(shown[at : at + part.nbytes])
                at += part.nbytes
            found = digest([whole(shown)])
        self._write(stream, head, _device_place(shown))
        return found

    def _register(self, place: _Place) -> None:
        self._registered.append(self._agent.register_memory([(*place.at, "")], place.kind))

    def _write(self, stream: Stream, head: dict[str, Any], place: _Place) -> None:
        kind, device = self._there
        with _failing():
            here = self._agent.get_xfer_descs([place.at], place.kind)
            there = self._agent.get_xfer_descs([(self._address + head["at"], head["size"], device)], kind)
            handle = self._agent.initialize_xfer("WRITE", here, there, self._peer)
            self._agent.transfer(handle)
        self._pending.append((handle, stream, head))

    def finish(self) -> None:
        while self._pending:
            self._announce()

    def abandon(self) -> None:
        """Returns once no more writes can happen."""
        while self._pending:
            handle, _, _ = self._pending.popleft()
            with contextlib.suppress(TransferFailed):
                self._wait(handle)

    def close(self) -> None:
        self.abandon()
        while self._registered:
            with contextlib.suppress(TransferFailed), _failing():
                self._agent.deregister_memory(self._registered.pop())
        self._device_stages.clear()
        self._agent = None

    def _announce(self) -> None:
        handle, stream, head = self._pending.popleft()
        self._wait(handle)
        send_chunk(stream, head)

    def _wait(self, handle: Any) -> None:
        left = int(self._timeout_s / POLL_S)
        with _failing():
            while (state := self._agent.check_xfer_state(handle)) == "PROC" and left:
                self._pause.wait(POLL_S)
                left -= 1
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransferFailed(f"nixl: a chunk was not written: {state}")


class NixlReceiver(Receiver):
    devices = _DEVICES

    def __init__(self) -> None:
        self._agent: Any = None
        self._registered: dict[int, Any] = {}  # by the address of the body

    def attach(self, offer: dict[str, Any]) -> dict[str, Any]:
        with _failing(SnapshotRefused):
            self._agent = _agent()
        return {}

    def begin(self, opening: dict[str, Any], body_bytes: int, pool: Memory | DeviceMemory) -> Landing:
        body = pool_landing(body_bytes, pool)
        with _failing(SnapshotRefused):
            (address, size, device), kind = _body_place(body)
            self._registered[address] = registered = self._agent.register_memory([(address, size, device, "")], kind)
            metadata = self._agent.get_partial_agent_metadata(registered, inc_conn_info=True, backends=["UCX"])
        return Landing(body, {"address": address, "agent": metadata, "kind": kind, "device": device})

    def chunk(self, stream: Stream, frame: Frame, target: memoryview, digest: Digest) -> Sum:
        """The chunk was written before it was announced."""
        stream.drain(frame.body_bytes)
        return digest([target])

    def device_chunk(self, stream: Stream, frame: Frame, target: OnDevice, digest: DeviceDigest) -> Sum:
        """The same; work of this process on the device comes after the write."""
        stream.drain(frame.body_bytes)
        return digest([target])

    def end(self, body: np.ndarray | OnDevice) -> None:
        registered = self._registered.pop(_body_place(body).at[0], None)
        if registered is not None:
            with contextlib.suppress(SnapshotRefused), _failing(SnapshotRefused):
                self._agent.deregister_memory(registered)

    def close(self) -> None:
        self._agent = None


@contextlib.contextmanager
def _failing(as_error: type[DoraError] = TransferFailed) -> Iterator[None]:
    try:
        yield
    except DoraError:
        raise
    except Exception as error:  # its bindings raise their own exceptions, derived from Exception alone
        raise as_error(f"nixl: {type(error).__name__} {error}".splitlines()[0]) from error
