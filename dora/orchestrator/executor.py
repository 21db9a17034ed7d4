"""Carries out the core's commands: each part of the service has handlers for those that concern its own state.

A command that has an outcome gets it as exactly one event. A background task of its handler posts that event (prompts
drawn, a response scored), or the worker that received the command sends it.
"""

from collections.abc import Callable
from typing import Any

from dora.core import commands as do
from dora.orchestrator.rollout.core import Handlers


class Executor:
    """Holds the handlers of all parts, by command."""

    def __init__(self) -> None:
        self._handler_of: dict[type, Callable[[Any], object]] = {}

    def register(self, handlers: Handlers) -> None:
        """Adds the handlers of one part. No command may have two."""
        assert self._handler_of.keys().isdisjoint(handlers), "a command has two handlers"
        self._handler_of.update(handlers)

    def carry_out(self, command: do.Command) -> None:
        """Runs one command without waiting; slow work continues in the background. An exception here is a bug."""
        self._handler_of[type(command)](command)
