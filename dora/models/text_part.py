"""The text part of a model's config.json."""

from collections.abc import Mapping
from typing import Any


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the ``text_config`` of a model of text and images, or nothing for a model of text alone."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else {}
