"""``python -m dora.pool``: host memory for parked requests. Started by the service, or by hand on its host."""

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from dora.data.types import KvEndpoint, PoolCapability
from dora.errors import DoraError, InvalidValue
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import ANY_MODEL
from dora.kvtransfer.plane import DataPlane, installed, local_host
from dora.pool.disk import Disk
from dora.pool.loop import PoolLoop
from dora.pool.spill import SpillFolder
from dora.pool.store import Store
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from dora.session.link import Link, at_host, plane_of
from dora.worker.absence import await_service

log = logging.getLogger("dora.worker")

MEGABYTE = 10**6


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options.pool_id} %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        with contextlib.ExitStack() as stack:
            run(options, stop, stack)
    except DoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidValue) else 3
    return 0


def run(options: argparse.Namespace, stop: threading.Event, stack: contextlib.ExitStack) -> None:
    """Serves until told to stop, or until the service is away and not to be outlived. What it holds ends with it."""
    token = os.environ.get("DORA_TOKEN", "")
    if not token:
        raise InvalidValue("DORA_TOKEN", "", "the service's worker token, in the environment")
    if options.memory_mb < 1:
        raise InvalidValue("--memory-mb", options.memory_mb, "at least 1")
    memory_bytes, spill_bytes = options.memory_mb * MEGABYTE, options.spill_mb * MEGABYTE
    spill = SpillFolder(Path(options.spill_folder), spill_bytes) if options.spill_folder and spill_bytes else None
    if spill is not None:
        stack.callback(spill.close)
    pool = _Pool(options, token, PoolCapability(memory_bytes, spill_bytes if spill is not None else 0))
    stack.callback(pool.close)
    link = pool.link({})
    welcome = at_host(link.open(), options.host_folder)
    arena = pool.connect(link, welcome, memory_bytes).arena
    assert arena is not None
    disk = Disk(spill, welcome.kv.secret, welcome.kv.memory_bytes) if spill is not None else None
    store = Store(arena, disk, welcome.kv.secret)
    stack.callback(store.close)
    loop, secret = PoolLoop(link, pool.plane, store), welcome.kv.secret
    while not _serves(loop, link, welcome.orphan_timeout_s, stop):
        found = await_service(partial(pool.link, loop.leave()), lambda: False, stop, welcome.orphan_timeout_s)
        if found is None:
            return
        link, welcome = found[0], at_host(found[1], options.host_folder)
        if welcome.kv.secret != secret:  # what is parked is under the other's sums
            raise ServiceUnavailable("the service is another one")
        loop.come_back(link, pool.connect(link, welcome))


def _serves(loop: PoolLoop, link: Link, orphan_timeout_s: float, stop: threading.Event) -> bool:
    """Until told to stop. False: the service is away, and is to be outlived."""
    try:
        loop.run(stop)
    except ServiceUnavailable as error:
        if not orphan_timeout_s or not link.is_lost:
            raise
        log.warning("the service is away, and is awaited for %g s: %s", orphan_timeout_s, error)
        return False
    return True


class _Pool:
    """Where this pool is reached, in one epoch after another; its arena goes from each to the next."""

    def __init__(self, options: argparse.Namespace, token: str, capability: PoolCapability) -> None:
        self._options, self._token, self._capability = options, token, capability
        self._listener = self._open_listener()
        self._link: Link | None = None
        self._plane: DataPlane | None = None

    @property
    def plane(self) -> DataPlane:
        assert self._plane is not None
        return self._plane

    def link(self, held: Mapping[str, int]) -> Link:
        """A link that is not begun; its hello says what is parked."""
        if self._plane is not None and self._link is not None:  # the door is the plane's of before
            self._link.close()
            self._link, self._listener = None, self._open_listener()
        kv = KvEndpoint(self._listener.address, installed())
        parked = [pb.HeldRequest(request_id=request_id, tokens=tokens) for request_id, tokens in held.items()]
        address, name = self._options.orchestrator, self._options.pool_id
        return Link(address, self._token, name, self._capability, kv, pb.PoolHello(held=parked), self._options.host)

    def connect(self, link: Link, welcome: pb.Welcome, arena_bytes: int = 0) -> DataPlane:
        """The data plane of this epoch."""
        before, self._link = self._plane, link
        arena = None if before is None else before.give_arena()
        self._plane = plane_of(self._listener, self._options.pool_id, ANY_MODEL, welcome, arena_bytes, arena)
        if before is not None:
            before.close()
        return self._plane

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._plane is not None:
            self._plane.close()
        self._listener.close()

    def _open_listener(self) -> Listener:
        return Listener(self._options.kv_host or local_host(self._options.orchestrator))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dora.pool", description=__doc__)
    parser.add_argument("--orchestrator", required=True, help="the service's host:port")
    parser.add_argument("--pool-id", required=True)
    parser.add_argument("--host", default="", help="name of its host; empty: the system's")
    parser.add_argument(
        "--host-folder", default="", help="with its host's weights and shared memory; empty: the service's"
    )
    parser.add_argument("--memory-mb", type=int, default=2048, help="host memory for parked requests' KV")
    parser.add_argument("--spill-folder", default="", help="folder on a disk, for what has no room in memory")
    parser.add_argument("--spill-mb", type=int, default=0, help="of that folder; 0: none")
    parser.add_argument("--kv-host", default="", help="address at which workers reach this pool with KV")
    return parser


if __name__ == "__main__":
    sys.exit(main())
