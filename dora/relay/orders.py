"""Orders to a relay and their outcomes."""

from dataclasses import dataclass, field

from dora.relay.link import Link


@dataclass(frozen=True, slots=True)
class Upstream:
    """A host that has a version or is receiving it. ``address`` is its relay's, host:port.

    ``base`` names another version that both hosts have, if they are in different zones: chunks come as deltas from it.
    """

    host: str
    epoch: int
    address: str
    base: str = field(default="", compare=False)  # a new one does not end a connection


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Brings the named version to this host from the first of ``upstreams`` that can deliver it.

    An order for a version in reception replaces its upstreams; received chunks are kept.
    """

    name: str  # the name in its manifest
    upstreams: tuple[Upstream, ...]
    piece_bytes: int = 4 << 20


@dataclass(frozen=True, slots=True)
class Arrived:
    """The version is in this host's store, complete and checked.

    ``link`` was measured to ``upstream``. It is None if too few bytes came for a measurement.
    """

    name: str
    upstream: str
    came_bytes: int
    took_s: float
    link: Link | None


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """No upstream could deliver the version. ``culprits`` are hosts that sent wrong bytes."""

    name: str
    reason: str
    culprits: tuple[str, ...] = ()


Outcome = Arrived | FetchFailed
