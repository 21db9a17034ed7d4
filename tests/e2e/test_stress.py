"""The short form of ``make stress``: one model, tens of trajectories, a worker and a trainer killed."""

import json
from pathlib import Path

import pytest

from tests.stress.__main__ import main

pytestmark = [pytest.mark.e2e, pytest.mark.full]

TRAJECTORIES = 96
KILLS = ("--worker-kills", "1", "--trainer-kills", "1")
PACE = ("--groups-per-step", "3", "--rebalance-s", "0.5")


def test_a_mixture_under_stress_keeps_every_promise(tmp_path: Path) -> None:
    asked = ["--model", "qwen3-moe", "--trajectories", str(TRAJECTORIES), "--out", str(tmp_path), *KILLS, *PACE]
    assert main(asked) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    model = report["models"]["qwen3-moe"]
    assert report["trajectories"] == TRAJECTORIES and report["failures"] == []
    assert (model["worker_kills"], model["trainer_kills"]) == (1, 1)
    assert model["migrations_kv"] > 0 and model["rebalances"] > 0 and model["versions"] > 1
