"""Converts text to token ids with a model folder's tokenizer and chat template, without transformers or torch.

The folder's settings of truncation and padding do not affect prompts.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError

from dora.errors import InvalidValue
from dora.models import default_cache
from dora.prompts.export import exported
from dora.prompts.template import Messages, compiled_template, rendered


class ChatTokenizer:
    """The tokenizer of a Hugging Face folder. Gives the same ids as transformers.

    ``cache`` is the folder of exported tokenizers, by default ``default_cache()``. Raises InvalidValue if ``folder``
    has no tokenizer.json, or a tokenizer that cannot be loaded.
    """

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder = folder
        self._exported = exported(folder, default_cache() if cache is None else cache)
        self._tokenizer = self._exported.tokenizer

    @cached_property
    def largest_id(self) -> int:
        """The largest token id in use: some vocabularies have gaps."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def longest_token(self) -> int:
        """The number of characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @property
    def chat_template(self) -> str:
        """The text of the chat template, empty if there is none."""
        text = self._exported.chat_template
        return text if isinstance(text, str) else ""

    def encode(self, text: str, special_tokens: bool = True) -> tuple[int, ...]:
        """Encodes text, with the special tokens that the tokenizer adds, or without. Other threads run meanwhile."""
        return tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids)

    def encode_chat(self, messages: Messages) -> tuple[str, tuple[int, ...]]:
        """Returns a chat's text up to the assistant's next answer, and its token ids."""
        text = self.render(messages)
        return text, self.encode(text, special_tokens=False)

    def render(
        self,
        messages: Messages,
        *,
        tools: Messages | None = None,
        answer: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders the chat template. Raises InvalidValue if it is missing or refuses the messages.

        A template with a date uses the current one, as in transformers. The other arguments are those of
        :func:`dora.prompts.template.rendered`.
        """
        try:
            special_tokens = self._exported.special_tokens
            text = rendered(self._template, messages, special_tokens, tools=tools, answer=answer, options=options)
            text.encode()
        except InvalidValue:
            raise
        except Exception as error:  # a template is a program, which may fail in any way
            raise InvalidValue("messages", messages, f"messages that the chat template accepts ({error})") from error
        return text

    def decode(self, token_ids: Sequence[int], special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=not special_tokens)

    @cached_property
    def _template(self) -> Template:
        text = self._exported.chat_template
        if not isinstance(text, str):
            raise InvalidValue(
                "model", str(self.folder), "a model whose tokenizer has a chat template", why="takes no messages"
            )
        try:
            return compiled_template(text)
        except TemplateError as error:
            raise InvalidValue("chat_template", str(self.folder), f"a valid Jinja template ({error})") from error
