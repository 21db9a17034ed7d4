"""Conversations: a policy writes as a template's model does, and a client repeats what it was told, in its own form."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dora.agents.chat.message import Message
from dora.agents.chat.rendering import ChatRenderer
from dora.agents.chat.reply import ReplyParser
from dora.agents.chat.text import TextStream
from dora.agents.chat.tool_calls import format_of
from dora.agents.chat.tree import Ask, SessionTree
from dora.errors import InvalidValue
from tests.unit.chat_templates import ADDED, STYLES, Style

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "description": "x", "parameters": {"type": "object", "properties": {}}},
    }
]
WORDS = [
    "The",
    " answer",
    " is",
    " 42",
    ".",
    "\n",
    "\n\n",
    " ünïcode",
    " 日本",
    "  ",
    "}",
    "###",
    " <b>",
    '"',
    " it's",
    "\n#",
]
VALUES: list[Any] = [True, False, None, 1, 2.50, -0.0, "text", 'ü\n"quoted"', [1, "a"], {"b": {"c": False}}, "True"]


@cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE whose merges reach over what templates write between messages."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    corpus = [
        ".\n\n### Instruction:\nThe answer",
        '"}}\n</tool_call>',
        " it's\n\n###",
        "}\n\n#",
        " 42.\n### Response:\n",
    ] * 50
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    found.train_from_iterator(corpus, trainer)
    found.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ADDED])
    found.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>", "<tool_call>")])
    return found


class Chat:
    """A tokenizer with a template of ``STYLES``, as ChatTokenizer is."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self._tokenizer = tokenizer()

    @property
    def longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str, special_tokens: bool = True) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, token_ids: Sequence[int], special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=not special_tokens)

    def render(
        self, messages: Any, *, tools: Any = None, answer: bool = True, options: Mapping[str, Any] | None = None
    ) -> str:
        try:
            return self.style.render(messages, tools, answer, options)
        except Exception as error:
            raise InvalidValue("messages", messages, f"accepted ({error})") from error

    def ends(self) -> tuple[int, ...]:
        return tuple(self.encode(end)[0] for end in (self.style.end, *self.style.other_ends))


def renderer(name: str) -> tuple[Chat, ChatRenderer]:
    chat = Chat(STYLES[name])
    return chat, ChatRenderer(chat, chat.ends())


class Conversation:
    """One session: ``exchange`` is one request of the client and its reply."""

    def __init__(self, name: str, seed: int) -> None:
        self.chat, self.renderer = renderer(name)
        self.style = STYLES[name]
        self.tree = SessionTree(self.renderer)
        self.random = random.Random(seed)
        self.tools = TOOLS if self.style.call and re.search(r"\btools\b", self.style.template) else None
        self.parses = format_of(self.style.template) if self.style.call else None
        self.messages: list[Message] = []
        self.tokens: list[int] = []  # of the branch, as a service has them
        self.calls = 0

    def user(self) -> None:
        """The client's next message, or the results of the calls of the last answer."""
        calls = self.messages[-1].get("tool_calls") if self.messages else None
        for call in calls or ():
            result = json.dumps(self.random.choice(VALUES))
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not calls:
            self.messages.append({"role": "user", "content": self.text()})

    def text(self) -> str:
        return "".join(self.random.choices(WORDS, k=self.random.randint(1, 8)))

    def exchange(self) -> Ask:
        self.user()
        ask = self.tree.ask(self.messages, self.tools)
        assert ask.inputs and not ask.reason and ask.branch == 0
        sampled = self.sample()
        stream = TextStream(self.chat, special_tokens=True)
        text = stream.push(sampled) + stream.end()
        for end in (self.style.end, *self.style.other_ends):
            text = text.removesuffix(end)
        self.calls += 1
        parser = ReplyParser(self.parses, is_thinking=ask.is_thinking, new_id=lambda: f"call{self.calls:05}")
        reply = parser.parse(text)
        message = reply.message()
        self.tree.answered(ask, sampled, message)
        self.tokens += [*ask.inputs, *sampled]
        assert self.tree.branches[0].token_ids == self.tokens
        self.messages.append(self.repeated(message))
        return ask

    def sample(self) -> list[int]:
        """An answer in the style of the model, in tokens that its tokenizer would not choose."""
        text = self.text()
        if self.style.think and (self.style.is_thinking or self.random.random() < 0.7):
            text = self.style.think.format(self.text()) + text
        if self.style.call and self.random.random() < 0.5:
            text = (
                text
                if self.random.random() < 0.3 and "{name}" not in self.style.call
                else text[: len(text) if self.style.think else 0]
            ) + self.call()
        pieces, at = [], 0
        while at < len(text):
            size = self.random.choice((1, 2, 3, 5, 8, 40))
            pieces.append(text[at : at + size])
            at += size
        sampled = [token_id for piece in pieces for token_id in self.chat.encode(piece, special_tokens=False)]
        ends = self.chat.ends()
        if self.random.random() < 0.1:
            return sampled  # its length has ended it
        return [*sampled, self.random.choice(ends) if self.random.random() < 0.2 else ends[0]]

    def call(self) -> str:
        arguments = {f"a{n}": self.random.choice(VALUES) for n in range(self.random.randint(0, 3))}
        separators = self.random.choice(((", ", ": "), (",", ":"), (" , ", " : ")))
        written = json.dumps(arguments, ensure_ascii=self.random.random() < 0.5, separators=separators)
        if self.random.random() < 0.15:
            written = written[:-1]  # a call that is no JSON stays text
        parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items())
        call = '{"name": "look_up", "arguments": ' + written + "}"
        form = self.style.call
        return form.format(call=call, name="look_up", arguments=written, parameters=parameters)

    def repeated(self, message: Message) -> Message:
        """An answer as clients give it back."""
        found = json.loads(json.dumps(message))
        if self.random.random() < 0.5:
            found.pop("reasoning", None)
            found.pop("reasoning_content", None)
        found |= {"refusal": None, "annotations": []} if self.random.random() < 0.5 else {}
        for call in found.get("tool_calls", ()):
            if self.random.random() < 0.5:
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(arguments, indent=2, sort_keys=True)
        if isinstance(found.get("content"), str) and self.random.random() < 0.3:
            found["content"] = found["content"].strip()
        elif found.get("content") and self.random.random() < 0.3:
            found["content"] = [{"type": "text", "text": found["content"]}]
        return found
