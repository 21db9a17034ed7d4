"""Environments of gymnasium for tests: importing this module registers them."""

import string
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text


class Number(gymnasium.Env[str, str]):
    """The policy guesses a number, which the seed gives. A guess is worth 0.25, the right one 1."""

    observation_space = Text(200, charset=string.printable)
    action_space = Text(3, charset="0123456789")

    def __init__(self, largest: int = 100) -> None:
        self.largest = largest
        self.number = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        largest = (options or {}).get("largest", self.largest)
        self.number = int(self.np_random.integers(1, largest + 1))
        return f"Guess my number from 1 to {largest}. A hint: {self.number}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if int(action) == self.number:
            return "found", 1.0, True, False, {}
        return "too low" if int(action) < self.number else "too high", 0.25, False, False, {}


class Counted(gymnasium.Env[int, str]):
    observation_space = Discrete(3)
    action_space = Text(3)


gymnasium.register("Number-v0", Number, max_episode_steps=3)
gymnasium.register("Counted-v0", Counted)
