"""Retries: a request that comes again gets the turns of its first call."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dora.agents.front.turns import RunningTurn

KEPT_S: Final = 600.0
KEPT_MAX: Final = 4096  # requests; the oldest is forgotten first


@dataclass(slots=True)
class _Kept:
    turns: Sequence[RunningTurn]
    at_s: float
    request_id: str = ""  # its client's name for it
    delivered: bool = False


class Replays:
    """The turns of the latest requests, by who asked and what."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._ids: dict[str, str] = {}  # the names of requests by their clients' ids

    def find(self, name: str, now_s: float, *, is_retry: bool) -> Sequence[RunningTurn] | None:
        """Returns the turns of the same request. ``is_retry``: its client says that it is one; else it is one only if
        the first call's reply was not delivered whole.
        """
        self._forget(now_s)
        kept = self._kept.get(name)
        if kept is None or not (is_retry or (not kept.delivered and all(turn.has_ended for turn in kept.turns))):
            return None
        return None if any(turn.error is not None for turn in kept.turns) else kept.turns

    def named(self, request_id: str) -> Sequence[RunningTurn]:
        """Returns the turns of the request that its client called so; none if there is no such request."""
        name = self._ids.get(request_id, "")
        return self._kept[name].turns if name in self._kept else ()

    def keep(self, name: str, turns: Sequence[RunningTurn], now_s: float, request_id: str = "") -> None:
        self._kept[name] = _Kept(turns, now_s, request_id)
        if request_id:
            self._ids[request_id] = name
        self._kept.move_to_end(name)
        self._forget(now_s)

    def delivered(self, name: str) -> None:
        """Notes that a client has got a reply whole."""
        if name in self._kept:
            self._kept[name].delivered = True

    def _forget(self, now_s: float) -> None:
        while self._kept and (len(self._kept) > KEPT_MAX or next(iter(self._kept.values())).at_s < now_s - KEPT_S):
            _, kept = self._kept.popitem(last=False)
            self._ids.pop(kept.request_id, None)


def name_of(holder: str, route: str, key: str, body: bytes) -> str:
    """Names a request: by the key that its client gave, or else by its content."""
    said = key.encode() if key else body
    return hashlib.blake2b(
        said, digest_size=16, key=hashlib.sha256(f"{holder} {route} {bool(key)}".encode()).digest()
    ).hexdigest()
