"""The trainer's client.

async with dora.Trainer("127.0.0.1:7070", token=...) as trainer:
    async for step in trainer.steps(groups=16):
        async for group in step:            # whole prompt groups, streamed as they finish
            ...
        await step.commit(weights=model)    # acknowledges the batch and publishes the next version
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Self

from dora.client.attachment import Attachment, attachment_of
from dora.client.connection import Connection, Patience
from dora.client.step import Step
from dora.errors import Conflict, InvalidValue
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import MAX_MESSAGE_BYTES
from dora.rpc.dora_pb2_grpc import TrainerStub
from dora.rpc.errors import ServiceUnavailable

_ATTACH_TIMEOUT_S = 30.0


class Trainer:
    """One trainer of one service. Attaching fences any other trainer; a broken connection is attached again."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        name: str = "trainer",
        connect_s: float = 10.0,
        reconnect_s: float = 60.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Connects to nothing yet.

        ``name`` is shown to operators. ``connect_s`` and ``reconnect_s`` say how long to try before the first contact
        and after a connection broke. Raises InvalidValue for a token that no header can hold.
        """
        self.connection = Connection(address, token, max_message_bytes)
        self.patience = Patience(reconnect_s)
        self._name = name
        self._connect_s = connect_s
        self._groups = 0
        self._attachment: Attachment | None = None
        self._stub: TrainerStub | None = None

    async def __aenter__(self) -> Self:
        self._stub = self.connection.stub(TrainerStub)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._attachment = self._stub = None
        await self.connection.close()

    @property
    def stub(self) -> TrainerStub:
        """Raises Conflict outside ``async with``."""
        if self._stub is None:
            raise Conflict("trainer", "not open", "used within: async with dora.Trainer(...) as trainer")
        return self._stub

    @property
    def attachment(self) -> Attachment:
        """What the service told when the trainer attached last. Raises Conflict before."""
        if self._attachment is None:
            raise Conflict("trainer", "not attached", "attach() or steps() first")
        return self._attachment

    async def attach(self, groups: int = 0) -> Attachment:
        """Becomes the service's one active trainer; ``groups`` a step, 0 for what the service has.

        :meth:`steps` does it by itself; call it to learn the model's folder before. Raises InvalidValue where the
        service refuses ``groups``, Unauthenticated, ServiceUnavailable when ``connect_s`` is over.
        """
        if groups < 0:
            raise InvalidValue("groups", groups, "1 or more, or 0 for what the service has")
        self._groups = groups
        patience = Patience(self._connect_s)
        while True:
            try:
                return await self._attach()
            except ServiceUnavailable as error:
                await patience.wait(error)

    async def attach_again(self, error: ServiceUnavailable) -> Attachment:
        """After the connection broke with ``error``. Raises it when ``reconnect_s`` without progress are over."""
        while True:
            await self.patience.wait(error)
            try:
                return await self._attach()
            except ServiceUnavailable as repeated:
                error = repeated

    async def steps(self, groups: int = 0) -> AsyncIterator[Step]:
        """The steps from the first uncommitted one on, until the prompts are exhausted.

        A step must be committed before the next is asked for, else Conflict is raised. The last one may be short
        (``step.end_of_prompts``); one that would hold no group at all is not yielded.
        """
        if self._attachment is None or groups not in (0, self._groups):
            await self.attach(groups)
        number = self.attachment.next_step
        while True:
            step = Step(self, number)
            if not await step.has_groups():
                return
            yield step
            if step.end_of_prompts:
                return
            if not step.committed:
                raise Conflict("step", number, "committed before the next one is asked for")
            number += 1

    async def _attach(self) -> Attachment:
        request = pb.AttachRequest(groups_per_step=self._groups, client_name=self._name)
        reply = await self.connection.call(self.stub.Attach, request, _ATTACH_TIMEOUT_S)
        self._attachment = await asyncio.to_thread(attachment_of, reply)
        if self._attachment.max_message_bytes:
            limit_bytes = min(self.connection.max_message_bytes, self._attachment.max_message_bytes)
            self.connection.max_message_bytes = limit_bytes
        return self._attachment
