"""One worker's life: its engine under one service, and under the next one if it outlives that."""

import contextlib
import logging
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dora.data.types import KvEndpoint
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.plane import installed, local_host
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from dora.session.link import Link, at_host, plane_of
from dora.worker.absence import await_service
from dora.worker.engine import RolloutEngine
from dora.worker.loop import EngineLoop, Versions, of_store

log = logging.getLogger("dora.worker")


@dataclass(frozen=True, slots=True)
class Address:
    """Where the service is, who we are to it, and where others reach us."""

    orchestrator: str  # host:port
    token: str
    worker_id: str
    kv_host: str = ""  # empty: that by which we reach the service
    host: str = ""  # the name of ours; empty: what the system calls it
    host_folder: str = ""  # with this host's store; empty: on the service's host


def serve(address: Address, engine: RolloutEngine, stop: threading.Event) -> None:
    """Serves until told to stop. Raises what ends it: the service's refusal, or ServiceUnavailable where it is away and
    is not to be outlived, or for too long."""
    listener = _listener(address)
    with contextlib.ExitStack() as held:
        held.callback(listener.close)
        link = _link(address, engine, listener, pb.WorkerHello())
        held.callback(link.close)
        welcome = at_host(link.open(), address.host_folder)
        plane = plane_of(listener, address.worker_id, engine.capability.fingerprint, welcome)
        held.callback(plane.close)
        loop = EngineLoop(engine, link, welcome, plane, versions=_versions(address, welcome))
        while not _serves(loop, link, stop):
            loop.leave()
            held.close()
            listener = _listener(address)
            held.callback(listener.close)
            found = await_service(
                partial(_again, address, engine, listener, loop), loop.step_alone, stop, loop.orphan_timeout_s
            )
            if found is None:
                return
            link, welcome = found[0], at_host(found[1], address.host_folder)
            held.callback(link.close)
            plane = plane_of(listener, address.worker_id, engine.capability.fingerprint, welcome)
            held.callback(plane.close)
            loop.come_back(link, welcome, plane, _versions(address, welcome))


def _serves(loop: EngineLoop, link: Link, stop: threading.Event) -> bool:
    """Until told to stop. False: the service is away, and is to be outlived."""
    try:
        loop.run(stop)
    except ServiceUnavailable as error:
        if not loop.orphan_timeout_s or not link.is_lost:
            raise
        log.warning("the service is away, and is awaited for %g s: %s", loop.orphan_timeout_s, error)
        return False
    return True


def _again(address: Address, engine: RolloutEngine, listener: Listener, loop: EngineLoop) -> Link:
    return _link(address, engine, listener, loop.held())


def _versions(address: Address, welcome: pb.Welcome) -> Versions:
    return of_store(Path(welcome.weights_folder), address.worker_id)


def _listener(address: Address) -> Listener:
    return Listener(address.kv_host or local_host(address.orchestrator))


def _link(address: Address, engine: RolloutEngine, listener: Listener, held: pb.WorkerHello) -> Link:
    kv = KvEndpoint(listener.address, installed())
    return Link(address.orchestrator, address.token, address.worker_id, engine.capability, kv, held, address.host)
