"""Who takes a version from whom: planning without clock or I/O.

Hosts form a chain behind the version's holder, its *head*, in which each takes pieces from the one before it and passes
them on while the rest is still coming (Laminar, section 4.2). Slow links come last, so that nothing waits behind them.
Between places (datacentres, say) one stream crosses: the fastest host of a place takes from a host elsewhere, and the
rest of the place forms a chain behind that one (StreamRL, section 6).

    head ─▶ a ─▶ b ─▶ c ─▶ d (slow)
                      └─────────────▶ e ─▶ f ─▶ g     of another place

A host that is lost is cut out in constant time: its followers take from the one before it, and ask for what they lack.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dora.errors import Conflict, NotFound

UPSTREAMS_MAX: Final = 4  # hosts that a follower is told of: the nearest first, the head among them


@dataclass(frozen=True, slots=True)
class Site:
    """A host as planning sees it."""

    host: str
    zone: str = ""  # hosts of one place reach each other well
    bytes_per_s: float = 0.0  # of the link on which it receives, as measured; 0: not measured, taken to be fast

    @property
    def order(self) -> tuple[float, str]:
        """The fastest first; names decide between equals."""
        return (-(self.bytes_per_s or math.inf), self.host)


class Chain:
    """One version's way over the hosts. ``planned`` makes one; what changes it returns whose upstream has changed."""

    def __init__(self, head: Site) -> None:
        self.head = head.host
        self._sites: dict[str, Site] = {head.host: head}
        self._upstream: dict[str, str] = {}
        self._followers: dict[str, list[str]] = {head.host: []}
        self._last: dict[str, str] = {head.zone: head.host}  # the end of each place's own chain

    def __contains__(self, host: str) -> bool:
        return host in self._sites

    def __len__(self) -> int:
        return len(self._sites)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The head first, each after its upstream."""
        found = [self.head]
        for host in found:
            found.extend(self._followers[host])
        return tuple(found)

    def upstream(self, host: str) -> str:
        """From whom a host takes; empty for the head. Raises NotFound."""
        self._site(host)
        return self._upstream.get(host, "")

    def upstreams(self, host: str, most: int = UPSTREAMS_MAX) -> tuple[str, ...]:
        """Whom a host is to ask, one after the other: its upstream, those before that one, and at last the head."""
        found: list[str] = []
        at = self.upstream(host)
        while at and len(found) < most - 1:
            found.append(at)
            at = self._upstream.get(at, "")
        if at:
            found.append(self.head)
        return tuple(found)

    def add(self, site: Site) -> str:
        """A host that comes late, or once more, goes to the end of its place's chain. Returns its upstream.

        Raises Conflict where it is in the chain already.
        """
        if site.host in self._sites:
            raise Conflict("host", site.host, "a host that is not in the chain", why="is in the chain already")
        upstream = self._last.get(site.zone) or self._exit(site)
        self._sites[site.host] = site
        self._followers[site.host] = []
        self._last[site.zone] = site.host
        self._follow(site.host, upstream)
        return upstream

    def cut(self, host: str) -> tuple[str, ...]:
        """Takes a lost host out: a follower in its own place steps into its place, others take from that one, or from
        the host before. Returns whose upstream has changed. Constant in the chain's length.

        Raises NotFound, and Conflict for the head, which has to be replaced.
        """
        site = self._site(host)
        if host == self.head:
            raise Conflict("host", host, "a host behind the head: the head is replaced", why="is the head")
        before, followers = self._upstream[host], self._followers[host]
        self._forget(site, before)
        near = [each for each in followers if self._sites[each].zone == site.zone]
        for each in followers:
            self._follow(each, before if each in near[:1] or not near else near[0])
        return tuple(followers)

    def replace_head(self, host: str) -> tuple[str, ...]:
        """Another holder, ``host``, becomes the head; the old one is out. Returns whose upstream has changed.

        ``host`` may be in the chain already. Raises NotFound where it is not: ``add`` it first.
        """
        site = self._site(host)
        if host == self.head:
            return ()
        changed = self.cut(host)
        old = self._sites.pop(self.head)
        followers = [each for each in self._followers.pop(old.host) if each != host]
        self._sites[host] = site
        self._followers.setdefault(host, [])
        if self._last.get(old.zone) == old.host:
            del self._last[old.zone]
        self._last.setdefault(site.zone, host)
        self.head = host
        for each in followers:
            self._follow(each, host)
        return tuple(dict.fromkeys([*followers, *(each for each in changed if each not in followers)]))

    def _exit(self, site: Site) -> str:
        """The host from which a stream leaves for a new place: the last in the head's place that is no slower, and
        from which none leaves yet, so that it neither waits for slower hosts nor loads the head."""
        zone = self._sites[self.head].zone
        at = self._last.get(zone, self.head)
        fit = [at]
        while at != self.head:
            at = self._upstream[at]
            fit.append(at)
        no_slower = [each for each in fit if self._sites[each].order[0] <= site.order[0] or each == self.head]
        free = [each for each in no_slower if all(self._sites[to].zone == zone for to in self._followers[each])]
        return (free or no_slower)[0]

    def _follow(self, host: str, upstream: str) -> None:
        self._upstream[host] = upstream
        self._followers[upstream].append(host)

    def _forget(self, site: Site, before: str) -> None:
        del self._sites[site.host], self._followers[site.host], self._upstream[site.host]
        self._followers[before].remove(site.host)
        if self._last.get(site.zone) == site.host:
            if self._sites[before].zone == site.zone:
                self._last[site.zone] = before
            else:
                del self._last[site.zone]

    def _site(self, host: str) -> Site:
        site = self._sites.get(host)
        if site is None:
            raise NotFound("host", host, "one of the chain's")
        return site


def planned(head: Site, others: Iterable[Site]) -> Chain:
    """The chain of a version that ``head`` holds over ``others``: fast hosts before slow ones, place by place."""
    chain = Chain(head)
    zones: dict[str, list[Site]] = {head.zone: []}
    for site in sorted(others, key=lambda each: each.order):
        zones.setdefault(site.zone, []).append(site)
    for sites in zones.values():  # the head's place, then the others by their fastest host
        for site in sites:
            chain.add(site)
    return chain


def ranked(upstreams: Sequence[str], holders: Iterable[str], most: int = UPSTREAMS_MAX) -> tuple[str, ...]:
    """``upstreams`` and after them other hosts that hold the version whole, each once; at most ``most``."""
    return tuple(dict.fromkeys([*upstreams, *sorted(holders)]))[:most]
