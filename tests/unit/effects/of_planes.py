"""The settings of the movement of KV, as the planes of workers have them, and of the pool and the tier."""

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Final

import numpy as np

from dora.config import Config
from dora.errors import DoraError
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.plane import DataPlane
from dora.orchestrator.services.worker import _kv_settings
from dora.rpc import dora_pb2 as pb
from dora.session.link import plane_of
from tests.unit.effects.of_engines import POOL, argument, listens, pools
from tests.unit.effects.rows import Place, Row, Seen, Shown


@contextlib.contextmanager
def plane(config: Config, place: Place, epoch: int) -> Iterator[tuple[DataPlane, Peer]]:
    """The plane of a worker that the service has welcomed."""
    settings = _kv_settings(config.kv, bytes(32))
    welcome = pb.Welcome(epoch=epoch, snapshot_folder=str(place.folder), kv=settings)
    listener = Listener("127.0.0.1")
    made = plane_of(listener, f"w{epoch}", "f", welcome)
    try:
        yield made, Peer(f"w{epoch}", epoch, listener.address, tuple(settings.transports))
    finally:
        made.close()


def moved(config: Config, place: Place, size: int = 1000) -> str:
    """The transport by which a snapshot moves to a worker that has shared memory alone, or ``refused``."""
    shared = config.model_copy(update={"kv": config.kv.model_copy(update={"transports": "shm"})})
    with plane(config, place, 1) as (source, _), plane(shared, place, 2) as (target, peer):
        part = np.zeros(size, np.uint8)
        target.expect("r", 1, size)
        done: Future[Any] = source.send_parts(peer, "r", [part.data], b"head").done
        error = done.exception(20.0)
        return "refused" if error is not None else str(done.result().transport)


def large(config: Config, place: Place) -> str:
    return moved(config, place, 20_000_000)


def paused(config: Config, place: Place) -> list[float]:
    """The pauses of a worker that sends two pieces of a megabyte at one moment."""
    with plane(config, place, 1) as (source, _):
        pauses: list[float] = []
        throttle = source._throttle
        throttle._clock, throttle._wait, throttle._free_s = (lambda: 0.0), pauses.append, 0.0
        for _piece in range(2):
            throttle.pass_bytes(1_000_000)
        return pauses


def given_up(config: Config, place: Place) -> bool:
    """Whether a peer that accepts and says nothing has failed within a second."""
    with socket.create_server(("127.0.0.1", 0)) as deaf, plane(config, place, 1) as (source, _):
        peer = Peer("w2", 2, f"127.0.0.1:{deaf.getsockname()[1]}", tuple(config.kv.transports.split(",")))
        done = source.send_parts(peer, "r", [np.zeros(9, np.uint8).data], b"head").done
        try:
            return isinstance(done.exception(1.0), DoraError)
        except TimeoutError:
            return False


TIER: Final = "tests/abuse/test_tier_server.py::"

ROWS: Final[dict[str, Row]] = {
    "kv.transports": Seen("tcp", moved, "refused"),
    "kv.host": Seen("127.0.0.2", listens, "127.0.0.2"),
    "kv.bandwidth_mb_per_s": Seen(10.0, paused),
    "kv.memory_mb": Seen(16, large, "refused"),
    "kv.timeout_s": Seen(0.1, given_up, True),
    "kv.tier": Shown(TIER + "test_without_lmcache_the_service_does_not_start"),
    "kv.tier_mb": Shown(TIER + "test_a_tier_for_which_there_is_no_room_is_refused"),
    "kv.tier_python": Shown(TIER + "test_without_lmcache_the_service_does_not_start"),
    "kv.pool_mb": Seen(0, pools, []),
    "kv.spill_mb": Seen(64, argument("--spill-mb", POOL), "64", {"kv.spill_folder": "spill"}),
    "kv.spill_folder": Seen("spill", argument("--spill-folder", POOL), "spill"),
}
