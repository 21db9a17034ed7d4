"""Text to token ids with a model folder's own tokenizer and chat template; transformers and torch stay outside.

Whatever the folder stores about lengths (truncation, padding) does not touch prompts.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from jinja2 import Template, TemplateError

from dora.errors import InvalidValue
from dora.models import default_cache
from dora.prompts.export import exported
from dora.prompts.template import Messages, compiled_template, rendered


class ChatTokenizer:
    """The tokenizer of one Hugging Face folder. Same ids as transformers gives for the same folder.

    ``cache``: where what transformers made of the folder is kept; None: ``default_cache()``. Raises InvalidValue where
    ``folder`` has no tokenizer.json, or no tokenizer that can be loaded.
    """

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder = folder
        self._exported = exported(folder, default_cache() if cache is None else cache)
        self._tokenizer = self._exported.tokenizer

    @cached_property
    def largest_id(self) -> int:
        """The largest token id that has a token: some vocabularies have gaps."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text, with whatever special tokens this tokenizer puts around a text."""
        return tuple(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Messages) -> tuple[str, tuple[int, ...]]:
        """The text of a chat that waits for the assistant's answer, and its token ids."""
        text = self.render(messages)
        return text, tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def render(self, messages: Messages) -> str:
        """The chat template's text. Raises InvalidValue where the template is missing or refuses the messages.

        A template that shows the date shows that of this moment, as in transformers.
        """
        try:
            text = rendered(self._template, messages, self._exported.special_tokens)
            text.encode()
        except InvalidValue:
            raise
        except Exception as error:  # a template is a program: it may refuse, or fail in any way
            raise InvalidValue("messages", messages, f"what the chat template takes ({error})") from error
        return text

    def decode(self, token_ids: Sequence[int], special_tokens: bool = False) -> str:
        """The text of token ids, special tokens shown or left out."""
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
