"""Places for connections. Those that have not proved who they are make room for others."""

import asyncio
from typing import Final


class Crowd:
    """Limits the connections to ``most``. Belongs to the event loop."""

    def __init__(self, most: int) -> None:
        self._most: Final = most
        self._unproven: dict[str, dict[asyncio.Transport, None]] = {}  # by the other end's host, the oldest first
        self._proven: set[asyncio.Transport] = set()

    def enter(self, transport: asyncio.Transport) -> bool:
        """Takes a place, if it can by ending the fullest host's oldest unproven connection. Returns if it could."""
        if self._full():
            for each in [*self._proven, *(each for held in self._unproven.values() for each in held)]:
                if each.is_closing():
                    self.leave(each)
        if self._full():
            most = max(self._unproven.values(), key=len, default=None)
            if most is None:
                return False
            oldest = next(iter(most))
            self.leave(oldest)
            oldest.abort()
        self._unproven.setdefault(_host(transport), {})[transport] = None
        return True

    def prove(self, transport: asyncio.Transport | None) -> None:
        """Notes that the other end has proved who it is."""
        if transport is not None and transport not in self._proven and not transport.is_closing():
            self.leave(transport)
            self._proven.add(transport)

    def leave(self, transport: asyncio.Transport) -> None:
        """Frees a connection's place."""
        self._proven.discard(transport)
        host = _host(transport)
        held = self._unproven.get(host, {})
        held.pop(transport, None)
        if not held:
            self._unproven.pop(host, None)

    def _full(self) -> bool:
        return len(self._proven) + sum(map(len, self._unproven.values())) >= self._most


def _host(transport: asyncio.Transport) -> str:
    return str((transport.get_extra_info("peername") or ("",))[0])
