"""Examinations of all hosts for ``dora doctor --service``: each measures itself on order, its links included.

Up to ``APART_MAX`` hosts are examined one after the other, since several that measure their links at once would share
them. Nothing else waits for an examination.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from dora.core.fleet.worker import Worker
from dora.core.state import State
from dora.errors import Conflict, DoraError, InvalidValue
from dora.host.examination import PACKAGES, PEERS_MAX
from dora.host.launcher import LOCAL
from dora.orchestrator.hosts.hosts import Hosts
from dora.orchestrator.hosts.remote import Answer
from dora.orchestrator.rollout.streams import MemberSessions
from dora.relay.orders import Upstream
from dora.rpc import dora_pb2 as pb
from dora.tls import Tls

EXAMINED_S: Final = 60.0  # one that answers later gives no result
RELAYS_S: Final = 10.0  # for which relays of hosts that have just joined are awaited; of others no link is measured
APART_MAX: Final = 16
AT_ONCE: Final = 8  # of more hosts
MOVED_TOKENS: Final = 1024  # whose KV a probe moves
UNKNOWN_KV_BYTES: Final = 4 << 20  # that it moves while no worker is connected
TEXT_MAX: Final = 1024
_ROLES_MAX: Final = 64


class Examinations:
    """Examines hosts, on the event loop."""

    def __init__(self, hosts: Hosts, sessions: MemberSessions, state: State, tls: Tls | None) -> None:
        """``tls`` has the files of the service's own host."""
        self._hosts = hosts
        self._sessions = sessions
        self._state = state
        self._tls = tls
        self._count = 0
        self._is_under_way = False

    async def run(self, *, probe: bool = False) -> AsyncGenerator[pb.ExaminedHost]:
        """Yields each host's result as it comes, the service's own first. With ``probe``, each also moves KV blocks and
        a version's chunks. Raises Conflict if an examination is running.
        """
        if self._is_under_way:
            raise Conflict("examination", "another", "started when the one under way has ended", why="is under way")
        self._is_under_way = True
        try:
            async with aclosing(self._examined(probe)) as found:
                async for each in found:
                    yield each
        finally:
            self._is_under_way = False

    async def _examined(self, probe: bool) -> AsyncGenerator[pb.ExaminedHost]:
        self._count += 1
        kv_bytes = self._kv_bytes() if probe else 0
        names = sorted(self._hosts.connected(), key=lambda name: (name != LOCAL, name))
        relays = await self._hosts.relays(RELAYS_S)
        room = asyncio.Semaphore(1 if len(names) <= APART_MAX else AT_ONCE)

        async def one(name: str) -> pb.ExaminedHost:
            async with room:
                return await self._one(name, _peers_of(name, relays), kv_bytes)

        tasks = [asyncio.create_task(one(name)) for name in names]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, name: str, peers: Sequence[Upstream], kv_bytes: int) -> pb.ExaminedHost:
        order = pb.ExamineHost(
            examination=self._count,
            kv_bytes=kv_bytes,
            peers=[pb.RelayPeer(host=each.host, epoch=each.epoch, address=each.address) for each in peers],
        )
        shown = self._shown(name)
        sent_at = time.time()
        try:
            async with asyncio.timeout(EXAMINED_S):
                found, came_at = await self._answer(name, order)
        except TimeoutError:
            shown.trouble = f"no result in {EXAMINED_S:g} s"
        except DoraError as error:
            shown.trouble = str(error)
        else:
            shown.found.CopyFrom(found)
            way_out_s, way_back_s = found.received_at - sent_at, came_at - found.sent_at
            shown.clock_ahead_s = (way_out_s - way_back_s) / 2
            shown.clock_error_s = max(0.0, way_out_s + way_back_s) / 2
        return shown

    async def _answer(self, name: str, order: pb.ExamineHost) -> Answer:
        session = self._hosts.session(name)
        if session is not None:
            return await session.examine(order)
        if name != LOCAL:
            raise Conflict("host", name, "a connected host", why="is lost")
        examiner = self._hosts.examiner(self._tls)
        found = await asyncio.to_thread(examiner.examine, order, time.time())
        return found, time.time()

    def _shown(self, name: str) -> pb.ExaminedHost:
        status, workers = self._hosts.status(name), self._workers(name)
        sessions = [session for each in workers if (session := self._sessions.workers.get(each.worker_id)) is not None]
        moved = max(sessions, key=lambda session: session.copy_s, default=None)
        fetch_s, fetched_bytes = self._hosts.fetched(name)
        return pb.ExaminedHost(
            host=name,
            load_s=max((session.load_s for session in sessions), default=0.0),
            move_s=0.0 if moved is None else moved.copy_s,
            moved_bytes=0 if moved is None else moved.copy_bytes,
            kv_token_bytes=max((session.capability.kv_token_bytes for session in sessions), default=0),
            workers=max(len(workers), 0 if status is None else status.workers),
            workers_ready=sum(worker.loaded >= 0 for worker in workers),
            fetch_s=fetch_s,
            fetched_bytes=fetched_bytes,
        )

    def _kv_bytes(self) -> int:
        sizes = [session.capability.kv_token_bytes for session in self._sessions.workers.values()]
        return MOVED_TOKENS * max(sizes, default=0) or UNKNOWN_KV_BYTES

    def _workers(self, name: str) -> list[Worker]:
        workers, others = self._state.workers.values(), self._state.arrived
        return [each for each in workers if (each.host not in others if name == LOCAL else each.host == name)]


def _peers_of(name: str, relays: Sequence[Upstream]) -> list[Upstream]:
    others = [each for each in relays if each.host != name]
    others.sort(key=lambda each: (each.host != LOCAL, each.host <= name, each.host))
    return others[:PEERS_MAX]


def checked_examination(found: pb.HostExamination) -> pb.HostExamination:
    """Raises InvalidValue for a result that is too large, or has numbers that are not finite."""
    certificate = found.certificate
    if len(found.links) > PEERS_MAX or not set(found.packages) <= set(PACKAGES):
        raise InvalidValue("examined", f"{len(found.links)} links", f"at most {PEERS_MAX}, and known packages")
    if len(certificate.roles) > _ROLES_MAX or len(found.capacity.gpus) > TEXT_MAX:
        raise InvalidValue("examined", f"{len(certificate.roles)} roles", f"at most {_ROLES_MAX}")
    texts = [found.dora_version, found.python_version, *found.packages.values(), certificate.file, *certificate.roles]
    texts += [text for link in found.links for text in (link.host, link.address, link.trouble)]
    texts += [certificate.trouble, *found.capacity.gpus, found.fetch.host, found.fetch.trouble]
    if any(len(text) > TEXT_MAX or not text.isprintable() for text in texts):
        raise InvalidValue("examined", "a text", f"printable, of at most {TEXT_MAX} characters")
    numbers = [found.received_at, found.sent_at, found.disk_bytes_per_s, found.read_bytes_per_s]
    numbers += [certificate.begins_at, certificate.ends_at]
    numbers += [
        number for link in found.links for number in (link.bytes_per_s, link.round_trip_s, link.loss, link.kv_s)
    ]
    numbers.append(found.fetch.took_s)
    if not all(math.isfinite(number) for number in numbers):
        raise InvalidValue("examined", "a number", "finite")
    return found
