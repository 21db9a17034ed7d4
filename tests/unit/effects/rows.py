"""The two kinds of rows: an observation, and a test elsewhere that shows the effect."""

import ast
import asyncio
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from dora.config import Config, merged, tree_of, validated, value_at

ROOT: Final = Path(__file__).parents[3]


class Another:
    """Anything but what is seen without the setting."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an observation. ``model``: the folder of a tiny model, ``dense`` or ``moe``."""

    folder: Path  # new and empty
    model: Callable[[str], Path]
    monkeypatch: pytest.MonkeyPatch

    def within(self, config: Config, *fields: str) -> Config:
        """The configuration with these fields, relative paths, within the folder. An empty path stays so."""
        tree = config.model_dump()
        for name in fields:
            path = value_at(tree, name)
            if path:
                tree = merged(tree, tree_of(name, str(self.folder / path)))
        return validated(tree)


@dataclass(frozen=True, slots=True)
class Seen:
    """``see`` observes a behaviour under a configuration, in a new folder.

    It sees ``then`` with the setting at ``value``, and something else with its default. ``base``: settings that both
    configurations have, by dotted names; the setting itself among them replaces its default.
    """

    value: Any
    see: Callable[[Config, Place], Any]
    then: Any = Another
    base: Mapping[str, Any] = field(default_factory=dict)

    def check(self, setting: str, at: Place) -> None:
        seen = []
        for name, more in (("without", {}), ("with", {setting: self.value})):
            place = replace(at, folder=at.folder / name)
            place.folder.mkdir()
            found = self.see(configured({**self.base, **more}), place)
            seen.append(asyncio.run(found) if inspect.iscoroutine(found) else found)
        without, with_it = seen
        assert without != with_it, f"{setting} = {self.value!r} changes nothing: {without!r}"
        assert self.then is Another or with_it == self.then, f"{setting} = {self.value!r} gives {with_it!r}"


@dataclass(frozen=True, slots=True)
class Shown:
    """The effect is shown by tests elsewhere: their ids, of which each names the option or setting."""

    tests: Sequence[str]

    def __init__(self, *tests: str) -> None:
        object.__setattr__(self, "tests", tests)

    def check(self, *names: str) -> None:
        """``names``: the forms of which each test must have one."""
        assert self.tests
        for test in self.tests:
            source = source_of(test)
            found = [name for name in names if re.search(rf"(?<![A-Za-z0-9-]){re.escape(name)}(?![\w-])", source)]
            assert found, f"{test} names none of {names}"


Row = Seen | Shown


def configured(settings: Mapping[str, Any]) -> Config:
    """The configuration with these settings, by dotted names."""
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        tree = merged(tree, tree_of(name, value))
    return validated(tree)


def source_of(test: str) -> str:
    """The source of a test that pytest collects, by its id, with what it uses of its module."""
    place, _, name = test.partition("::")
    file = ROOT / place
    assert file.is_file() and file.name.startswith("test_") and name.startswith("test_"), f"{test}: not collected"
    parts = _parts(file)
    assert name in parts, f"{test}: there is no such test"
    found: dict[str, str] = {}
    wanted = [name]
    while wanted:
        each = wanted.pop()
        if each not in found and each in parts:
            found[each], used = parts[each]
            wanted += used
    assert "mark.skip" not in found[name], f"{test} is skipped"
    return "\n".join(found.values())


@cache
def _parts(file: Path) -> Mapping[str, tuple[str, Sequence[str]]]:
    """The source of each definition of a module, with its decorators, and the names that it uses."""
    text = file.read_text()
    lines = text.splitlines()
    parts = {}
    for node in ast.parse(text).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names = [node.name]
            case ast.Assign():
                names = [each.id for each in node.targets if isinstance(each, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case _:
                continue
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        source = "\n".join(lines[first - 1 : node.end_lineno])
        walked = list(ast.walk(node))
        used = [each.id for each in walked if isinstance(each, ast.Name)]
        used += [each.arg for each in walked if isinstance(each, ast.arg)]  # fixtures
        parts.update(dict.fromkeys(names, (source, used)))
    return parts
