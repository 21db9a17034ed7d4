"""The regimes, the tasks, and the runs of a task under a regime, wholly specified."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from statistics import fmean
from typing import Any, Final, Literal, get_args

CLASSES: Final = 4
LETTERS: Final = 4  # of a class
NAMES_FROM: Final = CLASSES * LETTERS
QUESTION: Final = NAMES_FROM + CLASSES
TOOL: Final = QUESTION + 1
VOCABULARY: Final = TOOL + 1
TURN_TOKENS: Final = (2, 6, 6)  # sampled in each turn
ANSWER_TOKENS: Final = 2
LENGTH: Final = 1 + sum(TURN_TOKENS) + ANSWER_TOKENS * (len(TURN_TOKENS) - 1)
GROUPS: Final = 4
GROUP_SIZE: Final = 8

Rule = Literal["pinned", "kept", "computed again", "discarded at an update", "discarded when too old"]
Failures = Literal["replaced", "dropped", "reward 0"]


@dataclass(frozen=True, slots=True)
class Regime:
    """What happens to rollouts in flight when a version is published. ``window``: versions; 0: auto.

    All regimes but *pinned* load new weights under running sessions, and admit window x groups beyond those trained on.
    """

    title: str
    rule: Rule
    window: int = 3


REGIMES: Final = {
    **{f"pinned-{size}": Regime(f"pinned, window {size}", "pinned", size) for size in (1, 2, 3)},
    "pinned-auto": Regime("pinned, auto", "pinned", 0),
    "kept": Regime("mixed, KV kept", "kept"),
    "again": Regime("mixed, KV computed again", "computed again"),
    "update": Regime("discarded at an update", "discarded at an update"),
    "old": Regime("discarded when too old", "discarded when too old"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. ``pause``: the mean of a tool's time, in steps of training. ``failing``: share of the sessions."""

    regime: str
    task: str = "lookup"
    pause: float = 1.0
    learning_rate: float = 3e-3
    failing: float = 0.0
    failures: Failures = "replaced"
    seed: int = 0
    steps: int = 60

    @property
    def name(self) -> str:
        failures = f"-{self.failures.replace(' ', '')}{self.failing:g}" if self.failing else ""
        return f"{self.task}-{self.regime}-p{self.pause:g}-lr{self.learning_rate:g}{failures}-s{self.seed}"

    @property
    def specification(self) -> dict[str, Any]:
        """As it reads in a result."""
        return asdict(self)

    def pause_of(self, session: str, turn: int) -> float:
        """Lognormal with a sigma of 1, as in the simulator. The same in every regime."""
        return self.pause * Random(f"pause {self.seed} {session} {turn}").lognormvariate(-0.5, 1.0)

    def fails_after(self, session: str) -> int | None:
        """The turn after which the session's environment fails, if it does."""
        draw = Random(f"failure {self.seed} {session}")
        return draw.randrange(len(TURN_TOKENS)) if draw.random() < self.failing else None


PAUSES: Final = (0.1, 1.0, 3.0, 10.0)
FAILING: Final = (0.05, 0.15)
FAILED_REGIMES: Final = ("pinned-2", "kept")
RATES: Final = (1e-2, 3e-3)  # the policy moves about as far in a step as at the map's 0.003 and 0.001
MAIN: Final = Cell("pinned-1", pause=1.0, learning_rate=RATES[0], steps=40)
RECALL: Final = replace(MAIN, task="recall", steps=50)
SLOWER: Final = replace(MAIN, learning_rate=RATES[1], steps=50)
SEEDS: Final = 3
MAIN_SEEDS: Final = 10


def cells() -> Iterator[Cell]:
    """Yields the runs seed by seed, so that a sweep that is cut short has as many of each regime."""
    pauses = [replace(MAIN, pause=pause) for pause in (10.0, 3.0, 0.1)]
    failed = [replace(MAIN, failing=failing, failures=how) for failing in FAILING for how in get_args(Failures)]
    for seed in range(MAIN_SEEDS):
        for like in (MAIN, *pauses, RECALL, *failed, SLOWER) if seed < SEEDS else (MAIN,):
            for regime in FAILED_REGIMES if like in failed else REGIMES:
                yield replace(like, regime=regime, seed=seed)


@dataclass(frozen=True, slots=True)
class Task:
    """What one prompt's tool answers after each turn but the last, and the letters' class that each place should have.

    ``lookup``: the tool names a class, and again the same one; the policy writes letters of it. ``recall``: it names
    two, and the last turn is to have three letters of the second one, then three of the first.
    """

    answers: tuple[int, ...]
    wanted: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, name: str, prompt: str) -> "Task":
        draw = Random(prompt)
        first, second = draw.randrange(CLASSES), draw.randrange(CLASSES)
        if name == "lookup":
            second = first
        half = TURN_TOKENS[2] // 2
        return cls((first, second), ((first,) * TURN_TOKENS[1], (second,) * half + (first,) * half))

    def answer(self, turn: int) -> list[int]:
        return [TOOL, NAMES_FROM + self.answers[turn]]

    def reward(self, turns: Sequence[Sequence[int]]) -> float:
        """``turns``: the tokens sampled in each."""
        right = [
            token // LETTERS == wanted
            for sampled, classes in zip(turns[1:], self.wanted, strict=True)
            for token, wanted in zip(sampled, classes, strict=True)
        ]
        return fmean(right)
