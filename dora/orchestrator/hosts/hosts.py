"""The hosts of a service: its own, and those whose agents have joined, with the versions that each holds.
``worker_counts.py`` decides which workers each runs.

A host is lost when its agent's stream ends, when its agent is silent for too long, or when all of it is silent. Its
workers and its pool are lost with it for good: their tokens are revoked, so those that still run are refused. An agent
that returns begins a new epoch, with new worker processes under the same ids.

After a restart of the service, epochs that were active at shutdown remain valid. Their workers and pools continue, and
their agents are expected (``expected_hosts.py``). Each agent begins a new epoch with the processes that it has kept.
"""

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any, Final

from dora.config import Config
from dora.core import events as on
from dora.core.state import State
from dora.data.types import Canary
from dora.errors import Conflict, InvalidValue
from dora.host.capacity import capacity_to_wire
from dora.host.command import pool_id_of
from dora.host.examination import Examiner
from dora.host.launcher import LOCAL, Launcher, check_host_name, check_zone
from dora.journal import records
from dora.orchestrator.hosts.expected_hosts import ExpectedHosts
from dora.orchestrator.hosts.remote import HostSession, RemoteLauncher
from dora.orchestrator.hosts.statuses import kind_of, status_of
from dora.orchestrator.hosts.weight_distributor import WeightDistributor
from dora.orchestrator.hosts.worker_counts import CAUSES, Host, WorkerCounts
from dora.orchestrator.rollout.streams import DRAINED, MemberSession, MemberSessions
from dora.relay.orders import Upstream
from dora.release import __version__
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import LimitExceeded
from dora.rpc.roles import ServiceTokens
from dora.system.awake import awake_s
from dora.tls import Tls
from dora.tls.contexts import Contexts
from dora.weights.host_store import HostStore

log = logging.getLogger("dora.service")

HOSTS_MAX: Final = 1024
LOST_KEPT: Final = 64
DELTAS_BELOW_BYTES_PER_S: Final = 300e6  # on a faster link, encoding takes longer than it saves
NOT_BACK: Final = "its agent has not returned"
ANOTHER_CAME: Final = "its agent returned without its processes"


class Hosts:
    """``post`` hands an event to the core, whose ``state`` is read."""

    def __init__(
        self,
        config: Config,
        store: HostStore,
        sessions: MemberSessions,
        state: State,
        post: Callable[[on.Event], None],
        note: Callable[[records.LogRecord], None] = lambda record: None,
        fetched: Callable[[float], None] = lambda took_s: None,
    ) -> None:
        """``note`` logs the valid epochs of hosts. ``fetched`` receives the time of each fetch of a version."""
        self._config = config
        self._store = store
        self._sessions = sessions
        self._state = state
        self._post = post
        self._note = note
        self._fetched = fetched
        self._hosts: dict[str, Host] = {}
        self.worker_counts = WorkerCounts(self._hosts, state, post)
        self._expected: ExpectedHosts | None = None
        self._expected_s: float | None = None  # time from which agents may join
        self._unlike: Mapping[str, int] = {}
        self._is_suspended = False
        self._lost: dict[str, pb.HostStatus] = {}
        self.gone = dict.fromkeys(CAUSES, 0)  # hosts that left or were lost, by cause
        self._epochs = 0
        self._tokens: ServiceTokens | None = None
        self._distributor = WeightDistributor(
            store, self._within_reach, self._lost_version, self._order,
            deltas=config.host.zone_link_bytes_per_s < DELTAS_BELOW_BYTES_PER_S,
        )  # fmt: skip
        self._described: dict[str, on.HostDescribed] = {}  # as the core knows them
        self._own_kind = ""  # of the service's own machine
        self._opened = asyncio.Event()
        self.folder: Path = Path("/")
        self.kept_versions = 0  # of an earlier incarnation, whose window may have been wider

    # ------------------------------------------------------------------------------------------------ coming and going

    def expect(self, stands: Mapping[str, Any], epoch: int, tokens: ServiceTokens) -> Collection[str]:
        """Expects the hosts of an earlier incarnation's ledger, whose last epoch was ``epoch``.

        Returns the names of their workers and pools, which may connect from now on.
        """
        self._epochs = epoch
        has_pools = bool(self._config.kv.pool_mb)
        alike = {name: stand for name, stand in stands.items() if (pool_id_of(name) in stand[1]) == has_pools}
        # their pool does not fit the configuration
        self._unlike = {name: stands[name][0] for name in stands.keys() - alike.keys()}
        self._expected = ExpectedHosts(alike, tokens)
        return self._expected.members()

    def stood(self) -> tuple[on.HostJoined, ...]:
        """Returns the expected hosts for the core. Only the model is certain to be there."""
        return tuple(on.HostJoined(name, (0,)) for name in (self._expected.names() if self._expected else ()))

    def suspend(self) -> None:
        """Keeps epochs valid for the next incarnation: losses from now on are not logged."""
        self._is_suspended = True

    def begin(self, launcher: Launcher, folder: Path, tokens: ServiceTokens) -> None:
        """Adds the service's own host with its run folder."""
        for name, epoch in self._unlike.items():
            self._note(records.HostStands(name, epoch, None))
        self._hosts[LOCAL] = Host(LOCAL, launcher)
        self._tokens = tokens
        self.folder = folder
        self._own_kind = kind_of(capacity_to_wire(folder))

    def open_relay(self, listen_host: str, oldest: int = 0, tls: Contexts | None = None) -> None:
        """Opens the relay of the service's own host at this address, after which hosts may join.

        Stored versions below ``oldest`` are not live; the trainers' reference version may be among them.
        """
        self._distributor.begin(listen_host, oldest, tls)
        self._opened.set()

    async def opened(self) -> None:
        """Returns once hosts may join: the live versions are known then, so no host drops one."""
        await self._opened.wait()

    def close_relay(self) -> None:
        """Closes the relay if it was opened."""
        self._distributor.close()

    @property
    def _versions_most(self) -> int:
        return self._config.live_versions(self.kept_versions)

    def check(self, hello: pb.HostHello, digest: str) -> None:
        """Raises InvalidValue, Conflict or LimitExceeded for an unusable host. ``digest`` is the model's."""
        name = check_host_name(hello.name)
        check_zone(hello.zone)
        if hello.dora_version != __version__:
            raise Conflict("dora_version", hello.dora_version[:64], f"{__version__}, the service's", why="is another")
        if hello.model_digest and hello.model_digest != digest:
            raise Conflict("model", hello.model_digest[:64], f"that of the service's model, {digest}", why="is another")
        if name in self._hosts:
            allowed = "a name that no connected host has: dora host --name"
            session = self._hosts[name].session
            owner = "the service's own host" if session is None else f"an agent, process {session.pid} of its machine"
            raise Conflict("name", name, allowed, why=f"is in use by {owner}")
        if len(self._hosts) > HOSTS_MAX:
            raise Conflict("name", name, f"one of at most {HOSTS_MAX} hosts", why="is one too many")
        if self._orphaned(hello):
            return  # its versions are in that room already
        models = self._versions_most + (not hello.model_digest)
        needed_bytes = models * self._store.reference.content_bytes
        free_bytes = hello.capacity.store_free_bytes
        if free_bytes < needed_bytes:
            allowed = (
                f"{needed_bytes:,} bytes, for {models} models: those of window and evaluations, and one that arrives"
            )
            allowed += "" if hello.model_digest else ", and the model itself"
            raise LimitExceeded("store_free_bytes", free_bytes, allowed, why="is too little")

    def join(self, hello: pb.HostHello, digest: str) -> HostSession:
        """Begins a new epoch of a host. Raises like ``check``."""
        self.check(hello, digest)
        assert self._tokens is not None
        goes_on = self._orphaned(hello)
        if not goes_on:
            self._give_up(hello.name, ANOTHER_CAME)
        self._epochs += 1
        session = HostSession(self._epochs, hello)
        session.versions.add(0)
        session.goes_on = goes_on
        launcher = RemoteLauncher(session, self._tokens, lambda: self._stands(hello.name))
        self._hosts[hello.name] = Host(hello.name, launcher, session)
        self._lost.pop(hello.name, None)
        self._post(on.HostJoined(hello.name, (0,)))
        if goes_on:
            self._adopt(session, launcher, set(hello.kept.worker_ids))
        self._stands(hello.name)
        return session

    def _orphaned(self, hello: pb.HostHello) -> bool:
        return self._expected is not None and self._expected.orphaned(hello)

    def _adopt(self, session: HostSession, launcher: RemoteLauncher, kept: set[str]) -> None:
        assert self._expected is not None
        expected, pool_id = self._expected.take(session.name), pool_id_of(session.name)
        workers = expected.workers_of(session.name)
        launcher.adopt(sorted(workers & kept))
        for worker_id in sorted(workers - kept):
            launcher.start(worker_id)
        for name in sorted(expected.distrusted & (kept | {pool_id})):
            launcher.stop(name, again=True)
        for worker_id in sorted(kept - workers):
            session.send(pb.HostOrder(stop_worker=pb.StopWorker(worker_id=worker_id)))

    def _give_up(self, name: str, reason: str) -> None:
        if self._expected is None or name not in self._expected:
            return
        expected = self._expected.take(name)
        log.error("host %s is lost (epoch %d): %s", name, expected.epoch, reason)
        self._keep_lost(pb.HostStatus(name=name, state="lost", epoch=expected.epoch, reason=reason))
        self._end(name, expected.epoch, expected.names, reason)

    def _stands(self, name: str) -> None:
        """Logs the host's epoch and the tokens with which its processes may return after a restart."""
        host = self._hosts.get(name)
        if host is None or host.session is None or self._tokens is None:
            return
        names = [*host.launcher.workers, *([pool_id_of(name)] if self._config.kv.pool_mb else [])]
        marks = {each: mark for each in names if (mark := self._tokens.mark_of(each))}
        self._note(records.HostStands(name, host.session.epoch, marks))

    def welcome(self, session: HostSession, digest: str, orphan_timeout_s: float = 0.0) -> pb.HostWelcome:
        """Returns the first message to a host, whose processes live for ``orphan_timeout_s`` without this service."""
        assert self._tokens is not None
        config = self._config
        settings = config.model_dump_json(include={"workers", "kv"})
        pool_token = ""
        if config.kv.pool_mb and not session.goes_on:
            pool_token = self._tokens.started(pool_id_of(session.name))
            self._stands(session.name)
        return pb.HostWelcome(
            epoch=session.epoch,
            settings_json=settings,
            model_digest=digest,
            pool_token=pool_token,
            versions_most=self._versions_most,
            relay_secret=self._distributor.secret,
            goes_on=session.goes_on,
            orphan_timeout_s=orphan_timeout_s,
            notice_s=config.host.notice_s,
        )

    def welcomed(self, session: HostSession, workers: int) -> None:
        """Starts the host's workers unless it has kept them. If ``workers`` is below 0, it is the own host's number."""
        host = self._hosts.get(session.name)
        if host is not None and host.session is session and not session.goes_on:
            host.launcher.scale(self._config.workers.count if workers < 0 else workers)

    def lose(self, session: HostSession, reason: str, cause: str = "fault") -> None:
        """Ends the epochs of a host, its workers and pool. ``cause`` is one of CAUSES; a drained host has its own."""
        host = self._hosts.get(session.name)
        if host is None or host.session is not session:
            return
        left = host.draining and not host.launcher.workers
        shown = self._status(host)
        reason = host.reason or reason
        shown.state, shown.reason, shown.workers_ready = "drained" if left else "lost", reason, 0
        shown.leaves_in_s = 0.0
        del self._hosts[session.name]
        session.give_up()
        if self._is_suspended:
            return
        self._keep_lost(shown)
        self.gone[host.cause or cause] += 1
        level, how = (logging.INFO, "has left") if left else (logging.ERROR, "is lost")
        log.log(level, "host %s %s (epoch %d): %s", session.name, how, session.epoch, reason)
        names = [*host.launcher.workers, pool_id_of(session.name)]
        assert isinstance(host.launcher, RemoteLauncher)
        host.launcher.lost()
        self._end(session.name, session.epoch, names, reason)
        self._distributor.lost(session.name, session.epoch)

    def _end(self, host: str, epoch: int, names: Collection[str], reason: str) -> None:
        """Ends the epochs of a host and these workers and pool, for later incarnations too."""
        assert self._tokens is not None
        self._note(records.HostStands(host, epoch, None))
        for name in names:
            self._tokens.ended(name)
            ended = self._sessions.end(name)
            if ended is not None:
                self._sessions.lose(ended, f"its host {host} is lost: {reason}")
        self._described.pop(host, None)
        self._post(on.HostLost(host))

    def _keep_lost(self, shown: pb.HostStatus) -> None:
        self._lost[shown.name] = shown
        while len(self._lost) > LOST_KEPT:
            del self._lost[next(iter(self._lost))]

    def look(self, limit_s: float) -> None:
        """Ends hosts that are silent or obey no order, and distributes versions again that did not arrive."""
        self._distributor.remind()
        self._describe()
        if self._expected_s is None:
            self._expected_s = awake_s()
        elif self._expected is not None and awake_s() - self._expected_s > limit_s:
            for name in self._expected.names():
                self._give_up(name, f"{NOT_BACK} in {limit_s:g} s")
        for host in list(self._hosts.values()):
            if host.session is None:
                continue
            if (silent_s := self._overdrawn_s(host, host.session, limit_s)) is not None:
                self.lose(host.session, f"lease lost: silent for {silent_s:g} s", "lease")
            elif host.deadline_s and awake_s() >= host.deadline_s:
                host.session.leave(host.reason)
                self.lose(host.session, host.reason)
            else:
                self.worker_counts.end_if_drained(host)
        serving = Counter(worker.host for worker in self._state.workers.values() if worker.loaded >= 0)
        for host in list(self._remote()):
            assert host.session is not None
            host.session.serve(serving[host.name])
            self._look_for_workers(host)

    def _overdrawn_s(self, host: Host, session: HostSession, limit_s: float) -> float | None:
        """Returns the limit that a host has exceeded, or None: its agent's, or that of its silence as a whole."""
        names = (*host.launcher.workers, pool_id_of(host.name))
        heard_s = (member.heard_s for name in names if (member := self._sessions.end(name)) is not None)
        limits = ((limit_s, session.heard_s), (self._config.host.lease_s, max((session.heard_s, *heard_s))))
        return next((allowed_s for allowed_s, at_s in limits if awake_s() - at_s > allowed_s), None)

    def _look_for_workers(self, host: Host) -> None:
        """Orders workers again that do not join, and ends a host that does not obey."""
        assert host.session is not None
        absent = [] if host.is_failed else [name for name in host.launcher.workers if name not in self._state.workers]
        late, reason = host.session.overdue(absent, self._config.workers.start_timeout_s)
        if reason:
            self.lose(host.session, reason)
            return
        for name in late:
            host.launcher.stop(name, again=True)

    def close(self) -> None:
        for host in self._hosts.values():
            if host.session is not None:
                host.session.leave("the service has ended")

    def host_of(self, name: str) -> str | None:
        """Returns the host of a worker or pool that a launcher of the service started, or None."""
        for host in self._hosts.values():
            if name in host.launcher.workers or name == pool_id_of(host.name):
                return host.name
        return None if self._expected is None else self._expected.host_of(name)

    def has(self, name: str) -> bool:
        return name in self._hosts

    def has_others(self) -> bool:
        """Returns whether hosts other than the service's own have workers."""
        return any(host.launcher.workers and not host.is_failed for host in self._remote())

    # ----------------------------------------------------------------------------------------------- what agents say

    def ready(self, session: HostSession, message: pb.HostReady) -> None:
        """Notes that the host's relay listens. Raises InvalidValue for invalid names."""
        self._distributor.joined(session.name, session.epoch, message.relay_address, message.held, session.zone)
        session.settled.set()

    def arrived(self, session: HostSession, message: pb.VersionArrived) -> None:
        """Raises InvalidValue for an unknown name or measures that are not finite."""
        self._distributor.arrived(session.name, session.epoch, message)
        if message.upstream:
            self._fetched(message.took_s)
            session.fetched = message.took_s, message.came_bytes

    def failed(self, session: HostSession, message: pb.VersionFailed) -> None:
        """Raises InvalidValue for an unknown name."""
        self._distributor.failed(session.name, session.epoch, message)

    def reported(self, session: HostSession, report: pb.HostReport) -> None:
        session.capacity = report.capacity
        session.troubles = dict(itertools.islice(sorted(report.troubles.items()), 256))
        host = self._hosts.get(session.name)
        if report.failed and host is not None and not host.is_failed and isinstance(host.launcher, RemoteLauncher):
            log.error("host %s has failed: %s", session.name, report.failed)
            host.launcher.fails(report.failed)

    def leaves(self, session: HostSession, within_s: float) -> None:
        """Empties a host whose agent was told to end ``within_s`` from now. Raises InvalidValue."""
        if not 0.0 < within_s < inf:
            raise InvalidValue("within_s", within_s, "a positive number of seconds")
        self.drain(session.name, "notice", within_s)

    def drain(self, name: str, cause: str, within_s: float = 0.0) -> int:
        """Drains a host, and lets others fetch versions elsewhere. Returns and raises as ``WorkerCounts.drain``."""
        count = self.worker_counts.drain(name, cause, within_s)
        host = self._hosts[name]
        log.warning("host %s leaves: %s", name, host.reason)
        if host.session is not None and host.deadline_s:
            self._distributor.leaving(name, host.session.epoch)
        return count

    # ------------------------------------------------------------------------------------------------------- versions

    def published(self, version: int, *, anew: bool = False) -> None:
        """Distributes a version that is in the service's own store."""
        self._distributor.published(version, anew=anew)

    def publishing(self, version: int) -> contextlib.AbstractContextManager[None]:
        """Suppresses availability events while a version is being republished, so that the core asks for it until that
        succeeds or fails. Reports all holders afterwards.
        """
        return self._distributor.publishing(version)

    def name_of(self, version: int) -> str:
        """Returns the published name of a live version, even if its weights do not exist, or an empty text."""
        return self._distributor.name_of(version)

    def name(self, version: int) -> str:
        """Returns the name by which workers load a version from their hosts. Raises NotFound if it is neither live nor
        stored.
        """
        return self.name_of(version) or self._store.name(version)

    def canary(self, version: int) -> Canary | None:
        """Returns the canary that workers must reproduce, or None if it is unknown. Raises like ``name``."""
        return self._distributor.canary(version)

    def retired(self, version: int) -> None:
        for host in self._remote():
            assert host.session is not None
            host.session.versions.discard(version)
        self._distributor.retired(version)

    def _within_reach(self, name: str, version: int) -> None:
        host = self._hosts.get(name)
        if host is None:
            return
        if host.session is not None:
            host.session.versions.add(version)
            self._post(on.VersionArrived(name, version))
        elif version in self._state.missing or version in self._state.unavailable:
            self._post(on.VersionArrived("", version))

    def shares_store(self, worker_id: str) -> bool:
        """Returns whether this worker loads from the service's own store."""
        worker = self._state.workers.get(worker_id)
        return worker is None or worker.host not in self._state.arrived

    def missing(self, worker_id: str, version: int) -> None:
        """Makes the host of a worker fetch a version again that the worker has not found there."""
        if self.shares_store(worker_id):
            self.look_at_store(version)
            return
        host = self._hosts.get(self._state.workers[worker_id].host)
        if host is not None and host.session is not None:
            host.session.versions.discard(version)
            self._distributor.missed(host.name, host.session.epoch, version)

    async def lacks(self, worker_id: str, version: int) -> bool:
        """Returns whether the host of a worker that failed to load a version has lost it.

        The service's own store is read. Another host's loss is assumed if a third host has the version: files are
        checked as they arrive, and fetching them once more loses nothing.
        """
        if self.shares_store(worker_id):
            return await self._distributor.is_damaged(version)
        return self._distributor.has_elsewhere(self._state.workers[worker_id].host, version)

    def look_at_store(self, version: int) -> None:
        """Checks whether the service's own store has lost a version."""
        self._distributor.missed_here(version)

    def _lost_version(self, version: int, reason: str) -> None:
        """Reports a version that no host and no store has, after the current event."""
        asyncio.get_running_loop().call_soon(self._post, on.VersionUnavailable(version, reason))

    def _order(self, name: str, epoch: int, order: pb.HostOrder) -> None:
        host = self._hosts.get(name)
        if host is not None and host.session is not None and host.session.epoch == epoch:
            host.session.send(order)

    # ----------------------------------------------------------------------------- the processes, as sessions see them

    def kill(self, worker_id: str) -> None:
        for host in self._hosts.values():
            if worker_id in host.launcher.workers or worker_id == pool_id_of(host.name):
                host.launcher.stop(worker_id, again=True)
        if self._expected is not None and (name := self._expected.distrust(worker_id)) is not None:
            self._note(records.HostStands(name, *self._expected.stand(name)))

    def release(self, worker_id: str) -> None:
        if self._expected is not None and (name := self._expected.release(worker_id)) is not None:
            self._note(records.HostStands(name, *self._expected.stand(name)))
        self.worker_counts.release(worker_id)

    def worker_lost(self, session: MemberSession) -> None:
        if self.worker_counts.is_leaving(session.worker_id):
            self._sessions.keep_reason(session.worker_id, DRAINED)
            self.release(session.worker_id)

    # --------------------------------------------------------------------------------------------------------- status

    def workers(self) -> frozenset[str]:
        """Returns the running and starting workers of all connected hosts."""
        return frozenset(name for host in self._hosts.values() for name in host.launcher.workers)

    def connected(self) -> list[str]:
        """Returns the names of the service's own host and the connected ones."""
        return list(self._hosts)

    def status(self, name: str) -> pb.HostStatus | None:
        """Returns the status of a host of ``connected``, or None."""
        host = self._hosts.get(name)
        return None if host is None else self._status(host)

    def _describe(self) -> None:
        """Tells the core of each host's machine and of the links between zones, at first and when that has changed."""
        link = self._config.host
        token_s = self._sessions.kv_token_bytes() / link.zone_link_bytes_per_s
        for host in self._hosts.values():
            session = host.session
            zone = "" if session is None else session.zone
            kind = self._own_kind if session is None else kind_of(session.capacity)
            event = on.HostDescribed(host.name, kind, zone, token_s, link.zone_link_latency_s)
            if self._described.get(host.name) != event:
                self._described[host.name] = event
                self._post(event)

    def session(self, name: str) -> HostSession | None:
        """Returns the connection of a host's agent, or None if it is not connected or is the service's own host."""
        host = self._hosts.get(name)
        return None if host is None else host.session

    async def relays(self, limit_s: float) -> list[Upstream]:
        """Returns the relays of all hosts. Waits up to ``limit_s`` for those of hosts that have just joined."""
        settling = [asyncio.create_task(host.session.settled.wait()) for host in self._remote() if host.session]
        if settling:
            _, late = await asyncio.wait(settling, timeout=limit_s)
            for each in late:
                each.cancel()
        return self._distributor.relays()

    def fetched(self, name: str) -> tuple[float, int]:
        """Returns the seconds and bytes of a host's last fetch from another host, or 0 if it has fetched nothing."""
        session = self.session(name)
        return (0.0, 0) if session is None else session.fetched

    def examiner(self, tls: Tls | None) -> Examiner:
        """Returns the examiner of the service's own host, which uses these TLS files."""
        return self._distributor.examiner(self.folder, tls)

    def states(self) -> list[str]:
        expected = self._expected.statuses() if self._expected is not None else ()
        lost = (*expected, *self._lost.values())
        return [*(host.state for host in self._hosts.values()), *(shown.state for shown in lost)]

    def staying(self) -> list[str]:
        """Returns the joined hosts that are ready and not to leave."""
        return [host.name for host in self._remote() if host.state == "ready"]

    def statuses(self) -> list[pb.HostStatus]:
        """Returns the hosts for operators: the service's own first, then connected, expected and lost ones."""
        there = sorted(self._hosts.values(), key=lambda host: (host.session is not None, host.name))
        expected = self._expected.statuses() if self._expected is not None else ()
        return [*map(self._status, there), *expected, *self._lost.values()]

    def _status(self, host: Host) -> pb.HostStatus:
        return status_of(host, self._state, self._store, self.folder)

    def _remote(self) -> Iterator[Host]:
        return (host for host in self._hosts.values() if host.session is not None)
