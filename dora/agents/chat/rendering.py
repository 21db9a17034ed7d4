"""Token ids of a chat: those of a whole prompt, or those that follow a sampled answer.

History is never tokenised again, so new messages need the text that the template writes after an answer. The template
is rendered twice, with a mark in place of the last answer's text: once up to this answer, once with the new messages.
What follows the mark in the first text must be how the text after the mark begins in the second. The difference is
the template's own suffix, whatever it does to earlier messages, such as dropping their reasoning.

Source: "bridging" in renderers 0.1 (``bridge_to_next_turn``); TRL's ``get_training_chat_template``, which demands the
same property of a template.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol

from dora.agents.chat.message import FORMS, Form, Message, for_template, text_of
from dora.errors import DoraError, InvalidValue

_MARK: Final = "dora7mark7of7an7answer"  # a chat that has it itself is not proven
_TAIL_TOKENS: Final = 8  # sampled tokens before a suffix that may decide how its first characters are tokenised
_USUAL_CHARACTERS: Final = 4  # of a token: a longer text is tokenised slice by slice first
_SLICE: Final = 1 << 15  # characters
_CUT_TOKENS: Final = 16  # that a slice may have too many, as its ends cut tokens
OPENS_THINKING: Final = "<think>"

Tools = Sequence[Mapping[str, Any]]


class Tokenizer(Protocol):
    """The methods of :class:`dora.prompts.ChatTokenizer` that a renderer needs."""

    @property
    def longest_token(self) -> int: ...
    def encode(self, text: str, special_tokens: bool = True) -> tuple[int, ...]: ...
    def decode(self, token_ids: Sequence[int], special_tokens: bool = False) -> str: ...
    def render(
        self, messages: Any, *, tools: Any = None, answer: bool = True, options: Mapping[str, Any] | None = None
    ) -> str: ...


class TooLong(InvalidValue):
    """The text has no room in any context."""

    @classmethod
    def of(cls, length: str, context_tokens: int) -> "TooLong":
        allowed = f"less: the context has workers.max_model_len_tokens {context_tokens}"
        return cls("prompt", length, allowed, "is too long")


class Unproven(DoraError):
    """New messages cannot be appended to what was sampled. ``reason`` is ``template`` or ``boundary``."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the chat's suffix is not proven: {reason}")


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    token_ids: tuple[int, ...]

    @property
    def is_thinking(self) -> bool:
        return self.text.rstrip().endswith(OPENS_THINKING)


class ChatRenderer:
    """The chat template of one model. ``end_token_ids`` end a response of the model.

    Texts longer than ``context_tokens`` raise TooLong, after no more work than those that fit. 0 means not known.
    """

    def __init__(self, tokenizer: Tokenizer, end_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(end_token_ids)
        self.context_tokens = 0

    def prompt(self, messages: Sequence[Message], tools: Tools | None, options: Mapping[str, Any]) -> Rendered:
        """Returns a chat up to the next answer. Raises InvalidValue if the template refuses it or omits something."""
        self._check(messages, messages, tools, options)
        text = self._render(messages, tools, options, answer=True)
        return Rendered(text, self.encode(text))

    def encode(self, text: str, *, special_tokens: bool = False) -> tuple[int, ...]:
        """Raises TooLong."""
        most = self.context_tokens
        if most and len(text) > _USUAL_CHARACTERS * most:
            self.check_length(len(text))
            tokens = 0
            for at in range(0, len(text), _SLICE):
                tokens += len(self._tokenizer.encode(text[at : at + _SLICE], special_tokens=False)) - _CUT_TOKENS
                if tokens > most:
                    raise TooLong.of(f"{len(text):,} characters", most)
        return self._tokenizer.encode(text, special_tokens=special_tokens)

    def check_length(self, characters: int) -> None:
        """Raises TooLong for a text that has too many characters, whatever they are."""
        if self.context_tokens and characters > self.context_tokens * self._tokenizer.longest_token:
            raise TooLong.of(f"{characters:,} characters", self.context_tokens)

    def check_tokens(self, tokens: int, max_tokens: int) -> None:
        """Raises TooLong for a prompt that leaves no room for an answer of ``max_tokens`` (0 for any)."""
        if 0 < self.context_tokens < tokens + max(1, max_tokens):
            answer = f", with max_tokens {max_tokens:,}" if max_tokens else ""
            raise TooLong.of(f"{tokens:,} tokens{answer}", self.context_tokens)

    def _check(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Tools | None, options: Mapping[str, Any]
    ) -> None:
        """Raises TooLong, and InvalidValue for new messages or tools that the template leaves out. To find these, it
        renders a mark in place of each.
        """
        texts = [text_of(each.get("content")) for each in messages]
        self.check_length(sum(map(len, texts)))
        first = len(messages) - len(new)
        marks = {
            place: f"{_MARK}{place}x"
            for place, each in enumerate(messages)
            if place >= first and each["role"] != "assistant" and texts[place].strip()
        }
        marked = [{**each, "content": marks.get(place, each.get("content"))} for place, each in enumerate(messages)]
        named = [
            {**each, "function": {**each["function"], "name": f"{_MARK}t{n}x"}} for n, each in enumerate(tools or ())
        ]
        try:
            text = self._render(marked, named, options, answer=True)
        except InvalidValue:
            return  # it looks at what they say: the chat itself is rendered, or refused
        for place, mark in marks.items():
            if mark not in text:
                why = f"is not shown by the model's chat template (role {messages[place]['role']})"
                raise InvalidValue(f"messages[{place}]", texts[place][:80], "left out, or of another role", why)
        for each, given in zip(named, tools or (), strict=True):
            if each["function"]["name"] not in text:
                why = "is not shown by the model's chat template"
                raise InvalidValue("tools", given["function"]["name"], "left out: the policy would not see it", why)

    def suffix(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Tools | None,
        options: Mapping[str, Any],
        sampled: Sequence[int],
    ) -> Rendered:
        """Returns what the template writes after the last answer of ``history``, up to the answer to ``new``.

        ``sampled`` has the tokens of that answer, with the token that ended it. Raises Unproven.
        """
        self._check([*history, *new], new, tools, options)
        text = self._suffix_text(history, new, tools, options, self._end_text(sampled))
        return Rendered(text, self._suffix_tokens(text, sampled))

    def following(self, prompt: Rendered, token_ids: Sequence[int], sampled: Sequence[int]) -> Rendered | None:
        """Returns what a prompt has after the text of ``token_ids``, of which ``sampled`` are the last; None if it does
        not begin with that text.
        """
        text = self._tokenizer.decode(token_ids, special_tokens=True)
        if not prompt.text.startswith(text) or len(prompt.text) == len(text):
            return None
        rest = prompt.text[len(text) :]
        try:
            return Rendered(rest, self._suffix_tokens(rest, sampled))
        except Unproven:
            return None

    def _suffix_text(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Tools | None,
        options: Mapping[str, Any],
        end: str,
    ) -> str:
        for marked in _marked(history[-1]):
            found = self._around_mark([*history[:-1], marked], new, tools, options)
            if found is None:
                continue
            closing, rest = found
            if end:
                return self._after_end(closing, rest, end)
            if marked.get("tool_calls"):  # the answer was cut off: the policy has not closed its calls
                plain = [*history[:-1], {"role": "assistant", "content": _MARK}]
                found = self._around_mark(plain, (), tools, options)
                if found is None:
                    break
                closing = found[0]
            return closing + rest
        raise Unproven("template")

    def _around_mark(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Tools | None,
        options: Mapping[str, Any],
    ) -> tuple[str, str] | None:
        """Returns what the template writes after the mark to close the answer, and what it writes for ``new``.

        None if it refuses this form of the answer, or does not begin the second text as the first. An end that it
        writes only after the chat's last answer may be missing from the second.
        """
        try:
            closing = _after_mark(self._render(history, tools, options, answer=False))
            after = _after_mark(self._render([*history, *new], tools, options, answer=True)) if new else closing
        except InvalidValue:
            return None
        if closing is None or after is None:
            return None
        if after.startswith(closing):
            return closing, after[len(closing) :]
        return ("", after) if closing.strip() in self._end_texts else None

    def _after_end(self, closing: str, rest: str, end: str) -> str:
        for text in (end, *self._end_texts):  # the policy may end with another token than the template
            _, found, more = closing.partition(text)
            if found:
                return more + rest
        begun = rest.lstrip()  # some templates let the mark of the next role end an answer
        return begun.removeprefix(end) if begun.startswith(end) else rest

    def _suffix_tokens(self, text: str, sampled: Sequence[int]) -> tuple[int, ...]:
        """Tokenises a suffix that begins at a token's boundary. Raises Unproven if none does."""
        encode, decode = self.encode, self._tokenizer.decode
        tail = decode(sampled[-1:] if self._is_ended(sampled) else sampled[-_TAIL_TOKENS:], special_tokens=True)
        before, both = encode(tail), encode(tail + text)
        if both[: len(before)] == before:
            return both[len(before) :]
        alone = encode(text)  # a token would reach over the boundary: it is split there
        if decode(alone, special_tokens=True) != text and decode(both, special_tokens=True) == tail + text:
            raise Unproven("boundary")
        return alone

    def _is_ended(self, sampled: Sequence[int]) -> bool:
        return bool(sampled) and sampled[-1] in self._ends

    def _end_text(self, sampled: Sequence[int]) -> str:
        return self._tokenizer.decode(sampled[-1:], special_tokens=True) if self._is_ended(sampled) else ""

    def _render(
        self, messages: Sequence[Message], tools: Tools | None, options: Mapping[str, Any], *, answer: bool
    ) -> str:
        chat = [for_template(message, self._form) for message in messages]
        return self._tokenizer.render(chat, tools=tools or None, answer=answer, options=options)

    @cached_property
    def _end_texts(self) -> tuple[str, ...]:
        return tuple(self._tokenizer.decode([end], special_tokens=True) for end in sorted(self._ends))

    @cached_property
    def _form(self) -> Form:
        """Returns the first form in which the template writes a call's arguments, or any form if it knows no calls."""
        function = {"name": "f", "arguments": {"mark": _MARK}}
        call = {"id": "abcdefghi", "type": "function", "function": function}  # Mistral's templates ask for 9 letters
        chat: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
        tool = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object"}}}
        for form in FORMS:
            messages = [for_template(message, form) for message in chat]
            with suppress(InvalidValue):
                if _MARK in self._tokenizer.render(messages, tools=[tool], answer=False):
                    return form
        return FORMS[0]


def _marked(answer: Message) -> Iterator[Message]:
    """Yields forms of an answer in which a mark is its last text. The first that a template accepts is used."""
    calls = answer.get("tool_calls")
    if calls:
        last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {"mark": _MARK}}}
        marked = [*calls[:-1], last]
        yield {"role": "assistant", "content": answer.get("content"), "tool_calls": marked}
        yield {"role": "assistant", "content": _MARK, "tool_calls": calls}
    yield {"role": "assistant", "content": _MARK}


def _after_mark(text: str) -> str | None:
    parts = text.split(_MARK)
    return parts[1] if len(parts) == 2 else None
