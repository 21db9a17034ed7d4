"""StreamRL's strategy (section 5.3): long responses run on dedicated workers, the longest first."""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace
from math import ceil

import numpy as np

from dora.config import BalanceConfig
from dora.core.dispatcher import Dispatcher
from dora.core.fleet.worker import Worker
from dora.core.forecast.cost import CostModel
from dora.core.groups.queues import QueuedPrompt
from dora.core.policies.batch import OneStepPolicy

ALPHA = 0.2  # share of the samples that are the long tail
LONG_PERCENTILE, REGULAR_PERCENTILE = 90, 50  # typical lengths of long and regular responses


def dedicated_groups(lengths: Sequence[float], groups: int, latency_s: Callable[[int, float], float]) -> int:
    """Algorithm 2: the number of workers for the long tail of these estimated lengths. The others take the rest.

    ``latency_s`` gives the seconds of one worker for a number of samples of a mean length. As printed, the split
    minimises the sum of both latencies. Returns 0 for a single worker, which takes all.
    """
    longs = ceil(ALPHA * len(lengths))
    long_tokens, regular_tokens = np.percentile(lengths, (LONG_PERCENTILE, REGULAR_PERCENTILE)).tolist()

    def total_s(long_groups: int) -> float:
        long_s = latency_s(ceil(longs / long_groups), long_tokens)
        return long_s + latency_s(ceil((len(lengths) - longs) / (groups - long_groups)), regular_tokens)

    return min(range(1, groups), key=total_s, default=0)


def latency_s(samples: int, mean_tokens: float, prompt_tokens: float, worker: Worker, cost: CostModel | None) -> float:
    """Seconds of one worker for this many samples (eq. 2): PTL(BS) x mean length x rounds.

    The batch BS is as large as slots and KV allow. If the cost is unknown, a token takes the same time in any batch.
    """
    batch = max(1, min(samples, worker.slots, int(worker.kv_tokens / (prompt_tokens + mean_tokens))))
    token_s = cost.decode_step_s(batch, batch * (prompt_tokens + mean_tokens / 2)) if cost is not None else 1.0
    return token_s * mean_tokens * ceil(samples / batch)


class StreamRlPolicy(OneStepPolicy):
    """Batches as in ``stream``. A batch is admitted at once, and its longest fifth goes to dedicated workers.

    In both kinds of workers the longest expected response starts first, on the emptiest worker. Groups are delivered
    when they finish, which corresponds to the paper's dynamic batches (in the simulator: ``trainer.streams``). A window
    of 2 is StreamRL-Async. A window of 1 is StreamRL-Sync (section 7.1): a batch of the newest version only, still
    streamed. Wider windows are not defined.
    """

    def __init__(self, config: BalanceConfig) -> None:
        super().__init__(config)
        self._of: tuple[int, tuple[int, ...]] | None = None  # the step and hosts of the present split
        self._dedicated: frozenset[int] = frozenset()  # indexes of workers for the long tail
        self._threshold = 0.0  # the fewest expected tokens of a response in the long tail
        self._long: deque[int] = deque()  # queued rows, the longest first
        self._regular: deque[int] = deque()
        self._sorted: tuple[int, int] | None = None  # version and change counter of the queue that both were made from

    def version_of(self, step: int, newest: int, window: int) -> int:
        return newest if window == 1 else super().version_of(step, newest, window)

    def rank(self, entry: QueuedPrompt, expected_tokens: float) -> float:
        return -expected_tokens

    def dispatch(self, dispatcher: Dispatcher) -> None:
        if not self.ready(dispatcher):
            return
        for version in dispatcher.versions():
            hosts = list(dispatcher.workers_of(version))
            if hosts:
                self._serve(dispatcher, version, hosts)

    def _serve(self, dispatcher: Dispatcher, version: int, hosts: Sequence[Worker]) -> None:
        while dispatcher.backlog and dispatcher.window.admissible(version) > 0:
            entry = self.choose(dispatcher, version)
            if entry is None:
                break
            dispatcher.admit(entry, version, self.rank)
        if not dispatcher.waiting_requests(version):
            return
        self._split(dispatcher, version, hosts)
        self._sort(dispatcher, version)
        candidates = dispatcher.candidates(version)
        for rows, long in ((self._long, True), (self._regular, False)):
            self._start(
                dispatcher, rows, [worker for worker in candidates if (worker.index in self._dedicated) == long]
            )
        self._sorted = (version, dispatcher.waiting_requests(version).changes)

    def _split(self, dispatcher: Dispatcher, version: int, hosts: Sequence[Worker]) -> None:
        """Runs algorithm 2 once for each batch, and again if a host arrived or left."""
        of = (dispatcher.window.step, tuple(worker.index for worker in hosts))
        if of == self._of:
            return
        self._of = of
        rows = list(dispatcher.waiting_requests(version))
        lengths = np.maximum(1, dispatcher.requests["expected"][rows])
        prompt_tokens = float(dispatcher.requests["prompt_tokens"][rows].mean())

        def latency(samples: int, mean_tokens: float) -> float:
            return latency_s(samples, mean_tokens, prompt_tokens, hosts[0], dispatcher.cost)

        groups = dedicated_groups(lengths.tolist(), len(hosts), latency)
        fastest = sorted(hosts, key=dispatcher.step_scale)
        self._dedicated = frozenset(worker.index for worker in fastest[:groups])
        self._threshold = float(np.quantile(lengths, 1 - ALPHA)) if groups else float("inf")
        self._sorted = None

    def _sort(self, dispatcher: Dispatcher, version: int) -> None:
        """Rebuilds the two queues if the version's queue was changed elsewhere."""
        waiting_requests = dispatcher.waiting_requests(version)
        if self._sorted == (version, waiting_requests.changes):
            return
        expected = dispatcher.requests["expected"]
        rows = sorted(waiting_requests, key=lambda row: (-int(expected[row]), row))
        self._long = deque(row for row in rows if expected[row] >= self._threshold)
        self._regular = deque(row for row in rows if expected[row] < self._threshold)

    def _start(self, dispatcher: Dispatcher, rows: deque[int], workers: Sequence[Worker]) -> None:
        heap = [(-self.room(dispatcher, worker), worker.index, worker) for worker in workers]
        heapify(heap)
        while heap and rows:
            room, index, worker = heap[0]
            if room >= 0:
                dispatcher.full(worker)
                heappop(heap)
            else:
                dispatcher.place(rows.popleft(), worker)
                heapreplace(heap, (-self.room(dispatcher, worker), index, worker))
