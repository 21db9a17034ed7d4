"""Randomly timed handoffs over every transport: all tokens are those of unmoved requests, and nothing is kept.

A part of what ``python -m tests.abuse.migrations`` tries.
"""

import logging
from pathlib import Path

import pytest

from dora.models.tiny import make_tiny
from tests.abuse.migrations import driven
from tests.contract.planes import HERE
from tests.sweeps import some_of

SEED = 3
MOVED = 150  # over each transport


@pytest.mark.parametrize("transport", some_of(HERE, "shm"))
def test_no_timing_of_a_handoff_costs_a_token_or_a_block(
    tmp_path: Path, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "dora.worker")
    lane = driven(tmp_path, make_tiny("dense", tmp_path / "model"), transport, MOVED, SEED)
    assert lane.failures() == []
    assert lane.moved >= MOVED and lane.compared >= MOVED // 4
    phases = {what.rpartition(" ")[2] for what in lane.ends}
    assert {"PLANNED", "RESERVED", "COPYING", "FROZEN"} <= phases, "handoffs ended in each"
