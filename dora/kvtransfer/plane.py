"""A worker's data plane: sends snapshots to other workers and receives theirs, beside the engine's loop.

    source                                           target
    send(peer, ticket, snapshot) ──────┐             expect(ticket, epoch, most_bytes, ahead)
                                       ▼                    │
                    Pair, one a target: chunks ─────▶ Listener, one a worker
                                       │                    │
    Transfer.done: Sent(key) ◀─────────┘             take(key): the snapshot

``send`` returns at once. The copy reads the engine's blocks in place, while they do not change. It ends when the target
confirms that everything has arrived and is checked; from then on the source may fail.
"""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from dora.errors import InvalidValue
from dora.kvtransfer.arrivals import Ahead, Arrival, Arrivals
from dora.kvtransfer.checksum import Seal
from dora.kvtransfer.codec import Opening, head_of, round_of, snapshot_of
from dora.kvtransfer.device import DeviceMemory, Part
from dora.kvtransfer.incoming import Incoming, MakeReceiver
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.memory import BufferPool, Memory
from dora.kvtransfer.outgoing import MakeSender, Pair
from dora.kvtransfer.peer import SECRET_BYTES, Identity, Peer
from dora.kvtransfer.snapshot import NO_PREFIX, KvSnapshot, Prefix
from dora.kvtransfer.throttle import Throttle
from dora.kvtransfer.transfer import Transfer
from dora.kvtransfer.transports.arena import Arena
from dora.kvtransfer.transports.registry import TRANSPORTS, Resources, Transport, is_installed
from dora.kvtransfer.transports.segments import SegmentPool
from dora.kvtransfer.transports.transport import Receiver, Sender
from dora.kvtransfer.wire import Stream
from dora.tls.contexts import Contexts

HELPERS: Final = 2  # threads
PARTS: Final = 4  # of a round that may be in flight at one worker, each way
PART_BYTES: Final = (
    128 << 20
)  # of one: beyond this a transport gets no faster, and a device's landing memory holds four
IN_STREAM: Final = frozenset({"shm", "tcp"})  # transports whose bytes leave a host on the pair's own stream, or never


@dataclass(frozen=True, slots=True)
class PlaneSettings:
    """Settings shared by a whole run."""

    secret: bytes = field(repr=False)  # 32 random bytes
    folder: Path  # for shared-memory segments: a tmpfs
    transports: tuple[str, ...] = ("shm", "tcp")  # in order of preference
    bandwidth_bytes_per_s: float = 0.0  # limit for everything that a worker sends; 0: no cap
    memory_bytes: int = 1 << 30  # limit in flight, for shared-memory sends and again for receives
    timeout_s: float = 10.0  # a peer that stalls this long has failed
    tls: Contexts | None = None  # of this process; None: in the clear


class ArrivedSnapshot(NamedTuple):
    """An arrived snapshot, with its raw head and rounds."""

    snapshot: KvSnapshot
    head: bytes
    rounds: Sequence[Arrival]


def local_host(address: str) -> str:
    """The address of this host on its route to ``address`` (host:port), where that host can reach it."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing: the kernel only looks up the route
        try:
            probe.connect((host, int(port)))
        except (OSError, ValueError) as error:
            raise InvalidValue("address", address, f"host:port of a host that can be reached ({error})") from error
        return str(probe.getsockname()[0])


class DataPlane:
    """Thread-safe. Opens ``listener``, and closes it with everything else."""

    def __init__(
        self,
        listener: Listener,
        own: Identity,
        settings: PlaneSettings,
        arena_bytes: int = 0,
        arena: Arena | None = None,
    ) -> None:
        """``arena_bytes`` is the size of a pool's arena for received bodies, ``arena`` that of its previous epoch."""
        if len(settings.secret) != SECRET_BYTES:
            raise InvalidValue("kv secret", f"{len(settings.secret)} bytes", f"{SECRET_BYTES} bytes")
        self._own = own = replace(own, is_sealed=settings.tls is not None and set(settings.transports) <= IN_STREAM)
        self._settings = settings
        self._listener = listener
        self._arrivals = Arrivals()
        self._segments = SegmentPool(settings.folder, str(own.epoch), settings.memory_bytes)
        if arena is not None:
            try:
                arena.move(settings.folder, str(own.epoch))
            except InvalidValue:
                self._segments.close()
                raise
        elif arena_bytes:
            arena = Arena(settings.folder, str(own.epoch), arena_bytes)
        self.arena = arena
        self._memory: Memory = self.arena or BufferPool(settings.memory_bytes)
        self._helpers = ThreadPoolExecutor(HELPERS, "kv-sum")  # compute checksums while bytes are sent and received
        self._throttle = Throttle(settings.bandwidth_bytes_per_s)
        self._pairs: dict[tuple[str, int], Pair] = {}
        self._lock = threading.Lock()
        self._incoming = incoming = Incoming(
            own, settings.secret, self._arrivals, self._memory, self._receivers(), settings.timeout_s
        )
        listener.open(incoming.serve, settings.timeout_s, settings.tls)

    @property
    def part_bytes(self) -> int:
        """The bytes of a body that finds room at a target, which has the same settings, beside a few others."""
        return min(PART_BYTES, self._settings.memory_bytes // PARTS)

    def send(self, peer: Peer, ticket: str, snapshot: KvSnapshot) -> Transfer:
        """Begins to copy a snapshot to ``peer``, which expects it under ``ticket``; its blocks must not change.

        Raises SnapshotRefused if its parts contradict each other, TransferFailed if too many transfers are queued.
        """
        return self.send_parts(peer, ticket, round_of(snapshot), head_of(snapshot))

    def send_parts(
        self,
        peer: Peer,
        ticket: str,
        parts: Sequence[Part],
        head: bytes = b"",
        after: str = "",
        seal: Seal | None = None,
        goes_on: bool = False,
        prefix: Prefix = NO_PREFIX,
    ) -> Transfer:
        """The same for any bytes: the consecutive ``parts`` are the body.

        If a round of a snapshot ``goes_on``, the next one names its key as ``after``. The concatenated heads of all
        rounds are the snapshot's head. The first round may omit the blocks of a ``prefix``. A body that was received
        from another worker is one part, sent on with its ``seal``.
        """
        transfer = Transfer(ticket, parts, head, after, seal, goes_on, prefix)
        self._pair(peer).send(transfer)
        return transfer

    def use(self, device: DeviceMemory | None) -> None:
        """Lets bodies of later pairs go straight from device to device. Called once, before requests move."""
        self._incoming.device = device

    def expect(self, ticket: str, epoch: int, most_bytes: int, ahead: Ahead | None = None) -> None:
        """Expects one snapshot of this ticket, from this epoch of a worker. Raises Conflict if too many are expected.

        A thread of the plane writes its rounds, except the last, to ``ahead`` as they arrive.
        """
        self._arrivals.expect(ticket, epoch, most_bytes, ahead)

    def take(self, key: str) -> KvSnapshot:
        """Takes an arrived snapshot. Raises NotFound if it has not arrived, SnapshotRefused if it is damaged.

        Its arrays are read-only and use the plane's memory, which is freed after the last of them.
        """
        return self.take_all(key).snapshot

    def take_all(self, key: str) -> ArrivedSnapshot:
        """The same with its head and rounds, for a process that sends them on. Raises as ``take``."""
        head, rounds = self._arrivals.take(key)
        bodies = [each.body for each in rounds if not each.ahead_bytes]
        opening = rounds[0].opening
        known = opening if isinstance(opening, Opening) else None
        ahead_bytes = sum(each.ahead_bytes for each in rounds)
        return ArrivedSnapshot(snapshot_of(head, *bodies, ahead_bytes=ahead_bytes, opening=known), head, rounds)

    def take_rounds(self, key: str) -> tuple[bytes, Sequence[Arrival]]:
        """Returns the head and the rounds of an arrived snapshot, without joining them. Raises NotFound."""
        return self._arrivals.take(key)

    def forget(self, ticket: str) -> None:
        """Stops expecting this ticket, and drops what has arrived under it."""
        self._arrivals.forget(ticket)

    def arriving(self, epoch: int) -> list[str]:
        """Keys of rounds that this epoch of a worker has begun to send and not completed."""
        return self._arrivals.arriving(epoch)

    def held_bytes(self) -> tuple[int, int]:
        """Memory in use: for sending by shared memory, and for received snapshots, on the host and on a device."""
        device = self._incoming.device
        on_device = 0 if device is None else device.lent_bytes()
        return self._segments.lent_bytes(), self._memory.lent_bytes() + on_device

    def measured(self) -> dict[str, dict[str, float]]:
        with self._lock:
            return {worker_id: pair.measured() for (worker_id, _), pair in self._pairs.items()}

    def give_arena(self) -> Arena:
        """Hands over the arena to the data plane of a pool's next epoch; ``close`` will not remove it."""
        assert self.arena is not None
        arena, self.arena = self.arena, None
        return arena

    def close(self) -> None:
        with self._lock:
            pairs, self._pairs = list(self._pairs.values()), {}
        for pair in pairs:
            pair.close()
        self._listener.close()
        self._arrivals.close()
        self._helpers.shutdown(cancel_futures=True)
        if self.arena is not None:
            self.arena.close()
        self._segments.close()

    def _pair(self, peer: Peer) -> Pair:
        with self._lock:
            self._pairs = {which: pair for which, pair in self._pairs.items() if not pair.broken}
            pair = self._pairs.get((peer.worker_id, peer.epoch))
            if pair is None:
                settings = self._settings
                senders = self._senders(str(peer.epoch))
                pair = Pair(
                    self._own,
                    peer,
                    settings.secret,
                    senders,
                    self._throttle,
                    settings.timeout_s,
                    device=self._incoming.device,
                    tls=settings.tls,
                )
                self._pairs[peer.worker_id, peer.epoch] = pair
            return pair

    def _senders(self, owner: str) -> Mapping[str, MakeSender]:
        resources = self._resources(owner)
        return {name: partial(_send, TRANSPORTS[name], resources) for name in self._usable()}

    def _receivers(self) -> Mapping[str, MakeReceiver]:
        return {name: partial(_receive, TRANSPORTS[name], self._resources) for name in self._usable()}

    def _usable(self) -> list[str]:
        return [name for name in self._settings.transports if is_installed(name)]

    def _resources(self, owner: str) -> Resources:
        settings = self._settings
        return Resources(owner, settings.folder, self._segments, self.arena, self._helpers, settings.timeout_s)


def _send(transport: Transport, resources: Resources, _own: Identity, stream: Stream) -> Sender:
    return transport.sender(resources, stream)


def _receive(transport: Transport, resources: Callable[[str], Resources], peer: Identity, stream: Stream) -> Receiver:
    return transport.receiver(resources(str(peer.epoch)), stream)
