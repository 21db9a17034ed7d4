"""The classical baselines with whole batches and global weight changes: synchronous and one step off-policy."""

from dora.core.dispatcher import Dispatcher
from dora.core.fleet.worker import Worker
from dora.core.groups.queues import QueuedPrompt
from dora.core.plan import Plan, Trigger
from dora.core.policies.base import BasePolicy
from dora.core.policies.targets import plannable
from dora.core.view import View


class SyncPolicy(BasePolicy):
    """All workers host the newest version and generate exactly one step's batch of it after it is published.

    In the simulator the trainer trains when the whole batch is complete (``trainer.streams`` false). As in the papers,
    it uses the same accelerators (``cluster.colocated``).
    """

    def version_of(self, step: int, newest: int, window: int) -> int:
        """The version that generates the batch of ``step``."""
        return newest

    def plan(self, view: View, trigger: Trigger) -> Plan:
        """All workers change version together, when no request of an older version is unfinished."""
        requests = view.requests
        unfinished = requests.version[requests.unfinished]
        next_version = self.version_of(view.step, view.newest, view.window)
        version = int(unfinished.min()) if len(unfinished) else next_version
        return Plan(dict.fromkeys(plannable(view).tolist(), version))

    def ready(self, dispatcher: Dispatcher) -> bool:
        """A batch begins when all workers have loaded its version. Otherwise the first to load would take all of it."""
        hosts = [worker for version in dispatcher.versions() for worker in dispatcher.workers_of(version)]
        return len(hosts) >= dispatcher.groups() or any(worker.assigned for worker in hosts)

    def dispatch(self, dispatcher: Dispatcher) -> None:
        if self.ready(dispatcher):
            super().dispatch(dispatcher)

    def fits(self, dispatcher: Dispatcher, row: int, worker: Worker) -> bool:
        """Only slots limit a worker. Requests that exceed its KV wait inside the engine, as in the papers."""
        return True

    def choose(self, dispatcher: Dispatcher, version: int) -> QueuedPrompt | None:
        """Only the newest version begins groups, and only for the step that trains on it on-policy."""
        fresh = version == dispatcher.newest == dispatcher.window.step
        return dispatcher.backlog.first() if fresh and batch_open(dispatcher) else None


class OneStepPolicy(SyncPolicy):
    """One step off-policy: batch ``v + 1`` is generated under version ``v`` while the trainer trains on batch ``v``.

    Weights change globally: all workers keep version ``v`` until its whole batch is generated *and* ``v + 1`` is
    published. Then all of them load it (Laminar, figure 3b). Each version generates one batch. Version 0 also generates
    the first batch, which is on-policy. The window is 2.

    Streaming generation (figure 3c) is the same strategy under the name ``stream``. Only the trainer differs: it trains
    on the first responses of a batch while the last are still generated. Groups always reach the trainer when they
    finish; in the simulator the trainer uses them at once if ``trainer.streams`` is true.
    """

    def version_of(self, step: int, newest: int, window: int) -> int:
        return max(0, step - 1)

    def choose(self, dispatcher: Dispatcher, version: int) -> QueuedPrompt | None:
        due = version == self.version_of(dispatcher.window.step, dispatcher.newest, dispatcher.window.size)
        return dispatcher.backlog.first() if due and batch_open(dispatcher) else None


def batch_open(dispatcher: Dispatcher) -> bool:
    """Returns whether the current step lacks groups: fewer are open than it can still take."""
    return dispatcher.window.open_groups < dispatcher.window.left
