"""experiments/kept.py: raw results in short form, and a run that is compared with them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.convergence.plan import stored
from experiments.kept import KINDS, compared, keep, kept, main, restore
from experiments.pinning import cell, fleet
from experiments.staleness.grid import cells
from experiments.staleness.report import points
from experiments.tests.test_staleness import result


def named(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {f"r{number}": each for number, each in enumerate(results)}


def test_what_is_kept_makes_the_same_tables(tmp_path: Path) -> None:
    found = named([result(lag, seed, 30 + 10 * lag + seed, 0.0123456) for lag in (0, 2) for seed in range(3)])
    for name, each in found.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**each, "seconds": 1.5}))
    kind = replace(KINDS["staleness"], file=tmp_path / "kept.jsonl")
    assert keep([tmp_path], kind) == 6
    assert points(kept(kind).values()) == [
        replace(point, movement=pytest.approx(0.012346)) for point in points(found.values())
    ]
    (tmp_path / "r0.json").write_text("{}")
    assert restore(tmp_path, kind) == 0 and (tmp_path / "r0.json").read_text() == "{}", "what is there stays"
    assert restore(tmp_path / "new", kind) == 6
    assert json.loads((tmp_path / "new" / "r1.json").read_text()) == kept(kind)["r1"]


def test_a_run_agrees_if_it_is_among_those_of_other_seeds() -> None:
    results = named([result(1, seed, gains, 0.01) for seed, gains in enumerate((38, 40, 42, 44))])
    found = compared(result(1, 0, 40, 0.01), results)
    assert found.low < found.kept < found.steps < found.high and found.agrees
    assert not compared(result(1, 0, 20, 0.01), results).agrees


def test_the_pages_results_are_kept(tmp_path: Path) -> None:
    assert restore(tmp_path, KINDS["staleness"]) > 300
    wanted = cells(["tiny"], ["truncated"], (0, 1, 3), 5)
    assert [each.name for each in wanted if stored(each, tmp_path) is None] == []
    assert len(kept(KINDS["fleet"])) >= 18 and len(kept(KINDS["convergence"])) >= 12
    assert restore(tmp_path, KINDS["pinning"]) and restore(tmp_path, KINDS["pinning-fleet"])
    assert [each.name for each in cell.cells() if stored(each, tmp_path) is None] == []
    assert [each.name for each in fleet.runs() if stored(each, tmp_path) is None] == []


def test_a_name_that_is_not_kept_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["again", "tiny-none"]) == 2
    assert "tiny-none = not a kept cell" in capsys.readouterr().err
