"""What a relay is told, and what it tells."""

from dataclasses import dataclass

from dora.relay.link import Link


@dataclass(frozen=True, slots=True)
class Upstream:
    """A host that has a version, or is taking it in. ``address``: of its relay, host:port."""

    host: str
    epoch: int
    address: str


@dataclass(frozen=True, slots=True)
class Order:
    """Bring the version of this name here, from the first of ``upstreams`` that can give it.

    An order for a version that is on its way in replaces whom it is taken from; what has come stays.
    """

    name: str  # of its manifest
    upstreams: tuple[Upstream, ...]
    piece_bytes: int = 4 << 20


@dataclass(frozen=True, slots=True)
class Arrived:
    """The version is in this host's store, whole and checked.

    ``link``: measured on the way, from ``upstream``; None where too little came to tell.
    """

    name: str
    upstream: str
    came_bytes: int
    took_s: float
    link: Link | None


@dataclass(frozen=True, slots=True)
class Failed:
    """No upstream could give it. ``culprits``: hosts that sent bytes which are not the version's."""

    name: str
    reason: str
    culprits: tuple[str, ...] = ()


Outcome = Arrived | Failed
