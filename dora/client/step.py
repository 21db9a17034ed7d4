"""One training step at the trainer: its groups as they finish, then one commit."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, Self

from dora.client.publication import Weights
from dora.client.publishing import Commit, Publication, settle
from dora.client.session import Attachment, TrainerSession
from dora.data.strict_json import check_text
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Canary
from dora.errors import Conflict, InvalidValue, VersionRejected
from dora.rpc import dora_pb2 as pb
from dora.rpc.convert import group_from_wire
from dora.rpc.errors import ServiceUnavailable
from dora.rpc.packed import packed_groups

_BEGUN_ANEW: Final = "left, and restarted by steps()"


class Step:
    """An asynchronous iterator over the step's groups, each exactly once, even across reconnects.

    After a broken connection the trainer attaches again and the service repeats the groups; those already taken are
    skipped. Not safe for concurrent tasks.
    """

    def __init__(self, session: TrainerSession, number: int) -> None:
        self.number = number
        self.ended = ""  # with it: what has ended, and what one can do
        self.end_of_prompts = False  # known after iterating: the step is short, and the last one
        self._session = session
        self._stream: Any = None
        self._pending: deque[TrajectoryGroup] = deque()  # groups of at most one message
        self._parts: list[pb.TrajectoryGroup] = []  # of a group whose other parts are still to come
        self._seen: set[str] = set()
        self._repeated: set[str] = set()  # delivered by the current stream
        self._complete = False
        self._publication: Publication | None = None
        self._waited_s = 0.0
        self._replays: tuple[TrajectoryGroup, ...] = ()
        self._replayed: list[str] = []  # ids of the replays that the trainer has taken
        if session.replay is not None:
            attachment = session.attachment
            self._replays = session.replay.begin(number, attachment.groups_per_step, attachment.window_versions)

    def __repr__(self) -> str:
        state = "committed" if self.committed else f"{self.groups_taken} groups taken"
        return f"<Step {self.number}: {state}>"

    @property
    def version(self) -> int:
        """The newest policy version, which this step trains."""
        return self.number

    @property
    def groups_taken(self) -> int:
        return len(self._seen) - len(self._pending)

    @property
    def committed(self) -> bool:
        """Whether a commit has begun and has not failed."""
        publication = self._publication
        if publication is None:
            return False
        return publication.commit is not None or self._session.publishing is publication

    @property
    def waited_s(self) -> float:
        """The time spent waiting for its groups so far, including the wait for the first group."""
        return self._waited_s

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TrajectoryGroup:
        """Raises Conflict if another trainer has attached, ServiceUnavailable if reconnecting failed.

        Raises VersionRejected if the workers have rejected a version. Continue iterating after ``Trainer.republish``:
        the remaining groups follow.
        """
        if not await self.has_groups():
            raise StopAsyncIteration
        return self.take()

    @property
    def has_come(self) -> bool:
        """Whether a group is available without waiting."""
        return bool(self._pending)

    def take(self) -> TrajectoryGroup:
        """Returns the next available group. Call :meth:`has_groups` first."""
        group = self._pending.popleft()
        if self._session.replay is not None:
            self._session.replay.add(group)
        return group

    def replays(self) -> tuple[TrajectoryGroup, ...]:
        """Groups of earlier steps to train on once more in this one, if the trainer has a ``replay`` buffer.

        They have this step's number and staleness. They are no groups of the step: the commit names them separately.
        """
        self._replayed = [group.group_id for group in self._replays]
        return self._replays

    async def has_groups(self) -> bool:
        """Waits for a group; returns False if there are no more. Raises the last commit's error."""
        began_s = time.monotonic()
        if self._session.publishing is not self._publication:
            await settle(self._session)
        return await self._has_groups(began_s)

    async def _has_groups(self, began_s: float) -> bool:
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
        wait: bool = False,
    ) -> Commit:
        """Acknowledges the step's groups and publishes ``weights`` as version ``number + 1``.

        Returns once the weights are copied: they may change then, and training may continue. Hashing, checks and the
        commit run in the background. The trainer's next call, whichever that is, raises their error once; the step is
        not committed then, and the commit can be retried. With ``wait``, it returns once the service has the version.

        ``weights`` is a torch module (also one wrapped by torch.compile, DDP or FSDP1), tensors by checkpoint name
        (torch or numpy), or safetensors file(s) or folder. A module's canary is computed; for other weights it may be
        given. ``metrics`` are shown to operators; "alarm_x" beside "x" says that x exceeds this bound. ``waited_s`` is
        the trainer's idle time in this step, by default the time spent waiting for its groups. Set it if the trainer
        works while it waits. Repeating a commit is safe: a step is committed once.

        Raises at once: Conflict before all groups were taken, InvalidValue for weights that do not match the model or a
        metric that is not a number, LimitExceeded if this host has no room. Later, or with ``wait``: Conflict if
        another trainer has attached, InvalidValue for weights that are not finite, ServiceUnavailable if reconnecting
        failed, LimitExceeded if the service has no room, VersionRejected if the workers have rejected an earlier
        version: the commit continues by itself after ``Trainer.republish``.
        """
        session = self._session
        if self.committed:
            if wait:
                await settle(session)
            return self._commit
        await settle(session)  # of the previous step
        self._check_taken()
        numbers = _numbers(metrics or {})
        if waited_s is not None:
            self._waited_s = waited_s
        # Always the same thread, because torch has a thread pool for each calling thread.
        take = session.beside(lambda: session.take(weights, self.number + 1, canary))
        taken, compute = await asyncio.wrap_future(take)
        self._publication = session.publishing = Publication(
            session, self.number, taken, compute, self._lease_again, numbers, self._waited_s, self._replayed
        )
        if wait:
            await settle(session)
        return self._commit

    @property
    def _commit(self) -> Commit:
        known = self._publication.commit if self._publication is not None else None
        return known or Commit(self.number + 1, None)

    async def _receive(self) -> None:
        try:
            if self._stream is None:
                self._stream = self._session.stream_step(self.number)
                self._repeated.clear()
                self._parts.clear()
            message: tuple[pb.TrajectoryBatch, memoryview] | None = await self._session.connection.read(self._stream)
            if message is None:
                self._finish()
                return
        except VersionRejected:
            self._stream = None  # reopened once the version is republished
            raise
        except asyncio.CancelledError:  # gRPC ends a stream whose read is cancelled: open another
            self._stream = None
            raise
        except ServiceUnavailable as error:
            self._stream = None
            self._check_current(await self._session.attach_again(error))
            return
        self._session.patience.progress()
        batch, tokens = message
        self.end_of_prompts = self.end_of_prompts or batch.end_of_prompts
        self.ended = batch.ended or self.ended
        for group in packed_groups(batch, tokens, self._session.decode):
            if self._is_new(group.group_id):
                self._pending.append(group)
        for part in batch.groups:
            self._parts.append(part)
            if part.continues:
                continue
            parts, self._parts = self._parts, []
            if self._is_new(part.group_id):
                self._pending.append(group_from_wire(*parts, decoder=self._session.decode))

    def _is_new(self, group_id: str) -> bool:
        self._repeated.add(group_id)
        if group_id in self._seen:
            return False
        self._seen.add(group_id)
        return True

    def _finish(self) -> None:
        groups_per_step = self._session.attachment.groups_per_step
        if not self.end_of_prompts and len(self._repeated) < groups_per_step:
            # The service is shutting down: treat an undeclared end like a broken connection.
            raise ServiceUnavailable(f"the stream ended after {len(self._repeated)} of {groups_per_step} groups")
        if self._repeated != self._seen:
            gone = sorted(self._seen - self._repeated)
            why = f"has changed: the service replaced the groups {gone}"
            raise Conflict("step", self.number, _BEGUN_ANEW, why)
        self._complete = True

    async def _lease_again(self, attachment: Attachment) -> None:
        """Leases the groups again after attaching during a commit. It must have exactly the trained groups."""
        self._check_current(attachment)
        self._stream, self._complete = None, False
        if await self._has_groups(time.monotonic()):
            why = "has changed: the service added groups to it since it was trained"
            raise Conflict("step", self.number, _BEGUN_ANEW, why)

    def _check_taken(self) -> None:
        groups_per_step = self._session.attachment.groups_per_step
        if not self._complete or self._pending:
            why = f"is not complete: {self.groups_taken} of {groups_per_step} groups were taken"
            raise Conflict("step", self.number, "iterated to its end before it is committed", why)

    def _check_current(self, attachment: Attachment) -> None:
        if attachment.next_step != self.number:
            why = "has ended: another trainer has committed it"
            raise Conflict("step", self.number, f"{attachment.next_step}, the service's next", why)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
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
