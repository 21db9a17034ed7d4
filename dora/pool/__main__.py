"""``python -m dora.pool``: host memory for parked requests. Started by the service, or by hand on its host."""

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from dora.errors import DoraError, InvalidValue
from dora.kvtransfer.door import Door
from dora.kvtransfer.peer import ANY_MODEL
from dora.kvtransfer.plane import installed, local_host
from dora.pool.loop import PoolLoop
from dora.pool.spill import SpillFolder
from dora.pool.store import Store
from dora.types import KvEndpoint, PoolCapability
from dora.worker.link import Link, plane_of

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
    """Serves until told to stop, or until the stream ends. What it holds ends with it."""
    token = os.environ.get("DORA_TOKEN", "")
    if not token:
        raise InvalidValue("DORA_TOKEN", "", "the service's worker token, in the environment")
    if options.memory_mb < 1:
        raise InvalidValue("--memory-mb", options.memory_mb, "at least 1")
    memory_bytes, spill_bytes = options.memory_mb * MEGABYTE, options.spill_mb * MEGABYTE
    spill = SpillFolder(Path(options.spill_folder), spill_bytes) if options.spill_folder and spill_bytes else None
    if spill is not None:
        stack.callback(spill.close)
    door = Door(options.kv_host or local_host(options.orchestrator))
    stack.callback(door.close)
    capability = PoolCapability(memory_bytes, spill_bytes if spill is not None else 0)
    link = Link(options.orchestrator, token, options.pool_id, capability, KvEndpoint(door.address, installed()))
    stack.callback(link.close)
    welcome = link.open()
    plane = plane_of(door, options.pool_id, ANY_MODEL, welcome, memory_bytes)
    stack.callback(plane.close)
    assert plane.arena is not None
    store = Store(plane.arena, spill, welcome.kv.secret, welcome.kv.memory_bytes)
    stack.callback(store.close)
    PoolLoop(link, plane, store).run(stop)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dora.pool", description=__doc__)
    parser.add_argument("--orchestrator", required=True, help="the service's host:port")
    parser.add_argument("--pool-id", required=True)
    parser.add_argument("--memory-mb", type=int, default=2048, help="host memory for parked requests' KV")
    parser.add_argument("--spill-folder", default="", help="folder on a disk, for what has no room in memory")
    parser.add_argument("--spill-mb", type=int, default=0, help="of that folder; 0: none")
    parser.add_argument("--kv-host", default="", help="address at which workers reach this pool with KV")
    return parser


if __name__ == "__main__":
    sys.exit(main())
