"""torch.distributed between two workers: gloo on CPUs, NCCL on GPUs, with the same code.

Each pair is a process group with two ranks, created directly rather than by ``init_process_group``, so that no global
world must be formed again when a worker dies. The source hosts the store by which both ranks find each other. The group
neither authenticates nor protects its traffic: its network must be reachable by workers of this run alone.

Chunks are announced on the pair's stream, and sent and received in the group, by both ends in the same order.
"""

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from datetime import timedelta
from typing import Any, ClassVar, Final

from dora.errors import DoraError, SnapshotRefused, TransferFailed
from dora.kvtransfer.checksum import Digest
from dora.kvtransfer.memory import Memory
from dora.kvtransfer.transport import Landing, Receiver, Sender, Sum, copied, pool_landing, send_chunk, summed
from dora.kvtransfer.wire import Frame, Stream

DEVICES: Final = {"gloo": "cpu", "nccl": "cuda"}
STAGES: Final = 2  # chunks in transit at once
DIRECT_BYTES: Final = 64 << 10  # a smaller part costs more as its own message than as a copy
_SOURCE, _TARGET = 0, 1  # ranks
_TAG: Final = 0


def make_group(backend: str, store: Any, rank: int, host: str, timeout_s: float) -> Any:
    """Creates one rank of a pair. ``host``: this end's address, for gloo. Blocks until the other rank has joined."""
    import torch.distributed as distributed

    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        options._threads = 2
        return distributed.ProcessGroupGloo(store, rank, 2, options)
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # raises if a peer stops, instead of aborting the process
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, 2, options)


class TorchSender(Sender):
    """Sends large parts of a chunk in place. Small parts, and all parts for a GPU, are copied to a stage first."""

    chunk_bytes: ClassVar = 8 << 20

    def __init__(self, backend: str, stream: Stream, timeout_s: float, helpers: Executor) -> None:
        self.name = backend
        self._helpers = helpers
        self._stream = stream
        self._timeout_s = timeout_s
        self._store: Any = None
        self._group: Any = None
        self._stages: list[_Stage] = []
        self._next = 0

    def attach(self, ask: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        import torch.distributed as distributed

        host, prefix, timeout = self._stream.own_host(), secrets.token_hex(8), timedelta(seconds=self._timeout_s)
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listening.getsockname()[1]
        with _failing(self.name):
            self._store = distributed.TCPStore(
                host, port, None, True, timeout, False, master_listen_fd=listening.detach()
            )
        joining = _Joining(
            lambda: make_group(self.name, distributed.PrefixStore(prefix, self._store), _SOURCE, host, self._timeout_s)
        )
        joining.start()  # both ranks wait for each other, so this one joins while the other is asked
        try:
            ask({"host": host, "port": port, "prefix": prefix})
        finally:
            joining.join()
        with _failing(self.name):
            self._group = joining.result()
            self._stages = [_Stage(DEVICES[self.name], self.chunk_bytes) for _ in range(STAGES)]

    def chunk(self, stream: Stream, head: dict[str, Any], parts: Sequence[memoryview], digest: Digest) -> Sum:
        stage = self._stages[self._next]
        self._next = (self._next + 1) % STAGES
        with _failing(self.name):
            stage.wait()
            if self.name == "gloo" and all(_is_worth_a_message(part) for part in parts):
                found: Sum = self._helpers.submit(digest, parts).result
                tensors = [_shown(part) for part in parts]
            else:
                found = digest(copied(stage.host[: head["size"]], parts))
                tensors = [stage.on_device(head["size"])]
            send_chunk(stream, {**head, "messages": [len(tensor) for tensor in tensors]})
            stage.works = [self._group.send([tensor], _TARGET, _TAG) for tensor in tensors]
        return found

    def finish(self) -> None:
        with _failing(self.name):
            for stage in self._stages:
                stage.wait()

    def abandon(self) -> None:
        """Lets the target receive and discard the announced chunks."""
        with contextlib.suppress(TransferFailed):
            self.finish()

    def close(self) -> None:
        self._stages.clear()
        self._group = self._store = None


class TorchReceiver(Receiver):
    def __init__(self, backend: str, stream: Stream, timeout_s: float) -> None:
        self._backend = backend
        self._stream = stream
        self._timeout_s = timeout_s
        self._store: Any = None
        self._group: Any = None

    def attach(self, offer: dict[str, Any]) -> dict[str, Any]:
        import torch.distributed as distributed

        host, port, prefix = offer.get("host"), offer.get("port"), offer.get("prefix")
        if not isinstance(host, str) or not isinstance(port, int) or not isinstance(prefix, str):
            raise SnapshotRefused("store: no store is named")
        with _failing(self._backend, SnapshotRefused):
            timeout = timedelta(seconds=self._timeout_s)
            self._store = distributed.TCPStore(host, port, None, False, timeout, False)
            store = distributed.PrefixStore(prefix, self._store)
            self._group = make_group(self._backend, store, _TARGET, self._stream.own_host(), self._timeout_s)
        return {}

    def begin(self, opening: dict[str, Any], body_bytes: int, pool: Memory) -> Landing:
        return Landing(pool_landing(body_bytes, pool), {})

    def chunk(self, stream: Stream, frame: Frame, target: memoryview, digest: Digest) -> Sum:
        import torch

        stream.drain(frame.body_bytes)
        with _failing(self._backend, SnapshotRefused):
            host = torch.frombuffer(target, dtype=torch.uint8)
            place = host if self._backend == "gloo" else torch.empty_like(host, device=DEVICES[self._backend])
            tensors = place.split([int(size) for size in frame.head["messages"]])
            works = [self._group.recv([tensor], _SOURCE, _TAG) for tensor in tensors]

        def ready() -> bytes:
            with _failing(self._backend, SnapshotRefused):
                for work in works:
                    work.wait()
                if place is not host:
                    host.copy_(place)
            return digest([target])

        return ready

    def skip(self, stream: Stream, frame: Frame) -> None:
        ready = self.chunk(stream, frame, memoryview(bytearray(int(frame.head["size"]))), lambda _: b"")
        summed(ready)

    def close(self) -> None:
        self._group = self._store = None


class _Stage:
    """Staging memory for one chunk, on the host and, for NCCL, on the GPU."""

    def __init__(self, device: str, size_bytes: int) -> None:
        import torch

        on_gpu = device != "cpu"
        self._host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.empty(size_bytes, dtype=torch.uint8, device=device) if on_gpu else self._host
        self.host = self._host.numpy()
        self.works: list[Any] = []

    def on_device(self, size_bytes: int) -> Any:
        if self._device is not self._host:
            self._device[:size_bytes].copy_(self._host[:size_bytes])
        return self._device[:size_bytes]

    def wait(self) -> None:
        """Waits until everything sent from here has left."""
        works, self.works = self.works, []
        for work in works:
            work.wait()


def _is_worth_a_message(part: memoryview) -> bool:
    """Whether to send a part in place; torch accepts only writable memory."""
    return part.nbytes >= DIRECT_BYTES and not part.readonly


def _shown(part: memoryview) -> Any:
    """A part as a tensor, without a copy."""
    import torch

    return torch.frombuffer(part, dtype=torch.uint8)


class _Joining(threading.Thread):
    """Joins a group in a thread of its own."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(name="kv-join", daemon=True)
        self._make = make
        self._made: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._made = self._make()
        except Exception as error:  # torch raises its own exceptions; ``result`` raises them again
            self._error = error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._made


@contextlib.contextmanager
def _failing(backend: str, as_error: type[DoraError] = TransferFailed) -> Iterator[None]:
    """Raises torch's exceptions as a transport failure."""
    try:
        yield
    except (RuntimeError, ValueError, OSError, AttributeError, ImportError) as error:
        said = str(error).strip().splitlines()
        raise as_error(f"{backend}: {said[0] if said else error!r}") from error
