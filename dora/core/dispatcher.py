"""What a policy may see and do while it gives idle workers something to do.

The promises do not depend on the policy: ``place`` and ``admit`` refuse what would break them.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dora.core.fleet.worker import Worker
from dora.core.forecast.cost import CostModel
from dora.core.groups.queues import Backlog, QueuedPrompt, WaitingRequests
from dora.core.rules import admission, handoff, placement
from dora.core.state import State, unfinished
from dora.core.table import Column
from dora.errors import IllegalTransition

NO_LINE = WaitingRequests()


class Dispatcher:
    """The state as a policy sees it in ``dispatch``. Workers, lines and the backlog are to be read only."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.now_s = state.now_s
        self.window = state.window
        self.newest = state.window.newest_sound
        self.members = len(state.workers)
        self.rates = state.rates
        self.requests = state.requests
        self.cost: CostModel | None = state.cost

    @property
    def backlog(self) -> Backlog:
        return self._state.backlog

    def versions(self) -> range:
        """Live versions, the newest first. One that is withheld has no worker, and admits nothing."""
        return range(self.newest, self.window.oldest_live - 1, -1)

    def admissible(self, version: int) -> int:
        """How many groups of this version should begin now: what the window allows, as far as steps will want it."""
        return admission.admissible(self._state, version)

    def waiting_requests(self, version: int) -> WaitingRequests:
        """Admitted requests of this version that no worker holds, the parked ones among them."""
        return self._state.waiting.get(version, NO_LINE)

    def workers_of(self, version: int) -> Sequence[Worker]:
        """All workers that take requests of this version."""
        return self._state.workers_of(version)

    def candidates(self, version: int) -> list[Worker]:
        """Those of them that may have room: something has left them or their ration grew since they were found full."""
        state = self._state
        hosts, roomy = state.workers_of(version), state.worklist.roomy
        if len(roomy) < len(hosts):  # a look at those few alone
            found = (state.worker_list[index] for index in sorted(roomy))
            candidates = [worker for worker in found if worker is not None and worker.hosts == version]
        else:
            candidates = [worker for worker in hosts if worker.index in roomy]
        return [worker for worker in candidates if worker.rests_until_s <= state.now_s]

    def loading(self, version: int) -> int:
        """How many workers are loading this version, and will soon host it."""
        return len(self._state.hosting.loading(version))

    def ration(self, version: int, most: int | None) -> None:
        """Each host of this version is to hold at most ``most`` requests for now; None: as many as it has room for.

        Whoever was found full under a smaller ration is a candidate again.
        """
        self._state.worklist.ration(version, most, (worker.index for worker in self.workers_of(version)))

    def unfinished(self) -> Column:
        """Rows of the admitted requests that have not ended."""
        return np.flatnonzero(unfinished(self.requests))

    def full(self, worker: Worker) -> None:
        """The worker has no room: it is no candidate until something leaves it, or its version's ration grows."""
        self._state.worklist.full(worker.index)

    def context_tokens(self, row: int) -> int:
        """KV that a waiting request needs at once."""
        requests = self._state.requests
        return int(requests["prompt_tokens"][row] + requests["tokens"][row]) + 1

    def lacking(self) -> float:
        """Share of a step's groups that have not finished yet, of those that this step still takes."""
        state = self._state
        finished = sum(len(groups) for groups in state.finished.values())
        return max(0, self.window.left - finished) / max(1, self.window.groups_per_step)

    def workers(self) -> Iterable[Worker]:
        """All workers there are."""
        return self._state.workers.values()

    def groups(self) -> int:
        """workers that are to stay."""
        return self._state.hosting.staying()[0]

    def kv_tokens(self) -> int:
        """KV of the workers that are to stay."""
        return self._state.hosting.staying()[1]

    def place(self, row: int, worker: Worker) -> None:
        """Starts a waiting request on a worker that hosts its version, or resumes it there: from its pool if parked."""
        version = int(self._state.requests["version"][row])
        if worker.hosts != version:
            raise IllegalTransition(f"a request of version {version} does not run on {worker.worker_id} (C1)")
        self._state.waiting[version].remove(row)
        pool = self._state.pool_of(row)
        if pool is None:
            placement.start(self._state, row, worker)
        else:
            handoff.resume(self._state, row, pool, worker)

    def admit(
        self, entry: QueuedPrompt, version: int, rank: Callable[[QueuedPrompt, float], float] | None = None
    ) -> None:
        """A prompt on offer becomes a group of this version; its requests stand in line. Raises where C3 forbids it.

        ``rank`` of the entry and a request's expected tokens orders the line: the lowest starts first, equal ones as
        they came; None: all as they came.
        """
        self._state.window.admit(version)
        self._state.backlog.remove(entry)
        admission.admit(self._state, entry, version, rank)
