"""The protocol of environments: what DORA calls, and what it passes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dora.agents.chat.message import checked_chat
from dora.agents.chat.reply import ToolCall
from dora.data.types import FinishReason
from dora.data.verdict import ALLOWED_REWARD, check_reward, finite
from dora.errors import InvalidValue

Messages = Sequence[Mapping[str, Any]]  # of the OpenAI API


@dataclass(frozen=True, slots=True)
class Task:
    """The subject of a session. ``text`` is the prompt of the source, ``verifier`` what its reward function gets. No
    step trains on it if it ``is_evaluation``.
    """

    prompt_id: str
    task_id: str = ""
    text: str = ""
    verifier: Mapping[str, Any] = field(default_factory=dict)
    session_id: str = ""
    is_evaluation: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the policy. ``text`` has neither the reasoning nor the well-formed tool calls."""

    turn: int  # from 0
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The end of a session. If ``reward`` is None, the service's reward function scores it.

    ``turn_rewards`` are those of single turns, by ``Reply.turn``; without a reward of the session, they add up. ``log``
    is a line for the record. Components and log are cut to the limits of :mod:`dora.data.verdict`.
    """

    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    log: str = ""


class Environment(Protocol):
    """An instance drives one session.

    It may also have ``tools``, as in the OpenAI API; ``async prepare()``, which is called before ``reset`` and, in a
    warm pool, before there is a session; ``async close()``; and ``deterministic = True`` if the same task and replies
    always give the same messages and the same end.
    """

    async def reset(self, task: Task) -> Messages:
        """Returns the chat with which the session begins."""
        ...

    async def step(self, reply: Reply) -> Messages | End | tuple[str | Messages, float, bool, bool, Mapping[str, Any]]:
        """Returns new messages, the end, or Gymnasium's (observation, reward, terminated, truncated, info)."""
        ...


class Steps:
    """The results of one session's steps. The rewards of five-tuples are the turns' rewards, and add up."""

    def __init__(self) -> None:
        self._rewards: dict[int, float] = {}
        self._components: Mapping[str, float] = {}  # of the last step's info

    def cut(self, reason: str) -> End:
        """Returns the end of a session whose environment has not ended it."""
        reward = sum(self._rewards.values()) if self._rewards else None
        return End(reward, self._components, self._rewards, reason)

    def read(self, result: object, turn: int) -> list[dict[str, Any]] | End:
        """Returns new messages, or the end. Raises InvalidValue for any other result."""
        if isinstance(result, End):
            return _checked_end(result, turn)
        if not isinstance(result, tuple):
            return new_messages(result, "step()")
        if len(result) != 5:
            allowed = "5: (observation, reward, terminated, truncated, info), or a list of messages"
            raise InvalidValue("step(): values of the tuple", len(result), allowed)
        observation, reward, terminated, truncated, info = result
        self._rewards[turn] = _reward(reward, "step(): reward")
        if isinstance(info, Mapping) and isinstance(info.get("components"), Mapping):
            self._components = info["components"]
        if terminated or truncated:
            return self.cut(str(observation))
        if isinstance(observation, list):
            return new_messages(observation, "step(): observation")
        if not isinstance(observation, str):
            raise InvalidValue("step(): observation", observation, "a text, or a list of messages")
        return [{"role": "user", "content": observation}]


def first_message(task: Task, observation: str) -> list[dict[str, Any]]:
    """Returns the chat with which the session of a package's environment begins: the prompt, then the observation."""
    return [{"role": "user", "content": "\n\n".join(each for each in (task.text, observation) if each)}]


def new_messages(value: object, of: str) -> list[dict[str, Any]]:
    """Returns the messages of ``reset`` or ``step``. Raises InvalidValue."""
    if not isinstance(value, list | tuple) or not value:
        raise InvalidValue(of, value, "a list of at least one message {role, content}, or an End of step()")
    return checked_chat([dict(each) if isinstance(each, Mapping) else each for each in value], of)


def _checked_end(end: End, turn: int) -> End:
    if end.reward is not None:
        _reward(end.reward, "End.reward")
    for number, value in end.turn_rewards.items():
        if type(number) is not int or not 0 <= number <= turn:
            raise InvalidValue("End.turn_rewards: turn", number, f"a whole number from 0 to {turn}")
        _reward(value, f"End.turn_rewards[{number}]")
    return end


def _reward(value: Any, field: str) -> float:
    number = finite(value)
    if number is None:
        raise InvalidValue(field, value, ALLOWED_REWARD)
    check_reward(field, number)
    return number
