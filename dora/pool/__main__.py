"""``python -m dora.pool``: the process of a pool. The service starts it, or an operator does on the pool's host."""

import argparse
import contextlib
import logging
import os
import sys
import threading
from pathlib import Path

from dora.data.types import PoolCapability
from dora.errors import DoraError, InvalidValue
from dora.kvtransfer.peer import ANY_MODEL
from dora.kvtransfer.plane import DataPlane
from dora.pool.disk import Disk
from dora.pool.loop import PoolLoop
from dora.pool.spill import SpillFolder
from dora.pool.store import Store
from dora.rpc import dora_pb2 as pb
from dora.session.guarded import check_credentials
from dora.session.link import SessionLink
from dora.session.linked import Address, LinkedMember
from dora.system.environment import taken
from dora.system.private import PRIVATE_UMASK
from dora.system.signals import ignore_notices, stop_on_signals
from dora.tls.options import add_options, tls_of

MEGABYTE = 10**6


class PoolMember(LinkedMember):
    """A pool as a member of the service. Its arena and store survive a lost connection."""

    def __init__(self, address: Address, memory_bytes: int, spill: SpillFolder | None, stop: threading.Event) -> None:
        capability = PoolCapability(memory_bytes, spill.most_bytes if spill is not None else 0)
        super().__init__(address, capability, ANY_MODEL, stop, memory_bytes)
        self._spill = spill
        self._store: Store | None = None
        self._loop: PoolLoop | None = None

    def held(self) -> pb.PoolHello:
        parked = self._store.parked() if self._store is not None else {}
        digests = self._store.input_digests() if self._store is not None else {}
        held = [
            pb.HeldRequest(request_id=request_id, tokens=tokens, given_digest=digests.get(request_id, b""))
            for request_id, tokens in parked.items()
        ]
        return pb.PoolHello(held=held)

    def loop_of(self, link: SessionLink, welcome: pb.Welcome, plane: DataPlane) -> PoolLoop:
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


def main(argv: list[str] | None = None) -> int:
    ignore_notices()
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options.pool_id} %(levelname)s %(message)s")
    stop = threading.Event()
    stop_on_signals(stop.set)
    try:
        with contextlib.ExitStack() as stack:
            run(options, stop, stack)
    except DoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidValue) else 3
    return 0


def run(options: argparse.Namespace, stop: threading.Event, stack: contextlib.ExitStack) -> None:
    """Serves until it is stopped, or the service is away beyond the orphan timeout. Its snapshots end with it."""
    token = taken("DORA_TOKEN")
    tls = tls_of(options)
    check_credentials(token, tls)
    if options.memory_mb < 1:
        raise InvalidValue("--memory-mb", options.memory_mb, "at least 1")
    memory_bytes, spill_bytes = options.memory_mb * MEGABYTE, options.spill_mb * MEGABYTE
    spill = SpillFolder(Path(options.spill_folder), spill_bytes) if options.spill_folder and spill_bytes else None
    if spill is not None:
        stack.callback(spill.close)
    address = Address(
        options.orchestrator, token, options.pool_id, options.kv_host, options.host, options.host_folder, tls
    )
    pool = PoolMember(address, memory_bytes, spill, stop)
    stack.callback(pool.close)
    pool.serve()


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
    add_options(parser)
    parser.add_argument("--kv-host", default="", help="address at which workers reach this pool with KV")
    return parser


if __name__ == "__main__":
    os.umask(PRIVATE_UMASK)
    sys.exit(main())
