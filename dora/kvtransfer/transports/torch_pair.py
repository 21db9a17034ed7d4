"""torch.distributed between two workers: gloo on CPUs, NCCL on GPUs, with the same code.

Each pair is a process group with two ranks (``torch_group``). The source hosts the store by which both ranks find each
other. The group neither authenticates nor protects its traffic: its network must be reachable by workers of this run
alone.

Chunks are announced on the pair's stream, and sent and received in the group, by both ends in the same order.
"""

import contextlib
import secrets
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from datetime import timedelta
from typing import Any, ClassVar, Final

from dora.errors import SnapshotRefused, TransferFailed
from dora.kvtransfer.checksum import Digest
from dora.kvtransfer.device import DeviceMemory, OnDevice, whole
from dora.kvtransfer.memory import Memory
from dora.kvtransfer.transports.torch_group import DEVICES, Joining, TorchGroup
from dora.kvtransfer.transports.transport import (
    DeviceDigest,
    Landing,
    Receiver,
    Sender,
    Sum,
    copied,
    pool_landing,
    send_chunk,
    summed,
)
from dora.kvtransfer.wire import Frame, Stream

STAGES: Final = 2  # chunks in transit at once
DIRECT_BYTES: Final = 64 << 10  # a smaller part costs more as its own message than as a copy
JOIN_SHARE: Final = 0.5  # of the time within which the target must answer. It joins within this, or says why not
_SOURCE, _TARGET = 0, 1  # ranks


class TorchSender(Sender):
    """Sends large parts of a chunk in place. Small parts, and all parts for a GPU, are copied to a stage first."""

    chunk_bytes: ClassVar = 8 << 20

    def __init__(self, backend: str, stream: Stream, timeout_s: float, helpers: Executor) -> None:
        self.name = backend
        self.devices = (DEVICES[backend],)
        self._helpers = helpers
        self._stream = stream
        self._timeout_s = timeout_s
        self._store: Any = None
        self._group = TorchGroup(backend, timeout_s)
        self._stages: list[_Stage] = []
        self._next = 0

    def attach(self, ask: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        import torch.distributed as distributed

        host, prefix, timeout = self._stream.own_host(), secrets.token_hex(8), timedelta(seconds=self._timeout_s)
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listening.getsockname()[1]
        with self._group.failing():
            self._store = store = distributed.TCPStore(
                host, port, None, True, timeout, False, master_listen_fd=listening.detach()
            )
        # Both ranks wait for each other, so this one joins while the other is asked.
        joining = Joining(self.name, lambda _: distributed.PrefixStore(prefix, store), _SOURCE, host, self._timeout_s)
        try:
            ask({"host": host, "port": port, "prefix": prefix})
        except Exception:
            joining.give_up()
            raise
        self._group.join(joining)
        with self._group.failing():
            self._stages = [_Stage(DEVICES[self.name], self.chunk_bytes) for _ in range(STAGES)]

    def chunk(self, stream: Stream, head: dict[str, Any], parts: Sequence[memoryview], digest: Digest) -> Sum:
        stage = self._stages[self._next]
        self._next = (self._next + 1) % STAGES
        self._wait(stage)
        with self._group.failing():
            if self.name == "gloo" and all(_is_worth_a_message(part) for part in parts):
                found: Sum = self._helpers.submit(digest, parts).result
                tensors = [_shown(part) for part in parts]
            else:
                found = digest(copied(stage.host[: head["size"]], parts))
                tensors = [stage.on_device(head["size"])]
            self._send(stage, stream, head, tensors)
        return found

    def device_chunk(
        self, stream: Stream, head: dict[str, Any], parts: Sequence[OnDevice], digest: DeviceDigest
    ) -> Sum:
        stage = self._stages[self._next]
        self._next = (self._next + 1) % STAGES
        self._wait(stage)
        with self._group.failing():
            place = stage.device[: head["size"]]
            at = 0
            for part in parts:
                part.fill(place[at : at + part.nbytes])
                at += part.nbytes
            self._send(stage, stream, head, [place])
            return digest([whole(place)])

    def _send(self, stage: "_Stage", stream: Stream, head: dict[str, Any], tensors: Sequence[Any]) -> None:
        send_chunk(stream, {**head, "messages": [len(tensor) for tensor in tensors]})
        stage.works = [self._group.send(tensor, _TARGET) for tensor in tensors]

    def finish(self) -> None:
        for stage in self._stages:
            self._wait(stage)

    def abandon(self) -> None:
        """Lets the target receive and discard the announced chunks."""
        with contextlib.suppress(TransferFailed):
            self.finish()

    def close(self) -> None:
        self._stages.clear()
        self._group.close()
        self._store = None

    def _wait(self, stage: "_Stage") -> None:
        works, stage.works = stage.works, []
        self._group.wait(works)


class TorchReceiver(Receiver):
    def __init__(self, backend: str, stream: Stream, timeout_s: float) -> None:
        self._backend = backend
        self.devices = (DEVICES[backend],)
        self._stream = stream
        self._timeout_s = timeout_s
        self._group = TorchGroup(backend, timeout_s, SnapshotRefused)

    def attach(self, offer: dict[str, Any]) -> dict[str, Any]:
        import torch.distributed as distributed

        host, port, prefix = offer.get("host"), offer.get("port"), offer.get("prefix")
        if not isinstance(host, str) or not isinstance(port, int) or not isinstance(prefix, str):
            raise SnapshotRefused("store: no store is named")

        def connect(timeout: timedelta) -> Any:
            return distributed.PrefixStore(prefix, distributed.TCPStore(host, port, None, False, timeout, False))

        self._group.join(
            Joining(self._backend, connect, _TARGET, self._stream.own_host(), self._timeout_s * JOIN_SHARE)
        )
        return {}

    def begin(self, opening: dict[str, Any], body_bytes: int, pool: Memory | DeviceMemory) -> Landing:
        return Landing(pool_landing(body_bytes, pool), {})

    def chunk(self, stream: Stream, frame: Frame, target: memoryview, digest: Digest) -> Sum:
        with self._group.failing():
            there = _shown(target)
        return self._receive(stream, frame, there, lambda: digest([target]))

    def device_chunk(self, stream: Stream, frame: Frame, target: OnDevice, digest: DeviceDigest) -> Sum:
        return self._receive(stream, frame, target.tensor(), lambda: digest([target]))

    def _receive(self, stream: Stream, frame: Frame, target: Any, digest: Callable[[], bytes]) -> Sum:
        import torch

        device = DEVICES[self._backend]
        stream.drain(frame.body_bytes)
        with self._group.failing():
            place = target if target.device.type == device else torch.empty_like(target, device=device)
            tensors = place.split([int(size) for size in frame.head["messages"]])
            works = [self._group.receive(tensor, _SOURCE) for tensor in tensors]

        def ready() -> bytes:
            self._group.wait(works)
            with self._group.failing():
                if place is not target:
                    target.copy_(place)
                return digest()

        return ready

    def skip(self, stream: Stream, frame: Frame) -> None:
        ready = self.chunk(stream, frame, memoryview(bytearray(int(frame.head["size"]))), lambda _: b"")
        summed(ready)

    def close(self) -> None:
        self._group.close()


class _Stage:
    """Staging memory for one chunk, on the host and, for NCCL, on the GPU."""

    def __init__(self, device: str, size_bytes: int) -> None:
        import torch

        on_gpu = device != "cpu"
        self._host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self.device = torch.empty(size_bytes, dtype=torch.uint8, device=device) if on_gpu else self._host
        self.host = self._host.numpy()
        self.works: list[Any] = []

    def on_device(self, size_bytes: int) -> Any:
        if self.device is not self._host:
            self.device[:size_bytes].copy_(self._host[:size_bytes])
        return self.device[:size_bytes]


def _is_worth_a_message(part: memoryview) -> bool:
    """Returns whether to send a part in place; torch accepts only writable memory."""
    return part.nbytes >= DIRECT_BYTES and not part.readonly


def _shown(part: memoryview) -> Any:
    import torch

    return torch.frombuffer(part, dtype=torch.uint8)
