"""Decides which host fetches which version from which other host: events in, commands out, no clock and no I/O.

    joined, leaving, lost, published, sealed, failed, missed, retired, remind  ──▶  Fetch, Drop, Ready, GaveUp, Gone

Every live host gets every live version. A version starts at the host on which it was published and goes down a chain
(``dora/relay/chain.py``). A lost host is cut out of the chain, and so is one that leaves, unless it alone has the
version; any host with the whole version replaces a lost head.
Events of a past epoch of a host, and of versions that are not live, change nothing. Version 0, the model itself, is on
every host and does not travel.

A worker may load a version only after its host ``has`` it: ``Ready`` says when.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dora.errors import Conflict
from dora.relay.chain import UPSTREAMS_MAX, Chain, Site, planned, ranked
from dora.relay.link import ASSUMED, Link, piece_chunks
from dora.relay.orders import Arrived, FetchFailed, Upstream
from dora.weights.files import CHUNK_BYTES
from dora.weights.manifest import parsed_name

ATTEMPTS: Final = 3  # consecutive attempts of a host to get a version; ``remind`` starts over
ALIKE: Final = 1.5  # times a giver's own rate: a receiver in this range may only have waited for it
COMPLAINTS: Final = 2  # hosts that got wrong bytes from another one before nobody fetches this version from it


@dataclass(frozen=True, slots=True)
class Fetch:
    """Orders a host to fetch this version from the first of these hosts that can give it. Replaces an earlier order."""

    host: str
    epoch: int
    name: str
    upstreams: tuple[Upstream, ...]
    piece_bytes: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Orders a host to drop this version."""

    host: str
    epoch: int
    name: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Says that the host has the whole version, so its workers may load it."""

    host: str
    version: int


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Says that the host could not get the version. ``remind`` makes it try again."""

    host: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """Says that no live host has the whole version (``holders``), or that its hosts are reported to send bad bytes."""

    version: int
    name: str


Command = Fetch | Drop | Ready | GaveUp | Gone


@dataclass(slots=True)
class _Host:
    epoch: int
    address: str
    zone: str
    link: Link | None = None
    is_leaving: bool = False  # it fetches nothing more, and gives only what no other host has
    whole: dict[int, str] = field(default_factory=dict)  # names of versions that it has sealed

    def site(self, host: str) -> Site:
        return Site(host, self.zone, self.link.bytes_per_s if self.link else 0.0)


@dataclass(slots=True)
class _Version:
    name: str
    total_bytes: int
    chain: Chain | None = None  # None: no live host has it
    failures: dict[str, int] = field(default_factory=dict)  # by host, since the last new order
    avoided: dict[str, set[str]] = field(default_factory=dict)  # by host: senders of wrong bytes
    waiting: set[str] = field(default_factory=set)  # hosts that gave up


class Broadcast:
    """Holds the state of all versions on all hosts. Each event returns the commands that follow, in order."""

    def __init__(self, *, deltas: bool = True) -> None:
        """``deltas``: versions cross between zones as deltas."""
        self._deltas = deltas
        self._hosts: dict[str, _Host] = {}
        self._versions: dict[int, _Version] = {}
        # by receiver; not yet weighed, because the giver's own rate may come later
        self._measured: dict[str, Arrived] = {}
        self._newest = 0

    # -------------------------------------------------------------------------------------------------------- looking

    def has(self, host: str, version: int) -> bool:
        """Returns whether a worker of this host may load the version now."""
        known, live = self._hosts.get(host), self._versions.get(version)
        if version == 0:
            return known is not None
        return known is not None and live is not None and known.whole.get(version) == live.name

    def holders(self, version: int) -> tuple[str, ...]:
        return tuple(host for host in sorted(self._hosts) if self.has(host, version))

    def hosts(self) -> tuple[str, ...]:
        return tuple(sorted(self._hosts))

    def relays(self) -> list[Upstream]:
        return [Upstream(name, known.epoch, known.address) for name, known in sorted(self._hosts.items())]

    def versions(self) -> Mapping[int, str]:
        return {version: live.name for version, live in sorted(self._versions.items())}

    def chain(self, version: int) -> tuple[str, ...]:
        """Returns the hosts in the order in which the version reaches them, or none if no host has it live."""
        live = self._versions.get(version)
        return live.chain.hosts if live is not None and live.chain is not None else ()

    def link(self, host: str) -> Link | None:
        """Returns the measured link on which a host receives, or None if only slower hosts gave to it."""
        self._weigh()
        known = self._hosts.get(host)
        return known.link if known is not None else None

    # --------------------------------------------------------------------------------------------------------- events

    def joined(self, host: str, epoch: int, address: str, zone: str = "", held: Iterable[str] = ()) -> list[Command]:
        """Adds a host with the ``address`` of its relay and the versions ``held`` whole, by name.

        It gets the missing versions, the newest first, and drops versions that are not live. A service that starts
        again therefore names its live versions first (``restored``). A later epoch of a host replaces the earlier one.
        """
        known = self._hosts.get(host)
        if known is not None and known.epoch >= epoch:
            return []
        out = self.lost(host, known.epoch) if known is not None else []
        self._hosts[host] = added = _Host(epoch, address, zone)
        for name in sorted(held):
            version, _ = parsed_name(name)
            live = self._versions.get(version)
            if version and (live is None or live.name != name):
                out.append(Drop(host, epoch, name))
            elif version and live is not None:
                added.whole[version] = name
                out.append(Ready(host, version))
        for version in sorted(self._versions, reverse=True):
            out += self._appeared(host, version)
        return out

    def lost(self, host: str, epoch: int) -> list[Command]:
        known = self._hosts.get(host)
        if known is None or known.epoch != epoch:
            return []
        del self._hosts[host]
        self._measured.pop(host, None)
        out: list[Command] = []
        for version, live in sorted(self._versions.items()):
            live.waiting.discard(host)
            live.failures.pop(host, None)
            live.avoided.pop(host, None)
            out += self._left(host, version, live)
        return out

    def leaving(self, host: str, epoch: int) -> list[Command]:
        """Makes other hosts fetch from others than this one, which will be lost soon."""
        known = self._hosts.get(host)
        if known is None or known.epoch != epoch:
            return []
        known.is_leaving = True
        out: list[Command] = []
        for version, live in sorted(self._versions.items()):
            live.waiting.discard(host)
            if any(not self._hosts[each].is_leaving for each in self.holders(version)):
                out += self._left(host, version, live)
        return out

    def restored(self, version: int, name: str, total_bytes: int) -> list[Command]:
        """Adds a version that was live before a restart: a joining host has it, or it is ``Gone``."""
        self._newest = max(self._newest, version)
        self._versions.setdefault(version, _Version(name, total_bytes))
        return []

    def published(self, version: int, name: str, host: str, total_bytes: int, anew: bool = False) -> list[Command]:
        """Adds a version that a trainer has published on a host; the others fetch it.

        A repetition changes nothing. With ``anew`` it replaces a rejected version; hosts with the same weights may load
        them again. Raises Conflict if another version of this number is live, or a newer one was published before.
        """
        live = self._versions.get(version)
        if live is not None and live.name == name:
            again: list[Command] = [Ready(each, version) for each in self.holders(version)] if anew else []
            known = self._hosts.get(host)
            return again if known is None else [*again, *self._whole(host, known, version)]
        if live is not None and not anew:
            raise Conflict(
                "version", name, f"{live.name}, or another number", why="is not the version that was published"
            )
        if live is None and version <= self._newest:
            allowed = f"above {self._newest}, which was published before"
            raise Conflict("version", name, allowed, why="comes too late")
        out: list[Command] = [] if live is None else self.retired(version)
        self._newest = max(self._newest, version)
        self._versions[version] = _Version(name, total_bytes)
        known = self._hosts.get(host)
        return [*out, *(self._whole(host, known, version) if known is not None else [Gone(version, name)])]

    def sealed(self, host: str, epoch: int, outcome: Arrived) -> list[Command]:
        known = self._hosts.get(host)
        if known is None or known.epoch != epoch:
            return []
        version, _ = parsed_name(outcome.name)
        live = self._versions.get(version)
        if live is None or live.name != outcome.name:
            return [Drop(host, epoch, outcome.name)]
        if outcome.link is not None:
            self._measured[host] = outcome
        return self._whole(host, known, version)

    def failed(self, host: str, epoch: int, outcome: FetchFailed) -> list[Command]:
        """Gives other upstreams to a host that could get a version from none. After some attempts, the host waits for
        ``remind`` and its followers take the version from others.
        """
        known = self._hosts.get(host)
        version, _ = parsed_name(outcome.name)
        live = self._versions.get(version)
        if known is None or known.epoch != epoch or live is None or live.name != outcome.name:
            return []
        if self.has(host, version) or live.chain is None:
            return []
        out: list[Command] = []
        live.avoided.setdefault(host, set()).update(outcome.culprits)
        for culprit in outcome.culprits:
            out += self._suspected(culprit, version, live)
        live.failures[host] = live.failures.get(host, 0) + 1
        if live.chain is None:
            return out
        upstreams = self._upstreams(host, version, live, holders_first=True) if host in live.chain else ()
        if upstreams and live.failures[host] < ATTEMPTS:
            return [*out, self._fetch(host, live, upstreams)]
        live.waiting.add(host)
        out.append(GaveUp(host, version, outcome.reason))
        return [*out, *self._left(host, version, live)]

    def missed(self, host: str, epoch: int, name: str) -> list[Command]:
        """Makes a host that has lost or damaged a version fetch it again from another host."""
        known = self._hosts.get(host)
        version, _ = parsed_name(name)
        live = self._versions.get(version)
        if known is None or known.epoch != epoch or live is None or known.whole.get(version) != name:
            return []
        del known.whole[version]
        out: list[Command] = [Drop(host, epoch, name), *self._left(host, version, live)]
        if live.chain is not None:
            return [*out, *self._appeared(host, version)]
        is_told = any(isinstance(each, Gone) for each in out)
        return out if is_told or self.holders(version) else [*out, Gone(version, name)]

    def retired(self, version: int) -> list[Command]:
        """Makes all hosts drop a version on which no step trains."""
        live = self._versions.pop(version, None)
        if live is None:
            return []
        out: list[Command] = []
        for host, known in sorted(self._hosts.items()):
            known.whole.pop(version, None)
            out.append(Drop(host, known.epoch, live.name))
        return out

    def remind(self) -> list[Command]:
        """Makes hosts that gave up try again, even from a suspect host if it alone has the version. Called
        periodically.
        """
        out: list[Command] = []
        for version, live in sorted(self._versions.items(), reverse=True):
            holders = self.holders(version)
            if live.chain is None and holders:
                live.avoided.clear()
                out += self._begun(holders[0], version, live)
            for host in sorted(live.waiting):
                live.failures.pop(host, None)
                live.avoided.pop(host, None)
                out += self._appeared(host, version)
        return out

    # ------------------------------------------------------------------------------------------------------- deciding

    def _whole(self, host: str, known: _Host, version: int) -> list[Command]:
        live = self._versions[version]
        if self.has(host, version):
            return []
        known.whole[version] = live.name
        live.failures.pop(host, None)
        live.waiting.discard(host)
        return [Ready(host, version), *([] if live.chain is not None else self._begun(host, version, live))]

    def _begun(self, head: str, version: int, live: _Version) -> list[Command]:
        self._weigh()
        lacking = [host for host, known in self._hosts.items() if not (known.is_leaving or self.has(host, version))]
        sites = [self._hosts[host].site(host) for host in lacking]
        live.chain = planned(self._hosts[head].site(head), sites)
        live.failures.clear()
        live.waiting.clear()
        return [self._fetch(host, live, self._upstreams(host, version, live)) for host in live.chain.hosts[1:]]

    def _weigh(self) -> None:
        """Evaluates measured rates: a host behind a slow one received slowly, but may be fast."""
        while self._measured:
            self._weigh_one(next(iter(self._measured)))

    def _weigh_one(self, host: str) -> None:
        outcome = self._measured.pop(host)
        if outcome.upstream in self._measured:
            self._weigh_one(outcome.upstream)
        known, giver, measured = self._hosts[host], self._hosts.get(outcome.upstream), outcome.link
        assert measured is not None
        if giver is not None and giver.link is not None:
            ratio = measured.bytes_per_s / giver.link.bytes_per_s
            if 1 / ALIKE < ratio < ALIKE:
                return
        known.link = known.link.after(measured) if known.link is not None else measured

    def _appeared(self, host: str, version: int) -> list[Command]:
        """Puts a host that joined, or tries again, at the end of the chain."""
        live, known = self._versions[version], self._hosts[host]
        if self.has(host, version):
            return [] if live.chain is not None else self._begun(host, version, live)
        live.waiting.discard(host)
        if live.chain is None or known.is_leaving:
            return []
        if host not in live.chain:
            live.chain.add(known.site(host))
        return [self._fetch(host, live, self._upstreams(host, version, live))]

    def _left(self, host: str, version: int, live: _Version) -> list[Command]:
        """Cuts a host that stops giving this version out of the chain, or replaces it as the head."""
        chain = live.chain
        if chain is None or host not in chain:
            return []
        if host != chain.head:
            return self._pointed(chain.cut(host), version, live)
        heirs = [each for each in self.holders(version) if each != host and not self._is_suspect(each, live)]
        if not heirs:
            live.chain = None
            return [Gone(version, live.name)]
        hosts = self._hosts
        heir = min(heirs, key=lambda each: (hosts[each].is_leaving, each not in chain, hosts[each].site(each).order))
        if heir not in chain:
            chain.add(self._hosts[heir].site(heir))
        return self._pointed(chain.replace_head(heir), version, live)

    def _pointed(self, hosts: Sequence[str], version: int, live: _Version) -> list[Command]:
        return [
            self._fetch(host, live, self._upstreams(host, version, live))
            for host in hosts
            if host in self._hosts and not self.has(host, version)
        ]

    def _suspected(self, culprit: str, version: int, live: _Version) -> list[Command]:
        """Counts complaints of wrong bytes: after some, nobody fetches the version from this host."""
        if not self._is_suspect(culprit, live):
            return []
        known, out = self._hosts.get(culprit), self._left(culprit, version, live)
        if known is not None and known.whole.get(version) == live.name and live.chain is not None:
            del known.whole[version]  # others have it, so it fetches the version again
            live.waiting.add(culprit)
            out.append(Drop(culprit, known.epoch, live.name))
        return out

    def _is_suspect(self, host: str, live: _Version) -> bool:
        return sum(host in avoided for avoided in live.avoided.values()) >= COMPLAINTS

    def _upstreams(self, host: str, version: int, live: _Version, holders_first: bool = False) -> tuple[Upstream, ...]:
        assert live.chain is not None
        near = live.chain.upstreams(host)
        holders = [each for each in self.holders(version) if each != host]
        names = ranked(holders[:2], near, UPSTREAMS_MAX + 2) if holders_first else ranked(near, holders, len(near) + 2)
        avoided = live.avoided.get(host, set())
        there = [each for each in names if each in self._hosts and each not in avoided]
        fit = [each for each in there if not self._hosts[each].is_leaving] or there
        return tuple(self._upstream(each, host, version) for each in fit)

    def _upstream(self, giver: str, host: str, version: int) -> Upstream:
        """Names the base of deltas between zones: of the versions that both hosts have, the nearest by number."""
        own, other = self._hosts[host], self._hosts[giver]
        both = own.whole.items() & other.whole.items() if self._deltas and own.zone != other.zone else ()
        _, base = min(both, key=lambda each: (abs(each[0] - version), each), default=(0, ""))
        return Upstream(giver, other.epoch, other.address, base)

    def _fetch(self, host: str, live: _Version, upstreams: tuple[Upstream, ...]) -> Fetch:
        assert live.chain is not None
        links = [self._hosts[each].link for each in live.chain.hosts if each in self._hosts]
        measured = [link for link in links if link is not None]
        link = ASSUMED
        if measured:
            link = Link(min(each.bytes_per_s for each in measured), max(each.start_s for each in measured))
        chunks = piece_chunks(link, max(2, len(live.chain)), live.total_bytes, CHUNK_BYTES)
        return Fetch(host, self._hosts[host].epoch, live.name, upstreams, chunks * CHUNK_BYTES)
