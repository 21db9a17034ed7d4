"""A part of a publish is killed at each of these moments; ``python -m tests.e2e.publish_kills`` has all of them."""

from pathlib import Path

import pytest

from tests.e2e.publish_kills import MOMENTS, killed

SHORT = ("trainer.upload", "service.upload", "trainer.copy", "h1.chunk", "h1-w0.load", "service.chain")


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_whoever_is_killed_in_a_publish_nothing_is_mixed_or_lost(tiny_dense: Path, tmp_path: Path) -> None:
    """The trainer, a relay with its agent, a worker in its load, and the head, with the service."""
    assert set(SHORT) <= set(MOMENTS)
    found = await killed(tiny_dense, tmp_path, SHORT)
    assert found["moments"] == len(SHORT) and found["versions"] > 1
