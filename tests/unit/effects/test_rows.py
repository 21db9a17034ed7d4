"""The tables themselves can fail: a missing row, an effect that is not seen, a test that shows nothing."""

from pathlib import Path

import pytest
import typer

from dora.config import Config
from tests.unit.effects.commands import Bench, Ran, Sets
from tests.unit.effects.of_core import bench, staleness_bound
from tests.unit.effects.of_settings import ROWS
from tests.unit.effects.rows import Place, Seen, Shown
from tests.unit.effects.test_options import parameters
from tests.unit.effects.test_settings import settings

FILE = "tests/unit/effects/test_rows.py"


class More(Config):
    new: int = 0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, str, monkeypatch)  # type: ignore[arg-type]


def test_a_new_setting_and_a_new_option_are_listed() -> None:
    assert {*settings(More)} - ROWS.keys() == {"new"}
    app = typer.Typer()
    app.command("one")(lambda: None)

    @app.command("other")
    def other(new: int = 0) -> None: ...

    assert [(path, each.name) for path, each in parameters(typer.main.get_command(app)) if each.name == "new"] == [
        ("other", "new")
    ]


def test_an_effect_that_is_not_seen_or_another_one_fails(place: Place) -> None:
    with pytest.raises(AssertionError) as unchanged:
        Seen(3, lambda config, _: len(bench(config).state.workers)).check("window.size", place)
    assert "changes nothing" in str(unchanged.value)
    for number, (then, holds) in enumerate(((6, True), (7, False))):
        where = Place(place.folder / f"{number}", place.model, place.monkeypatch)
        where.folder.mkdir()
        if holds:
            Seen(3, staleness_bound, then).check("window.size", where)
            continue
        with pytest.raises(AssertionError) as another:
            Seen(3, staleness_bound, then).check("window.size", where)
        assert "gives 6" in str(another.value)


@pytest.mark.parametrize(
    "row",
    [Ran(["version"], []), Ran(["version"], ["--json"], lambda done: done.code == 0), Sets("model", [], "smollm2")],
)
def test_an_option_without_effect_fails(row: Ran | Sets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(_name: str) -> Bench:
        return Bench(tmp_path, lambda word: word, monkeypatch)

    with pytest.raises(AssertionError):
        row.check("an option", one)


@pytest.mark.parametrize(
    ("test", "name"),
    [
        ("tests/unit/no_such_file.py::test_it", "x"),
        ("tests/unit/effects/rows.py::source_of", "x"),
        (f"{FILE}::test_that_is_not_there", "x"),
        (f"{FILE}::test_a_new_setting_and_a_new_option_are_listed", "workers." + "slots"),
    ],
)
def test_a_test_that_is_not_there_or_names_something_else_shows_nothing(test: str, name: str) -> None:
    with pytest.raises(AssertionError):
        Shown(test).check(name)
