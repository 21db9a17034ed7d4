"""The client of those who bring prompts."""

from collections.abc import Iterable
from dataclasses import dataclass

from dora.client.connection import Client
from dora.rpc import dora_pb2 as pb
from dora.rpc.convert import prompt_to_wire
from dora.rpc.dora_pb2_grpc import PromptsStub
from dora.types import Prompt


@dataclass(frozen=True, slots=True)
class Submitted:
    """What the service did with a batch of prompts."""

    accepted: int
    queue_free: int  # prompts that still fit


class Prompts(Client):
    """Queues prompts at a service."""

    async def submit(self, prompts: Iterable[Prompt]) -> Submitted:
        """Queues all of them or none.

        Raises InvalidValue for a prompt that is refused (too long, say), Conflict for a duplicate id, LimitExceeded
        where the queue is full or the batch exceeds the message limit, Unauthenticated, ServiceUnavailable.
        """
        request = pb.SubmitRequest(prompts=[prompt_to_wire(prompt) for prompt in prompts])
        reply = await self._connection.call(self._connection.stub(PromptsStub).Submit, request)
        return Submitted(reply.accepted, reply.queue_free)
