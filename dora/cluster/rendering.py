"""Renders the templates of scripts and manifests."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES: Final = Path(__file__).parent / "templates"
_TEXTS: Final = Environment(
    loader=FileSystemLoader(TEMPLATES),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEXTS.filters["quoted"] = lambda value: shlex.quote(str(value))


def rendered(template: str, values: Mapping[str, Any]) -> str:
    return _TEXTS.get_template(template).render(values)
