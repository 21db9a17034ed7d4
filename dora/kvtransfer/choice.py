"""Which transport brings the next snapshot of a pair: as preferred, but for what has failed or was measured slower.

What fails is left for good, and what has no room just now for one snapshot. Either is *news*, told once: with the next
snapshot that is sent.
"""

from collections.abc import Iterable
from typing import Final

FASTER: Final = 1.25  # a later transport is taken where it was measured faster by this factor
MEASURED_LEAST_BYTES: Final = 1 << 20
SMOOTHING: Final = 0.3  # share of the newest measurement


class Choice:
    """One thread sends and chooses; the one that hears the other end may ``doubt`` and ``measure`` meanwhile."""

    def __init__(self, names: Iterable[str]) -> None:
        """``names``: transports that both ends have, in order of preference."""
        self._usable = list(names)
        self._suspect: dict[str, str] = {}
        self._news: list[str] = []
        self._bytes_per_s: dict[str, float] = {}

    def order(self) -> list[str]:
        """Transports that work, the best first: as preferred, but for a later one that was measured faster."""
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
        """It cannot work between these two, which is no failure."""
        if name in self._usable:
            self._usable.remove(name)

    def leave(self, name: str, reason: str) -> None:
        """It has failed between these two, and is not tried again."""
        self.rule_out(name)
        self._news.append(f"{name}: {reason}")

    def pass_over(self, name: str, reason: str) -> None:
        """It could not take one snapshot, and may take the next."""
        self._news.append(f"{name}: {reason}")

    def suspect(self, name: str, reason: str) -> None:
        """The other end has found that it does not work; the thread that sends is to leave it."""
        self._suspect[name] = reason

    def take_suspects(self) -> dict[str, str]:
        """What is to be left, with the reasons, each told once."""
        return {name: self._suspect.pop(name) for name in list(self._suspect)}

    def take_suspect(self, name: str) -> str:
        """Why this one is to be left; empty: it is not."""
        return self._suspect.pop(name, "")

    def take_news(self) -> list[str]:
        """What has failed, or had no room, since the last call, each with its reason."""
        news, self._news = self._news, []
        return news

    def measure(self, name: str, body_bytes: int, took_s: float) -> None:
        """A body has gone this way. Small ones say little of a transport's speed."""
        if body_bytes >= MEASURED_LEAST_BYTES:
            rate = body_bytes / max(took_s, 1e-9)
            before = self._bytes_per_s.get(name, rate)
            self._bytes_per_s[name] = before + SMOOTHING * (rate - before)

    def forget_measured(self, name: str) -> None:
        self._bytes_per_s.pop(name, None)

    def measured(self) -> dict[str, float]:
        """Bytes a second of each transport, as far as one was used."""
        return dict(self._bytes_per_s)
