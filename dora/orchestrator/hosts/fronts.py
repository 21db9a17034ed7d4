"""The HTTP fronts that serve now, and those that were lost, for Prometheus."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import psutil

from dora.errors import InvalidValue
from dora.rpc.channel import is_loopback, is_wildcard
from dora.rpc.errors import LimitExceeded
from dora.system.awake import awake_s

FRONTS_MAX: Final = 256
NAMED_S: Final = 5.0  # for the addresses of a name
LOST_S: Final = 3600.0  # for so long a lost front stays listed, unless it is back
_ADDRESS: Final = re.compile(r"([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([1-9][0-9]{0,4})")


@dataclass(frozen=True, slots=True)
class Front:
    """Describes a front. If ``host`` is empty, it listens at every address of the service's own machine."""

    host: str
    port: int
    secure: bool

    @classmethod
    def of(cls, address: str, caller: str, *, secure: bool) -> "Front":
        """Returns the front that listens at ``address``, or if that is a wildcard, at ``caller``, from which it calls.
        Raises InvalidValue.
        """
        found = _ADDRESS.fullmatch(address)
        if found is None or int(found[2]) >= 1 << 16:
            raise InvalidValue("address", address[:80], "HOST:PORT at which the front listens")
        host = found[1]
        if is_wildcard(host):
            host = "" if not caller or is_loopback(caller) else f"[{caller}]" if ":" in caller else caller
        return cls(host, int(found[2]), secure)

    def reached_from(self, reached: str) -> str | None:
        """Returns the address for clients that reach the service's machine as ``reached``, or None if the front listens
        on loopback and they are elsewhere.
        """
        if self.host and is_loopback(self.host) and not is_loopback(reached):
            return None
        return f"{self.host or reached}:{self.port}"


class Fronts:
    """Holds the fronts, on the event loop. A front is lost if its call ends before it leaves. At most ``FRONTS_MAX``
    lost ones are kept, and the one that was lost first is forgotten first.
    """

    def __init__(self, clock: Callable[[], float] = awake_s) -> None:
        self._clock = clock
        self._naming = asyncio.Lock()
        self._open: dict[object, Front] = {}
        self._lost: dict[Front, float] = {}  # since when

    async def check(self, front: Front, caller: str) -> None:
        """Raises InvalidValue unless the front listens on the machine from which it calls."""
        found: Sequence[tuple[Any, ...]] = ()
        with suppress(TimeoutError, OSError):
            async with self._naming, asyncio.timeout(NAMED_S):
                found = await asyncio.get_running_loop().getaddrinfo(front.host.strip("[]") or caller, None)
        addresses = {str(address[0]) for *_, address in found}
        here = {each.address for interface in psutil.net_if_addrs().values() for each in interface}
        if front.host and caller not in addresses and not (caller in here and addresses & here):
            allowed = f"an address of the machine from which the front calls, {caller}, or a name of it"
            raise InvalidValue("address", f"{front.host}:{front.port}", allowed)

    @contextmanager
    def serving(self, front: Front) -> Iterator[None]:
        """Holds the front until its call ends. Raises LimitExceeded."""
        if len(self._open) >= FRONTS_MAX:
            raise LimitExceeded("fronts", len(self._open) + 1, f"at most {FRONTS_MAX}")
        key = object()
        self._open[key] = front
        self._lost.pop(front, None)
        try:
            yield
        finally:
            if self._open.pop(key, None) is not None and front not in self._open.values():
                self._lost[front] = self._clock()
                while len(self._lost) > FRONTS_MAX:
                    del self._lost[next(iter(self._lost))]

    def leave(self, front: Front) -> None:
        """Removes a front that was stopped, even if the end of its calls is not known yet."""
        self._open = {key: each for key, each in self._open.items() if each != front}
        self._lost.pop(front, None)

    def __iter__(self) -> Iterator[Front]:
        """Yields each front once, though two incarnations of one may be connected; the lost ones are the last."""
        oldest_s = self._clock() - LOST_S
        lost = [front for front, since_s in self._lost.items() if since_s > oldest_s]
        return iter(dict.fromkeys((*self._open.values(), *lost)))
