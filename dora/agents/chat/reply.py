"""A reply's text as reasoning, content and tool calls, whole or piece by piece."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dora.agents.chat.tool_calls import FoundCall, FoundCalls, ToolFormat, Tools

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of a reply. ``arguments`` is a JSON object, as text."""

    id: str
    name: str
    arguments: str

    def value(self) -> Any:
        return json.loads(self.arguments)

    def message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ChatReply:
    """An answer for a client. ``reasoning`` is None if it has none."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """Returns it as a message of the OpenAI API. Clients read the reasoning under either of two names."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            found["reasoning"] = found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["content"] = self.content or None
            found["tool_calls"] = [call.message() for call in self.tool_calls]
        return found


@dataclass(frozen=True, slots=True)
class Piece:
    content: str = ""
    reasoning: str = ""


class ReplyParser:
    """Parses one reply. If ``tools`` is None, no text is a call. ``offered`` has the tools.

    ``is_thinking`` says that the prompt has opened the reasoning, ``is_plain`` that all text is content. ``new_id``
    names a call.

    The pieces of :meth:`push` and :meth:`end` together are the texts of the reply. Text that may be a call is kept
    until the end.
    """

    def __init__(
        self,
        tools: ToolFormat | None = None,
        offered: Tools = (),
        *,
        is_thinking: bool = False,
        is_plain: bool = False,
        new_id: Callable[[], str] = lambda: "",
    ) -> None:
        self._tools = tools
        self._offered = offered
        self._is_thinking = is_thinking
        self._is_plain = is_plain
        self._new_id = new_id
        self._text = ""
        self._sent = Piece()

    def parse(self, text: str) -> ChatReply:
        reasoning, content = self._split(text)
        found = FoundCalls(content, ()) if self._tools is None else self._tools.find(content, self._offered)
        return ChatReply(found.content, reasoning, tuple(map(self._named, found.calls)))

    def push(self, text: str) -> Piece:
        """Returns the part of the text so far that no later text can change."""
        self._text += text
        if self._is_plain:
            return self._unsent(ChatReply(self._text))
        reasoning, content = self._split(self._text)
        if reasoning is not None and not self._has_closed():
            reasoning = _before(reasoning, CLOSE)
        if reasoning is None and not self._is_thinking and OPEN.startswith(self._text.lstrip()[: len(OPEN)]):
            content = ""  # it may yet be reasoning
        if self._tools is not None:
            content = self._before_call(content, self._tools)
        return self._unsent(ChatReply(content, reasoning))

    def end(self) -> tuple[Piece, ChatReply]:
        """Returns the rest of the text, and the whole reply."""
        reply = self.parse(self._text)
        return self._unsent(reply), reply

    def _unsent(self, reply: ChatReply) -> Piece:
        content, reasoning = self._sent.content, self._sent.reasoning
        new = Piece(reply.content[len(content) :], (reply.reasoning or "")[len(reasoning) :])
        self._sent = Piece(content + new.content, reasoning + new.reasoning)
        return new

    def _split(self, text: str) -> tuple[str | None, str]:
        if self._is_plain:
            return None, text
        if not self._is_thinking:
            if not text.lstrip().startswith(OPEN):
                return None, text
            text = text.lstrip().removeprefix(OPEN)
        reasoning, _, content = text.partition(CLOSE)
        return reasoning.lstrip("\n"), content.lstrip("\n")

    def _has_closed(self) -> bool:
        return CLOSE in self._text

    @staticmethod
    def _before_call(content: str, tools: ToolFormat) -> str:
        if tools.only_first:
            begin = content.lstrip()
            may_be = any(begin.startswith(mark) or mark.startswith(begin) for mark in tools.marks)
            return "" if may_be else content
        for mark in tools.marks:
            content = content.partition(mark)[0] if mark in content else _before(content, mark)
        return content.rstrip()  # spaces before a call are no content

    def _named(self, call: FoundCall) -> ToolCall:
        return ToolCall(self._new_id(), call.name, json.dumps(call.arguments, ensure_ascii=False))


def _before(text: str, mark: str) -> str:
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return text[:-length]
    return text
