"""Hints name packages that there are, and a failure that repeats is not said each time."""

import re
import tomllib
from pathlib import Path

import pytest

import dora
from dora.data.extras import install
from dora.host.agent import FailedAttempts

ROOT = Path(dora.__file__).parents[1]
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
SOURCES = sorted(Path(dora.__file__).parent.rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("file", [*SOURCES, *PAGES], ids=lambda file: str(file.relative_to(ROOT)))
def test_no_hint_names_the_package_of_an_index(file: Path) -> None:
    """DORA is on no index, so `pip install dora-rollout` would fail or install something else."""
    text = file.read_text()
    assert not re.search(r"pip install[^\n`]*dora-rollout", text)
    named = re.findall(r"\binstall\(\"([\w, \"]+)\"\)|pip install[^\n]*'\.\[([\w,]+)\]'", text)
    extras = {name for pair in named for found in pair for name in re.findall(r"\w+", found)}
    assert extras <= EXTRAS


def test_the_hint_names_the_extras() -> None:
    assert install("cpu", "data") == "pip install '.[cpu,data]' in a checkout of DORA"


def test_a_dead_port_is_said_a_few_times_in_ten_minutes() -> None:
    attempts = FailedAttempts()
    said = [now_s for now_s in range(0, 600, 2) if attempts.failed("connection refused", float(now_s)) is not None]
    assert said == [0, 10, 30, 70, 150, 310]


def test_another_reason_is_said_at_once() -> None:
    attempts = FailedAttempts()
    assert [attempts.failed(reason, 1.0) for reason in ("a", "a", "b", "b", "a")] == [1, None, 3, None, 5]
