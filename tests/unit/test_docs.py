"""The documents: every Python snippet is run by some test, and every ``dora`` command is one."""

import ast
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from dora.config import load_config, validated
from dora.core.events import Tick
from dora.core.machine import Machine
from dora.ops.cli.app import app
from tests.snippets import ROOT, blocks, commands, documents, snippet

COMMANDS = [(document.name, line) for document in documents() for line in commands(document)]


def exercised() -> set[tuple[str, str]]:
    """The document and marker of each ``snippet`` that a test asks for."""
    found = set()
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "snippet":
                match node.args:
                    case [ast.Constant(value=str(document)), ast.Constant(value=str(marker)), *_]:
                        found.add((document, marker))
    return found


def test_every_python_snippet_is_run_by_some_test() -> None:
    markers = exercised()
    for document in documents():
        name = str(document.relative_to(ROOT))
        for block in blocks(document, "python"):
            run = [marker for where, marker in markers if where == name and marker in block]
            assert run, f"{name}: no test runs the snippet that begins with {block.splitlines()[0]!r}"


@pytest.mark.parametrize(("document", "line"), COMMANDS)
def test_every_command_is_one(document: str, line: str) -> None:
    """Its names, options and values are parsed; nothing is run."""
    words = shlex.split(re.split(r" [>|] ", line)[0], comments=True)[1:]
    parsed = parse(typer.main.get_command(app), words)
    if words[0] == "serve":
        load_config(None, parsed["settings"] or ())


def parse(command: Any, words: list[str], parent: Any = None) -> dict[str, Any]:
    """The options and arguments of the innermost command, as the command line reads them."""
    context = command.make_context(command.name, list(words), parent=parent)
    rest = [*getattr(context, "_protected_args", ()), *context.args]
    if rest and hasattr(command, "resolve_command"):
        _, below, rest = command.resolve_command(context, rest)
        return parse(below, rest, context)
    return dict(context.params)


def test_the_documents_name_files_that_are_there() -> None:
    for document in documents():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def headings(document: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_documents_link_to_headings_that_are_there() -> None:
    for document in documents():
        for name, anchor in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", document.read_text(encoding="utf-8")):
            target = document.parent / name if name else document
            assert target.suffix != ".md" or anchor in headings(target), f"{document.name}: {name}#{anchor}"


def test_the_architecture_page_shows_the_layers_in_force() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each.get("containers") == ["dora"])
    shown = "\n".join(["```", *layers, "```"]).replace(" | ", "  ")
    assert shown in (ROOT / "docs" / "architecture.md").read_text()


def test_the_cores_entrance_is_as_shown() -> None:
    names = {"machine": Machine(validated({})), "event": Tick(), "now_s": 0.0}
    exec(snippet("docs/architecture.md", "machine.handle"), names)
    assert names["commands"] == []


def test_the_reward_function_of_the_page() -> None:
    names: dict[str, object] = {}
    exec(snippet("docs/bring-your-own.md", "def score"), names)
    score = names["score"]
    assert callable(score) and score("", "1x3?", [], {"answer": "0123456789"}) == 0.5
    assert score("", "", [], {"answer": "x"}) == 0.0
