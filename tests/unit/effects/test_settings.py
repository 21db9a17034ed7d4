"""Every setting has an effect: a table with a row for each, and a test that no row is missing or wrong."""

import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from dora.config import Config
from tests.unit.effects import of_engines
from tests.unit.effects.of_settings import ROWS
from tests.unit.effects.rows import Place, Seen, Shown


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Place:
    return Place(tmp_path, lambda kind: request.getfixturevalue(f"tiny_{kind}"), monkeypatch)


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted name of each setting. A section that may be missing is a setting, too."""
    for name, field in section.model_fields.items():
        kinds = [each for each in (field.annotation, *typing.get_args(field.annotation)) if isinstance(each, type)]
        below = next((each for each in kinds if issubclass(each, BaseModel)), None)
        if below is not field.annotation:
            yield prefix + name
        if below is not None:
            yield from settings(below, f"{prefix}{name}.")


def test_every_setting_has_a_row_and_every_row_a_setting() -> None:
    assert sorted(settings(Config)) == sorted(ROWS)


@pytest.mark.parametrize("setting", [name for name, row in ROWS.items() if isinstance(row, Seen)])
def test_the_effect_of_a_setting_is_seen(setting: str, place: Place) -> None:
    row = ROWS[setting]
    assert isinstance(row, Seen)
    row.check(setting, place)


@pytest.mark.parametrize("setting", [name for name, row in ROWS.items() if isinstance(row, Shown)])
def test_the_test_that_shows_an_effect_names_the_setting(setting: str) -> None:
    row = ROWS[setting]
    assert isinstance(row, Shown)
    row.check(setting, setting.replace(".", "__"), setting.rpartition(".")[2])


@pytest.mark.full
@pytest.mark.parametrize("setting", of_engines.VLLM)
def test_the_effect_of_a_setting_is_seen_in_vllms_arguments(setting: str, place: Place) -> None:
    of_engines.VLLM[setting].check(setting, place)
