"""Prometheus beside ``make chaos`` and ``make demo``: each fault fires its alert and no other, a healthy run none."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.chaos.alarms import ALERTS, TIMES
from tests.prometheus.hasty import hasty_rules
from tests.prometheus.server import free_address, scraping
from tests.prometheus.test_alerts import alerts

STEPS: Final = 8
# As they are deployed: the first says that the trainer waits, and that of a demo has nothing else to do; the next two,
# that the demo has begun or has ended; the last looks hours ahead, from what all processes here write.
OF_THE_DEMO: Final = {"DoraTrainerWaits", "DoraTrainerAbsent", "DoraDown", "DoraDiskFills"}


@pytest.mark.full
@pytest.mark.timeout(1200)  # a dozen faults, each of which lasts until its alert
def test_each_fault_of_the_chaos_fires_its_alert_and_no_other_and_it_clears(
    tmp_path: Path, binary: Callable[[str], Path]
) -> None:
    binary("prometheus")
    argv = [sys.executable, "-m", "tests.chaos", "--alerts", "--out", str(tmp_path)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failures"] == []
    possible = {name for name in ALERTS if name.partition(" ")[0] not in report["left_out"]}
    assert report["alerts"] == {name: sorted(ALERTS[name].alerts) for name in possible}


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.timeout(900)
async def test_a_healthy_demo_fires_no_alert(tmp_path: Path, binary: Callable[[str], Path]) -> None:
    address = free_address()
    rules = hasty_rules(tmp_path / "rules", alerts().keys() - OF_THE_DEMO, TIMES)
    argv = ["demo", "--model", "tiny", "--steps", str(STEPS), "--out", str(tmp_path / "demo")]
    async with scraping(binary("prometheus"), address, tmp_path, rules) as prometheus:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dora", *argv, "--set", f"service.metrics={address}", stdout=subprocess.DEVNULL
        )
        try:
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        assert await prometheus.ever_fired() == set()
        (step,) = await prometheus.query("max_over_time(dora_step[1h])")
        assert float(step["value"][1]) > STEPS // 2, "it was scraped while it trained"
