"""The verifier and the group filter of a service, as configured."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from dora.config import Config, RewardConfig
from dora.errors import InvalidValue
from dora.prompts.source import PromptSource
from dora.rewards import EQUAL_REWARDS, EqualRewards, FilterRunner, GroupFilter, RewardRunner
from dora.rewards.limits import UserLimits


@contextlib.asynccontextmanager
async def verifying(config: Config, source: PromptSource, model: Path | None) -> AsyncIterator[RewardRunner]:
    """Runs the configured verifier, or the prompt source's own. Raises InvalidValue if there is none."""
    function = config.reward.function or source.reward
    if not function:
        allowed = f"module:function, because prompts {config.prompts.source!r} bring no verifier"
        raise InvalidValue("reward.function", "", allowed)
    reward = config.reward
    runner = await RewardRunner.start(
        function,
        tokenizer_folder=model,
        workers=reward.workers,
        timeout_s=reward.timeout_s,
        queue_max=reward.queued_max,
        environment=reward.environment,
        limits=_limits(reward),
    )
    try:
        yield runner
    finally:
        await runner.close()


@contextlib.asynccontextmanager
async def filtering(config: Config) -> AsyncIterator[GroupFilter | None]:
    """Runs the configured filter of scored groups, if any. Raises InvalidValue if it cannot be loaded."""
    name = config.selection.filter
    if name in ("", EQUAL_REWARDS):
        yield EqualRewards() if name else None
        return
    reward = config.reward
    runner = await FilterRunner.start(
        name,
        timeout_s=reward.timeout_s,
        queue_max=reward.queued_max,
        environment=reward.environment,
        limits=_limits(reward),
    )
    try:
        yield runner
    finally:
        await runner.close()


def _limits(reward: RewardConfig) -> UserLimits:
    return UserLimits(reward.memory_mb, reward.open_files, reward.processes, reward.calls_max)
