"""A worker or a pool as a member: its session is a ``SessionLink``, and a data plane under its epoch."""

import contextlib
import logging
import threading
import time
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Final

from dora.data.types import EngineCapability, KvEndpoint, PoolCapability
from dora.errors import Conflict, DoraError
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.plane import DataPlane, local_host
from dora.kvtransfer.transports.registry import installed
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from dora.rpc.proven import Prover
from dora.session.commands import CommandLoop
from dora.session.link import OPEN_TIMEOUT_S, SessionLink, at_host, plane_of
from dora.session.member import TOLD_TO_END, Member, run_blocking
from dora.tls import Tls
from dora.tls.contexts import Contexts

log = logging.getLogger("dora.worker")

IDLE_S: Final = 0.05  # between two checks if there is nothing to do meanwhile


@dataclass(frozen=True, slots=True)
class Address:
    """The service's address, and this process's identity."""

    orchestrator: str  # host:port
    token: str = field(repr=False)
    name: str  # of the worker or pool
    kv_host: str = ""  # empty: that by which we reach the service
    host: str = ""  # the name of ours; empty: what the system calls it
    host_folder: str = ""  # with this host's store; empty: on the service's host
    tls: Tls | None = None  # None: that of DORA_TLS and the like


class LinkedMember(Member):
    """Ends when its service is lost, unless the welcome permitted it to live on.

    A pool's arena continues from each session to the next. It lies in the folder of its data plane, which is closed
    once the next one has the arena.
    """

    def __init__(
        self,
        address: Address,
        capability: EngineCapability | PoolCapability,
        fingerprint: str,
        stop: threading.Event,
        arena_bytes: int = 0,
    ) -> None:
        super().__init__(stop.is_set)
        self._address = address
        self._prover = Prover(address.orchestrator, address.token, address.name, address.tls)
        self._tls = Contexts(self._prover.tls) if self._prover.tls is not None else None
        self._capability = capability
        self._fingerprint = fingerprint
        self._stop = stop
        self._arena_bytes = arena_bytes
        self._plane: DataPlane | None = None  # of the session before, if it holds an arena
        self._secret = b""  # of the run
        self._listener: Listener | None = None
        self._orphan_timeout_s = 0.0

    @abstractmethod
    def held(self) -> pb.WorkerHello | pb.PoolHello:
        """Returns the hello's fields about earlier sessions."""

    @abstractmethod
    def loop_of(self, link: SessionLink, welcome: pb.Welcome, plane: DataPlane) -> CommandLoop[Any]:
        """Returns the command loop: a new one, or the earlier one after a reconnection."""

    def step_alone(self) -> bool:
        """Does some work without a service. Returns False if there is none."""
        return False

    def serve(self) -> None:
        """Serves until told to end. Raises the service's refusal, and ServiceUnavailable if it is lost for too long."""
        try:
            run_blocking(self.stay_connected())
        except (ServiceUnavailable, Conflict) as error:
            if not self._orphan_timeout_s:
                raise
            raise ServiceUnavailable(f"no service within {self._orphan_timeout_s:g} s ({error})") from error

    def close(self) -> None:
        for each in (self._plane, self._listener):
            if each is not None:
                each.close()

    async def run_session(self) -> str | None:
        address = self._address
        self._listener = self._listener or Listener(address.kv_host or local_host(address.orchestrator))
        kv = KvEndpoint(self._listener.address, installed())
        with contextlib.ExitStack() as session:
            link = SessionLink(self._prover, address.name, self._capability, kv, self.held(), address.host)
            session.callback(link.close)
            link.begin()
            welcome = self._await_welcome(link)
            if welcome is None:
                return None
            self.has_joined, self._orphan_timeout_s = True, 0.0
            plane = self._open_plane(self._listener, at_host(welcome, address.host_folder))
            session.callback(self._end_plane, plane)
            loop = self.loop_of(link, welcome, plane)
            try:
                loop.run(self._stop)
            except ServiceUnavailable as error:
                if welcome.orphan_timeout_s and link.is_lost:
                    self._orphan_timeout_s = welcome.orphan_timeout_s
                    log.warning("the service is away, and is awaited for %g s: %s", welcome.orphan_timeout_s, error)
                    loop.leave()
                raise
        return TOLD_TO_END

    def patience_s(self, error: DoraError) -> float:
        """Tolerates a name in use: the service has not noticed the end of the earlier session."""
        is_in_use = isinstance(error, Conflict) and error.field in ("worker_id", "pool_id")
        if not is_in_use and not isinstance(error, ServiceUnavailable):
            self._orphan_timeout_s = 0.0
        return self._orphan_timeout_s

    async def live_on(self, pause_s: float, error: DoraError) -> None:
        ends_s = time.monotonic() + pause_s
        while time.monotonic() < ends_s and not self._stop.is_set():
            if not self.step_alone():
                self._stop.wait(IDLE_S)

    def _await_welcome(self, link: SessionLink) -> pb.Welcome | None:
        """Returns None if told to end meanwhile. Raises the service's refusal, or ServiceUnavailable."""
        ends_s = time.monotonic() + OPEN_TIMEOUT_S
        while not self._stop.is_set():
            command = link.take(0.0 if self.step_alone() else IDLE_S)
            if command is not None and command.HasField("welcome"):
                return command.welcome
            if command is not None or time.monotonic() >= ends_s:
                raise ServiceUnavailable(f"{link.address} did not say welcome within {OPEN_TIMEOUT_S:g} s")
        return None

    def _open_plane(self, listener: Listener, welcome: pb.Welcome) -> DataPlane:
        before, name = self._plane, self._address.name
        if before is None:
            self._secret = welcome.kv.secret
            return plane_of(listener, name, self._fingerprint, welcome, self._arena_bytes, tls=self._tls)
        if welcome.kv.secret != self._secret:  # what is parked is under the other's sums
            raise ServiceUnavailable("the service is another one")
        plane = plane_of(listener, name, self._fingerprint, welcome, arena=before.give_arena(), tls=self._tls)
        self._plane = None
        before.close()
        return plane

    def _end_plane(self, plane: DataPlane) -> None:
        self._listener = None  # it is the plane's
        if plane.arena is not None:
            self._plane = plane
        else:
            plane.close()
