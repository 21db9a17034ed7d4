"""The served model, as the front knows it: its tokenizer, template and formats."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, TypeVar

from dora.agents.chat.rendering import ChatRenderer
from dora.agents.chat.reply import CLOSE, OPEN
from dora.agents.chat.tool_calls import ToolFormat, format_of
from dora.models.ends import end_token_ids
from dora.prompts.tokenizer import ChatTokenizer

RENDERING: Final = 2  # texts that are rendered or tokenised at once; others wait
T = TypeVar("T")


@dataclass(frozen=True)
class ServedModel:
    """A served model. ``ends`` are the tokens that end a response, ``tools`` the format of its tool calls."""

    tokenizer: ChatTokenizer
    ends: frozenset[int]
    tools: ToolFormat
    renderer: ChatRenderer = field(repr=False)
    folder: Path | None = None
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(RENDERING, "render"), repr=False)

    @property
    def reference(self) -> str:
        """The folder, from which a client on this host reads the tokenizer, or an empty text. Tinker's client takes a
        name of three parts for a variant of the model in the first two.
        """
        name = "" if self.folder is None else str(self.folder)
        return f"/{name}" if name.count("/") == 2 else name

    async def beside(self, work: Callable[[], T]) -> T:
        """Renders or tokenises beside the event loop. Work whose caller has left is not begun."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @cached_property
    def shows_special_tokens(self) -> bool:
        """Whether a mark of tool calls or reasoning is a special token, which a reply's text must then have."""
        marks = (*self.tools.marks, OPEN, CLOSE)
        encode, decode = self.tokenizer.encode, self.tokenizer.decode
        return any(not decode(encode(mark, special_tokens=False)).strip() for mark in marks)


def served_model(folder: Path, cache: Path | None = None, tools: ToolFormat | None = None) -> ServedModel:
    """Reads a model's folder. Raises InvalidValue if it has no tokenizer."""
    tokenizer, ends = ChatTokenizer(folder, cache), frozenset(end_token_ids(folder))
    renderer = ChatRenderer(tokenizer, ends)
    return ServedModel(tokenizer, ends, tools or format_of(tokenizer.chat_template), renderer, folder.absolute())
