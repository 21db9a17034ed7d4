"""Text to token ids with a model folder's own tokenizer and chat template, without transformers or torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from dora.errors import InvalidValue

Messages = Sequence[Mapping[str, str]]


class ChatTokenizer:
    """The tokenizer of one Hugging Face folder. Same ids as transformers gives for the same folder.

    Raises InvalidValue where ``folder`` has no tokenizer.json or no usable chat template (when one is needed).
    """

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise InvalidValue("tokenizer", str(folder), "a folder with tokenizer.json")
        self.folder = folder
        self._tokenizer = Tokenizer.from_file(str(file))
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        self._special_tokens = _special_tokens(config)
        self._template_text = _template_text(folder, config)
        self._template: Template | None = None

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have a token, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text, with whatever special tokens this tokenizer puts around a text."""
        return tuple(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Messages) -> tuple[str, tuple[int, ...]]:
        """The text of a chat that waits for the assistant's answer, and its token ids."""
        text = self.render(messages)
        return text, tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def render(self, messages: Messages) -> str:
        """The chat template's text. Raises InvalidValue where the template is missing or refuses the messages."""
        if self._template is None:
            self._template = self._compiled()
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except TemplateError as error:
            raise InvalidValue("messages", messages, f"what the chat template takes ({error})") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _compiled(self) -> Template:
        if self._template_text is None:
            raise InvalidValue("messages", str(self.folder), "a model whose tokenizer has a chat template")
        # The environment that model authors write for: these options and helpers are transformers'. The current time,
        # which it also offers, is left out: a prompt must be the same after a restart.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _raise_template_error
        try:
            return environment.from_string(self._template_text)
        except TemplateError as error:
            raise InvalidValue("chat_template", str(self.folder), f"a valid Jinja template ({error})") from error


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for key, value in config.items():
        if key.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[key] = content
    return tokens


def _template_text(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template
