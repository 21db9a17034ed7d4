"""``dora demo --model tiny`` shows what DORA is for: it learns, while engines generate for several versions."""

import json
import os
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
    dora = [sys.executable, "-m", "dora"]
    argv = [*dora, "demo", "--model", "tiny", "--steps", str(STEPS), "--out", str(out)]
    environment = {**os.environ, "DORA_TOKEN": "", "XDG_RUNTIME_DIR": str(tmp_path / "tokens")}
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        look = next(line.partition(" dora ")[2].split() for line in demo.stdout if " dora status --address" in line)
        shown = subprocess.run([*dora, *look, "--json"], env=environment, check=False, capture_output=True, text=True)
        demo.stdout.read()
    assert demo.returncode == 0
    assert shown.returncode == 0 and "filling_step" in json.loads(shown.stdout), "the demo stores its token"
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
