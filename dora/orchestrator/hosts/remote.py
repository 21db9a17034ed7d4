"""The service's end of a remote agent: its stream, and the launcher of its workers."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from dora.errors import Conflict
from dora.host.command import pool_id_of
from dora.host.launcher import Scaled, WorkerStartError, prefix_of, scaled
from dora.rpc import dora_pb2 as pb
from dora.rpc.roles import ServiceTokens
from dora.system.awake import awake_s

log = logging.getLogger("dora.service")

Answer = tuple[pb.HostExamination, float]  # a host's result, and when it came by the service's clock

ORDERS_QUEUED_MAX = 4096  # an agent this far behind counts as lost


class HostSession:
    def __init__(self, epoch: int, hello: pb.HostHello) -> None:
        self.name = hello.name
        self.epoch = epoch
        self.pid = hello.pid
        self.device = hello.device
        self.zone = hello.zone
        self.capacity: pb.HostCapacity = hello.capacity
        self.troubles: dict[str, str] = {}
        self.versions: set[int] = set()
        self.goes_on = False  # continues with the processes of its previous epoch
        self.settled = asyncio.Event()  # its relay listens, or it is given up
        self.heard_s = awake_s()
        self.seen_at = time.time()
        self.workers_serving = 0  # as the agent was told
        self.fetched = 0.0, 0  # seconds and bytes of the last version that came; 0: none has
        self.absent_s: dict[str, float] = {}  # workers that have not joined: since when they are awaited
        self._ordered_again: set[str] = set()  # of these
        self._has_left = False  # it was told to end
        self._outbox: asyncio.Queue[pb.HostOrder | None] = asyncio.Queue(ORDERS_QUEUED_MAX + 1)
        self._examined: tuple[int, asyncio.Future[Answer]] | None = None  # the examination that is awaited

    def heard(self) -> None:
        self.heard_s, self.seen_at = awake_s(), time.time()

    def overdue(self, absent: Iterable[str], limit_s: float) -> tuple[list[str], str]:
        """Returns the workers to be ordered again, which have been ``absent`` for ``limit_s``. If one stays absent as
        long again, also returns the reason to give the host up: its agent reports, and does not obey.

        A worker with trouble that the agent reports is not awaited.
        """
        now_s = awake_s()
        awaited = [name for name in absent if name not in self.troubles]
        self.absent_s = {name: self.absent_s.get(name, now_s) for name in awaited}
        self._ordered_again.intersection_update(awaited)
        late = [name for name, since_s in self.absent_s.items() if now_s - since_s > limit_s]
        for name in late:
            if name in self._ordered_again:
                return late, f"{name} has not joined in {limit_s:g} s after it was ordered again"
            log.warning("worker %s has not joined in %g s: it is ordered again", name, limit_s)
            self.absent_s[name] = now_s
            self._ordered_again.add(name)
        return late, ""

    def send(self, order: pb.HostOrder) -> None:
        """Queues an order; an agent with too many unread orders is given up."""
        if self._outbox.qsize() >= ORDERS_QUEUED_MAX:
            self.give_up()
        else:
            self._outbox.put_nowait(order)

    def serve(self, workers: int) -> None:
        """Tells the agent how many of its workers have loaded a version, if that has changed."""
        if workers != self.workers_serving:
            self.workers_serving = workers
            self.send(pb.HostOrder(serving=pb.HostServing(workers=workers)))

    async def examine(self, order: pb.ExamineHost) -> Answer:
        """Orders an examination, and waits for its result."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._examined = order.examination, answered
        self.send(pb.HostOrder(examine=order))
        return await answered

    def examined(self, found: pb.HostExamination) -> None:
        """Takes a result; one that is not awaited is dropped."""
        if self._examined is None or self._examined[0] != found.examination or self._examined[1].done():
            return
        self._examined[1].set_result((found, time.time()))

    def leave(self, reason: str) -> None:
        """Tells the agent to end, once. No order follows."""
        if self._has_left:
            return
        self._has_left = True
        self.send(pb.HostOrder(leave=pb.LeaveHost(reason=reason)))

    def give_up(self) -> None:
        """Ends the stream and drops queued orders, but for the one to leave."""
        self.settled.set()
        orders = [self._outbox.get_nowait() for _ in range(self._outbox.qsize())]
        if orders and (last := orders[-1]) is not None and last.HasField("leave"):
            self._outbox.put_nowait(last)
        if self._examined is not None and not self._examined[1].done():
            self._examined[1].set_exception(Conflict("host", self.name, "a connected host", why="is lost"))
        self._outbox.put_nowait(None)

    async def next_order(self) -> pb.HostOrder | None:
        """Returns the next order, or None at the end of the stream."""
        return await self._outbox.get()


class RemoteLauncher:
    """Launches the workers of a host that an agent runs (``host/launcher.py`` has the contract)."""

    def __init__(self, session: HostSession, tokens: ServiceTokens, changed: Callable[[], None] = lambda: None) -> None:
        """``changed`` is called after each change of the workers or their tokens."""
        self._session = session
        self._tokens = tokens
        self._changed = changed
        self._pool_id = pool_id_of(session.name)
        self._prefix = prefix_of(session.name)
        self._workers: list[str] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self._workers)

    def adopt(self, worker_ids: Iterable[str]) -> None:
        """Adopts workers that the agent runs already, with valid tokens."""
        self._workers.extend(worker_ids)

    def start(self, worker_id: str) -> None:
        if worker_id not in self._workers:
            self._start(worker_id)
            self._changed()

    def _start(self, worker_id: str) -> None:
        self._workers.append(worker_id)
        token = self._tokens.started(worker_id)
        self._session.send(pb.HostOrder(start_worker=pb.StartWorker(worker_id=worker_id, token=token)))

    def stop(self, worker_id: str, *, again: bool = False) -> None:
        """Stops a worker. With ``again``, starts it or the host's pool again with another token, because the order may
        be late or lost.
        """
        if again and (worker_id in self._workers or worker_id == self._pool_id):
            order = pb.StopWorker(worker_id=worker_id, again=True, token=self._tokens.started(worker_id))
        elif not again and worker_id in self._workers:
            self._workers.remove(worker_id)
            self._tokens.ended(worker_id)
            order = pb.StopWorker(worker_id=worker_id)
        else:
            return
        self._session.send(pb.HostOrder(stop_worker=order))
        self._changed()

    def scale(self, workers: int) -> Scaled:
        change = scaled(self._prefix, self._workers, workers)
        for worker_id in change.started:
            self._start(worker_id)
        if change.started:
            self._changed()
        return change

    def fails(self, reason: str) -> None:
        """Notes the agent's report that no worker is left that may be started again."""
        if not self.failed.done():
            self.failed.set_exception(WorkerStartError(reason))
            self.failed.exception()  # shown in the host's state

    def lost(self) -> None:
        """Revokes the workers' tokens after the loss of the host."""
        for worker_id in self._workers:
            self._tokens.ended(worker_id)
        self._workers.clear()
        self.failed.cancel()
