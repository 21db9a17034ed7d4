"""Distributes versions from the service's own host to the others: passes events to ``broadcast.py``, and runs its
commands.

The service's own host has a relay like any other: other relays fetch from its store.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dora.data.types import Canary
from dora.errors import InvalidValue, NotFound
from dora.host.examination import Examiner
from dora.host.launcher import LOCAL
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import SECRET_BYTES, Identity, this_host
from dora.orchestrator.hosts import broadcast
from dora.relay.link import Link
from dora.relay.orders import Arrived, FetchFailed, FetchOrder, Outcome, Upstream
from dora.relay.relay import Relay, RelaySettings
from dora.rpc import dora_pb2 as pb
from dora.system.awake import awake_s
from dora.tls import Tls
from dora.tls.contexts import Contexts
from dora.weights.host_store import HostStore
from dora.weights.manifest import parsed_name

log = logging.getLogger("dora.service")

REMIND_S: Final = 5.0
OWN_EPOCH: Final = 1  # of the service's own host
HELD_MAX: Final = 4096
REASON_MAX: Final = 2000  # characters

InReach = Callable[[str, int], None]
Lost = Callable[[int, str], None]
SendOrder = Callable[[str, int, pb.HostOrder], None]


class WeightDistributor:
    """Distributes versions to hosts. ``in_reach`` receives each host with a version that it has now, ``lost`` each
    version that no host has, with the reason. ``order`` sends an order to a host's epoch.
    """

    def __init__(
        self, store: HostStore, in_reach: InReach, lost: Lost, order: SendOrder, *, deltas: bool = True
    ) -> None:
        """``deltas``: versions cross between zones as deltas."""
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._store = store
        self._in_reach = in_reach
        self._lost = lost
        self._order = order
        self._broadcast = broadcast.Broadcast(deltas=deltas)
        self._relay: Relay | None = None
        self._identity: Identity | None = None  # of the relay
        self._reminded_s = awake_s()
        self._suspect: set[int] = set()  # versions not found in the service's own store
        self._damaged: set[str] = set()  # names of versions whose files here differ from the publication
        self._checks: dict[str, asyncio.Task[bool]] = {}  # running checks, by name
        self._anew = -1  # the version that is being republished
        self._canaries: dict[int, Canary | None] = {}  # of live versions, as published

    def begin(self, listen_host: str, oldest: int = 0, tls: Contexts | None = None) -> None:
        """Opens the relay of the service's own host. Stored versions from ``oldest`` on are live.

        Raises InvalidValue for an address that this host lacks.
        """
        loop = asyncio.get_running_loop()
        self._identity = own = Identity(LOCAL, OWN_EPOCH, self._store.name(0), this_host())

        def tell(outcome: Outcome) -> None:
            loop.call_soon_threadsafe(self._told, LOCAL, OWN_EPOCH, outcome)

        self._relay = Relay(self._store, Listener(listen_host), own, RelaySettings(self.secret, tls=tls), tell)
        live = [self._store.manifest(version) for version in self._store.versions() if version >= max(1, oldest)]
        for manifest in live:
            self._canaries[manifest.version] = manifest.canary
            self._carry_out(self._broadcast.restored(manifest.version, manifest.name, manifest.total_bytes))
        held = [manifest.name for manifest in live]
        self._carry_out(self._broadcast.joined(LOCAL, OWN_EPOCH, self._relay.address, held=held))

    def relays(self) -> list[Upstream]:
        return self._broadcast.relays()

    def examiner(self, folder: Path, tls: Tls | None) -> Examiner:
        """Returns the examiner of the service's own host. ``folder`` is the run's."""
        assert self._identity is not None
        return Examiner(self._identity, self.secret, self._store, folder, tls)

    def close(self) -> None:
        """Closes the relay if it was opened."""
        if self._relay is not None:
            self._relay.close()

    # --------------------------------------------------------------------------------------------------------- events

    def joined(self, host: str, epoch: int, address: str, held: Iterable[str], zone: str = "") -> None:
        """Adds a host. Hosts in one ``zone`` reach each other well; that of the service's own host has no name."""
        names = list(held)
        if len(names) > HELD_MAX or len(address) > 256:
            raise InvalidValue("held", f"{len(names)} versions", f"at most {HELD_MAX}")
        for name in names:
            parsed_name(name)
        self._carry_out(self._broadcast.joined(host, epoch, address, zone, names))

    def lost(self, host: str, epoch: int) -> None:
        self._carry_out(self._broadcast.lost(host, epoch))

    def leaving(self, host: str, epoch: int) -> None:
        """Lets others fetch from other hosts than this one, which leaves."""
        self._carry_out(self._broadcast.leaving(host, epoch))

    def published(self, version: int, *, anew: bool) -> None:
        manifest = self._store.manifest(version)
        self._canaries[version] = manifest.canary
        self._replaced(manifest.name)
        self._carry_out(self._broadcast.published(version, manifest.name, LOCAL, manifest.total_bytes, anew=anew))

    @contextmanager
    def publishing(self, version: int) -> Iterator[None]:
        """Suppresses availability events while a version is being republished. Afterwards ``in_reach`` receives all
        holders.
        """
        self._anew = version
        try:
            yield
        finally:
            self._anew = -1
            self._look_at_own()
            for host in self._broadcast.holders(version):
                self._in_reach(host, version)

    def retired(self, version: int) -> None:
        self._canaries.pop(version, None)
        self._carry_out(self._broadcast.retired(version))

    def arrived(self, host: str, epoch: int, message: pb.VersionArrived) -> None:
        parsed_name(message.name)
        link = Link(message.bytes_per_s, message.start_s) if message.bytes_per_s else None
        outcome = Arrived(message.name, message.upstream, message.came_bytes, message.took_s, link)
        if message.upstream:
            log.info(
                "%s has %s from %s: %.1f MB in %.2f s",
                host, message.name, message.upstream, message.came_bytes / 1e6, message.took_s,
            )  # fmt: skip
        self._told(host, epoch, outcome)

    def failed(self, host: str, epoch: int, message: pb.VersionFailed) -> None:
        parsed_name(message.name)
        self._told(host, epoch, FetchFailed(message.name, message.reason[:REASON_MAX], tuple(message.culprits)))

    def remind(self) -> None:
        """Retries versions that hosts gave up, and fetches again those that are missing here. Called periodically."""
        if awake_s() - self._reminded_s >= REMIND_S:
            self._reminded_s = awake_s()
            self._look_at_own()
            self._carry_out(self._broadcast.remind())

    def missed(self, host: str, epoch: int, version: int) -> None:
        if name := self.name_of(version):
            log.error("%s is missing in the store of %s, or damaged there", name, host)
            self._carry_out(self._broadcast.missed(host, epoch, name))

    def missed_here(self, version: int) -> None:
        """Checks whether the service's own host has lost a version, and reports the result to ``in_reach``."""
        self._suspect.add(version)
        self._look_at_own()

    def has_elsewhere(self, host: str, version: int) -> bool:
        return any(holder != host for holder in self._broadcast.holders(version))

    async def is_damaged(self, version: int) -> bool:
        """Returns whether this host's files of a live version differ from the publication; it is missing here then.
        Reads all files, once for all concurrent callers.
        """
        name = self.name_of(version)
        if not name:
            return False
        if name not in self._checks:
            self._checks[name] = asyncio.create_task(self._check(version, name))
        return await self._checks[name]

    async def _check(self, version: int, name: str) -> bool:
        try:
            is_sound = await asyncio.to_thread(self._store.is_sound, version)
        except OSError as error:  # the folder of all versions is at fault, which may pass
            log.error("%s cannot be read: %s", name, error)
            is_sound = True
        if self._checks.get(name) is asyncio.current_task():  # otherwise it has been replaced meanwhile
            del self._checks[name]
            if not is_sound and self._is_here(version, name):
                log.error("%s is damaged in this host's store", name)
                self._damaged.add(name)
        return not is_sound

    def _replaced(self, name: str) -> None:
        self._damaged.discard(name)
        self._checks.pop(name, None)

    def _look_at_own(self) -> None:
        self._suspect &= self._broadcast.versions().keys()
        for version, name in self._broadcast.versions().items():
            if version == self._anew:
                continue
            is_here, had = self._is_here(version, name), self._broadcast.has(LOCAL, version)
            if is_here is False and had:
                log.error("%s is missing in this host's store", name)
                self._miss(name)
            elif is_here and not had:  # it is back
                self._told(LOCAL, OWN_EPOCH, Arrived(name, "", 0, 0.0, None))
            elif is_here and version in self._suspect:
                self._in_reach(LOCAL, version)
            if is_here:
                self._suspect.discard(version)

    def _is_here(self, version: int, name: str) -> bool | None:
        """Returns None if the folder of all versions is at fault, which is shown as a storage fault and may pass."""
        if name in self._damaged:
            return False
        try:
            return self._store.name(version) == name
        except NotFound:
            return False
        except OSError:
            return None

    def _miss(self, name: str) -> None:
        self._carry_out(self._broadcast.missed(LOCAL, OWN_EPOCH, name))

    def _told(self, host: str, epoch: int, outcome: Outcome) -> None:
        if isinstance(outcome, Arrived):
            self._carry_out(self._broadcast.sealed(host, epoch, outcome))
        else:
            self._carry_out(self._broadcast.failed(host, epoch, outcome))

    def name_of(self, version: int) -> str:
        """Returns the name of a live version, or an empty text."""
        return self._broadcast.versions().get(version, "")

    def canary(self, version: int) -> Canary | None:
        """Returns the canary that came with the version, or its first worker's, if that is known here.

        Raises NotFound for a version that is neither live nor stored.
        """
        published = self._canaries.get(version)
        if published is not None:
            return published
        try:
            return self._store.canary(version)
        except (NotFound, OSError):
            if version in self._canaries:
                return None  # another host has it
            raise

    # ------------------------------------------------------------------------------------------------------- commands

    def _carry_out(self, commands: Iterable[broadcast.Command]) -> None:
        for command in commands:
            match command:
                case broadcast.Fetch(host=host, epoch=epoch):
                    self._fetch(host, epoch, command)
                case broadcast.Drop(host=host, epoch=epoch, name=name):
                    self._drop(host, epoch, name)
                case broadcast.Ready(host=host, version=version):
                    if version != self._anew:
                        self._in_reach(host, version)
                case broadcast.GaveUp(host=host, version=version, reason=reason):
                    log.warning("%s does not have version %d yet: %s", host, version, reason)
                case broadcast.Gone(version=version, name=name):
                    self._gone(version, name)

    def _gone(self, version: int, name: str) -> None:
        """Handles a version that no host can give. If this host has it, its files are read again."""
        if self._relay is None or version == self._anew:
            return  # nothing is distributed, or the version is here
        if not self._broadcast.has(LOCAL, version):
            log.error("no host has %s", name)
            self._lost(version, "no host has its weights")
            return

        def tell(checked: asyncio.Future[bool]) -> None:
            if checked.cancelled():
                return
            if (error := checked.exception()) is not None:  # the folder of all versions is at fault, which may pass
                log.error("%s cannot be read: %s", name, error)
            elif checked.result():
                log.warning(
                    "%s is as published, but hosts received it wrong: the links of this host are at fault", name
                )
            else:
                log.error("%s is damaged in this host's store", name)
                self._miss(name)

        checking = asyncio.get_running_loop().run_in_executor(None, self._store.is_sound, version)
        checking.add_done_callback(tell)

    def _fetch(self, host: str, epoch: int, command: broadcast.Fetch) -> None:
        if host == LOCAL:
            self._own(FetchOrder(command.name, command.upstreams, command.piece_bytes))
            return
        peers = [
            pb.RelayPeer(host=each.host, epoch=each.epoch, address=each.address, base=each.base)
            for each in command.upstreams
        ]
        fetch = pb.FetchVersion(name=command.name, upstreams=peers, piece_bytes=command.piece_bytes)
        self._order(host, epoch, pb.HostOrder(fetch_version=fetch))

    def _own(self, order: FetchOrder) -> None:
        if self._relay is not None:
            self._relay.fetch(order)

    def _drop(self, host: str, epoch: int, name: str) -> None:
        if host != LOCAL:
            self._order(host, epoch, pb.HostOrder(drop_version=pb.DropVersion(name=name)))
        else:
            self._replaced(name)
            if self._relay is not None:
                self._relay.drop(name)
