"""A configuration as a commented TOML file or a tree, without its secret."""

import json
from typing import Any

import tomli_w
from pydantic import BaseModel

from dora.config import Config, Setting


def shown(config: Config) -> dict[str, Any]:
    """Returns the resolved configuration as a tree, without the secret."""
    tree = config.model_dump(mode="json")
    del tree["service"]["token"]
    return tree


def toml_of(config: Config) -> str:
    """Returns a complete, commented configuration file that loads back to ``config``, except its token."""
    return "\n".join(_lines(config, "", hidden={"service.token"})) + "\n"


def _lines(section: BaseModel, path: str, hidden: set[str]) -> list[str]:
    lines, sections = [], []
    for name, value in section:
        if isinstance(value, BaseModel):
            sections.append(f"\n[{path}{name}]")
            sections += _lines(value, f"{path}{name}.", hidden)
        elif value is not None and f"{path}{name}" not in hidden:
            lines.append(_field(section, name, value))
    return lines + sections


def _field(section: BaseModel, name: str, value: Setting) -> str:
    description = type(section).model_fields[name].description
    line = f"{name} = {_toml_value(value)}"
    return f"{line}  # {description}" if description else line


def _toml_value(value: Setting | dict[str, Any]) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(each)}" for key, each in value.items()) + "}"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")
