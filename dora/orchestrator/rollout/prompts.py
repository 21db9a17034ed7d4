"""Draws prompts for the core, and drops those that it does not admit."""

from dataclasses import dataclass

from dora.core import commands as do
from dora.core import events as on
from dora.data.types import Prompt
from dora.orchestrator.rollout.core import Core, Handlers
from dora.orchestrator.rollout.feed import PromptFeed
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.prompts.traits import features_of, key_of


@dataclass(eq=False, repr=False)
class Prompts:
    """Carries out the core's commands to the feed and its ledger."""

    _core: Core
    _feed: PromptFeed
    _buffer: ResponseBuffer

    def __post_init__(self) -> None:
        self.handlers: Handlers = {
            do.DrawPrompts: lambda command: self._core.spawn(self._draw(command.count)),
            do.DropPrompt: lambda command: self._feed.ledger.drop(command.prompt_id),
        }

    async def _draw(self, count: int) -> None:
        prompts, exhausted = await self._feed.take(count)
        offered = tuple(offer(self._buffer, prompt) for prompt in prompts)
        self._core.post(on.PromptsOffered(offered, exhausted))


def offer(buffer: ResponseBuffer, prompt: Prompt) -> on.OfferedPrompt:
    """Converts a prompt into the core's form."""
    return on.OfferedPrompt(
        prompt.prompt_id,
        prompt.task_id,
        len(prompt.token_ids),
        prompt.group_size,
        buffer.sampling(prompt).max_tokens,
        key_of(prompt),
        features_of(prompt),
        priority=prompt.priority,
        sessions=bool(prompt.environment),
        group_size_min=prompt.group_size_min,
    )
