"""The trainer's client.

async with dora.Trainer("127.0.0.1:7070", token=...) as trainer:
    async for step in trainer.steps(groups=16):
        async for group in step:            # whole prompt groups, streamed as they finish
            ...
        await step.commit(weights=model)    # acknowledges the batch and publishes the next version
"""

from collections.abc import AsyncIterator

from dora.client.session import Session
from dora.client.step import Step
from dora.errors import Conflict


class Trainer(Session):
    """One trainer of one service, used as ``async with dora.Trainer(...) as trainer``."""

    async def steps(self, groups: int = 0) -> AsyncIterator[Step]:
        """The steps from the first uncommitted one on, until the prompts are exhausted.

        A step must be committed before the next is asked for, else Conflict is raised. The last one may be short
        (``step.end_of_prompts``); one that would hold no group at all is not yielded. May be called again after a loop
        was left: a step that was not committed begins anew, with the groups it had.
        """
        number = (await self.attached(groups)).next_step
        while True:
            step = Step(self, number)
            if not await step.has_groups():
                return
            yield step
            if step.end_of_prompts:
                return
            if not step.committed:
                raise Conflict("step", number, "committed before the next one is asked for", why="is not committed")
            number += 1
