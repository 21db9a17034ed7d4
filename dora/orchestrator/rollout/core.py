"""The core as the parts of a service use it."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeAlias

from dora.core import events as on
from dora.core.state import State

Handlers: TypeAlias = Mapping[type, Callable[[Any], object]]  # by command: who carries it out


class Core(Protocol):
    """Hands events to the core, and gives its state to read."""

    @property
    def state(self) -> State: ...

    def post(self, event: on.Event) -> None:
        """Hands an event to the core and carries out its commands. Must not be called while another one is handled."""

    def soon(self, action: Callable[[], None]) -> None:
        """Calls ``action`` after the present event."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> object:
        """Runs a coroutine in the background. A failure of it is a bug."""

    def now(self) -> float:
        """Returns seconds since the Unix epoch."""
