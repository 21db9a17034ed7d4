"""The trainer's client.

async with dora.Trainer("127.0.0.1:7070", token=...) as trainer:
    async for step in trainer.steps(groups=16):
        async for group in step:            # whole prompt groups, streamed as they finish
            ...
        await step.commit(weights=model)    # acknowledges the batch and publishes the next version
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from dora.client.publication import Weights, files_to_wire
from dora.client.publishing import end, settle
from dora.client.session import Attachment, TrainerSession
from dora.client.step import Step
from dora.data.types import Canary
from dora.errors import Conflict, VersionRejected
from dora.rpc import dora_pb2 as pb
from dora.rpc.convert import canary_to_wire
from dora.rpc.errors import ServiceUnavailable

log = logging.getLogger("dora.client")

ENDED = "step %d has no groups: the service at %s admits no more prompts (%s)"
UNSAID = "they have ended, or it is draining; to train further, start a new service"


class Trainer(TrainerSession):
    """One trainer of one service, used as ``async with dora.Trainer(...) as trainer``.

    On exit it waits for the commit in progress and raises its error. If an exception leaves the block, the commit gets
    a few seconds; if it does not end, the next trainer may restart its step.
    """

    async def __aexit__(self, *exception: object) -> None:
        try:
            await end(self, hurried=any(each is not None for each in exception))
        finally:
            await super().__aexit__(*exception)

    async def attach(self, groups: int = 0) -> Attachment:
        """Like :meth:`TrainerSession.attach`, once the commit in progress has ended."""
        await settle(self)
        return await super().attach(groups)

    async def steps(self, groups: int = 0) -> AsyncIterator[Step]:
        """Yields the steps, starting at the first uncommitted one, until the prompts end.

        Commit each step before requesting the next; otherwise Conflict is raised. The last one may be short
        (``step.end_of_prompts``); an empty one is not yielded, and a warning is logged if it is the first. May be
        called again after leaving a loop: an uncommitted step restarts with the same groups.

        Raises Conflict for a replay buffer with a window of 1. VersionRejected is raised by the step. Its iteration or
        commit continues after :meth:`republish`.
        """
        number = first = (await self.attached(groups)).next_step
        if self.replay is not None:
            self.replay.check(self.attachment.window_versions)
        while True:
            step = Step(self, number)
            with contextlib.suppress(VersionRejected):  # raised again by the step: here it would end the loop
                await settle(self)
                self.make_ready(number + 1)
                if not await step.has_groups():
                    if number == first:
                        log.warning(ENDED, number, self.connection.address, step.ended or UNSAID)
                    return
            yield step
            if step.end_of_prompts:
                await settle(self)
                return
            if not step.committed:
                raise Conflict("step", number, "committed before the next one is requested", why="is not committed")
            number += 1

    async def republish(self, weights: Weights, *, version: int, canary: Canary | None = None) -> None:
        """Replaces a rejected version: the ``version`` of the VersionRejected that a step or its commit raised.

        ``weights`` and ``canary`` are as in ``Step.commit``; the weights may be newer than the rejected ones. Repeating
        it is safe. Raises Conflict if ``version`` is not rejected or another trainer has attached, InvalidValue for
        weights that do not match the model or are not finite, ServiceUnavailable if reconnecting failed.
        """
        with contextlib.suppress(VersionRejected):  # expected for this version
            await settle(self)
        taken, compute = await asyncio.to_thread(self.take, weights, version, canary)
        try:
            await asyncio.to_thread(taken.examine)
            canary = await asyncio.to_thread(compute)
            while True:
                try:
                    await self.bring(taken, version)
                    request = pb.RepublishVersionRequest(
                        version=version,
                        files=files_to_wire(taken.identities),
                        canary=canary_to_wire(canary) if canary is not None else None,
                        trainer_epoch=self.attachment.epoch,
                    )
                    await self.connection.call(self.stub.RepublishVersion, request)
                    break
                except ServiceUnavailable as error:
                    await self.attach_again(error)
        except BaseException:
            taken.close()
            raise
        self.release(taken)
        self.patience.progress()
        if self.publishing is not None:
            self.publishing.again()

    async def settled(self) -> None:
        """Waits for the commit in progress, if any. Raises its error, as any other call would."""
        await settle(self)
