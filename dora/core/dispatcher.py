"""The dispatcher: the state and the actions that a policy has while it assigns work.

The promises do not depend on the policy: ``place`` and ``admit`` refuse actions that would break them.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dora.core.fleet.worker import Worker
from dora.core.forecast.cost import CostModel
from dora.core.groups.queues import Backlog, QueuedPrompt, WaitingRequests
from dora.core.rules import admission, handoff, parking, placement
from dora.core.state import State, unfinished
from dora.core.table import Column
from dora.errors import IllegalTransition

NO_REQUESTS = WaitingRequests()


class Dispatcher:
    """The state in a policy's ``dispatch``. Workers, queues and the backlog are read-only."""

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
        """Live versions, the newest first. A quarantined one has no worker, and admits nothing."""
        return range(self.newest, self.window.oldest_live - 1, -1)

    def admissible(self, version: int) -> int:
        """The number of groups of this version that should begin now: allowed by the window and needed by a step."""
        return admission.admissible(self._state, version)

    def waiting_requests(self, version: int) -> WaitingRequests:
        """Admitted requests of this version without a worker, including parked ones."""
        return self._state.waiting.get(version, NO_REQUESTS)

    def workers_of(self, version: int) -> Sequence[Worker]:
        return self._state.workers_of(version)

    def candidates(self, version: int) -> list[Worker]:
        """This version's workers that may have room: since they were full, a request has left or the ration grew."""
        state = self._state
        hosts, roomy = state.workers_of(version), state.worklist.roomy
        if len(roomy) < len(hosts):  # only those few are checked
            found = (state.worker_list[index] for index in sorted(roomy))
            candidates = [worker for worker in found if worker is not None and worker.hosts == version]
        else:
            candidates = [worker for worker in hosts if worker.index in roomy]
        return [worker for worker in candidates if worker.rests_until_s <= state.now_s]

    def token_s_on(self, worker: Worker) -> float:
        """Seconds of a token on this worker's kind of machine, of late."""
        return self._state.places.pace_s(worker.host, self.rates.pace_s)

    def step_scale(self, worker: Worker) -> float:
        """The duration of a step on this worker, as a multiple of ``cost``'s."""
        return self._state.places.step_scale(worker.host)

    def mean_scale(self) -> float:
        """The scale of a worker that is as fast as the mean of all."""
        workers = self._state.workers.values()
        return len(workers) / sum(1.0 / self.step_scale(worker) for worker in workers) if self.are_unlike else 1.0

    @property
    def are_unlike(self) -> bool:
        """Returns whether workers differ in speed or zone."""
        return self._state.places.are_unlike

    def loading(self, version: int) -> int:
        return len(self._state.hosting.loading(version))

    def ration(self, version: int, most: int | None) -> None:
        """Limits the requests of each host of this version to ``most`` for now, or removes the limit if it is None.

        Workers that were full under a smaller ration become candidates again.
        """
        self._state.worklist.ration(version, most, (worker.index for worker in self.workers_of(version)))

    def unfinished(self) -> Column:
        """Rows of the admitted requests that have not ended."""
        return np.flatnonzero(unfinished(self.requests))

    def full(self, worker: Worker) -> None:
        """Marks a worker as full: it is no candidate until a request leaves it or its ration grows."""
        self._state.worklist.full(worker.index)

    def context_tokens(self, row: int) -> int:
        """KV that a waiting request needs at once."""
        requests = self._state.requests
        return int(requests["prompt_tokens"][row] + requests["tokens"][row]) + 1

    def token_s(self, entry: QueuedPrompt) -> float:
        """The time of one token of this prompt's responses: sampled, and its part of the pauses of sessions."""
        pace_s, prompt = self.rates.pace_s, entry.prompt
        return pace_s + self._state.pauses.token_s(prompt.task_id) if prompt.sessions else pace_s

    def lacking(self) -> float:
        """The share of a step's groups that it still needs and that have not finished."""
        state = self._state
        finished = sum(len(groups) for groups in state.finished.values())
        return max(0, self.window.left - finished) / max(1, self.window.groups_per_step)

    def workers(self) -> Iterable[Worker]:
        return self._state.workers.values()

    def groups(self) -> int:
        """The number of workers that stay."""
        return self._state.hosting.staying()[0]

    def kv_tokens(self) -> int:
        return self._state.hosting.staying()[1]

    def place(self, row: int, worker: Worker) -> None:
        """Starts a waiting request on a worker that hosts its version, or resumes it there with KV from elsewhere."""
        version = int(self._state.requests["version"][row])
        if worker.hosts != version:
            raise IllegalTransition(f"a request of version {version} cannot run on {worker.worker_id} (C1)")
        state, pool, home = self._state, self._state.pool_of(row), self._state.owner(row)
        end = home or pool
        crosses = end is None or state.places.crosses(end.host, worker.host, state.kv_of(row))
        rests = state.requests["rests_until_s"][row] > state.now_s
        if home is not None and home is not worker and crosses and not rests:
            handoff.begin(state, row, worker)
            return
        if home is not None and home is not worker:  # a move has failed lately, or its KV takes longer than its prefill
            handoff.send_back(state, row)
            home = None
        placement.leave_queue(state, row)
        if home is not None:
            placement.extend(state, row, worker)
        elif pool is not None and crosses:
            handoff.resume(state, row, pool, worker)
        else:
            if pool is not None:
                parking.forget(state, row)
            placement.start(state, row, worker)

    def admit(
        self, entry: QueuedPrompt, version: int, rank: Callable[[QueuedPrompt, float], float] | None = None
    ) -> None:
        """Makes an offered prompt a group of this version; its requests wait. Raises if C3 forbids it.

        ``rank`` of the prompt and a request's expected tokens orders the requests: the lowest starts first, and equal
        ones in order of arrival. Without it all start in order of arrival.
        """
        self._state.window.admit(version)
        self._state.backlog.remove(entry)
        admission.admit(self._state, entry, version, rank)
