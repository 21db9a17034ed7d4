"""Servers of OpenEnv for tests, run by its own environment: ``python openenv_servers.py NAME FD``."""

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str


class Number(Environment):
    """The policy guesses a number, which the seed gives."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self._state = State()

    def reset(self, seed: int = 0, episode_id: str = "", most: int = 100, **kwargs: Any) -> Hint:
        self.number = seed % most + 1
        self._state = State(episode_id=episode_id)
        return Hint(hint=f"1 to {most}")

    def step(self, action: Guess, **kwargs: Any) -> Hint:
        if action.number < 0:
            raise RuntimeError("a broken environment")
        self._state.step_count += 1
        found = action.number == self.number
        metadata = {"distance": abs(action.number - self.number), "name": "x"}
        return Hint(hint="found" if found else "no", done=found, reward=1.0 if found else 0.25, metadata=metadata)

    @property
    def state(self) -> State:
        return self._state


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tools")

        @server.tool
        def add(numbers: list[int]) -> str:
            """Adds numbers."""
            return f"the sum is {sum(numbers)}"

        super().__init__(server)

    def reset(self, **kwargs: Any) -> Hint:
        return Hint(hint="add")

    def _step_impl(self, action: Action, **kwargs: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    made = {"number": (Number, Guess, Hint), "tools": (Tools, CallToolAction, CallToolObservation)}[sys.argv[1]]
    app = create_app(*made, env_name=sys.argv[1], max_concurrent_envs=2)
    uvicorn.run(app, fd=int(sys.argv[2]), log_level="warning")
