"""docs/reference/ is what the code makes, and has every command, counter, and field that a command prints."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dora.core.state import Counters
from dora.ops.cli.app import CLUSTER_COMMANDS, COMMANDS, app
from dora.ops.cli.reference import main, meanings, reference
from dora.orchestrator.rollout.telemetry import Telemetry
from tests.refusals import refused

DOCS = Path(__file__).parents[2] / "docs"
SMALL = ("simulate", "--preset", "small", "--steps", "2", "--warmup", "1")


def described() -> set[str]:
    """The last names of all fields of the pages: ``step_s`` of ``candidates[].step_s``."""
    text = "\n".join(reference().values())
    return {name.rpartition(".")[2] for name in re.findall(r"^\| `([\w.\[\]]+)`", text, re.MULTILINE)}


def keys(tree: Any) -> Iterator[str]:
    """The names of all fields, at any depth."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield name
            yield from keys(value)
    elif isinstance(tree, list):
        for each in tree:
            yield from keys(each)


def test_the_committed_pages_are_what_the_code_makes(tmp_path: Path) -> None:
    committed = {file.name: file.read_text() for file in (DOCS / "reference").iterdir()}
    assert committed == reference(), "run make docs"
    (tmp_path / "renamed.md").write_text("a page that the code does not make")
    main(tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == committed


@pytest.mark.parametrize(
    "arguments",
    [
        SMALL,
        (*SMALL, "--compare"),
        ("simulate", "presets"),
        ("simulate", "sweep", "--seeds", "2"),
        ("plan", "--gpus", "64"),
        ("plan", "--generation-s", "600", "--training-s", "300", "--engines", "2"),
    ],
)
def test_every_field_that_a_command_prints_is_in_it(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert set(keys(json.loads(result.stdout))) <= described()


def test_every_command_and_every_counter_is_in_it() -> None:
    assert {*COMMANDS, "groups_lost", "groups_open", "handoffs_now"} <= described()
    assert {field.name for field in fields(Counters)} | Telemetry().counters().keys() <= described()
    commands = {*COMMANDS, "simulate", "simulate presets", "simulate sweep", "tls make"}
    commands |= {f"cluster {name}" for name in CLUSTER_COMMANDS}
    assert commands == set(re.findall(r"^\| `([^`]+)` \| .+ \| `dora ", reference()["commands.md"], re.MULTILINE))


def test_a_field_that_does_not_say_what_it_means_is_refused() -> None:
    @dataclass
    class Silent:
        step_s: float

    with refused(TypeError, names=("Silent.step_s",)):
        meanings(Silent)
