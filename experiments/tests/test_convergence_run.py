"""The short form of ``make convergence``: one step, two modes; simulated on a small cluster."""

import json
from pathlib import Path

import pytest

from experiments.convergence.__main__ import main
from experiments.convergence.page import BEGIN, END

pytestmark = [pytest.mark.e2e, pytest.mark.full]

SHORT = ("--steps", "1", "--seeds", "1", "--lr", "1e-3", "--parts", "fleet", "modes")
FLEET = ("--preset", "small", "--fleet-steps", "2", "--fleet-warmup", "1")


def test_curves_are_made_once_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    asked = ["--rows", "sync", "window-2", "partial", *SHORT, *FLEET, "--out", str(tmp_path), "--page", str(page)]
    assert main(asked) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["modes"]) == ["sync", "window-2", "partial"] and report["failures"] == []
    assert all(report["modes"][name]["seeds"] == 1 for name in ("sync", "window-2"))
    assert report["modes"]["window-2"]["fleet_step_min"] < report["modes"]["sync"]["fleet_step_min"]
    assert "| window 2 (1) |" in page.read_text()
    assert all((tmp_path / name).stat().st_size for name in ("convergence-reward.svg", "convergence-limits.svg"))
    runs = sorted((tmp_path / "runs").iterdir())
    assert [run.stem for run in runs] == ["sync-lr0.001-seed0", "window-2-lr0.001-seed0"]
    made = [run.stat().st_mtime_ns for run in runs]
    capsys.readouterr()
    assert main(asked) == 0
    assert [run.stat().st_mtime_ns for run in runs] == made
    assert "s of steps" not in capsys.readouterr().err
