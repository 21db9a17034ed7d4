"""Chooses the transport of a pair's next snapshot: the preferred one, unless it has failed or a later one is faster.

A transport that fails is not used again; one that has no room is skipped for one snapshot. Both are *news*, reported
once, with the next snapshot that is sent.
"""

from collections.abc import Iterable
from typing import Final

FASTER: Final = 1.25  # a later transport is preferred if it was measured faster by this factor
MEASURED_LEAST_BYTES: Final = 1 << 20
SMOOTHING: Final = 0.3  # weight of the newest measurement


class TransportChoice:
    """One thread sends and chooses; the thread that receives replies may call ``suspect`` and ``measure`` meanwhile."""

    def __init__(self, names: Iterable[str]) -> None:
        """``names`` are transports that both ends have, in order of preference."""
        self._usable = list(names)
        self._suspect: dict[str, str] = {}
        self._news: list[str] = []
        self._bytes_per_s: dict[str, float] = {}

    def order(self) -> list[str]:
        """Working transports, best first: in order of preference, unless a later one was measured faster."""
        best: list[str] = []
        for name in self._usable:
            rate = self._bytes_per_s.get(name, 0.0)
            place = next(
                (i for i, other in enumerate(best) if rate > FASTER * self._bytes_per_s.get(other, rate)), len(best)
            )
            best.insert(place, name)
        return best

    def works(self, name: str) -> bool:
        return name in self._usable

    def rule_out(self, name: str) -> None:
        """Removes a transport that these two workers cannot use; this is not a failure."""
        if name in self._usable:
            self._usable.remove(name)

    def leave(self, name: str, reason: str) -> None:
        self.rule_out(name)
        self._news.append(f"{name}: {reason}")

    def pass_over(self, name: str, reason: str) -> None:
        """Reports that a transport could not carry one snapshot; it may carry the next."""
        self._news.append(f"{name}: {reason}")

    def suspect(self, name: str, reason: str) -> None:
        """Notes the other end's report that a transport does not work; the sending thread abandons it."""
        self._suspect[name] = reason

    def take_suspects(self) -> dict[str, str]:
        """Returns the transports to abandon, with reasons, once."""
        return {name: self._suspect.pop(name) for name in list(self._suspect)}

    def take_suspect(self, name: str) -> str:
        """Returns the reason to abandon this transport, or an empty text."""
        return self._suspect.pop(name, "")

    def take_news(self) -> list[str]:
        """Returns, with reasons, the transports that failed or had no room since the last call."""
        news, self._news = self._news, []
        return news

    def measure(self, name: str, body_bytes: int, took_s: float) -> None:
        """Records the time of one body. Small bodies are ignored, as they say little about a transport's speed."""
        if body_bytes >= MEASURED_LEAST_BYTES:
            rate = body_bytes / max(took_s, 1e-9)
            before = self._bytes_per_s.get(name, rate)
            self._bytes_per_s[name] = before + SMOOTHING * (rate - before)

    def forget_measured(self, name: str) -> None:
        self._bytes_per_s.pop(name, None)

    def measured(self) -> dict[str, float]:
        """Bytes per second of each transport that was used."""
        return dict(self._bytes_per_s)
