"""What judges responses and groups in a service, as configured: started, and closed at the end."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from dora.config import Config
from dora.errors import InvalidValue
from dora.prompts import PromptSource
from dora.rewards import EQUAL_REWARDS, EqualRewards, FilterRunner, GroupFilter, RewardRunner


@contextlib.asynccontextmanager
async def verifying(config: Config, source: PromptSource, model: Path | None) -> AsyncIterator[RewardRunner]:
    """The verifier: the configured one, or the prompt source's own. Raises InvalidValue where there is none."""
    function = config.reward.function or source.reward
    if not function:
        allowed = f"module:function, since prompts {config.prompts.source!r} bring none"
        raise InvalidValue("reward.function", "", allowed)
    reward = config.reward
    runner = await RewardRunner.start(
        function,
        tokenizer_folder=model,
        workers=reward.workers,
        timeout_s=reward.timeout_s,
        queue_max=reward.queued_max,
    )
    try:
        yield runner
    finally:
        await runner.close()


@contextlib.asynccontextmanager
async def filtering(config: Config) -> AsyncIterator[GroupFilter | None]:
    """The filter of scored groups, where one is configured. Raises InvalidValue where it cannot be loaded."""
    name = config.selection.filter
    if name in ("", EQUAL_REWARDS):
        yield EqualRewards() if name else None
        return
    runner = await FilterRunner.start(name, timeout_s=config.reward.timeout_s, queue_max=config.reward.queued_max)
    try:
        yield runner
    finally:
        await runner.close()
