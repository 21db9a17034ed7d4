"""The relay of a host: brings versions into the host's store and passes them on during reception.

    order: fetch ──▶ Fetch, one a version ──▶ store.receive … seal ──▶ outcome: Arrived or Failed
                          │ each chunk, as soon as it is checked
                          ▼
    followers ◀── Serving, one a follower

A relay decides nothing: its orders name the upstreams (dora/orchestrator/hosts/broadcast.py).
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from dora.errors import InvalidValue, NotFound, TransferFailed, described
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import SECRET_BYTES, Identity
from dora.kvtransfer.throttle import Throttle
from dora.relay.background import stand_back
from dora.relay.fetching import VersionFetch
from dora.relay.holding import Holding
from dora.relay.orders import Arrived, FetchFailed, FetchOrder, Outcome
from dora.relay.serving import Serving
from dora.tls.contexts import Contexts
from dora.weights.host_store import HostStore
from dora.weights.manifest import Manifest, parsed_name

log = logging.getLogger("dora.relay")

FETCHES_MAX: Final = 2  # at once; others wait in their order
ORDERS_MAX: Final = 64  # that wait or are under way; one more fails
HELPERS: Final = 2  # threads that check chunks


@dataclass(frozen=True, slots=True)
class RelaySettings:
    secret: bytes = field(repr=False)  # 32 random bytes
    bandwidth_bytes_per_s: float = 0.0  # limit of all that the relay sends; 0: none
    timeout_s: float = 30.0  # a peer that is silent for this long has failed; a busy host may answer late
    wait_s: float = 60.0  # an upstream that delivers nothing new for this long is left for the next one
    tls: Contexts | None = None  # of this host; None: in the clear


class Relay:
    """Sends and receives versions. Thread-safe."""

    def __init__(
        self,
        store: HostStore,
        listener: Listener,
        own: Identity,
        settings: RelaySettings,
        tell: Callable[[Outcome], None],
    ) -> None:
        """Opens ``door``, and closes it in the end. ``own`` has the host's name and epoch for its peers.

        ``tell`` gets one outcome for each order, or for several orders of one version, in a thread of the relay.
        """
        if len(settings.secret) != SECRET_BYTES:
            raise InvalidValue("relay secret", f"{len(settings.secret)} bytes", f"{SECRET_BYTES} bytes")
        self.address = listener.address
        self._store = store
        self._listener = listener
        self._own = own
        self._settings = settings
        self._tell = tell
        self._lock = threading.RLock()  # guards the next three; nothing slow is done under it
        self._begun = threading.Condition(self._lock)  # notified when a version gets its first chunk
        self._fetches: dict[str, VersionFetch] = {}
        self._holdings: dict[str, Holding] = {}
        self._threads = ThreadPoolExecutor(FETCHES_MAX, "relay-in", stand_back)
        self._helpers = ThreadPoolExecutor(HELPERS, "relay-sum", stand_back)
        self._is_closed = False
        throttle = Throttle(settings.bandwidth_bytes_per_s)
        serving = Serving(own, settings.secret, self.find, throttle, settings.wait_s)
        listener.open(serving.serve, settings.timeout_s, settings.tls)

    def fetch(self, order: FetchOrder) -> None:
        """Starts to bring a version here, or changes its upstreams. Raises InvalidValue for a malformed name."""
        version, _ = parsed_name(order.name)
        with self._lock:
            fetch = self._fetches.get(order.name)
            if fetch is not None:
                fetch.replace(order)
                return
            refused = ""
            if self._is_closed:
                refused = "this relay ends"
            elif len(self._fetches) >= ORDERS_MAX:
                refused = f"{ORDERS_MAX} versions are on their way here"
            elif not self._is_held(version, order.name):
                fetch = self._fetches[order.name] = self._made(order)
        if fetch is not None:
            self._threads.submit(self._run, fetch)
        else:
            self._tell(FetchFailed(order.name, refused) if refused else Arrived(order.name, "", 0, 0.0, None))

    def drop(self, name: str) -> None:
        """Stops serving a version that is no longer needed; the store retires it. May be repeated."""
        version, _ = parsed_name(name)
        with self._lock:
            fetch = self._fetches.get(name)
        if fetch is not None:
            fetch.stop(f"{name} is retired")
        self._forget(name)
        if self._is_held(version, name):
            self._store.retire(version)
            self._forget(name)  # a follower may have asked for it meanwhile

    def find(self, name: str, wait_s: float = 0.0) -> Holding | None:
        """Returns the local copy of a version, complete or in reception. Waits up to ``wait_s`` for its first chunk.

        Raises InvalidValue for a malformed name.
        """
        version, _ = parsed_name(name)
        with self._begun:
            self._begun.wait_for(lambda: name in self._holdings or self._is_held(version, name), wait_s)
            holding = self._holdings.get(name)
        return holding or self._whole(version, name)

    def close(self) -> None:
        """Cancels receptions and discards their chunks. May be repeated."""
        with self._lock:
            self._is_closed = True
            fetches, holdings = list(self._fetches.values()), list(self._holdings.values())
        for fetch in fetches:
            fetch.stop("this relay ends")
        for holding in holdings:
            holding.end("this relay ends")
        self._listener.close()
        self._threads.shutdown()
        self._helpers.shutdown()

    def _whole(self, version: int, name: str) -> Holding | None:
        if not self._is_held(version, name):
            return None
        try:
            manifest = self._store.manifest(version)
        except NotFound:
            return None
        with self._lock:
            if manifest.name != name or not self._is_held(version, name):
                return None
            return self._holdings.setdefault(name, Holding(self._store, manifest))

    def _forget(self, name: str) -> None:
        with self._lock:
            holding = self._holdings.pop(name, None)
        if holding is not None:
            holding.end(f"{name} is retired")

    def _made(self, order: FetchOrder) -> VersionFetch:
        settings = self._settings
        found, times_s = (self._hold, self.find), (settings.timeout_s, settings.wait_s)
        return VersionFetch(order, self._own, settings.secret, *found, self._helpers, *times_s, tls=settings.tls)

    def _run(self, fetch: VersionFetch) -> None:
        began_s = monotonic()
        while True:
            outcome = self._outcome(fetch, began_s)
            if isinstance(outcome, FetchFailed):
                self._clean(fetch)
            with self._lock:
                if isinstance(outcome, FetchFailed) and fetch.may_retry:
                    continue  # others were named meanwhile
                del self._fetches[fetch.order.name]
            break
        self._tell(outcome)

    def _clean(self, fetch: VersionFetch) -> None:
        name = fetch.order.name
        with self._lock:
            holding = self._holdings.get(name)
            if holding is None or holding.is_whole or not (fetch.is_stopped or holding.is_ended):
                return
            del self._holdings[name]
        holding.end(f"{name} is given up")

    def _outcome(self, fetch: VersionFetch, began_s: float) -> Outcome:
        name, culprits = fetch.order.name, fetch.culprits
        try:
            fetch.run()
        except TransferFailed as error:
            return FetchFailed(name, str(error), tuple(sorted(culprits)))
        except Exception as error:  # a bug, or a disk that fails: whoever has ordered it must not wait for ever
            log.exception("relay: %s", name)
            return FetchFailed(name, described(error), tuple(sorted(culprits)))
        return Arrived(name, fetch.taken_from, fetch.came_bytes, monotonic() - began_s, fetch.link)

    def _hold(self, manifest: Manifest) -> Holding:
        """Starts or resumes a reception with the chunks of an earlier version. Raises as ``HostStore.receive``."""
        with self._lock:
            known = self._holdings.get(manifest.name)
        if known is not None:
            return known
        receiving = self._store.receive(manifest)
        try:
            self._take_alike(manifest, receiving.take_from)
        except BaseException:
            receiving.close()  # otherwise the version could never come, and its room would stay reserved
            raise
        with self._begun:
            holding = self._holdings[manifest.name] = Holding(self._store, manifest, receiving)
            self._begun.notify_all()
        return holding

    def _take_alike(self, manifest: Manifest, take: Callable[..., int]) -> None:
        """Copies the chunks that equal those of the newest earlier version.

        If that version cannot be read, the remaining chunks must travel.
        """
        base = max((version for version in self._store.versions() if 0 < version < manifest.version), default=0)
        try:
            with self._store.hold(base, "relay") as folder:
                copied = take(folder, self._store.manifest(base))
        except (InvalidValue, OSError) as error:
            level = logging.DEBUG if isinstance(error, NotFound) else logging.WARNING
            log.log(level, "relay: %s takes nothing of version %d: %s", manifest.name, base, error)
            return
        log.info("relay: %s has %d chunks like version %d", manifest.name, copied, base)

    def _is_held(self, version: int, name: str) -> bool:
        try:
            return self._store.name(version) == name
        except NotFound:
            return False
