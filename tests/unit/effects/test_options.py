"""Every option and argument has an effect: a table with a row for each, and a test that no row is missing or wrong."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import typer

from dora.ops.cli.app import app
from dora.ops.stored_token import left_token
from tests.private_token import with_token
from tests.sweeps import some_of
from tests.unit.cli.conftest import address, own_environment  # noqa: F401
from tests.unit.cli.service import TOKEN
from tests.unit.effects import of_operators, of_planning, of_settings, of_starts
from tests.unit.effects.commands import Bench, OptionRow, Sets, Shown
from tests.unit.test_verify import models, record, trajectories  # noqa: F401

ROWS: dict[tuple[str, str], OptionRow] = {**of_operators.ROWS, **of_planning.ROWS, **of_starts.ROWS}
OBSERVED = {name: row for name, row in ROWS.items() if not isinstance(row, Shown)}
SLOW = [name for name in OBSERVED if name[0] == "profile" and name[1] != "model"]  # each profiles an engine, twice
SLOW += [("report", "out"), ("simulate sweep", "as_json"), ("simulate", "plot"), ("simulate", "compare")]


def parameters(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The parameters of a command and of those below it, each with the command's name."""
    for parameter in command.params:
        yield path, parameter
    for name, below in getattr(command, "commands", {}).items():
        yield from parameters(below, f"{path} {name}".strip())


PARAMETERS = {(path, str(each.name)): each for path, each in parameters(typer.main.get_command(app))}


def test_every_option_has_a_row_and_every_row_an_option() -> None:
    assert sorted(PARAMETERS) == sorted(ROWS)


@pytest.mark.parametrize("option", some_of(OBSERVED, *(OBSERVED.keys() - SLOW)), ids=".".join)
def test_the_effect_of_an_option_is_seen(
    option: tuple[str, str],
    address: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    with ExitStack() as stack:

        def bench(name: str) -> Bench:
            folder = tmp_path / "runs" / name
            folder.mkdir(parents=True)

            def word(name: str) -> str:
                match name:
                    case "dense" | "moe":
                        return str(request.getfixturevalue(f"tiny_{name}"))
                    case "record":
                        return str(request.getfixturevalue("record"))
                    case "left":  # a service on this host that has left its token
                        stack.enter_context(left_token("127.0.0.1:9", TOKEN))
                        return "127.0.0.1:9"
                return {"folder": str(folder), "address": address, "token": with_token(TOKEN)}[name]

            return Bench(folder, word, monkeypatch)

        row = OBSERVED[option]
        assert not isinstance(row, Shown)
        row.check(" ".join(option), bench)


@pytest.mark.parametrize("option", [name for name, row in ROWS.items() if isinstance(row, Shown)], ids=".".join)
def test_the_test_that_shows_an_effect_names_the_option(option: tuple[str, str]) -> None:
    row, parameter = ROWS[option], PARAMETERS[option]
    assert isinstance(row, Shown)
    forms = (parameter.name,) if parameter.param_type_name == "argument" else (*parameter.opts, parameter.name)
    row.check(*forms)


@pytest.mark.parametrize("option", [name for name, row in ROWS.items() if isinstance(row, Sets)], ids=".".join)
def test_the_setting_that_an_option_sets_has_a_row(option: tuple[str, str]) -> None:
    row = ROWS[option]
    assert isinstance(row, Sets) and row.setting in of_settings.ROWS
