"""Environments of the package gymnasium whose observations and actions are texts.

Source: Gymnasium 1.4's documentation, "Env" and "Text".
"""

import asyncio
import importlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from dora.agents.environment.protocol import End, Messages, Reply, Task, first_message
from dora.agents.environment.spec import OPTION, one_line, seed_of
from dora.errors import InvalidValue

Result = TypeVar("Result")
PREFIX: Final = "gymnasium:"
_SEED: Final = "seed"  # fields of a prompt's verifier
_OPTIONS: Final = "options"


class TextEpisode:
    """One episode. The environment lives in a thread of its own, so that its calls block nothing else."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, "gymnasium")
        self._env: Any = None

    async def reset(self, task: Task) -> Messages:
        seed, options = task.verifier.get(_SEED, seed_of(task.prompt_id)), task.verifier.get(_OPTIONS)
        if type(seed) is not int or not 0 <= seed < 1 << 64:
            raise InvalidValue(f"verifier.{_SEED}", seed, "a whole number from 0 on")
        self._env = await self._run(self._make)
        observation, _ = await self._run(partial(self._env.reset, seed=seed, options=options))
        if not isinstance(observation, str):
            raise InvalidValue("reset(): observation", observation, "a text")
        return first_message(task, observation)

    async def step(self, reply: Reply) -> End | tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Takes the reply as the action. One outside of the action space ends the episode without a further reward."""
        action = reply.text.strip()
        if not self._env.action_space.contains(action):
            return "the reply is not in the environment's action space", 0.0, False, True, {}
        return await self._run(partial(self._env.step, action))

    async def close(self) -> None:
        try:
            if self._env is not None:
                await self._run(self._env.close)
        finally:
            self._thread.shutdown(wait=False)

    async def _run(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def gymnasium_episodes(spec: str) -> Callable[[], TextEpisode]:
    """Returns a maker of episodes of ``gymnasium:ID``. Makes one environment to look at its spaces.

    Raises InvalidValue. ID may begin with a module that registers it, as in ``my_games:WordGame-v0``.
    """
    try:
        gymnasium: Any = importlib.import_module("gymnasium")
    except ImportError as error:
        allowed = f"used where the package gymnasium is installed: pip install 'gymnasium>=1.4' ({error})"
        raise InvalidValue(OPTION, spec, allowed) from error
    make = partial(gymnasium.make, spec.removeprefix(PREFIX))
    try:
        found: Any = make()
    except Exception as error:  # of the package, or of the environment's constructor
        raise InvalidValue(OPTION, spec, f"an environment that gymnasium can make ({one_line(error)})") from error
    spaces = {"observation": found.observation_space, "action": found.action_space}
    found.close()
    for name, space in spaces.items():
        if not isinstance(space, gymnasium.spaces.Text):
            allowed = f"one of texts: its {name} space is {type(space).__name__}, not gymnasium.spaces.Text"
            raise InvalidValue(OPTION, spec, allowed)
    return lambda: TextEpisode(make)
