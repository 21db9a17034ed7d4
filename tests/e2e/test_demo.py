"""``dora demo --model tiny`` shows what DORA is for: it learns, while engines generate for several versions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 60


@pytest.mark.full  # a minute and a half, with vLLM
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_reward_rises_while_versions_overlap(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    argv = [sys.executable, "-m", "dora", "demo", "--model", "tiny", "--steps", str(STEPS), "--out", str(out)]
    assert subprocess.run(argv, check=False).returncode == 0
    report = json.loads((out / "report.json").read_text())
    assert report["steps"] == STEPS and report["failures"] == []
    assert report["reward_last"] > 2 * report["reward_first"]
    assert report["two_versions_share"] > 0.0, "docs/performance.md has the bar, for a quiet machine"


@pytest.mark.full  # three minutes, with vLLM
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_sessions_with_a_tool_learn_to_use_it(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    dora = [sys.executable, "-m", "dora"]
    assert subprocess.run([*dora, "demo", "--agent", "--model", "tiny", "--out", str(out)], check=False).returncode == 0
    report = json.loads((out / "report.json").read_text())
    assert report["failures"] == [] and report["sessions_replaced"] == 0
    assert report["reward_last"] > 2 * report["reward_first"]
    argv = [*dora, "trajectories", "--show", report["conversation"], "--record", str(out / "record")]
    shown = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    assert shown.count("given by lookup") == 2 and shown.count("sampled ") == 3
