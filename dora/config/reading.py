"""Reads a configuration: a TOML file, and overrides by dotted names."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from dora.config.whole import Config
from dora.data.validation import validated_as
from dora.errors import InvalidValue

SLURM: Final = "slurm"
RAY: Final = "ray"
KUBERNETES: Final = "kubernetes"
CLUSTERS: Final = "dora.clusters"  # entry points of further schedulers

Setting = str | int | float | bool
Override = str | tuple[str, Setting]  # "window.size=3", its value in TOML, or ("window.size", 3)


def overrides_of(settings: Mapping[str, Setting | None]) -> list[Override]:
    """Returns settings by dotted names as overrides; None means not given and overrides nothing."""
    return [(key, value) for key, value in settings.items() if value is not None]


def load_config(file: Path | None = None, overrides: Iterable[Override] = ()) -> Config:
    """Reads ``file`` (TOML), applies ``overrides`` in order, validates. An override is a text or a pair from
    ``overrides_of``.

    Values in a text are TOML; text that is not TOML is a string. The dotted name of a list's element has its index,
    from 0.
    """
    tree = settings_tree(file, ())
    if not tree.keys() <= Config.model_fields.keys():  # a scheduler's table, which the service ignores
        tree = {name: value for name, value in tree.items() if name not in schedulers()}
    if isinstance(tree.get("prompts"), str):
        tree["prompts"] = {"source": tree["prompts"]}  # so that overrides find the section
    for override in overrides:
        key, value = _parsed(override) if isinstance(override, str) else override
        _apply(tree, "prompts.source" if key == "prompts" and isinstance(value, str) else key, value)
    return validated(tree)


def schedulers() -> set[str]:
    """Returns the names of the tables that `dora cluster` reads in the same file."""
    return {SLURM, RAY, KUBERNETES, *(each.name for each in entry_points(group=CLUSTERS))}


def settings_tree(file: Path | None, overrides: Iterable[Override], option: str = "--config") -> dict[str, Any]:
    """Returns ``file`` (TOML) with the overrides applied, as one nested mapping, not yet validated.

    ``option`` is the command-line option that named the file; an unreadable file is an InvalidValue of it.
    """
    tree: dict[str, Any] = {}
    if file is not None:
        try:
            tree = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidValue(option, str(file), f"a readable TOML file ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise InvalidValue(option, str(file), f"TOML, which is UTF-8 text ({error})") from error
        except ValueError as error:  # also a whole number of more digits than Python reads
            raise InvalidValue(option, str(file), f"valid TOML ({error})") from error
    for override in overrides:
        _apply(tree, *(_parsed(override) if isinstance(override, str) else override))
    return tree


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``base`` overridden by ``over``; sections present in both are merged field by field."""
    tree = dict(base)
    for key, value in over.items():
        below = tree.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merged(below, value)
        tree[key] = value
    return tree


def value_at(tree: Mapping[str, Any], field: str) -> Any:
    """Returns the value of a dotted field; None if absent."""
    value: Any = tree
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def tree_of(field: str, value: Any) -> dict[str, Any]:
    """Returns ``{"a": {"b": value}}`` for ``"a.b"``."""
    for name in reversed(field.split(".")):
        value = {name: value}
    return value


def validated(tree: Mapping[str, Any]) -> Config:
    """Returns the Config of a nested mapping; raises InvalidValue for the first wrong field."""
    return validated_as(Config, tree)


def _parsed(override: str) -> tuple[str, Any]:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise InvalidValue("--set", override, "section.field=value")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # also a whole number of more digits than Python reads
        return key.strip(), text


def _apply(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    node: Any = tree
    for section in sections:
        node = node[_index(node, section, key)] if isinstance(node, list) else node.setdefault(section, {})
        if not isinstance(node, dict | list):
            raise InvalidValue("--set", key, f"section.field=value; {section} is a field")
    node[_index(node, name, key) if isinstance(node, list) else name] = value


def _index(elements: Sequence[Any], name: str, key: str) -> int:
    if name not in map(str, range(len(elements))):
        raise InvalidValue("--set", key, f"the number of an element, below {len(elements)}, not {name}")
    return int(name)
