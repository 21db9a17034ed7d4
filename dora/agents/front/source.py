"""What the front needs of a service."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dora.data.types import FinishReason


@dataclass(frozen=True, slots=True)
class LiveVersions:
    """The served model and versions. ``context_tokens`` is 0 if not known; ``sampling`` has the default parameters."""

    model: str
    newest: int
    versions: tuple[int, ...]
    context_tokens: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampled:
    """More tokens of a turn. While more follow, ``finish_reason`` is None. ``stop`` is the stop string that ended it.
    ``prompt_logprobs`` come with the first tokens, if asked for: those of all tokens before the turn but the first.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None = None
    stop: str = ""
    prompt_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionOpening:
    """Sessions to open: ``size`` of one group. ``version`` None is the newest that the window allows."""

    group: str
    size: int = 1
    version: int | None = None
    sampling: Mapping[str, Any] | None = None  # as dora.data.sampling.PARAMETERS; None: the service's
    task: str = ""
    tags: Mapping[str, str] | None = None
    verifier: Mapping[str, Any] | None = None  # for the service's reward function


class SessionHandle(Protocol):
    """One session of a service. Its turns follow each other in time, whatever branch each continues."""

    @property
    def session_id(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def capability(self) -> bytes:
        """A secret of the service and its fronts, the same for all of them: a session's key follows from it."""
        ...

    @property
    def sampling(self) -> Mapping[str, Any]:
        """The parameters of its opening."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens of the present branch up to the end of the last turn, if another front began the session."""
        ...

    @property
    def last(self) -> Sampled:
        """The last turn that has ended."""
        ...

    @property
    def turn(self) -> int:
        """The number of the last turn that has ended."""
        ...

    @property
    def given_name(self) -> str:
        """The name of what gave that turn's tokens, if another front began the session."""
        ...

    @property
    def is_over(self) -> bool:
        """Returns whether the session had ended when it was found."""
        ...

    def stream(
        self,
        token_ids: Sequence[int],
        *,
        after_turn: int | None,
        max_tokens: int = 0,
        name: str = "",
        sampling: Mapping[str, Any] | None = None,
        prompt_logprobs: bool = False,
    ) -> AsyncGenerator[Sampled]:
        """Gives tokens, and yields the turn that they begin. They follow all tokens of turn ``after_turn``; if it is
        None, they are a prompt, with which a branch begins. ``sampling`` has this turn's parameters that differ from
        the session's. ``prompt_logprobs`` asks for those of all tokens before the turn.

        Raises InvalidValue, Conflict, NotFound, LimitExceeded.
        """
        ...

    async def end(
        self,
        reward: float | None = None,
        *,
        components: Mapping[str, float] | None = None,
        turn_rewards: Mapping[int, float] | None = None,
        log: str = "",
    ) -> None: ...
    async def give_up(self, reason: str) -> None: ...


class SessionSource(Protocol):
    async def live(self) -> LiveVersions:
        """Raises ServiceUnavailable."""
        ...

    async def find(self, group: str, size: int) -> Sequence[SessionHandle]:
        """Returns the sessions of a group that any front has opened, each at the end of its turn under way.

        Raises NotFound if none was opened or a step has trained on it, Conflict for another size, LimitExceeded if a
        turn takes long or the window is full for long, ServiceUnavailable.
        """
        ...

    async def find_opened(self, session_id: str) -> SessionHandle:
        """Returns a session of a group that any front has opened, at the end of its turn. Raises as ``find``."""
        ...

    async def open(self, opening: SessionOpening) -> Sequence[SessionHandle]:
        """Returns once the window has admitted the sessions. Raises LimitExceeded if it is full for long, Conflict for
        a version that admits no new group, ServiceUnavailable.
        """
        ...

    async def withdraw(self, group: str, reason: str) -> None:
        """Cancels a group that an opening has named, if there is one and no step has it. Raises ServiceUnavailable."""
        ...
