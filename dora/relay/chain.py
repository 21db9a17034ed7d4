"""Plans from which host each host takes a version, without clock or I/O.

Hosts form a chain behind the version's holder, its *head*. Each takes pieces from its predecessor and passes them on
while the rest is still coming (Laminar, section 4.2). Slow links come last, so that no host waits behind them. One
stream crosses between zones (datacentres, for instance): the fastest host of a zone takes from a host of another zone,
and the rest of its zone forms a chain behind it (StreamRL, section 6).

    head ─▶ a ─▶ b ─▶ c ─▶ d (slow)
                      └─────────────▶ e ─▶ f ─▶ g     of another zone

A lost host is removed in constant time: its followers take from its predecessor and ask for the missing chunks.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dora.errors import Conflict, NotFound

UPSTREAMS_MAX: Final = 4  # hosts named to a follower: the nearest first, the head included


@dataclass(frozen=True, slots=True)
class Site:
    """A host, as planning needs it."""

    host: str
    zone: str = ""  # hosts of one zone reach each other well
    bytes_per_s: float = 0.0  # measured bandwidth of its receiving link; 0: not measured, assumed fast

    @property
    def order(self) -> tuple[float, str]:
        """The sort key: fastest first, then by name."""
        return (-(self.bytes_per_s or math.inf), self.host)


class Chain:
    """The distribution tree of one version. ``planned`` creates it; changes return the hosts whose upstream changed."""

    def __init__(self, head: Site) -> None:
        self.head = head.host
        self._sites: dict[str, Site] = {head.host: head}
        self._upstream: dict[str, str] = {}
        self._followers: dict[str, list[str]] = {head.host: []}
        self._last: dict[str, str] = {head.zone: head.host}  # the end of each zone's own chain

    def __contains__(self, host: str) -> bool:
        return host in self._sites

    def __len__(self) -> int:
        return len(self._sites)

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts: the head first, each after its upstream."""
        found = [self.head]
        for host in found:
            found.extend(self._followers[host])
        return tuple(found)

    def upstream(self, host: str) -> str:
        """Returns a host's upstream; empty for the head. Raises NotFound."""
        self._site(host)
        return self._upstream.get(host, "")

    def upstreams(self, host: str, most: int = UPSTREAMS_MAX) -> tuple[str, ...]:
        found: list[str] = []
        at = self.upstream(host)
        while at and len(found) < most - 1:
            found.append(at)
            at = self._upstream.get(at, "")
        if at:
            found.append(self.head)
        return tuple(found)

    def add(self, site: Site) -> str:
        """Appends a host to its zone's chain. Returns its upstream. Raises Conflict if it is in the chain already."""
        if site.host in self._sites:
            raise Conflict("host", site.host, "a host that is not in the chain", why="is in the chain already")
        upstream = self._last.get(site.zone) or self._exit(site)
        self._sites[site.host] = site
        self._followers[site.host] = []
        self._last[site.zone] = site.host
        self._follow(site.host, upstream)
        return upstream

    def cut(self, host: str) -> tuple[str, ...]:
        """Removes a lost host in time that does not depend on the chain's length. A follower of the same zone takes its
        place, and the other followers take from that follower or from the predecessor. Returns the hosts whose upstream
        changed.

        Raises NotFound, and Conflict for the head, which must be replaced.
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
        """Makes ``host`` the head and removes the old head. Returns the hosts whose upstream changed.

        Raises NotFound if ``host`` is not in the chain: ``add`` it first.
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
        """Returns the host that feeds a new zone: the last in the head's zone that is no slower and feeds no other
        zone, so that the stream neither waits for slow hosts nor loads the head.
        """
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
    """Plans a version's chain from ``head`` over ``others``: fast hosts before slow ones, zone by zone."""
    chain = Chain(head)
    zones: dict[str, list[Site]] = {head.zone: []}
    for site in sorted(others, key=lambda each: each.order):
        zones.setdefault(site.zone, []).append(site)
    for sites in zones.values():  # the head's zone, then the others by their fastest host
        for site in sites:
            chain.add(site)
    return chain


def ranked(upstreams: Sequence[str], holders: Iterable[str], most: int = UPSTREAMS_MAX) -> tuple[str, ...]:
    """Returns ``upstreams`` followed by other complete holders, each once; at most ``most``."""
    return tuple(dict.fromkeys([*upstreams, *sorted(holders)]))[:most]
