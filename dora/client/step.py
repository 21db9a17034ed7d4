"""One training step at the trainer: its groups as they finish, then one commit."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from dora.client.publication import Weights, canary_of, files_to_wire
from dora.client.session import Attachment, Session
from dora.errors import Conflict, InvalidValue, VersionRejected
from dora.rpc import dora_pb2 as pb
from dora.rpc.convert import canary_to_wire, group_from_wire
from dora.rpc.errors import ServiceUnavailable
from dora.strict_json import check_text
from dora.trajectory import TrajectoryGroup
from dora.types import Canary
from dora.weights.files import WeightFile

_BEGUN_ANEW: Final = "left, and begun anew by steps()"


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit did."""

    version: int  # the version it published
    groups_trained: int | None  # since the service started; None where only the reply was lost


class Step:
    """An asynchronous iterator over the step's groups: each exactly once, whatever the connection does.

    When the connection breaks, the trainer attaches again and the service repeats the groups; those that were taken
    already are left out. Not for use by several tasks at once.
    """

    def __init__(self, session: Session, number: int) -> None:
        self.number = number
        self.end_of_prompts = False  # known after iterating: the step ended short; there will be no other
        self._session = session
        self._stream: Any = None
        self._pending: deque[TrajectoryGroup] = deque()  # at most one message's groups
        self._parts: list[pb.TrajectoryGroup] = []  # of a group whose other parts are still to come
        self._seen: set[str] = set()
        self._repeated: set[str] = set()  # delivered by the present stream
        self._complete = False
        self._commit: Commit | None = None
        self._waited_s = 0.0

    def __repr__(self) -> str:
        state = "committed" if self.committed else f"{self.groups_taken} groups taken"
        return f"<Step {self.number}: {state}>"

    @property
    def version(self) -> int:
        """The newest policy version: the one that this step improves on."""
        return self.number

    @property
    def groups_taken(self) -> int:
        return len(self._seen) - len(self._pending)

    @property
    def committed(self) -> bool:
        return self._commit is not None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TrajectoryGroup:
        """Raises Conflict where another trainer has taken over, ServiceUnavailable when reconnecting failed.

        Raises VersionRejected if the workers have rejected a version. Once that is published anew
        (``Trainer.republish``) iterate on: the groups that were not taken yet follow.
        """
        if not await self.has_groups():
            raise StopAsyncIteration
        return self.take()

    def take(self) -> TrajectoryGroup:
        """The next group that has come: only after :meth:`has_groups`."""
        return self._pending.popleft()

    async def has_groups(self) -> bool:
        """Waits until there is a group to take; False when there are no more."""
        began_s = time.monotonic()
        while not self._pending and not self._complete:
            await self._receive()
        self._waited_s += time.monotonic() - began_s
        return bool(self._pending)

    async def commit(
        self,
        weights: Weights,
        *,
        metrics: Mapping[str, float] | None = None,
        canary: Canary | None = None,
        waited_s: float | None = None,
    ) -> Commit:
        """Acknowledges the step's groups and publishes ``weights`` as version ``number + 1``.

        ``weights`` is a torch module (also one that torch.compile, DDP or FSDP1 wraps), tensors by checkpoint name
        (torch or numpy), or safetensors file(s) or folder; they must not change before it returns. The canary of a
        module is computed, of the others it may be given.
        ``metrics`` are shown to operators; "alarm_x" beside "x" says that x is above this bound.
        ``waited_s``: how long the trainer had nothing to do in this step; by default, how long its groups were waited
        for. Who works while it waits says it. Repeating a commit is safe: a step is committed once.

        Raises Conflict before all groups were taken or where another trainer took over, InvalidValue for weights
        that do not fit the model or are not finite, or for a metric that is no number, ServiceUnavailable when
        reconnecting failed. Raises VersionRejected if the workers have rejected an earlier version: commit again once
        that is published anew (``Trainer.republish``).
        """
        if self._commit is not None:
            return self._commit
        self._check_taken()
        numbers = _numbers(metrics or {})
        if waited_s is not None:
            self._waited_s = waited_s
        if canary is None:
            canary = await asyncio.to_thread(canary_of, weights, self._session.attachment.tensors)
        sent = False
        while True:
            attachment = self._session.attachment
            try:
                files = await self._session.bring(weights, self.number + 1)
                request = self._commit_request(attachment, files, canary, numbers)
                sent = True
                reply = await self._session.connection.call(self._session.stub.CommitStep, request)
                self._commit = Commit(self.number + 1, reply.groups_trained)
                break
            except ServiceUnavailable as error:
                attachment = await self._session.attach_again(error)
                if sent and attachment.next_step == self.number + 1:
                    self._commit = Commit(self.number + 1, None)
                    break
                await self._lease_again(attachment)
        self._session.patience.progress()
        return self._commit

    async def _receive(self) -> None:
        """Takes one message of the stream, reconnecting as needed."""
        try:
            if self._stream is None:
                request = pb.StreamStepRequest(trainer_epoch=self._session.attachment.epoch, step=self.number)
                self._stream = self._session.stub.StreamStep(request, metadata=self._session.connection.metadata)
                self._repeated.clear()
                self._parts.clear()
            batch: pb.TrajectoryBatch | None = await self._session.connection.read(self._stream)
            if batch is None:
                self._finish()
                return
        except VersionRejected:
            self._stream = None  # asked again once the version is published anew
            raise
        except asyncio.CancelledError:  # gRPC ends a stream whose reading is cancelled: go on with another one
            self._stream = None
            raise
        except ServiceUnavailable as error:
            self._stream = None
            self._check_current(await self._session.attach_again(error))
            return
        self._session.patience.progress()
        self.end_of_prompts = self.end_of_prompts or batch.end_of_prompts
        for message in batch.groups:
            self._parts.append(message)
            if message.continues:
                continue
            parts, self._parts = self._parts, []
            self._repeated.add(message.group_id)
            if message.group_id not in self._seen:
                self._seen.add(message.group_id)
                self._pending.append(group_from_wire(*parts, decoder=self._session.decode))

    def _finish(self) -> None:
        groups_per_step = self._session.attachment.groups_per_step
        if not self.end_of_prompts and len(self._repeated) < groups_per_step:
            # The service is going down: an end that it did not declare is as good as a broken connection.
            raise ServiceUnavailable(f"the stream ended after {len(self._repeated)} of {groups_per_step} groups")
        if self._repeated != self._seen:
            gone = sorted(self._seen - self._repeated)
            why = f"is not as it was: the service has put other groups in place of {gone}"
            raise Conflict("step", self.number, _BEGUN_ANEW, why)
        self._complete = True

    async def _lease_again(self, attachment: Attachment) -> None:
        """After attaching again in mid-commit: the new lease must cover the very groups that were trained."""
        self._check_current(attachment)
        self._stream, self._complete = None, False
        if await self.has_groups():
            why = "is not as it was: the service has put other groups into it since it was trained"
            raise Conflict("step", self.number, _BEGUN_ANEW, why)

    def _commit_request(
        self,
        attachment: Attachment,
        files: Sequence[WeightFile],
        canary: Canary | None,
        metrics: Mapping[str, float],
    ) -> pb.CommitStepRequest:
        return pb.CommitStepRequest(
            trainer_epoch=attachment.epoch,
            step=self.number,
            version=self.number + 1,
            files=files_to_wire(files),
            canary=canary_to_wire(canary) if canary is not None else None,
            metrics=metrics,
            waited_s=self._waited_s,
        )

    def _check_taken(self) -> None:
        groups_per_step = self._session.attachment.groups_per_step
        if not self._complete or self._pending:
            why = f"is not complete: {self.groups_taken} of {groups_per_step} groups were taken"
            raise Conflict("step", self.number, "iterated to its end before it is committed", why)

    def _check_current(self, attachment: Attachment) -> None:
        if attachment.next_step != self.number:
            why = "is over: another trainer committed in the meantime"
            raise Conflict("step", self.number, f"{attachment.next_step}, the service's next", why)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as plain numbers; a tensor or array of one element is one. Raises InvalidValue for another value."""
    if not isinstance(metrics, Mapping):
        raise InvalidValue("metrics", metrics, "a mapping of names to numbers")
    numbers = {}
    for name, value in metrics.items():
        check_text(str(name), "metrics: name")
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InvalidValue(f"metrics: {name}", value, "a number") from error
    return numbers
