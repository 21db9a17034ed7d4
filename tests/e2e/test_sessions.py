"""Sessions with vLLM's engines: what is recorded is what the model gives, turn for turn."""

import asyncio
from pathlib import Path

import pytest

import dora
from dora.ops.verify.check import verify
from tests.e2e.test_sessions_fake import GROUPS, check_sessions, drive, prompts_of, several_turns
from tests.service import configured, during, running, train


@pytest.mark.full
@pytest.mark.parametrize("pool_mb", [0, 64])
async def test_every_logprob_of_a_session_is_the_models(tiny_dense: Path, tmp_path: Path, pool_mb: int) -> None:
    """Versions change twice while sessions are open, and their requests move or rest in a pool."""
    config = configured(
        tiny_dense,
        prompts="none",
        reward__function="dora.rewards.tiny:score",
        window__size=3,
        rollout__max_tokens=12,
        kv__pool_mb=pool_mb,
        record=str(tmp_path / "record"),
    )
    async with (
        running(config) as handle,
        dora.Prompts(handle.address, handle.token) as prompts,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        await prompts.submit(prompts_of(6 * GROUPS))
        driving = asyncio.create_task(drive(handle, several_turns))
        steps = await during(driving, train(handle, trainer, steps=4, groups=GROUPS))
        driving.cancel()
    check_sessions(steps, window=3)
    report = verify(tmp_path / "record")
    assert report.recomputed and report.ok, report
