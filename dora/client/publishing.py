"""One commit in progress while its trainer continues: hashes, checks, the canary, and the call that commits the step.

taken (the trainer waits) ──▶ examined ──▶ brought ──▶ committed
                                  └── refused ─────────┴──▶ failed: raised once, at the trainer's next call
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from dora.client.publication import files_to_wire
from dora.client.session import Attachment, TrainerSession
from dora.client.taking import Taken
from dora.data.types import Canary
from dora.errors import VersionRejected
from dora.rpc import dora_pb2 as pb
from dora.rpc.convert import canary_to_wire
from dora.rpc.errors import ServiceUnavailable

log = logging.getLogger("dora.client")

_HURRY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Commit:
    version: int  # the published version
    groups_trained: int | None  # since the service's start; None if unknown


class Publication:
    def __init__(
        self,
        session: TrainerSession,
        step: int,
        taken: Taken,
        canary: Callable[[], Canary | None],
        lease_again: Callable[[Attachment], Awaitable[None]],
        metrics: dict[str, float],
        waited_s: float,
        replayed: Sequence[str],
    ) -> None:
        """Starts at once. ``canary`` is computed from the copied weights, in a separate thread.

        ``lease_again`` is called after the trainer has attached again. ``replayed`` has the ids of the step's replays.
        """
        self.step = step
        self.commit: Commit | None = None  # set once committed
        self._session, self._taken, self._lease_again = session, taken, lease_again
        self._metrics, self._waited_s, self._replayed = metrics, waited_s, replayed
        self._checked = asyncio.wrap_future(session.beside(lambda: self._check(canary)))
        self._task = asyncio.create_task(self._run())

    @property
    def failed(self) -> bool:
        """Whether it ended without a commit."""
        return self._task.done() and self.commit is None

    async def settled(self) -> Commit:
        """Waits for the end. Raises the error of a failure."""
        await asyncio.wait([self._task])
        return self._task.result()

    async def ends_within(self, limit_s: float) -> bool:
        """Waits up to ``limit_s``; returns whether the commit succeeded."""
        await asyncio.wait([self._task], timeout=limit_s)
        return self.commit is not None

    def again(self) -> None:
        """Retries with the same weights, after the cause of the failure is removed."""
        if self.failed:
            self._task = asyncio.create_task(self._run())

    async def give_up(self) -> None:
        """Cancels the commit at any stage and releases the copied weights."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await asyncio.wait([self._checked])
        if not self._checked.cancelled():
            self._checked.exception()  # marks the error as retrieved
        if self.commit is None:
            self._taken.close()

    def _check(self, canary: Callable[[], Canary | None]) -> Canary | None:
        self._taken.examine()
        return canary()

    async def _run(self) -> Commit:
        session = self._session
        canary = await asyncio.shield(self._checked)
        sent = False
        while True:
            attachment = session.attachment
            try:
                await session.bring(self._taken, self.step + 1)
                request = pb.CommitStepRequest(
                    trainer_epoch=attachment.epoch,
                    step=self.step,
                    version=self.step + 1,
                    files=files_to_wire(self._taken.identities),
                    canary=canary_to_wire(canary) if canary is not None else None,
                    metrics=self._metrics,
                    waited_s=self._waited_s,
                    replayed_groups=self._replayed,
                )
                sent = True
                reply = await session.connection.call(session.stub.CommitStep, request)
                self.commit = Commit(self.step + 1, reply.groups_trained)
                break
            except ServiceUnavailable as error:
                attachment = await session.attach_again(error)
                if sent and attachment.next_step == self.step + 1:
                    self.commit = Commit(self.step + 1, None)
                    break
                await self._lease_again(attachment)
        session.patience.progress()
        session.release(self._taken)
        return self.commit


async def settle(session: TrainerSession) -> None:
    """Waits for the commit in progress, if any. Raises its error; the step is not committed then.

    A rejected version is raised until it is republished; any other error once.
    """
    publication = session.publishing
    if publication is None:
        return
    try:
        await publication.settled()
    except VersionRejected:
        raise
    except BaseException:
        if publication.failed and session.publishing is publication:
            session.publishing = None
            await publication.give_up()
        raise
    if session.publishing is publication:
        session.publishing = None


async def end(session: TrainerSession, hurried: bool) -> None:
    """Waits, at the end of a session, for the commit in progress, and raises its error.

    If ``hurried``, waits a few seconds and raises nothing. A commit that has not ended then is cancelled.
    """
    publication = session.publishing
    if publication is None:
        return
    try:
        if not hurried:
            await settle(session)
            return
        if not await publication.ends_within(_HURRY_S):
            log.warning("the commit of step %d was cancelled: it did not end in time", publication.step)
    finally:
        session.publishing = None
        await publication.give_up()
