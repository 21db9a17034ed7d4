"""A short form of ``python -m tests.e2e.kills``: real engines outlive an orchestrator that is killed."""

from pathlib import Path

import pytest

from tests.e2e.kills import killed

pytestmark = [pytest.mark.e2e, pytest.mark.full]


async def test_a_killed_orchestrator_costs_no_sample_of_real_engines(tiny_dense: Path, tmp_path: Path) -> None:
    report = await killed(tiny_dense, tmp_path, ("handoff", "delivery", "commit", "loading"))
    assert report.wrong == [] and report.steps == 5 and report.versions >= 4
    assert report.workers_lost == report.c1_violations == 0
