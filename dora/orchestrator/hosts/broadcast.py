"""Which host takes which version from whom: decided by events, answered with commands, without clock or I/O.

    joined, lost, published, sealed, failed, missed, retired, remind  ──▶  Fetch, Drop, Ready, GaveUp, Gone

Every living host is to have every live version. A version starts at the host where it was published, and goes down a
chain (``dora/relay/chain.py``); a lost host is cut out of it, and any host that has the version whole takes the place
of a lost head. Events of a past epoch of a host, and of versions that are not live, change nothing. Version 0, the
model itself, is on every host and does not travel.

A worker may load a version only where its host ``has`` it: ``Ready`` says when.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dora.errors import Conflict
from dora.relay.chain import UPSTREAMS_MAX, Chain, Site, planned, ranked
from dora.relay.link import ASSUMED, Link, piece_chunks
from dora.relay.orders import Arrived, Failed, Upstream
from dora.weights.files import CHUNK_BYTES
from dora.weights.manifest import parsed_name

ATTEMPTS: Final = 3  # of a host to get a version, one after the other; then ``remind`` begins anew
ALIKE: Final = 1.5  # times a giver's own rate: who receives no faster or slower than that may have waited for it
COMPLAINTS: Final = 2  # hosts that got wrong bytes from another one: nobody takes this version from it any more


@dataclass(frozen=True, slots=True)
class Fetch:
    """To a host: bring this version, from the first of these that can give it. Replaces an earlier order for it."""

    host: str
    epoch: int
    name: str
    upstreams: tuple[Upstream, ...]
    piece_bytes: int


@dataclass(frozen=True, slots=True)
class Drop:
    """To a host: this version is needed no more."""

    host: str
    epoch: int
    name: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The host has the version whole: its workers may load it."""

    host: str
    version: int


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The host could not get the version. It is asked again when ``remind`` is called."""

    host: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """There is nobody to take the version from: no living host has it whole (``holders``), and it has to be published
    anew; or those that have it are said to send wrong bytes."""

    version: int
    name: str


Command = Fetch | Drop | Ready | GaveUp | Gone


@dataclass(slots=True)
class _Host:
    epoch: int
    address: str
    zone: str
    link: Link | None = None
    whole: dict[int, str] = field(default_factory=dict)  # names of versions that it has sealed

    def site(self, host: str) -> Site:
        return Site(host, self.zone, self.link.bytes_per_s if self.link else 0.0)


@dataclass(slots=True)
class _Version:
    name: str
    total_bytes: int
    chain: Chain | None = None  # None: no living host has it
    failures: dict[str, int] = field(default_factory=dict)  # by host, since something of it was ordered anew
    avoided: dict[str, set[str]] = field(default_factory=dict)  # by host: who sent it wrong bytes
    waiting: set[str] = field(default_factory=set)  # hosts that gave up


class Broadcast:
    """The state of all versions on all hosts. Each event returns the commands that follow from it, in order."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._versions: dict[int, _Version] = {}
        self._measured: dict[str, Arrived] = {}  # by who received: not weighed yet, as the giver's own may come later
        self._newest = 0

    # -------------------------------------------------------------------------------------------------------- looking

    def has(self, host: str, version: int) -> bool:
        """Whether a worker of this host may load the version now."""
        known, live = self._hosts.get(host), self._versions.get(version)
        if version == 0:
            return known is not None
        return known is not None and live is not None and known.whole.get(version) == live.name

    def holders(self, version: int) -> tuple[str, ...]:
        """Hosts that have a version whole, by name."""
        return tuple(host for host in sorted(self._hosts) if self.has(host, version))

    def hosts(self) -> tuple[str, ...]:
        return tuple(sorted(self._hosts))

    def versions(self) -> Mapping[int, str]:
        """The names of the live versions."""
        return {version: live.name for version, live in sorted(self._versions.items())}

    def chain(self, version: int) -> tuple[str, ...]:
        """The hosts in the order in which a version reaches them; empty where it is not live, or nobody has it."""
        live = self._versions.get(version)
        return live.chain.hosts if live is not None and live.chain is not None else ()

    def link(self, host: str) -> Link | None:
        """What was measured of the link on which a host receives; None where only slower hosts gave to it."""
        self._weigh()
        known = self._hosts.get(host)
        return known.link if known is not None else None

    # --------------------------------------------------------------------------------------------------------- events

    def joined(self, host: str, epoch: int, address: str, zone: str = "", held: Iterable[str] = ()) -> list[Command]:
        """A host is there. ``address``: of its relay; ``held``: names of the versions that it has whole.

        It gets what it lacks, the newest version first. What it has that is not live is dropped, so a service that
        starts again names the live versions first (``restored``). A later epoch of a host replaces the earlier one.
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
        """A host is gone, with all that it had."""
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

    def restored(self, version: int, name: str, total_bytes: int) -> list[Command]:
        """A version that was live before the service started again: a host that joins has it, or it is ``Gone``."""
        self._newest = max(self._newest, version)
        self._versions.setdefault(version, _Version(name, total_bytes))
        return []

    def published(self, version: int, name: str, host: str, total_bytes: int, anew: bool = False) -> list[Command]:
        """A host has a version whole that a trainer has published there; the others are to get it.

        A repetition changes nothing. ``anew``: it takes the place of a live one that was rejected; where that has the
        same weights, whoever has it may load it again. Raises Conflict where another version of this number is live,
        or a newer one was published before.
        """
        live = self._versions.get(version)
        if live is not None and live.name == name:
            again: list[Command] = [Ready(each, version) for each in self.holders(version)] if anew else []
            known = self._hosts.get(host)
            return again if known is None else [*again, *self._whole(host, known, version)]
        if live is not None and not anew:
            raise Conflict("version", name, f"{live.name}, or another number", why="is another one than was published")
        if live is None and version <= self._newest:
            allowed = f"above {self._newest}, which was published before"
            raise Conflict("version", name, allowed, why="comes too late")
        out: list[Command] = [] if live is None else self.retired(version)
        self._newest = max(self._newest, version)
        self._versions[version] = _Version(name, total_bytes)
        known = self._hosts.get(host)
        return [*out, *(self._whole(host, known, version) if known is not None else [Gone(version, name)])]

    def sealed(self, host: str, epoch: int, outcome: Arrived) -> list[Command]:
        """A host has brought a version in."""
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

    def failed(self, host: str, epoch: int, outcome: Failed) -> list[Command]:
        """A host could get a version from none of those that it was to ask. Others are named; after some attempts it
        is left without until ``remind``, and those behind it take from others."""
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
        """A host has a version no longer, or not as it was published: it gets it anew, from whoever else has it."""
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
        """No step trains on it any more: all hosts drop it."""
        live = self._versions.pop(version, None)
        if live is None:
            return []
        out: list[Command] = []
        for host, known in sorted(self._hosts.items()):
            known.whole.pop(version, None)
            out.append(Drop(host, known.epoch, live.name))
        return out

    def remind(self) -> list[Command]:
        """Hosts that gave up try again, also from one that was doubted, if it alone has the version: called now and
        then."""
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
        """A host has a version whole, by whatever way."""
        live = self._versions[version]
        if self.has(host, version):
            return []
        known.whole[version] = live.name
        live.failures.pop(host, None)
        live.waiting.discard(host)
        return [Ready(host, version), *([] if live.chain is not None else self._begun(host, version, live))]

    def _begun(self, head: str, version: int, live: _Version) -> list[Command]:
        """All that lack a version are to get it from this host on."""
        self._weigh()
        lacking = [host for host in self._hosts if not self.has(host, version)]
        sites = [self._hosts[host].site(host) for host in lacking]
        live.chain = planned(self._hosts[head].site(head), sites)
        live.failures.clear()
        live.waiting.clear()
        return [self._fetch(host, live, self._upstreams(host, version, live)) for host in live.chain.hosts[1:]]

    def _weigh(self) -> None:
        """Takes what was measured for what it tells: a host behind a slow one received slowly, and may be fast."""
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
        """A host has come, or tries again: it goes to the end of the chain."""
        live, known = self._versions[version], self._hosts[host]
        if self.has(host, version):
            return [] if live.chain is not None else self._begun(host, version, live)
        live.waiting.discard(host)
        if live.chain is None:
            return []
        if host not in live.chain:
            live.chain.add(known.site(host))
        return [self._fetch(host, live, self._upstreams(host, version, live))]

    def _left(self, host: str, version: int, live: _Version) -> list[Command]:
        """A host gives no more of this version: it is cut out of the chain, or replaced as its head."""
        chain = live.chain
        if chain is None or host not in chain:
            return []
        if host != chain.head:
            return self._pointed(chain.cut(host), version, live)
        heirs = [each for each in self.holders(version) if each != host and not self._is_suspect(each, live)]
        if not heirs:
            live.chain = None
            return [Gone(version, live.name)]
        heir = min(heirs, key=lambda each: (each not in chain, self._hosts[each].site(each).order))
        if heir not in chain:
            chain.add(self._hosts[heir].site(heir))
        return self._pointed(chain.replace_head(heir), version, live)

    def _pointed(self, hosts: Sequence[str], version: int, live: _Version) -> list[Command]:
        """Those of ``hosts`` that still take the version in take it from others."""
        return [
            self._fetch(host, live, self._upstreams(host, version, live))
            for host in hosts
            if host in self._hosts and not self.has(host, version)
        ]

    def _suspected(self, culprit: str, version: int, live: _Version) -> list[Command]:
        """Hosts have complained of wrong bytes: after some, nobody takes the version from this one."""
        if not self._is_suspect(culprit, live):
            return []
        known, out = self._hosts.get(culprit), self._left(culprit, version, live)
        if known is not None and known.whole.get(version) == live.name and live.chain is not None:
            del known.whole[version]  # others have it: it gets it anew
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
        fit = [each for each in names if each in self._hosts and each not in avoided]
        return tuple(Upstream(each, self._hosts[each].epoch, self._hosts[each].address) for each in fit)

    def _fetch(self, host: str, live: _Version, upstreams: tuple[Upstream, ...]) -> Fetch:
        assert live.chain is not None
        links = [self._hosts[each].link for each in live.chain.hosts if each in self._hosts]
        measured = [link for link in links if link is not None]
        link = ASSUMED
        if measured:
            link = Link(min(each.bytes_per_s for each in measured), max(each.start_s for each in measured))
        chunks = piece_chunks(link, max(2, len(live.chain)), live.total_bytes, CHUNK_BYTES)
        return Fetch(host, self._hosts[host].epoch, live.name, upstreams, chunks * CHUNK_BYTES)
