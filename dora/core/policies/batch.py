"""Whole batches under a global change of weights, the classical baselines: synchronous, and one step off-policy."""

from dora.core.dispatcher import Dispatcher
from dora.core.fleet.worker import Worker
from dora.core.groups.queues import QueuedPrompt
from dora.core.plan import Plan, Trigger
from dora.core.policies.base import BasePolicy
from dora.core.policies.targets import plannable
from dora.core.view import View


class SyncPolicy(BasePolicy):
    """All workers on the newest version; exactly one step's batch of it, once it is published; nothing besides.

    In the simulator the trainer trains when the whole batch is there (``trainer.streams`` false) and, as the papers run
    it, on the same accelerators (``cluster.colocated``).
    """

    def version_of(self, step: int, newest: int, window: int) -> int:
        """The version that generates the batch of ``step``."""
        return newest

    def plan(self, view: View, trigger: Trigger) -> Plan:
        """Global synchronisation: the pool changes version together, once nothing of an older one is unfinished."""
        requests = view.requests
        unfinished = requests.version[requests.unfinished]
        next_version = self.version_of(view.step, view.newest, view.window)
        version = int(unfinished.min()) if len(unfinished) else next_version
        return Plan(dict.fromkeys(plannable(view).tolist(), version))

    def ready(self, dispatcher: Dispatcher) -> bool:
        """A batch begins on the whole pool at once: else the first to have its weights would take all of it."""
        hosts = [worker for version in dispatcher.versions() for worker in dispatcher.workers_of(version)]
        return len(hosts) >= dispatcher.groups() or any(worker.held for worker in hosts)

    def dispatch(self, dispatcher: Dispatcher) -> None:
        if self.ready(dispatcher):
            super().dispatch(dispatcher)

    def fits(self, dispatcher: Dispatcher, row: int, worker: Worker) -> bool:
        """Slots alone count: what exceeds the KV waits inside the engine, as in the systems that the papers compare."""
        return True

    def choose(self, dispatcher: Dispatcher, version: int) -> QueuedPrompt | None:
        """Only the newest version, only for the step that trains on it fresh."""
        fresh = version == dispatcher.newest == dispatcher.window.step
        return dispatcher.backlog.first() if fresh and batch_open(dispatcher) else None


class OneStepPolicy(SyncPolicy):
    """One step off-policy: batch ``v + 1`` is generated under version ``v`` while the trainer trains on batch ``v``.

    Weights change globally: all workers keep version ``v`` until its whole batch is generated *and* ``v + 1`` is
    published, then all load it (Laminar, figure 3b). One batch a version; version 0 also makes the first batch, which
    is on-policy. Its window is 2.

    Streaming generation (figure 3c) is the same strategy, under the name ``stream``: only the trainer differs, which
    trains on the first responses of a batch while the last are still generated. Groups always reach it as they finish;
    in the simulator it uses that where ``trainer.streams`` is true.
    """

    def version_of(self, step: int, newest: int, window: int) -> int:
        return max(0, step - 1)

    def choose(self, dispatcher: Dispatcher, version: int) -> QueuedPrompt | None:
        due = version == self.version_of(dispatcher.window.step, dispatcher.newest, dispatcher.window.size)
        return dispatcher.backlog.first() if due and batch_open(dispatcher) else None


def batch_open(dispatcher: Dispatcher) -> bool:
    """Whether the step now being filled lacks groups: fewer are open than it still takes."""
    return dispatcher.window.open_groups < dispatcher.window.left
