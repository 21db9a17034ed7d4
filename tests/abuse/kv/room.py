"""A room of mutations of one kind of thing, and the account of their results."""

from collections.abc import Callable
from dataclasses import dataclass, field

FAULTS_MAX = 50  # that are told


@dataclass
class Room:
    """``mutations`` were tried; each was refused, or it is in ``accepted``."""

    name: str
    mutations: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # by what was done
    accepted: list[str] = field(default_factory=list)
    without_effect: int = 0  # changes of what nobody reads any more
    controls: int = 0  # snapshots that nobody touched, and that were taken in
    reprefilled: int = 0
    compared: int = 0  # responses
    wrong: list[str] = field(default_factory=list)  # responses that differ from an unmoved one
    blocks_leaked: int = 0
    held_most_bytes: int = 0
    took_s: float = 0.0

    def goes_on(self, count: int) -> bool:
        """Whether fewer than so many were tried, and few enough went wrong to go on."""
        return self.mutations < count and max(len(self.accepted), len(self.wrong)) < FAULTS_MAX

    def refuse(self, what: str) -> None:
        self.mutations += 1
        self.refused[what] = self.refused.get(what, 0) + 1

    def accept(self, what: str) -> None:
        self.mutations += 1
        if len(self.accepted) < FAULTS_MAX:
            self.accepted.append(what)

    def failures(self) -> list[str]:
        return [
            *(f"{self.name}: accepted: {what}" for what in self.accepted),
            *(f"{self.name}: {what}" for what in self.wrong[:FAULTS_MAX]),
            *([f"{self.name}: {self.blocks_leaked} blocks leaked"] if self.blocks_leaked else []),
            *([f"{self.name}: nothing untouched was taken in"] if self.mutations and not self.controls else []),
        ]


Tell = Callable[[Room], None]
