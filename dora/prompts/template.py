"""The environment of chat templates as in transformers, without importing it.

Source: ``transformers/utils/chat_template_utils.py``, ``_cached_compile_jinja_template``, ``render_jinja_template``.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from jinja2 import Template, TemplateError
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Variables and functions of a template that no option replaces.
RESERVED: Final = frozenset(
    (*DEFAULT_NAMESPACE, "raise_exception", "strftime_now", "messages", "tools", "documents", "add_generation_prompt")
)
Messages = Sequence[Mapping[str, Any]]


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training masks; its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 # as jinja2 declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Macro) -> str:
        return caller()


def compiled_template(text: str) -> Template:
    """Compiles a template. Raises jinja2.TemplateError for an invalid one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = _time_now
    return environment.from_string(text)


def rendered(
    template: Template,
    messages: Messages,
    special_tokens: Mapping[str, str],
    *,
    tools: Messages | None = None,
    answer: bool = True,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Renders a chat. Raises the template's errors.

    ``tools`` are as in the OpenAI API. With ``answer``, the header of the assistant's next answer follows. ``options``
    are further variables of the template, such as ``enable_thinking``.
    """
    variables = {**(options or {}), **special_tokens, "messages": messages, "tools": tools, "documents": None}
    return template.render(**variables, add_generation_prompt=answer)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialises to JSON. Unlike Jinja's own filter, it does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def _time_now(form: str) -> str:
    return datetime.now().strftime(form)
