"""A pool as a member of a service: what is parked stays while it waits for the next one."""

import threading

from dora.data.types import PoolCapability
from dora.kvtransfer.peer import ANY_MODEL
from dora.kvtransfer.plane import DataPlane
from dora.pool.disk import Disk
from dora.pool.loop import PoolLoop
from dora.pool.spill import SpillFolder
from dora.pool.store import Store
from dora.rpc import dora_pb2 as pb
from dora.session.link import Link
from dora.session.linked import Address, LinkedMember


class PoolMember(LinkedMember):
    """Its arena, and the store over it, go on from each session to the next."""

    def __init__(self, address: Address, memory_bytes: int, spill: SpillFolder | None, stop: threading.Event) -> None:
        capability = PoolCapability(memory_bytes, spill.most_bytes if spill is not None else 0)
        super().__init__(address, capability, ANY_MODEL, stop, memory_bytes)
        self._spill = spill
        self._store: Store | None = None
        self._loop: PoolLoop | None = None

    def held(self) -> pb.PoolHello:
        parked = self._store.parked() if self._store is not None else {}
        held = [pb.HeldRequest(request_id=request_id, tokens=tokens) for request_id, tokens in parked.items()]
        return pb.PoolHello(held=held)

    def loop_of(self, link: Link, welcome: pb.Welcome, plane: DataPlane) -> PoolLoop:
        if self._loop is not None:
            self._loop.come_back(link, plane)
            return self._loop
        assert plane.arena is not None
        secret, read_bytes = welcome.kv.secret, welcome.kv.memory_bytes
        disk = Disk(self._spill, secret, read_bytes) if self._spill is not None else None
        self._store = Store(plane.arena, disk, secret)
        self._loop = PoolLoop(link, plane, self._store)
        return self._loop

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        super().close()
